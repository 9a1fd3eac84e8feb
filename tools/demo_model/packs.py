# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Makes the EXL3 packs of `examples/` by `exl3 quantize`.

    python -m tools.demo_model.packs demo-glm-dsa-exl3 --work-dir build/demo_model

The pack takes the place of the one in `examples/`, whose card stays.
"""

import argparse
import shutil
from dataclasses import dataclass
from pathlib import Path

from exl3 import cli
from exl3.tools.quantize import command
from exl3.tools.quantize.recipe import Recipe

EXAMPLES = Path("examples")
TEXT = EXAMPLES / "calibration.txt"
#: What the source has for people, and the pack has of its own or not at all.
_FOR_PEOPLE = ("README.md", "loss.svg")


@dataclass(frozen=True)
class Pack:
    """How a pack is made.

    Attributes:
        source: The BF16 checkpoint in `examples/`.
        options: Of `exl3 quantize`.
    """

    source: str
    options: tuple[str, ...]

    def arguments(self, out: Path) -> list[str]:
        """The arguments of `exl3` that make the pack in a folder."""
        places = ["quantize", str(EXAMPLES / self.source), str(out)]
        return [*places, *self.options, "--text", str(TEXT)]

    @property
    def recipe(self) -> Recipe:
        """What the options ask for."""
        parser = argparse.ArgumentParser()
        command.add_command(parser.add_subparsers())
        return command.recipe_of(parser.parse_args(self.arguments(Path("out"))))


PACKS = {
    "demo-glm-dsa-exl3": Pack("demo-glm-dsa", ("--bits", "4")),
    "demo-glm-dsa-ragged-exl3": Pack(
        "demo-glm-dsa-ragged",
        (
            *("--rank-sliced", "--tp", "2", "--bits", "3.5", "--mtp-bits", "3"),
            *("--attn-bits", "5", "--head-bits", "6"),
        ),
    ),
}


def install(made: Path, place: Path) -> None:
    """Puts a pack into the place of another, but for what it has for people."""
    for file in place.iterdir():
        if file.name not in _FOR_PEOPLE:
            file.unlink()
    for file in made.iterdir():
        if file.name not in _FOR_PEOPLE:
            shutil.copyfile(file, place / file.name)


def main() -> None:
    """Makes one pack."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pack", choices=PACKS)
    parser.add_argument("--work-dir", type=Path, required=True)
    args = parser.parse_args()
    made = args.work_dir / "packs" / args.pack
    made.parent.mkdir(parents=True, exist_ok=True)
    if cli.main([*PACKS[args.pack].arguments(made), "--resume"]) != 0:
        raise SystemExit(1)
    place = EXAMPLES / args.pack
    place.mkdir(exist_ok=True)
    install(made, place)


if __name__ == "__main__":
    main()
