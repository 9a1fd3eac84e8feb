# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""What the steps leave for each other in the work folder."""

from pathlib import Path

CORPUS_FILE = "kjv.txt"
TOKENIZER_FILE = "tokenizer.json"

_MADE_BY = {
    CORPUS_FILE: "corpus",
    TOKENIZER_FILE: "tokenizer",
    "pretrain.pt": "train pretrain",
    "pruned.pt": "prune",
    "pruned.json": "prune",
    "finetune.pt": "train finetune",
    ".acceptance": "acceptance OUT",
}


def made(work_dir: Path, name: str) -> Path:
    """The path of a file that an earlier step made.

    Raises:
        FileNotFoundError: If that step was not run.
    """
    path = work_dir / name
    if not path.exists():
        step = _MADE_BY.get(path.name) or _MADE_BY[path.suffix]
        raise FileNotFoundError(
            f"{path}: not there; first run: python -m "
            f"tools.demo_model.{step} --work-dir {work_dir}"
        )
    return path


def acceptance_name(checkpoint: Path) -> str:
    """The file in which `acceptance` leaves a checkpoint's share."""
    return f"{checkpoint.resolve().name}.acceptance"
