# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""What is served does not hang on the files that it was loaded from.

A checkpoint on a network disk is synchronised, pruned or replaced while it is served.
Were its files still mapped, a shorter one would end the server with a bus error, and a
new content would change the weights under way.
"""

import os

import pytest


def truncate(file):
    """In place, so that a page of a mapping would lie beyond the end."""
    os.truncate(file, file.stat().st_size // 2)


def overwrite(file):
    """In place, so that a mapping would show the new content."""
    with file.open("r+b") as stream:
        stream.write(b"\xff" * file.stat().st_size)


def replace(file):
    """By another file of that name, as a downloader does it."""
    other = file.with_name(f"{file.name}.new")
    other.write_bytes(b"\xff" * file.stat().st_size)
    other.rename(file)


def remove(file):
    file.unlink()


@pytest.fixture
def on_disk(server):
    """The checkpoint's files; afterwards as they were."""
    saved = {file: file.read_bytes() for file in server.model.iterdir()}
    yield list(saved)
    for file, content in saved.items():
        file.write_bytes(content)


@pytest.mark.parametrize("harm", [truncate, overwrite, replace, remove])
def test_a_changed_file_changes_nothing(server, on_disk, harm):
    before = server.tokens()
    for file in on_disk:
        harm(file)
    assert server.tokens() == before
    assert server.health() == 200


def test_no_file_is_mapped(server):
    paths = {
        mapping.path
        for process in server.processes()
        for mapping in process.memory_maps()
    }
    assert paths
    assert not [path for path in paths if path.startswith(str(server.model))]
