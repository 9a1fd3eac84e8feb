# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Without a device that it could run on, the server says so, and still has --help."""

import subprocess
import sys

import pytest

import vllm.platforms
from vllm.config.device import DeviceConfig
from vllm.platforms.interface import UnspecifiedPlatform
from vllm.refusal import refusal_in

#: The server of a build for GPUs, where no GPU is found.
SERVER = """
import vllm.platforms
from vllm.platforms.interface import UnspecifiedPlatform
vllm.platforms._current_platform = UnspecifiedPlatform()
from vllm.entrypoints.launchers.api_server.entry import main
main()
"""


@pytest.fixture
def no_device(monkeypatch):
    monkeypatch.setattr(vllm.platforms, "_current_platform", UnspecifiedPlatform())


def test_a_device_that_is_found_is_chosen_as_upstream_does():
    assert DeviceConfig().device_type == "cpu"
    assert DeviceConfig(device="cpu").device.type == "cpu"


def test_the_defaults_need_no_device(no_device):
    config = DeviceConfig()
    assert (config.device, config.device_type) == (None, "")


def test_an_engine_without_a_device_is_refused(no_device):
    with pytest.raises(ValueError, match="no GPU was found") as error:
        DeviceConfig(device="")
    assert refusal_in(error.value).startswith("no GPU was found")


@pytest.mark.parametrize(
    "words, code, last",
    [
        (["--help"], 0, "distinct configurations in the codebase."),
        (["--model", "DEMO"], 1, "a container is given them by --gpus all."),
    ],
    ids=["help", "serve"],
)
def test_the_server(words, code, last, request):
    demo = str(request.config.rootpath / "examples" / "demo-glm-dsa-ragged-exl3")
    words = [demo if word == "DEMO" else word for word in words]
    ran = subprocess.run(
        [sys.executable, "-c", SERVER, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert "Traceback" not in ran.stdout
    assert ran.stdout.rstrip().endswith(last)
    assert ran.returncode == code
