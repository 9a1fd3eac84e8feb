# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Reads a Dockerfile into its stages."""

import re
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Stage:
    """One `FROM ... AS name`, with its instructions as (word, rest) in their order."""

    base: str
    name: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, word: str) -> list[str]:
        return [rest for found, rest in self.instructions if found == word]

    def only(self, word: str) -> str:
        (rest,) = self.all(word)
        return rest


def read_stages(path: Path) -> dict[str, Stage]:
    """Returns the stages by name, in their order; comments and line ends are gone."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE)
    stages: dict[str, Stage] = {}
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            base, name = re.fullmatch(r"(\S+) AS (\S+)", rest).groups()
            stage = stages[name] = Stage(base, name)
        elif word:
            stage.instructions.append((word, rest.strip()))
    return stages
