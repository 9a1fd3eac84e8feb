# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""A pack is read as its dense twin, which an independent decoder wrote."""

import pytest
import torch
from safetensors.torch import load_file

from exl3.model.dense import read_dense
from tests.packs import Format, write_pack

SMALL = {"layers": 2, "experts": 2, "mtp": 0}
PACKS = {
    "plain": {"formats": [Format(2, "3inst"), Format(3), Format(2.5, "mul1")]},
    "packed signs": {"legacy_signs": True},
    "slices": {"ranks": 2},
    "shared vectors": {"ranks": 2, "shared_h": True},
}


@pytest.mark.parametrize("name", PACKS)
def test_a_pack_is_read_as_its_twin(tmp_path, name):
    pack = write_pack(tmp_path / "pack", **SMALL, **PACKS[name])
    found = read_dense(pack.path)
    wanted = {}
    for file in sorted(pack.twin.glob("*.safetensors")):
        wanted |= load_file(file)
    assert found.keys() == wanted.keys()
    for tensor_name, tensor in wanted.items():
        stored = found[tensor_name][tuple(map(slice, tensor.shape))]
        # The twin was decoded in float64, and this in float32.
        torch.testing.assert_close(stored.float(), tensor.float(), rtol=1e-4, atol=1e-5)
