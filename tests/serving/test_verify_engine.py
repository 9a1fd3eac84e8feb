# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""`exl3 verify` on packs that are sound, broken, or drafting nonsense."""

import json
import shutil
import subprocess
import sys

import pytest
import torch

from tests.damage import with_tensors
from tests.serving.generate import REPO

pytestmark = pytest.mark.slow

PACK = REPO / "examples" / "demo-glm-dsa-ragged-exl3"
SCALE = "model.layers.3.self_attn.o_proj.suh"


def copy(out, change):
    """Copies the pack, with other tensors and its own tokenizer."""
    with_tensors(PACK, out, change)
    for file in PACK.glob("tokenizer*"):
        shutil.copy(file, out)
    return out


def verify(path, *arguments, code):
    """The checks by name, and which failed. Compiling would take longer than asking."""
    command = [sys.executable, "-m", "exl3.cli", "verify", str(path), *arguments]
    done = subprocess.run(
        [*command, "--engine-arg", "enforce_eager=true", "--json"],
        capture_output=True,
        text=True,
        cwd=REPO,
        check=False,
    )
    assert done.returncode == code, done.stderr + done.stdout
    report = json.loads(done.stdout)  # no word of the engine's among it
    assert done.stderr == ""
    return {check["name"]: check for check in report["checks"]}, report["failed"]


def test_a_sound_pack_is_ok():
    checks, failed = verify(PACK, "--speculative", code=0)
    assert failed == []
    assert checks["beats chance"]["value"] < 6  # bits; by lot 10
    # The pack's card says how many; half of it still means a trained draft.
    assert checks["mtp acceptance"]["value"] > 0.35
    assert checks["mtp output"]["value"] <= 0.25


def test_a_broken_scale_is_named(tmp_path):
    def break_scale(tensors):
        tensors[SCALE][7] = torch.nan

    bad = copy(tmp_path / "bad", break_scale)
    checks, failed = verify(bad, code=1)
    assert failed == ["engine"]
    assert checks["engine"]["figure"].startswith(f"{SCALE}: holds NaN")


def test_wrong_scales_give_no_english(tmp_path):
    """They are finite, and so is the output: only its sense is lost."""

    def swap_scales(tensors):
        """Gives each input of the head the scale of another one, and a larger one."""
        tensors["lm_head.suh"] = tensors["lm_head.suh"].roll(1) * 3

    bad = copy(tmp_path / "bad", swap_scales)
    checks, failed = verify(bad, code=1)
    assert "beats chance" in failed
    assert all(checks[f"prefill {n}"]["ok"] for n in (1, 2, 5, 8, 9))


def test_a_draft_that_knows_nothing_is_ok_and_seldom_accepted(tmp_path):
    def randomize(tensors):
        generator = torch.Generator().manual_seed(0)
        for name, tensor in tensors.items():
            if ".layers.6." in name and name.endswith(".trellis"):
                random = torch.randint(
                    -(2**15), 2**15, tensor.shape, generator=generator
                )
                tensors[name] = random.to(torch.int16)
        joins = "model.layers.6.eh_proj.weight"
        noise = torch.randn(tensors[joins].shape, generator=generator)
        tensors[joins] = (noise * tensors[joins].std()).to(tensors[joins].dtype)

    noise = copy(tmp_path / "noise", randomize)
    checks, failed = verify(noise, "--speculative", code=0)
    assert failed == []
    assert checks["mtp acceptance"]["value"] < 0.2
