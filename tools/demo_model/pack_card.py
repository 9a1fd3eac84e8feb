# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Writes the model card of an EXL3 pack, all figures measured.

    python -m tools.demo_model.pack_card demo-glm-dsa-exl3 --work-dir build/demo_model

`acceptance` is run on the pack and its source before: what vLLM accepts is not measured
here.
"""

import argparse
import json
import math
import shlex
from pathlib import Path

from exl3.checkpoint.plan import read_plan
from tools.demo_model.compare import compare_folders
from tools.demo_model.files import acceptance_name, made
from tools.demo_model.packs import EXAMPLES, PACKS

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
| routed experts of the MTP layer | {recipe.mtp_bits} | {codebook} |
| attention, dense layer, shared experts | {recipe.attn_bits} | {codebook} |
| `lm_head` | {recipe.head_bits} | {codebook} |
| embeddings, norms, routers, indexers, `eh_proj` | 16 | none |

{size:.1f} MB of weights, where BF16 has {source_size:.1f} MB. Calibrated on
{calibration_tokens:,} tokens of [calibration.txt](../calibration.txt), a part of the
training text; each expert on the tokens that the router sends it.
{map_table}
```
{command}
```

makes the same bytes again, all but this card, on the same kind of CPU with the same
torch; other vector units round differently.

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

By these commands, of which the last writes this card:

```
python -m tools.demo_model.acceptance examples/{source} --work-dir build/demo_model
python -m tools.demo_model.acceptance examples/{title} --work-dir build/demo_model
python -m tools.demo_model.pack_card {title} --work-dir build/demo_model
```
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


def map_table(pack: Path, config: dict) -> str:
    """The bits of each expert."""
    rows = [
        "",
        "Experts whose output is the larger part of the residual stream got more bits:",
        "",
        "| layer | bits of each expert |",
        "|---|---|",
    ]
    for name, layer in read_plan(pack, config).experts.items():
        bits = ", ".join(str(gate.bits) for gate, _up, _down in layer.encodings)
        rows.append(f"| `{name.removesuffix('.mlp.experts')}` | {bits} |")
    return "\n".join(rows) + "\n"


def weights_mb(folder: Path) -> float:
    """Megabytes of a folder's safetensors files."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e6


def command(name: str) -> str:
    """The command that makes a pack, in lines of a card."""
    words = ["exl3", *PACKS[name].arguments(Path("build") / name)]
    lines = [""]
    for word in map(shlex.quote, words):
        if len(lines[-1]) + len(word) > 80:
            lines.append("   ")
        lines[-1] += f" {word}"
    return " \\\n".join(lines).strip()


def card(name: str, work_dir: Path) -> str:
    """The text of the card."""
    pack, source, recipe = EXAMPLES / name, PACKS[name].source, PACKS[name].recipe
    found = compare_folders(EXAMPLES / source, pack, work_dir)
    config = json.loads((pack / "config.json").read_text())
    about = (PLAIN if recipe.ranks is None else RANK_SLICED).format(
        ranks=recipe.ranks, expert_size=config["moe_intermediate_size"]
    )
    bits = f"{recipe.bits:g}"
    if recipe.is_mixed:
        low = math.floor(recipe.bits)
        bits = f"{low} and {low + 1}, {bits} on average"
    calibration = config["quantization_config"]["calibration"]
    return CARD.format(
        title=name,
        source=source,
        about=about,
        expert_bits=bits,
        recipe=recipe,
        codebook=recipe.codebook.label,
        size=weights_mb(pack),
        source_size=weights_mb(EXAMPLES / source),
        calibration_tokens=calibration["rows"] * calibration["cols"],
        map_table=map_table(pack, config) if recipe.is_mixed else "",
        command=command(name),
        reference_bits=found.bits_per_byte / found.bits_per_byte_ratio,
        bits=found.bits_per_byte,
        kl=found.kl,
        top1=found.top1,
        reference_mtp=found.reference_mtp_agreement,
        mtp=found.mtp_agreement,
        reference_accepted=accepted(work_dir, source),
        accepted=accepted(work_dir, name),
    )


def accepted(work_dir: Path, name: str) -> str:
    """The share of drafts that vLLM accepts."""
    return made(work_dir, acceptance_name(EXAMPLES / name)).read_text().strip()


def main() -> None:
    """Writes README.md beside the weights."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pack", choices=PACKS)
    parser.add_argument("--work-dir", type=Path, required=True)
    args = parser.parse_args()
    text = card(args.pack, args.work_dir)
    (EXAMPLES / args.pack / "README.md").write_text(text)


if __name__ == "__main__":
    main()
