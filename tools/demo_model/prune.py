# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Prunes the trained demo model to unequal widths by routing statistics.

An expert's saliency is the mean size of what it adds to the residual stream: over
all tokens of a calibration text, its router weight (0 where it isn't chosen) times
the norm of its output. Each layer keeps its most salient experts, in their order,
with their rows of the router and of its selection bias.

    python -m tools.demo_model.prune --work-dir build/demo_model
"""

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor

from tools.demo_model.data import Data
from tools.demo_model.export import load_state
from tools.demo_model.model import DemoModel
from tools.demo_model.moe import MoE

# By global layer index, the MTP layer last. Unequal, with one layer left whole,
# and small enough that both checkpoints together stay under 60 MB.
WIDTHS = (0, 8, 7, 5, 4, 6, 6)

CALIBRATION_SEED = 1614
CALIBRATION_STEPS = 24
CALIBRATION_BATCH = 8
CALIBRATION_WINDOW = 256

EXPERT_ROWS = ("gate.weight", "gate.e_score_correction_bias", "gate_up", "down")
"""The tensors of a mixture-of-experts layer with one row an expert."""


def moe_layers(model: DemoModel) -> dict[str, MoE]:
    """The mixture-of-experts layers by module name, the MTP layer's last."""
    modules = dict(model.named_modules())
    names = [name for name, module in modules.items() if isinstance(module, MoE)]
    return {name: modules[name] for name in sorted(names)}


@torch.no_grad()
def saliency(moe: MoE, tokens: Tensor) -> Tensor:
    """Sum over `tokens` `[N, H]` of each expert's contribution norms, `[E]`."""
    weights, experts = moe.gate(tokens)
    total = torch.zeros(len(moe.down))
    for expert in range(len(total)):
        token, slot = torch.where(experts == expert)
        out = moe.expert(tokens[token], moe.gate_up[expert], moe.down[expert])
        total[expert] = (weights[token, slot] * out.norm(dim=-1)).sum()
    return total


def calibrate(model: DemoModel, data: Data) -> dict[str, Tensor]:
    """Mean contribution of every expert, `[E]` by name of its layer."""
    layers = moe_layers(model)
    sums = {name: torch.zeros(len(moe.down)) for name, moe in layers.items()}

    def record(name: str):
        def hook(moe: MoE, inputs: tuple[Tensor]) -> None:
            sums[name] += saliency(moe, inputs[0].flatten(0, 1))

        return hook

    hooks = [
        moe.register_forward_pre_hook(record(name)) for name, moe in layers.items()
    ]
    shape = CALIBRATION_BATCH, CALIBRATION_WINDOW + 2
    with torch.no_grad():
        for step in range(CALIBRATION_STEPS):
            model.losses(data.windows(CALIBRATION_SEED, step, *shape))
    for hook in hooks:
        hook.remove()
    count = CALIBRATION_STEPS * CALIBRATION_BATCH * CALIBRATION_WINDOW
    return {name: total / count for name, total in sums.items()}


def kept_experts(saliencies: Tensor, width: int) -> list[int]:
    """The `width` most salient experts of a layer, in ascending order.

    Raises:
        ValueError: If the layer has fewer experts.
    """
    if width > len(saliencies):
        raise ValueError(f"width {width}: the layer has {len(saliencies)} experts")
    return sorted(saliencies.topk(width).indices.tolist())


def prune(model: DemoModel, kept: dict[str, list[int]]) -> dict[str, Tensor]:
    """The state of `model` with the kept experts only.

    Args:
        model: The model to prune; it is left as it is.
        kept: Kept expert ids by name of the mixture-of-experts layer.
    """
    state = model.state_dict()
    for layer, experts in kept.items():
        for rows in EXPERT_ROWS:
            state[f"{layer}.{rows}"] = state[f"{layer}.{rows}"][experts].clone()
    return state


def main() -> None:
    """Prunes the pretrained state and reports what was kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work-dir", type=Path, required=True)
    work_dir = parser.parse_args().work_dir
    model = load_state(work_dir, "pretrain")
    saliencies = calibrate(model, Data(work_dir))
    moe_widths = [width for width in WIDTHS if width]
    kept = {
        name: kept_experts(values, width)
        for (name, values), width in zip(saliencies.items(), moe_widths, strict=True)
    }
    torch.save({"widths": WIDTHS, "model": prune(model, kept)}, work_dir / "pruned.pt")
    report = {
        name: {"kept": kept[name], "saliency": [round(v, 4) for v in values.tolist()]}
        for name, values in saliencies.items()
    }
    (work_dir / "pruned.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
