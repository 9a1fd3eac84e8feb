# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Files of measured plans: read back as written, and refused in one line otherwise."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from exl3 import ops
from exl3.plans import Plan, PlanError, check_disjoint, read, write

PLAN = Plan("12.0", 4096, 512, (1, 16), 16, 2, True)


def test_what_is_written_is_read(tmp_path):
    plans = [PLAN, replace(PLAN, rows=(17, 2048), block_rows=128, unrounded=False)]
    write(tmp_path / "plans.json", plans)
    assert read(tmp_path / "plans.json") == plans
    write(tmp_path / "none.json", [])
    assert read(tmp_path / "none.json") == []


def test_unrounded_may_be_left_out(tmp_path):
    entry = vars(PLAN) | {}
    del entry["unrounded"]
    (tmp_path / "plans.json").write_text(json.dumps({"plans": [entry]}))
    assert read(tmp_path / "plans.json") == [replace(PLAN, unrounded=False)]


@pytest.mark.parametrize("field, value, said", [
    ("architecture", 12.0, 'architecture is 12.0; write it as "12.0"'),
    ("architecture", "sm_120", "architecture is 'sm_120'"),
    ("k", 4000, "k is 4000; stored sizes are multiples of 128"),
    ("k", 0, "k is 0"),
    ("n", "512", "n is '512'"),
    ("rows", [16, 1], "rows is (16, 1); write the first and the last, from 1 to 2048"),
    ("rows", [0, 1], "rows is (0, 1)"),
    ("rows", [1], "rows is (1,)"),
    ("rows", 16, "rows is 16"),
    ("rows", [1, 4096], "rows is (1, 4096)"),
    ("block_rows", 24, "block_rows is 24; there are 16, 32, 48, 64, 128"),
    ("block_rows", 32, "unrounded with block_rows 32; it needs 16"),
    ("splits", 9, "splits is 9; it can be 1 to 8"),
    ("splits", True, "splits is True"),
    ("unrounded", 1, "unrounded is 1; it is true or false"),
    ("warps", 4, "unknown warps"),
    ("splits", None, "splits is None"),
])  # fmt: skip
def test_a_bad_field_is_named(tmp_path, field, value, said):
    path = tmp_path / "plans.json"
    good = replace(PLAN, rows=(17, 20))
    path.write_text(json.dumps({"plans": [vars(good), vars(PLAN) | {field: value}]}))
    with pytest.raises(PlanError) as error:
        read(path)
    message = str(error.value)
    assert message.startswith(f"{path}: plans[1]: {said}")
    assert "\n" not in message


@pytest.mark.parametrize("text, said", [
    ("{", "cannot be read as JSON: "),
    ("[]", 'no list "plans"'),
    ('{"plans": {}}', 'no list "plans"'),
    ('{"plans": [3]}', "plans[0]: 3 is no object"),
    ('{"plans": [{"k": 128}]}', "plans[0]: architecture, block_rows, n, rows, splits "),
])  # fmt: skip
def test_a_bad_file_is_named(tmp_path, text, said):
    path = tmp_path / "plans.json"
    path.write_text(text)
    with pytest.raises(PlanError) as error:
        read(path)
    assert str(error.value).startswith(f"{path}: {said}")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(PlanError, match=r"nothing\.json: cannot be read"):
        read(Path(tmp_path / "nothing.json"))


def test_two_plans_for_one_call_are_refused(tmp_path):
    other = replace(PLAN, rows=(16, 20))
    path = tmp_path / "plans.json"
    write(path, [other, PLAN])
    with pytest.raises(PlanError, match="k 4096, n 512: rows 1 to 16 and 16 to 20"):
        read(path)
    check_disjoint([PLAN, replace(other, architecture="9.0"), replace(other, k=128)])
    check_disjoint([PLAN, replace(other, n=128), replace(other, rows=(17, 17))])


def test_a_build_without_kernels_has_no_plans():
    if ops.has_cuda():
        pytest.skip("this build has CUDA kernels")
    with pytest.raises(RuntimeError, match="no CUDA kernels"):
        ops.set_plans([PLAN])
