# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""What the commands take as numbers, and how they name what they don't take."""

import argparse

import pytest

from exl3 import cli
from exl3.tools.shared.arguments import count, number


def test_counts():
    assert count()("1") == 1
    assert count(least=2)("12") == 12
    for text in ("0", "-1", "1.5", "x", "", "1e3", "1_000", "9" * 13):
        with pytest.raises(argparse.ArgumentTypeError, match="is no count; expected 1"):
            count()(text)
    with pytest.raises(argparse.ArgumentTypeError, match="expected 2 or more"):
        count(least=2)("1")


def test_numbers():
    share = number("share", 0, 1)
    assert share("0.5") == 0.5 and share("1") == 1.0
    for text in ("0", "1.01", "-1", "nan", "inf", "x", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="is no share"):
            share(text)


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect", "a", "--tp", "two"],
        ["inspect", "a", "--gpu-memory", "big"],
        ["prune", "a", "b", "--keep-ratio", "half"],
        ["quantize", "a", "b", "--bits", "few"],
        ["quantize", "a", "b", "--tokens", "x"],
        ["quantize", "a", "b", "--seed", "x"],
        ["compare", "a", "b", "--text", "t", "--window", "x"],
        ["compare", "a", "b", "--text", "t", "--logprobs", "-2"],
        ["verify", "a", "--tp", "0"],
    ],
    ids=" ".join,
)
def test_no_message_names_a_function(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert arguments[-1] in message and "invalid _" not in message
    assert "function" not in message and "parse" not in message
