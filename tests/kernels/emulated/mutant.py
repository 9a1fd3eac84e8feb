# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""A kernel file with one place changed: a fault that the tests must find."""

from dataclasses import dataclass
from pathlib import Path

from tests.kernels.emulated.build import CSRC


@dataclass(frozen=True)
class Mutant:
    """One changed place of `exl3/kernels/<file>`.

    `caught_as` has the faults that may report it, separated by |. What isn't a fault of
    its own is "wrong" (a result far from float64) or "schedule" (one that depends on
    the order of threads).
    """

    name: str
    file: str
    before: str
    after: str
    caught_as: str

    def write(self, folder: Path) -> Path:
        """Writes the changed file where a build with this overlay finds it."""
        source = (CSRC / "exl3" / "kernels" / self.file).read_text()
        assert source.count(self.before) == 1, "the mutant's place has changed"
        changed = folder / "exl3" / "kernels" / self.file
        changed.parent.mkdir(parents=True)
        changed.write_text(source.replace(self.before, self.after))
        return folder

    def check(self, found: str) -> None:
        """Whether a run's verdict is what this mutant must cause."""
        assert found.split(":")[0] in self.caught_as.split("|"), found or "not caught"
