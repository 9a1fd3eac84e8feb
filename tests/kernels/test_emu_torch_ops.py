# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""torch's CUDA ops, run by the emulator, against the CPU's ops."""

import json
import subprocess
import sys

import pytest

from tests.kernels.emulated.torch_cases import CASES

#: fp16 activations are 2.1e-4, or 6e-4 for two products and an activation. A result in
#: bfloat16 is rounded by either op: 2.3e-3 together.
LINEAR, MOE, BFLOAT16 = 3e-4, 6e-4, 4e-3
BOUNDS = {
    "values_beyond_half_precision": BFLOAT16,
    "measured_plans": 3.4e-4,  # some of the weights are unrounded: 2.3e-4
    "shards_of_several_kinds": BFLOAT16,
    "slices_and_a_limit": BFLOAT16,
    "narrow_strided_and_batched": 6e-4,  # float16
    "dequant": 1e-6,
    "hadamard": 1e-6,
    "no_rows": 0.0,
    "no_tokens": 0.0,
    "experts_of_several_bits": MOE,
    "an_expert_map_and_narrow_tokens": MOE,
    "tokens_beyond_one_part": MOE,
}


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    command = [sys.executable, "-m", "tests.kernels.emulated.torch_cases"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", CASES)
def test_emulated_ops_agree_with_the_cpu(case, errors):
    assert errors[case] <= BOUNDS.get(case, LINEAR)


def test_the_emulated_ops_ran(errors):
    """The CPU's exact ops would differ from themselves by nothing."""
    assert errors["split_k"] > 1e-5
