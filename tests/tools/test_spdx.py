# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Source files carry the licence header."""

import pytest

from tools.lint.spdx import HEADER, main

PYTHON = "".join(f"# {line}\n" for line in HEADER)
CPP = "".join(f"// {line}\n" for line in HEADER)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", PYTHON),
        ("a.py", "#!/usr/bin/env python3\n" + PYTHON + "x = 1\n"),
        ("Makefile", PYTHON),
        ("a.cuh", CPP + "#pragma once\n"),
        ("__init__.py", ""),
    ],
)
def test_header_is_accepted(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    assert main([str(path)]) == 0


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", "x = 1\n"),
        ("a.py", "\n" + PYTHON),
        ("a.py", PYTHON.splitlines()[0]),
        ("a.py", PYTHON.replace("Apache", "MIT")),
        ("a.cpp", PYTHON),
    ],
)
def test_file_without_it_is_named(tmp_path, capsys, name, text):
    good, bad = tmp_path / "good.py", tmp_path / name
    good.write_text(PYTHON)
    bad.write_text(text)
    assert main([str(good), str(bad)]) == 1
    assert capsys.readouterr().out.startswith(f"{bad}: the header must say ")
