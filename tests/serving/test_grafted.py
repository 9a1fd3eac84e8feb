# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""A checkpoint with a grafted MTP layer is served as one that was made with it."""

import shutil
from pathlib import Path

import pytest

from exl3.cli import main
from tests.packs import Format, write_pack
from tests.serving.generate import MTP, Case, run

EXAMPLES = Path(__file__).parents[2] / "examples"
DRAFT = {"speculative_config": MTP}

pytestmark = pytest.mark.slow


def test_as_one_that_was_made_with_it(tmp_path):
    formats = {"ranks": 2, "formats": [Format(3), Format(4)]}
    made = write_pack(tmp_path / "made", **formats).path
    base = write_pack(tmp_path / "base", draft=(), **formats).path
    grafted = shutil.copytree(base, tmp_path / "grafted")
    assert main(["graft-mtp", str(grafted), str(made)]) == 0
    folders = made, grafted, base
    wanted, found, before = run(*(Case(str(folder), DRAFT) for folder in folders))
    assert found == wanted
    assert 0 < found.accepted < found.drafted
    # The layer that was there is another one, so the tests can tell them apart.
    assert before.accepted != found.accepted


@pytest.mark.parametrize("name", ["demo-glm-dsa", "demo-glm-dsa-ragged"])
def test_a_dense_trunk_with_an_exl3_draft(name, tmp_path):
    grafted = shutil.copytree(EXAMPLES / name, tmp_path / name)
    assert main(["graft-mtp", str(grafted), str(EXAMPLES / f"{name}-exl3")]) == 0
    before, plain, found = run(
        Case(str(EXAMPLES / name), DRAFT),
        Case(str(grafted)),
        Case(str(grafted), DRAFT),
    )
    assert found.error is None
    tokens = [
        [completion.tokens for completion in result.completions]
        for result in (before, plain, found)
    ]
    assert tokens[0] == tokens[1] == tokens[2]
    # 3 or 4 bits cost a draft some of its guesses, and not most of them.
    rates = [result.accepted / result.drafted for result in (before, found)]
    assert 0.7 * rates[0] < rates[1] < 1
