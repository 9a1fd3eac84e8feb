# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The demo model's text: the King James Bible from Debian's package.

The text is fetched with apt and unpacked without root. `kjv.txt` then holds one
verse a line, references removed, with an empty line between chapters.

    python -m tools.demo_model.corpus --work-dir build/demo_model
"""

import argparse
import hashlib
import re
import shutil
import subprocess
from pathlib import Path

from tools.demo_model.files import CORPUS_FILE

# Debian's bible-kjv-text holds the compressed text, bible-kjv the program
# that expands it.
PACKAGES = ("bible-kjv-text", "bible-kjv")

# The text that the committed checkpoints were trained on (packages 4.38).
CORPUS_SHA256 = "6b40e3f13a6cf83937165995b4868d7eb1f429d0c96ddb8574bea5544101a914"

# Chapters `HELDOUT_FIRST`, `HELDOUT_FIRST + HELDOUT_EVERY`, ... are never
# trained on: 33 of 1,189 chapters, about 3% of the text, from all over the book.
HELDOUT_EVERY = 36
HELDOUT_FIRST = 18

_VERSE = re.compile(r"(?P<chapter>\w+?\d+):\d+ (?P<text>.*)")

Chapter = list[str]
"""The verses of one chapter, in order."""


def fetch(work_dir: Path) -> Path:
    """Downloads the Debian packages and writes `kjv.txt`.

    Args:
        work_dir: A folder for everything that is downloaded and made.

    Returns:
        The path of the text.

    Raises:
        RuntimeError: If this is no Debian, or if the program printed a line that
            is no verse, or another text than `CORPUS_SHA256` says.
    """
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise RuntimeError(
                f"{tool}: not found; the text comes from Debian's {PACKAGES[0]}"
            )
    work_dir.mkdir(parents=True, exist_ok=True)
    corpus = work_dir / CORPUS_FILE
    subprocess.run(["apt-get", "download", *PACKAGES], cwd=work_dir, check=True)
    root = work_dir / "debian"
    for package in PACKAGES:
        for deb in sorted(work_dir.glob(f"{package}_*.deb")):
            subprocess.run(["dpkg-deb", "-x", deb, root], check=True)
    # -f turns pretty-printing off: one verse a line, as `Ge1:1 In the ...`.
    printed = subprocess.run(
        [root / "usr/bin/bible", "-p", root / "usr/lib", "-f", "gen1:1-rev22:21"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    text = plain_text(printed).encode()
    digest = hashlib.sha256(text).hexdigest()
    if digest != CORPUS_SHA256:
        raise RuntimeError(
            f"{corpus.name}: sha256 is {digest}, not {CORPUS_SHA256}: this Debian's "
            f"{PACKAGES[0]} holds another text; take version 4.38"
        )
    corpus.write_bytes(text)
    return corpus


def plain_text(printed: str) -> str:
    """Turns `Ge1:1 In the ...` lines into verses and empty lines.

    Args:
        printed: The output of the `bible` program without pretty-printing.

    Raises:
        RuntimeError: If a line is no verse.
    """
    lines = []
    previous = None
    for line in printed.splitlines():
        match = _VERSE.fullmatch(line)
        if match is None:
            raise RuntimeError(f"bible: not a verse: {line!r}")
        if previous not in (None, match["chapter"]):
            lines.append("")
        previous = match["chapter"]
        lines.append(match["text"].strip())
    return "\n".join(lines) + "\n"


def read_chapters(corpus: Path) -> list[Chapter]:
    """Reads `kjv.txt` as a list of chapters."""
    text = corpus.read_text(encoding="utf-8")
    return [block.split("\n") for block in text.strip("\n").split("\n\n")]


def split(chapters: list[Chapter]) -> tuple[list[Chapter], list[Chapter]]:
    """Splits off the held-out chapters.

    Returns:
        The chapters to train on and the held-out ones.
    """
    train: list[Chapter] = []
    heldout: list[Chapter] = []
    for index, chapter in enumerate(chapters):
        held = index % HELDOUT_EVERY == HELDOUT_FIRST
        (heldout if held else train).append(chapter)
    return train, heldout


def running_text(chapter: Chapter) -> str:
    """Joins the verses of a chapter to one paragraph."""
    return " ".join(chapter)


def main() -> None:
    """Fetches the text and says how it is split."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work-dir", type=Path, required=True)
    corpus = fetch(parser.parse_args().work_dir)
    for name, part in zip(("train", "held out"), split(read_chapters(corpus))):
        size = sum(len(running_text(chapter).encode()) for chapter in part)
        print(f"{name}: {len(part)} chapters, {size} bytes")


if __name__ == "__main__":
    main()
