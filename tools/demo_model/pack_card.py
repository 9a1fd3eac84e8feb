# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Writes the model card of an EXL3 pack, all figures measured.

    python -m tools.demo_model.pack_card plain examples/demo-glm-dsa \
        examples/demo-glm-dsa-exl3 --work-dir build/demo_model

`acceptance` is run on both folders before: what vLLM accepts is not measured here.
"""

import argparse
import json
from pathlib import Path

from exl3.checkpoint.plan import read_plan
from tools.demo_model.calibrate import BATCH, STEPS, WINDOW
from tools.demo_model.compare import compare_folders
from tools.demo_model.files import acceptance_name, made
from tools.demo_model.quantize import RECIPES, Recipe

CARD = """\
---
license: apache-2.0
language: en
library_name: vllm
base_model: {source}
tags: [glm_moe_dsa, exl3, demo]
---

# {title}

The small English language model [{source}](../{source}/README.md) with EXL3
weights, for trying vLLM Hetero and for its tests. That card tells of its data, licence
and training.

```
python -m vllm.entrypoints.openai.api_server --model examples/{title} \\
    --speculative-config '{{"method": "mtp", "num_speculative_tokens": 1}}'
```

## Format

{about}

| weights | bits | codebook |
|---|---|---|
| routed experts | {expert_bits} | {codebook} |
| routed experts of the MTP layer | {mtp_bits} | {codebook} |
| attention, dense layer, shared experts | {other_bits} | {codebook} |
| `lm_head` | {head_bits} | {codebook} |
| embeddings, norms, routers, indexers, `eh_proj` | 16 | none |

{size:.1f} MB of weights, where BF16 has {source_size:.1f} MB. Calibrated on
{calibration_tokens:,} tokens of the training text, each expert on the tokens that the
router sends it.
{map_table}
```
python -m tools.demo_model.quantize {recipe} examples/{source} \\
    examples/{title} --work-dir build/demo_model
```

## Measured

On the held-out chapters; all but the last row in float32, with the weights that the
reference decoder makes of the trellises.

| | BF16 | EXL3 |
|---|---|---|
| bits per byte | {reference_bits:.4f} | {bits:.4f} |
| KL divergence from BF16, nats a token | | {kl:.4f} |
| same first choice as BF16 | | {top1:.1%} |
| MTP draft is the trunk's greedy choice, text given | {reference_mtp:.1%} | {mtp:.1%} |
| drafts that vLLM accepts, greedy decoding | {reference_accepted} | {accepted} |
"""

PLAIN = """\
Plain EXL3: one trellis for each linear layer and for each matrix of each expert. One
rank serves it, or two: four would cut an expert's {expert_size} features between
multiples of 128."""

RANK_SLICED = """\
Rank-sliced EXL3 (`hybrid_tr3_tail`): the routed experts are stored in {ranks} slices,
each encoded by itself, so that each of {ranks} ranks reads its own; one rank serves all
of them. The rest is plain EXL3. Layers differ in their number of experts, and experts
in their bits."""


def map_table(pack: Path, config: dict, recipe: Recipe) -> str:
    """The bits of each expert, where they differ."""
    if len(recipe.choices) == 1:
        return ""
    plan = read_plan(pack, config)
    rows = [
        "",
        "Experts whose output is the larger part of the residual stream got more bits:",
        "",
        "| layer | bits of each expert |",
        "|---|---|",
    ]
    for name, layer in plan.experts.items():
        bits = ", ".join(
            str(layer.matrix(expert, "gate").bits) for expert in range(layer.width)
        )
        rows.append(f"| `{name.removesuffix('.mlp.experts')}` | {bits} |")
    return "\n".join(rows) + "\n"


def weights_mb(folder: Path) -> float:
    """Megabytes of a folder's safetensors files."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e6


def card(name: str, source: Path, pack: Path, work_dir: Path) -> str:
    """The text of the card."""
    recipe = RECIPES[name]
    found = compare_folders(source, pack, work_dir)
    config = json.loads((pack / "config.json").read_text())
    about = (PLAIN if recipe.ranks is None else RANK_SLICED).format(
        ranks=recipe.ranks, expert_size=config["moe_intermediate_size"]
    )
    bits = f"{recipe.expert_bits:g}"
    if len(recipe.choices) > 1:
        bits = f"{' and '.join(map(str, recipe.choices))}, {bits} on average"
    return CARD.format(
        title=pack.name,
        source=source.name,
        recipe=name,
        about=about,
        expert_bits=bits,
        mtp_bits=recipe.mtp_bits,
        other_bits=recipe.other_bits,
        head_bits=recipe.head_bits,
        codebook=recipe.codebook.label,
        size=weights_mb(pack),
        source_size=weights_mb(source),
        calibration_tokens=STEPS * BATCH * WINDOW,
        map_table=map_table(pack, config, recipe),
        reference_bits=found.bits_per_byte / found.bits_per_byte_ratio,
        bits=found.bits_per_byte,
        kl=found.kl,
        top1=found.top1,
        reference_mtp=found.reference_mtp_agreement,
        mtp=found.mtp_agreement,
        reference_accepted=made(work_dir, acceptance_name(source)).read_text().strip(),
        accepted=made(work_dir, acceptance_name(pack)).read_text().strip(),
    )


def main() -> None:
    """Writes README.md beside the weights."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", choices=sorted(RECIPES))
    parser.add_argument("source", type=Path)
    parser.add_argument("pack", type=Path)
    parser.add_argument("--work-dir", type=Path, required=True)
    args = parser.parse_args()
    text = card(args.recipe, args.source, args.pack, args.work_dir)
    (args.pack / "README.md").write_text(text)


if __name__ == "__main__":
    main()
