# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Measures in vLLM how many of a demo checkpoint's MTP drafts are accepted.

    python -m tools.demo_model.acceptance OUT --work-dir build/demo_model

Run it with the fork's Python. Every held-out chapter's first words are continued
greedily, with one draft token a step.
"""

import argparse
import os
from pathlib import Path

from tools.demo_model import corpus
from tools.demo_model.files import CORPUS_FILE, acceptance_name, made

PROMPT_WORDS = 12
NEW_TOKENS = 64
MAX_MODEL_LEN = 256

DRAFTED = "vllm:spec_decode_num_draft_tokens"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


def prompts(work_dir: Path) -> list[str]:
    """The first words of every held-out chapter."""
    _, heldout = corpus.split(corpus.read_chapters(made(work_dir, CORPUS_FILE)))
    texts = map(corpus.running_text, heldout)
    return [" ".join(text.split()[:PROMPT_WORDS]) for text in texts]


def measure(checkpoint: Path, texts: list[str]) -> tuple[int, int]:
    """Continues `texts`; returns the numbers of accepted drafts and of drafts."""
    # vLLM reads its settings when it is imported.
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    # The repository's `vllm` folder, which mypy sees, is not the composed package.
    from vllm import LLM, SamplingParams  # type: ignore[attr-defined]

    llm = LLM(
        str(checkpoint),
        max_model_len=MAX_MODEL_LEN,
        speculative_config={"method": "mtp", "num_speculative_tokens": 1},
        disable_log_stats=False,
    )
    llm.generate(texts, SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS))
    counts = {metric.name: metric for metric in llm.get_metrics()}
    return counts[ACCEPTED].value, counts[DRAFTED].value


def main() -> None:
    """Writes the share for the card."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--work-dir", type=Path, required=True)
    args = parser.parse_args()
    accepted, drafted = measure(args.out, prompts(args.work_dir))
    share = f"{accepted / drafted:.1%} ({accepted} of {drafted})"
    (args.work_dir / acceptance_name(args.out)).write_text(share + "\n")
    print(share)


if __name__ == "__main__":
    main()
