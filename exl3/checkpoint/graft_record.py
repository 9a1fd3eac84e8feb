# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The file that `exl3 graft-mtp` leaves in a checkpoint, and what it means to readers.

A graft replaces several files of a folder, one after the other. Between the first and
the last the folder is half one checkpoint and half another, and must not be read.
"""

from enum import StrEnum
from pathlib import Path

from exl3.checkpoint.json_files import read_json
from exl3.format.errors import FileError

GRAFT_FILE = "exl3-graft.json"
#: What follows the name of a file that a graft has replaced.
ORIGINAL = ".orig"


class GraftState(StrEnum):
    """How far a graft is."""

    PREPARING = "preparing"  # new files lie beside the old ones, under other names
    REPLACING = "replacing"
    DONE = "done"
    REVERTING = "reverting"


def refuse_half_grafted(folder: Path) -> None:
    """Refuses a checkpoint whose graft, or its reverting, was stopped halfway.

    Raises:
        FileError: It was, or the record of it is damaged.
    """
    file = folder / GRAFT_FILE
    if not file.is_file():
        return
    record = read_json(file)
    state = record.get("state") if isinstance(record, dict) else None
    if state not in tuple(GraftState):
        raise FileError(
            f"{file}: is no record of a graft; run `exl3 graft-mtp {folder} --revert`, "
            "or fetch the checkpoint anew"
        )
    if state in (GraftState.REPLACING, GraftState.REVERTING):
        raise FileError(
            f"{file}: a graft was stopped while {state} files, so the checkpoint is "
            "half changed; run `exl3 graft-mtp` as before to finish it, or with "
            "--revert to undo it"
        )
