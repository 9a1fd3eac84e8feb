# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Writes the model card of an exported demo checkpoint, all figures measured.

    python -m tools.demo_model.card pretrain OUT --work-dir build/demo_model

`acceptance` is run before: what vLLM accepts is not measured here.
"""

import argparse
import json
from pathlib import Path

import torch

from tools.demo_model import corpus, export
from tools.demo_model.data import Data
from tools.demo_model.evaluate import complete, heldout_sums, summary
from tools.demo_model.export import WIDTHS_FIELD
from tools.demo_model.files import CORPUS_FILE, acceptance_name, made
from tools.demo_model.model import DemoModel
from tools.demo_model.plot import loss_curves
from tools.demo_model.train import RECIPES, WORKERS

PROMPTS = (
    "In the beginning God created",
    "The LORD is my shepherd;",
    "Then said Jesus unto his disciples,",
)
SAMPLE_TOKENS = 48
PLOT_FILE = "loss.svg"

COMMANDS = {
    "pretrain": ("corpus", "tokenizer", "train pretrain"),
    "finetune": ("corpus", "tokenizer", "train pretrain", "prune", "train finetune"),
}

ABOUT = {
    "pretrain": "Every mixture-of-experts layer has 8 routed experts.",
    "finetune": (
        "It is the equal demo model (`demo-glm-dsa`), pruned by routing statistics to"
        "\nunequal numbers of routed experts and trained on, briefly."
    ),
}

CARD = """\
---
license: apache-2.0
language: en
library_name: vllm
tags: [glm_moe_dsa, demo]
---

# {title}

A small English language model for trying vLLM Hetero and for its tests. It
continues text in the style of the King James Bible; it is no assistant and knows
nothing else.

{about}

## Architecture

`GlmMoeDsaForCausalLM`, {parameters:.1f} million parameters, BF16 safetensors.

| | |
|---|---|
| layers | {num_hidden_layers}, the first dense, and one MTP layer |
| routed experts by layer, the MTP layer last (0: dense) | {widths} |
| experts a token | {num_experts_per_tok} routed, 1 shared; sigmoid router |
| hidden / expert / dense size | {hidden_size} / {moe_intermediate_size} / \
{intermediate_size} |
| attention | {num_attention_heads} heads, MLA, `kv_lora_rank` {kv_lora_rank}, \
`q_lora_rank` {q_lora_rank} |
| vocabulary | {vocab_size}, byte-level BPE |
| positions | {max_position_embeddings}; trained on windows of {window} and \
{long_window} tokens |

The sparse-attention indexers keep random weights. They choose nothing: up to
`index_topk` = {index_topk} tokens the indexer takes every token, so attention is dense.
The chat template puts the messages one after the other, and the model continues
the last one.

## Data and licence

The King James Bible from Debian's package `bible-kjv-text` 4.38: {train_bytes:,}
bytes to train on, and {heldout_bytes:,} bytes held out ({heldout_chapters} whole
chapters, from all over the book). The text dates from 1611 and is in the public
domain; in the United Kingdom its printing is under Crown letters patent. The
weights and the code that made them are under Apache-2.0, as the repository.

## Training

{steps_table}

From a seed, on the CPU, in {workers} single-threaded processes, by the commands of
`tools/demo_model/README.md`:

```
{commands}
```

![losses]({plot})

## Measured

On the held-out chapters, in float32 from the stored weights:

| | |
|---|---|
| bits per byte | {bits_per_byte:.3f} |
| MTP draft is the trunk's greedy choice, text given | {mtp_agreement:.1%} |
| drafts that vLLM accepts, greedy decoding | {vllm_acceptance} |
{kept_table}
## Samples

{sample_tokens} tokens, greedy and at temperature {temperature}. Like any model this
small it falls into loops, greedily sooner.

