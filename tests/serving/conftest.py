# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Checkpoints that the engines serve, and their references in transformers."""

import pytest

from tests.checkpoints import write_checkpoint
from tests.serving.oracle import load_reference, widen

#: A dense layer, two decoder layers of unequal width, and a draft wider than both.
#: No two ranks can share 7 or 5 experts evenly.
WIDTHS = [0, 7, 5, 8]


class Checkpoints:
    """Tiny float32 checkpoints by name, each written when it is first asked for."""

    def __init__(self, folder):
        self.folder = folder
        self._references = {}

    def path(self, model_type, *, unequal):
        """A checkpoint's folder. Its tensors lie in three files."""
        path = self.folder / f"{model_type}-{'unequal' if unequal else 'equal'}"
        if not path.exists():
            widths = WIDTHS if unequal else None
            if unequal and model_type == "qwen3_moe":
                widths = WIDTHS[:-1]  # it has no draft
            write_checkpoint(
                path, model_type=model_type, widths=widths, dtype="float32", shards=3
            )
        return path

    def reference(self, model_type, *, unequal):
        """The same model in transformers, in float32."""
        path = self.path(model_type, unequal=unequal)
        if path not in self._references:
            same = path
            if unequal:
                same = widen(path, path.with_name(f"{path.name}-widened"))
            self._references[path] = load_reference(same)
        return self._references[path]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))
