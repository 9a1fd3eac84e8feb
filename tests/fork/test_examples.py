# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""What the docstrings of tools/fork show is what the code gives."""

import doctest

import pytest

from tools.fork import drift_fingerprint, overlay


@pytest.mark.parametrize("module", [drift_fingerprint, overlay])
def test_examples_in_docstrings(module):
    failed, tried = doctest.testmod(module)
    assert tried
    assert not failed
