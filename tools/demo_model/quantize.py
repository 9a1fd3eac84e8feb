# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Encodes a demo checkpoint as an EXL3 pack, calibrated on the training text.

    python -m tools.demo_model.quantize plain examples/demo-glm-dsa \
        examples/demo-glm-dsa-exl3 --work-dir build/demo_model
    python -m tools.demo_model.quantize rank-sliced examples/demo-glm-dsa-ragged \
        examples/demo-glm-dsa-ragged-exl3 --work-dir build/demo_model

Embeddings, norms, routers, the indexers and `eh_proj` stay as they are.
"""

import argparse
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

from exl3.checkpoint.metadata import QUANTIZATION_FILE
from exl3.format.constants import Codebook
from exl3.format.tail import TAIL
from exl3.tools.quantize import metadata
from exl3.tools.quantize.allocate import allocate_bits
from exl3.tools.quantize.encode import Job, encode, slice_job
from exl3.tools.shared.staging import StagedCheckpoint
from tools.demo_model.calibrate import Calibration, calibrate
from tools.demo_model.data import Data
from tools.demo_model.export import WEIGHTS_FILE
from tools.demo_model.load import load_checkpoint

COPIED = ("generation_config.json", "tokenizer.json", "tokenizer_config.json")

_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj")
_ENCODED = re.compile(r"(.*(?<!\.eh)(_proj|_proj_with_mqa)|lm_head)\.weight")


@dataclass(frozen=True)
class Recipe:
    """How a pack is made.

    Attributes:
        expert_bits: Mean bits of the trunk's routed experts.
        choices: What an expert may have.
        mtp_bits: Bits of the MTP layer's routed experts.
        other_bits: Bits of attention, the dense layer and the shared experts.
        head_bits: Bits of `lm_head`.
        codebook: The trellis's codebook.
        ranks: Slices of each routed expert; None for plain EXL3.
    """

    expert_bits: float
    choices: tuple[int, ...]
    mtp_bits: int
    other_bits: int
    head_bits: int
    codebook: Codebook
    ranks: int | None = None


def uniform(bits: int, codebook: Codebook) -> Recipe:
    """Plain EXL3 with one bitrate throughout, but for the head."""
    return Recipe(bits, (bits,), bits, bits, 6, codebook)


RECIPES = {
    "plain": uniform(4, Codebook.MUL1),
    "rank-sliced": Recipe(
        expert_bits=3.5,
        choices=(3, 4),
        mtp_bits=3,
        other_bits=5,
        head_bits=6,
        codebook=Codebook.MCG,
        ranks=2,
    ),
}


class Quantizer:
    """Makes packs of one checkpoint.

    Args:
        source: The BF16 checkpoint's folder.
        work_dir: The folder with the text.
    """

    def __init__(self, source: Path, work_dir: Path):
        self.source = source
        self.config = json.loads((source / "config.json").read_text())
        self.tensors = load_file(source / WEIGHTS_FILE)
        self.data = Data(work_dir)
        self.calibration = calibrate(load_checkpoint(source), self.data)

    def write(self, recipe: Recipe, out: Path) -> None:
        """Writes a pack to the folder `out`."""
        bits = expert_bits(recipe, self.calibration, self.config["num_hidden_layers"])
        with StagedCheckpoint(out, {}, sources=[self.source]) as writer:
            stored = self._encoded(recipe, bits)
            writer.write_shard("all", stored)
            quantization = metadata.quantization_config(
                recipe.expert_bits if recipe.ranks is None else "mixed",
                recipe.head_bits,
                recipe.codebook,
            )
            config = {**self.config, "quantization_config": quantization}
            if recipe.ranks is not None:
                config[TAIL] = metadata.rank_sliced_tail(bits, recipe.ranks)
                writer.write_json(metadata.BITS_MAP_FILE, metadata.bits_map(bits))
            writer.write_json("config.json", config)
            storage = {"tensor_storage": metadata.tensor_storage(stored)}
            writer.write_json(QUANTIZATION_FILE, quantization | storage)
            for file in COPIED:
                writer.copy(self.source / file)

    def _encoded(self, recipe: Recipe, bits: dict[int, list[int]]) -> dict[str, Tensor]:
        """The tensors of a pack, by name."""
        stored: dict[str, Tensor] = {}
        for name, weight in tqdm(sorted(self.tensors.items()), unit=" tensors"):
            if not is_encoded(name):
                stored[name] = weight
                continue
            module = name.removesuffix(".weight")
            for job in self._jobs(module, weight, recipe, bits):
                stored |= encode(job, seed=len(stored))
        return stored

    def _jobs(
        self, module: str, weight: Tensor, recipe: Recipe, bits: dict[int, list[int]]
    ) -> Iterator[Job]:
        """One matrix, or its slices."""
        hessian = self.calibration.hessians[module].mean()
        expert = _EXPERT.fullmatch(module)
        if expert is None:
            rate = recipe.head_bits if module == "lm_head" else recipe.other_bits
            yield Job(module, weight, hessian, rate, recipe.codebook)
            return
        layer, index, projection = expert.groups()
        rate = bits[int(layer)][int(index)]
        job = Job(module, weight, hessian, rate, recipe.codebook)
        if recipe.ranks is None:
            yield job
        else:
            yield from slice_job(job, recipe.ranks, by_output=projection != "down")


def is_encoded(name: str) -> bool:
    """Whether a pack has a trellis in place of this tensor of its source."""
    return _ENCODED.fullmatch(name) is not None and ".indexer." not in name


def expert_bits(
    recipe: Recipe, calibration: Calibration, num_layers: int
) -> dict[int, list[int]]:
    """Bits of every routed expert by layer, the MTP layer (`num_layers`) last."""
    trunk = {
        key: value
        for key, value in calibration.sensitivities.items()
        if key[0] < num_layers
    }
    chosen = allocate_bits(trunk, recipe.expert_bits, recipe.choices)
    bits: dict[int, list[int]] = {}
    for layer, expert in sorted(calibration.sensitivities):
        rate = chosen.get((layer, expert), recipe.mtp_bits)
        bits.setdefault(layer, []).append(rate)
    return bits


def main() -> None:
    """Writes one pack."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", choices=sorted(RECIPES))
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--work-dir", type=Path, required=True)
    args = parser.parse_args()
    Quantizer(args.source, args.work_dir).write(RECIPES[args.recipe], args.out)


if __name__ == "__main__":
    main()
