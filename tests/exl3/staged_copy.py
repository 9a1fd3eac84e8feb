# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""A command that copies a checkpoint in four steps, to be stopped meanwhile."""

from pathlib import Path
from types import SimpleNamespace

from exl3 import cli
from exl3.checkpoint.headers import list_folder
from exl3.checkpoint.plan import read_config
from exl3.tools.shared.staging import StagedCheckpoint

STEPS = 4


def copy(options):
    read_config(options.source)
    headers = list_folder(options.source).headers
    request = {"command": "copy"}
    sources = [options.source]
    with StagedCheckpoint(options.out, request, options.resume, sources=sources) as out:
        from safetensors import safe_open

        for step in range(STEPS):
            if out.has(f"part-{step}"):
                continue
            part = {}
            for header in headers[step::STEPS]:
                with safe_open(options.source / header.file, "pt") as file:
                    part[header.name] = file.get_tensor(header.name)
            state = {"last": part[header.name]}
            out.write_shard(f"part-{step}", part, state=state)
        out.copy(options.source / "config.json")
        out.write_json("copied.json", [header.name for header in headers])


def add_command(commands):
    parser = commands.add_parser("copy")
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.set_defaults(run=copy)


def main(arguments):
    cli.COMMANDS = (SimpleNamespace(add_command=add_command),)
    return cli.main(arguments)