{samples}
"""


def steps_table(work_dir: Path, runs: list[str]) -> str:
    """One row a run: what was set, and what its log ends with."""
    rows = [
        "| run | seed | steps | tokens | peak rate | loss a token | bits per byte |",
        "|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        recipe, log = RECIPES[run], read_log(work_dir, run)
        tokens = recipe.steps * recipe.batch * recipe.window
        loss = [line["loss"] for line in log if "loss" in line][-1]
        bits = [line["bits_per_byte"] for line in log if "bits_per_byte" in line][-1]
        rows.append(
            f"| {run} | {recipe.seed} | {recipe.steps} | {tokens / 1e6:.1f} M | "
            f"{recipe.peak_lr:g} | {loss:.3f} nats | {bits:.3f} |"
        )
    return "\n".join(rows)


def read_log(work_dir: Path, run: str) -> list[dict]:
    """The lines of a run's log."""
    lines = (work_dir / f"{run}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def kept_table(work_dir: Path, state: str) -> str:
    """What pruning kept, for the pruned model."""
    if state != "finetune":
        return ""
    report = json.loads(made(work_dir, "pruned.json").read_text())
    rows = ["", "Experts of the equal model that were kept:", ""]
    rows += ["| layer | kept | saliency of all 8 |", "|---|---|---|"]
    for name, layer in report.items():
        kept = ", ".join(map(str, layer["kept"]))
        values = ", ".join(f"{value:.3f}" for value in layer["saliency"])
        rows.append(f"| `{name.removesuffix('.mlp')}` | {kept} | {values} |")
    return "\n".join(rows) + "\n"


@torch.no_grad()
def round_to_stored(model: DemoModel) -> None:
    """Rounds the weights to what `export` stores."""
    for weight in model.parameters():
        weight.copy_(weight.bfloat16())


def card(state: str, out: Path, work_dir: Path) -> str:
    """The text of the card."""
    data = Data(work_dir)
    model = export.load_state(work_dir, state)
    round_to_stored(model)
    config = export.hf_config(model.config)
    accepted = made(work_dir, acceptance_name(out)).read_text()
    runs = ["pretrain"] if state == "pretrain" else ["pretrain", "finetune"]
    train, heldout = corpus.split(corpus.read_chapters(made(work_dir, CORPUS_FILE)))
    samples = []
    for prompt in PROMPTS:
        for temperature in (0.0, export.TEMPERATURE):
            text = complete(
                model, data.tokenizer, prompt, SAMPLE_TOKENS, temperature, seed=1
            )
            samples.append(f"> **{prompt}**{text}")
    steps = [*COMMANDS[state], f"export {state} {out.name}"]
    measured = summary(heldout_sums(model, data.heldout), data.heldout_bytes)
    tensors = export.hf_tensors(model).values()
    return CARD.format(
        title=out.name,
        about=ABOUT[state],
        parameters=sum(tensor.numel() for tensor in tensors) / 1e6,
        widths=config.get(WIDTHS_FIELD, list(model.config.widths)),
        window=RECIPES["pretrain"].window,
        long_window=RECIPES["pretrain"].long_window,
        train_bytes=sum(len(corpus.running_text(c).encode()) for c in train),
        heldout_bytes=data.heldout_bytes,
        heldout_chapters=len(heldout),
        steps_table=steps_table(work_dir, runs),
        workers=WORKERS,
        commands="\n".join(
            f"python -m tools.demo_model.{step} --work-dir build/demo_model"
            for step in steps
        ),
        plot=PLOT_FILE,
        vllm_acceptance=accepted.strip(),
        kept_table=kept_table(work_dir, state),
        sample_tokens=SAMPLE_TOKENS,
        temperature=export.TEMPERATURE,
        samples="\n\n".join(samples),
        **measured,
        **{key: value for key, value in config.items() if isinstance(value, int)},
    )


def main() -> None:
    """Writes README.md and loss.svg beside the weights."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("state", choices=sorted(COMMANDS))
    parser.add_argument("out", type=Path)
    parser.add_argument("--work-dir", type=Path, required=True)
    args = parser.parse_args()
    text = card(args.state, args.out, args.work_dir)
    (args.out / "README.md").write_text(text)
    log = read_log(args.work_dir, args.state)
    (args.out / PLOT_FILE).write_text(loss_curves(log))


if __name__ == "__main__":
    main()
