# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The tutorial's commands, as it shows them, make a pack that serves and is sound."""

import json
import time

import pytest

from tools.tutorial import PAGE, commands

#: Seconds that all of it may take on two cores.
LIMIT = 15 * 60
REPORTING = ("exl3 inspect", "exl3 verify", "exl3 compare")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * LIMIT)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tutorial")


@pytest.fixture(scope="module")
def done(folder):
    """What each command printed, in the page's order, as pairs with its name."""
    printed = []
    started = time.monotonic()
    for command in commands(PAGE.read_text()):
        more = "--json" if command.name in REPORTING else ""
        process = command.run(more, work=str(folder), plots=str(folder))
        said = process.stdout
        assert process.returncode == 0, f"{command.line}\n{said}{process.stderr}"
        printed.append((command.name, json.loads(said) if more else said))
    assert time.monotonic() - started < LIMIT
    return printed


@pytest.fixture(scope="module")
def last(done):
    """What the last command of each name printed."""
    return dict(done)


def test_every_command_is_shown_in_order(done):
    names = [name.removeprefix("exl3 ") for name, _ in done]
    assert names == [
        *("inspect", "prune", "quantize", "graft-mtp", "graft-mtp"),
        *("inspect", "verify", "compare"),
    ]


def test_the_pack_has_unequal_widths_and_an_exl3_draft(last):
    report = last["exl3 inspect"]
    dense, *trunk, draft = report["expert_widths"]
    assert (dense, draft) == (0, 6)  # the draft is another pack's
    assert sum(trunk) == 30  # three quarters of 40
    assert len(set(trunk)) > 1
    assert report["draft"] == "exl3"


def test_experts_have_three_and_a_half_bits(last):
    layers = [each for each in last["exl3 inspect"]["layers"] if each["kind"] != "MTP"]
    count, bits = 0, 0.0
    for layer in layers:
        for rate, experts in layer["experts"].items():
            count += experts
            bits += float(rate) * experts
    assert bits / count == pytest.approx(3.5, abs=0.01)


def test_it_is_a_third_of_what_it_was(folder):
    def size(path):
        return sum(file.stat().st_size for file in path.glob("*.safetensors"))

    assert size(folder / "pack") < size(PAGE.parents[1] / "examples/demo-glm-dsa") / 3


def test_it_serves_and_drafts(last):
    report = last["exl3 verify"]
    assert report["ok"]
    checks = {check["name"]: check for check in report["checks"]}
    # Its trunk is not the one that the draft was trained on, but near it.
    assert checks["mtp acceptance"]["value"] > 0.35


def test_little_is_lost(last):
    measured = last["exl3 compare"]
    ratio = measured["b"]["bits_per_byte"] / measured["a"]["bits_per_byte"]
    assert 1 < ratio < 1.1


def test_the_plots_are_drawn(folder):
    for name in ("layers.svg", "compare.svg"):
        assert "<svg" in (folder / name).read_text()
