# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""`exl3 graft-mtp`: puts an EXL3 MTP layer into a checkpoint, and takes it out again.

The checkpoint is changed in place. Files that change are kept as NAME.orig, and
--revert brings them back, byte for byte. If a run is stopped, the same command finishes
it, and --revert undoes it; until then servers refuse the checkpoint, unless it is still
or already whole.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from exl3.checkpoint.expert_widths import resolve_widths
from exl3.checkpoint.file_header import TensorHeader
from exl3.checkpoint.graft_record import GRAFT_FILE, ORIGINAL, GraftState
from exl3.checkpoint.headers import INDEX_FILE
from exl3.checkpoint.json_files import read_json
from exl3.checkpoint.plan import read_checkpoint, read_config, text_config
from exl3.format.errors import CheckpointError, FileError
from exl3.tools.graft.in_place import InPlaceEdit
from exl3.tools.graft.layer import Graft, Side, parts, plan_graft
from exl3.tools.graft.metadata import changes, edited_files, edited_index
from exl3.tools.graft.report import Report
from exl3.tools.shared import durable
from exl3.tools.shared.errors import ToolError

_SHARD = "model-mtp-exl3-{number:05d}-of-{count:05d}.safetensors"


def add_command(commands: Any) -> None:
    """Adds `graft-mtp` to the commands of `exl3`."""
    parser = commands.add_parser(
        "graft-mtp",
        help="put an EXL3 MTP layer into a checkpoint in place, or take it out",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "base", type=Path, metavar="BASE", help="the checkpoint to change"
    )
    parser.add_argument(
        "overlay",
        type=Path,
        nargs="?",
        metavar="OVERLAY",
        help="a checkpoint of the same model with its MTP layer in EXL3",
    )
    parser.add_argument(
        "--revert", action="store_true", help="bring back what BASE was"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the edits, and make none"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Grafts or reverts.

    Raises:
        CheckpointError: One of the checkpoints cannot be served.
        ToolError: The MTP layer does not fit, or there is nothing to revert.
    """
    base, overlay = options.base, options.overlay
    if not base.is_dir():
        raise FileError(f"{base}: is no folder; check the path")
    if options.revert == (overlay is not None):
        raise ToolError(
            "--revert takes BASE alone"
            if overlay
            else "graft-mtp takes BASE and OVERLAY, or BASE and --revert"
        )
    edit, report = InPlaceEdit(base), Report(base, options.json)
    with edit.locked():
        if options.revert:
            _revert(edit, options.dry_run, report)
        elif not _go_on(edit, overlay, options.dry_run, report):
            _graft(edit, overlay, options.dry_run, report)


def _revert(edit: InPlaceEdit, dry_run: bool, report: Report) -> None:
    record = edit.read()
    if record is None:
        if not dry_run:
            edit.clear()
        raise ToolError(
            f"{edit.folder}: nothing was grafted ({GRAFT_FILE} is not there)"
        )
    report.files("restores", record.replaced)
    report.files("removes", record.added)
    if dry_run:
        report.end("planned")
    else:
        edit.undo(record)
        report.end("reverted", " is as it was before the graft")


def _go_on(edit: InPlaceEdit, overlay: Path, dry_run: bool, report: Report) -> bool:
    """Finishes a graft that was stopped while it replaced files.

    Returns:
        Whether there was one. A graft that had replaced nothing is cleared away.

    Raises:
        ToolError: A graft is done, is being reverted, or is of another OVERLAY.
    """
    record = edit.read()
    if record is None:
        return False
    if record.state == GraftState.DONE:
        raise ToolError(
            f"{edit.folder}: is grafted already, with {record.about.get('overlay')}; "
            "run it with --revert first"
        )
    if record.state == GraftState.REVERTING:
        raise ToolError(
            f"{edit.folder}: a --revert was stopped; run it with --revert first"
        )
    if record.state == GraftState.PREPARING:
        if dry_run:
            return False
        edit.undo(record)
        return False
    if record.about.get("overlay") != os.path.realpath(overlay):
        raise ToolError(
            f"{edit.folder}: a graft of {record.about.get('overlay')} was stopped; run "
            "it with that again, or with --revert first"
        )
    if dry_run:
        report.end(
            "planned", ": has a graft that was stopped; the same would finish it"
        )
    else:
        edit.finish(record)
        report.end("finished", ": finished the graft that was stopped")
    return True


def _graft(
    edit: InPlaceEdit, overlay_folder: Path, dry_run: bool, report: Report
) -> None:
    if os.path.realpath(edit.folder) == os.path.realpath(overlay_folder):
        raise ToolError(f"{overlay_folder}: is BASE itself; name another OVERLAY")
    base, overlay = Side(edit.folder), Side(overlay_folder)
    graft = plan_graft(base, overlay)
    shards = _shards(graft)
    files = edited_files(base, overlay, graft)
    files[INDEX_FILE] = edited_index(base, graft, shards)
    replaced = [name for name in files if (edit.folder / name).exists()]
    replaced += graft.rewritten
    added = [*shards, *(name for name in files if name not in replaced)]
    _describe(base, graft, shards, files, report)
    report.files("keeps", [f"{name}{ORIGINAL}" for name in replaced])
    _check(base, graft, shards, files)
    if dry_run:
        report.end("planned")
        return
    edit.clear()
    about = {
        "overlay": os.path.realpath(overlay_folder),
        "layers": overlay.draft_layers,
    }
    record = edit.begin(added, replaced, about)
    try:
        _write(edit, base, overlay, graft, shards, files)
        edit.commit(record)
    except BaseException:
        if record.state == GraftState.PREPARING:
            edit.undo(record)
        raise
    layers = ", ".join(map(str, overlay.draft_layers))
    report.end("grafted", f": layer {layers} is EXL3 now; --revert undoes it")


def _shards(graft: Graft) -> dict[str, list[TensorHeader]]:
    """The new files, and OVERLAY's tensors that go into each."""
    found = list(parts(graft.added))
    return {
        _SHARD.format(number=number, count=len(found)): part
        for number, part in enumerate(found, start=1)
    }


def _describe(
    base: Side,
    graft: Graft,
    shards: Mapping[str, list[TensorHeader]],
    files: Mapping[str, Any],
    report: Report,
) -> None:
    for name, headers in shards.items():
        report.tensors("adds", name, f"adds {name}:", headers)
    if graft.dropped:
        line = f"drops from {INDEX_FILE}:"
        report.tensors("drops", INDEX_FILE, line, graft.dropped)
    for name, headers in graft.rewritten.items():
        report.tensors("rewrites", name, f"writes {name} anew without", headers)
    for name, content in files.items():
        file = base.folder / name
        if not file.exists():
            report.files("adds", [name])
        elif name != INDEX_FILE:
            for line in changes(read_json(file), content):
                report.change(name, line)


def _write(
    edit: InPlaceEdit,
    base: Side,
    overlay: Side,
    graft: Graft,
    shards: Mapping[str, list[TensorHeader]],
    files: Mapping[str, Any],
) -> None:
    """Writes all new files beside the old ones."""
    for name, headers in shards.items():
        tensors = {header.name: overlay.read(header) for header in headers}
        durable.write_safetensors(edit.new(name), tensors, edit.temporary)
    for name in graft.rewritten:
        tensors = {
            header.name: base.read(header) for header in _kept(base, graft, name)
        }
        durable.write_safetensors(edit.new(name), tensors, edit.temporary)
    for name, content in files.items():
        durable.write_json(edit.new(name), content, edit.temporary)


def _kept(base: Side, graft: Graft, file: str) -> list[TensorHeader]:
    """The tensors of a file of BASE that is written anew."""
    gone = {header.name for header in graft.rewritten[file]}
    return [
        header
        for fields in base.modules.values()
        for header in fields.values()
        if header.file == file and header.name not in gone
    ]


def _check(
    base: Side,
    graft: Graft,
    shards: Mapping[str, list[TensorHeader]],
    files: Mapping[str, Any],
) -> None:
    """Reads the outcome as a server does, before anything is written to BASE.

    Raises:
        ToolError: A server would refuse it.
    """
    headers = dict(shards)
    headers |= {name: _kept(base, graft, name) for name in graft.rewritten}
    with tempfile.TemporaryDirectory() as temporary:
        view = Path(temporary)
        for path in base.folder.resolve().iterdir():
            is_read = path.suffix in (".json", ".safetensors")
            if is_read and path.name not in {*headers, *files}:
                (view / path.name).symlink_to(path)
        try:
            for file in (*files, *headers):
                if file in files:
                    (view / file).write_text(json.dumps(files[file]))
                else:
                    durable.write_header(view / file, headers[file])
        except OSError as error:  # such as a limit that BASE's file would meet too
            where = str(base.folder / file)
            raise OSError(error.errno, error.strerror, where) from error
        try:
            config = read_config(view)
            checkpoint = read_checkpoint(view, config)
            resolve_widths(text_config(config), checkpoint.widths)
        except CheckpointError as error:
            raise ToolError(
                f"{base.folder}: does not take this MTP layer: {error}"
            ) from error
