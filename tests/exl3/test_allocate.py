# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""A budget of bits goes where it saves most, and is used up."""

import itertools

import pytest

from exl3.tools.quantize.allocate import RELATIVE_ERROR, allocate_bits

SENSITIVITIES = {"a": 5.0, "b": 1.0, "c": 40.0, "d": 0.1, "e": 7.0}


def total_error(bits):
    return sum(
        SENSITIVITIES[key] * RELATIVE_ERROR[number] for key, number in bits.items()
    )


@pytest.mark.parametrize("choices", [(3, 4), (2, 3, 4), (2, 3, 4, 5)])
@pytest.mark.parametrize("extra", range(6))
def test_no_other_choice_of_the_same_mean_has_a_smaller_error(choices, extra):
    budget = choices[0] * len(SENSITIVITIES) + extra
    bits = allocate_bits(SENSITIVITIES, budget / len(SENSITIVITIES), choices)
    assert sum(bits.values()) == budget
    others = (
        dict(zip(SENSITIVITIES, numbers))
        for numbers in itertools.product(choices, repeat=len(SENSITIVITIES))
        if sum(numbers) == budget
    )
    assert total_error(bits) == pytest.approx(min(map(total_error, others)))


def test_a_mean_between_two_counts_takes_the_nearest():
    bits = allocate_bits(SENSITIVITIES, 3.29, (3, 4))
    assert sorted(bits.values()) == [3, 3, 3, 3, 4]
    assert bits["c"] == 4


def test_a_choice_too_large_for_what_is_left_is_passed_over():
    bits = allocate_bits({"a": 1.0, "b": 0.9}, 3.0, (2, 3, 5))
    assert sum(bits.values()) == 6


@pytest.mark.parametrize("mean", [2.9, 4.1])
def test_a_mean_that_the_choices_cannot_have_is_refused(mean):
    with pytest.raises(ValueError, match=r"the choices are \[3, 4\]"):
        allocate_bits(SENSITIVITIES, mean, (4, 3))
