# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Everything that the files beside the tensors say of an EXL3 checkpoint."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import repr as brief  # a hostile value must not fill the log
from typing import Any

from exl3.checkpoint.graft_record import refuse_half_grafted
from exl3.checkpoint.json_files import is_file, read_json
from exl3.format.errors import MetadataError, UnsupportedFormatError
from exl3.format.metadata import QUANT_METHOD, QuantizationConfig, refuse_siblings
from exl3.format.tail import TAIL, Tail

QUANTIZATION_FILE = "quantization_config.json"
_SIBLING_FILE = "exl3-manifest.json"
#: In a layer without the bits of its experts: all of them have 3.
_ALL_THREE_BITS = "tail_tr3"


@dataclass
class Metadata:
    """What a checkpoint's files say. The tensors decide; this must not contradict."""

    declared: bool = False  # the config says that the checkpoint is EXL3
    block: QuantizationConfig | None = None  # of config.json, or else of its own file
    tail: Tail | None = None
    bits_map: Mapping[str, Any] = field(default_factory=dict)  # by layer
    storage: Mapping[str, Any] = field(default_factory=dict)  # `tensor_storage`
    ignored: Sequence[str] = ()  # modules that `quantization_config.ignore` names
    warnings: list[str] = field(default_factory=list)

    def expert_bits(self, layer: int, width: int) -> list[int] | None:
        """The bits that the metadata gives each expert of a layer.

        Raises:
            MetadataError: The file of the bits says nothing of the layer, or not for
                each of its experts.
        """
        tail = self.tail
        if tail is None:
            return None
        if tail.bits_by_layer is not None:
            return [tail.bits_by_layer[layer]] * width
        if tail.bits is not None:
            return [tail.bits] * width
        where = f"{tail.bits_file}: layer {layer}"
        entry = self.bits_map.get(str(layer))
        if not isinstance(entry, Mapping):
            raise MetadataError(
                f"{where} has the entry {brief(entry)}; expected an object with a list "
                f"{tail.bits_field!r} of {width} bits"
            )
        bits = entry.get(tail.bits_field)
        if bits is None and _is_list(entry.get(_ALL_THREE_BITS), width):
            return [3] * width
        if not isinstance(bits, list) or len(bits) != width:
            length = f"{len(bits)} entries" if isinstance(bits, list) else brief(bits)
            raise MetadataError(
                f"{where} has {length} in {tail.bits_field!r}; expected a list of "
                f"{width}, one for each routed expert that is stored"
            )
        for expert, k in enumerate(bits):
            if type(k) is not int or k not in tail.k_values:
                raise MetadataError(
                    f"{where} gives expert {expert} {brief(k)} bits; {TAIL}.k_values "
                    f"has {sorted(tail.k_values)}"
                )
        return bits


def read_metadata(folder: Path, config: Mapping[str, Any]) -> Metadata:
    """Reads and checks the metadata of a checkpoint, EXL3 or not.

    Args:
        folder: The checkpoint's folder.
        config: Its `config.json`.

    Raises:
        CheckpointError: The metadata is malformed, contradicts itself or belongs to
            another format.
    """
    found = Metadata()
    refuse_half_grafted(folder)
    if (folder / _SIBLING_FILE).exists():
        raise UnsupportedFormatError(
            f"{_SIBLING_FILE}: marks a format that resembles EXL3 and is not supported"
            "; convert the model to plain or rank-sliced EXL3"
        )
    block = _either(config, "quantization_config", found)
    if block is not None and not isinstance(block, Mapping):
        raise MetadataError(
            f"config.json: quantization_config is {brief(block)}; expected an object, "
            "or remove it"
        )
    is_exl3 = isinstance(block, Mapping) and block.get("quant_method") == QUANT_METHOD
    if isinstance(block, Mapping):
        where = "config.json: quantization_config"
        refuse_siblings(block, where)
        ignored = block.get("ignore")
        if isinstance(ignored, list):
            found.ignored = [name for name in ignored if isinstance(name, str)]
        if is_exl3:
            found.block = QuantizationConfig.parse(block, where)
    tail = _either(config, TAIL, found)
    if tail is not None:
        found.tail = Tail.parse(tail, f"config.json: {TAIL}")
    found.declared = is_exl3 or tail is not None
    return found


def add_files(metadata: Metadata, folder: Path) -> None:
    """Reads the other files of a checkpoint that is EXL3.

    Raises:
        CheckpointError: See `read_metadata`.
    """
    file = folder / QUANTIZATION_FILE
    if os.path.lexists(file):
        _add_quantization_file(metadata, read_json(file))
    tail = metadata.tail
    if tail is not None and tail.bits_file is not None:
        if not is_file(folder / tail.bits_file):
            raise MetadataError(
                f"config.json: {TAIL}.bits_per_expert names {tail.bits_file!r}, which "
                f"is not in {folder}; fetch it"
            )
        bits_map = read_json(folder / tail.bits_file)
        if not isinstance(bits_map, Mapping):
            raise MetadataError(
                f"{tail.bits_file} is {brief(bits_map)}; expected an object by layer"
            )
        metadata.bits_map = bits_map


def _add_quantization_file(metadata: Metadata, content: Any) -> None:
    if not isinstance(content, Mapping):
        raise MetadataError(
            f"{QUANTIZATION_FILE} is {brief(content)}; expected an object"
        )
    storage = content.get("tensor_storage")
    if isinstance(storage, Mapping):
        metadata.storage = storage
    if metadata.tail is None and content.get("rank_sliced") is not None:
        where = f"{QUANTIZATION_FILE}: rank_sliced"
        metadata.tail = Tail.parse(content["rank_sliced"], where)
    if content.get("quant_method", QUANT_METHOD) != QUANT_METHOD:
        return
    block = QuantizationConfig.parse(content, QUANTIZATION_FILE)
    first = metadata.block
    if first is None:
        metadata.block = block
        return
    for name in ("bits", "head_bits", "codebook"):
        one, other = getattr(first, name), getattr(block, name)
        if one is not None and other is not None and one != other:
            if name == "codebook":
                one, other = one.label, other.label
            metadata.warnings.append(
                f"{name} is {one} in config.json and {other} in {QUANTIZATION_FILE}; "
                "config.json wins where it is shown, and the tensors' shapes and "
                "markers decide how each is decoded"
            )


def _either(config: Mapping[str, Any], name: str, found: Metadata) -> Any:
    """A field of the outer config, or else of the text model's."""
    outer = config.get(name)
    text = config.get("text_config")
    inner = text.get(name) if isinstance(text, Mapping) else None
    if outer is None:
        return inner
    if inner is not None and inner != outer:
        found.warnings.append(
            f"config.json: {name} is another one in text_config; the outer one wins"
        )
    return outer


def _is_list(value: Any, length: int) -> bool:
    return isinstance(value, list) and len(value) == length
