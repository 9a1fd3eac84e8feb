# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Requirements, extras, commands and licences of what is built."""

import zipfile

import pytest

from tools.fork.errors import ForkError
from tools.fork.metadata import library_metadata, read_metadata, unpack_licences


@pytest.fixture
def wheel(make_wheel):
    return make_wheel({})


@pytest.fixture
def metadata(wheel, pin_wheel):
    return read_metadata(wheel, pin_wheel(wheel))


def test_torch_is_replaced_once_and_the_rest_is_upstreams(metadata):
    assert metadata.name == "vllm"
    assert metadata.requirements == ["regex", "torch==2.13.0"]


def test_what_is_left_out_is_offered_as_an_extra_and_so_is_ray(metadata):
    assert metadata.extras == {
        "bench": ["pandas"],
        "multimodal": ["torchvision", 'torchaudio; platform_machine != "s390x"'],
        "plot": ["matplotlib>=3.8"],
        "ray": ["ray>=2.60"],
    }


def test_commands_are_those_of_upstream_and_the_library(metadata):
    assert metadata.entry_points == {
        "console_scripts": [
            "vllm = vllm.entrypoints.cli.main:main",
            "exl3 = exl3.cli:main",
        ]
    }


def test_the_library_needs_torch_only():
    metadata = library_metadata()
    assert (metadata.name, metadata.requirements) == ("exl3", ["torch>=2.11"])
    assert metadata.extras == {"plot": ["matplotlib>=3.8"]}
    assert metadata.entry_points == {"console_scripts": ["exl3 = exl3.cli:main"]}


def test_upstreams_licences_go_along(wheel, tmp_path):
    (licence,) = unpack_licences(wheel, tmp_path / "licences")
    assert licence.read_text() == "the licence of upstream\n"


def test_a_wheel_without_metadata_is_refused(tmp_path, wheel, pin_wheel):
    pins = pin_wheel(wheel)
    empty = tmp_path / "vllm.whl"
    zipfile.ZipFile(empty, "w").close()
    with pytest.raises(
        ForkError, match=r"vllm\.whl: has no METADATA; it is not a vLLM"
    ):
        read_metadata(empty, pins)
