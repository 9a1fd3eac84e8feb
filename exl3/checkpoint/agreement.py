# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Whether the metadata and the config agree with what is stored.

The tensors decide. A contradiction in a decoder layer is refused, since one of the two
is of another checkpoint. A draft is often exchanged without its metadata, so of a draft
layer a contradiction is only told.
"""

from collections.abc import Collection, Mapping
from reprlib import repr as brief  # a hostile value must not fill the log
from typing import Any

from exl3.checkpoint.experts import ExpertLayer
from exl3.checkpoint.matrix import Matrix
from exl3.checkpoint.metadata import Metadata
from exl3.checkpoint.problems import Problems
from exl3.format.constants import Codebook, padded
from exl3.format.errors import MetadataError, TensorError
from exl3.format.names import UNKNOWN_LAYERS, layer_of, parse_name
from exl3.format.tail import TAIL, Tail


def check_agreement(
    metadata: Metadata,
    text: Mapping[str, Any],
    linears: Mapping[str, Matrix],
    experts: Mapping[str, ExpertLayer],
    dense_experts: Collection[str],
    problems: Problems | None = None,
) -> list[str]:
    """Compares metadata, config and tensors.

    Args:
        metadata: What the files say.
        text: The text model's config.
        linears: EXL3 modules.
        experts: Layers whose routed experts are EXL3.
        dense_experts: Layers whose routed experts are not.
        problems: Takes note of each layer's, if there is more than one.

    Returns:
        Warnings.

    Raises:
        CheckpointError: They contradict each other.
    """
    problems = problems or Problems()
    num_layers = decoder_layers(text)
    warnings: list[str] = []
    for name, layer in experts.items():
        with problems.noted():
            warnings += _check_layer(name, layer, num_layers, metadata)
            _check_sizes(name, layer, text)
    for name in dense_experts:
        with problems.noted():
            warnings += _check_dense(name, num_layers, metadata)
    with problems.noted():
        _check_tail_stored((*experts, *dense_experts), num_layers, metadata)
    with problems.noted():
        _check_head(linears, text)
    warnings += _codebook_warnings(metadata, linears, experts)
    warnings += _storage_warnings(metadata, linears, experts)
    warnings += _ignore_warnings(metadata, linears, experts)
    return warnings


def _check_layer(
    name: str, layer: ExpertLayer, num_layers: int, metadata: Metadata
) -> list[str]:
    index = layer_of(name, num_layers)
    if index is None:
        raise TensorError(
            f"{name}: the name has no layer index; expected one like layers.3"
        )
    if layer.sliced:
        return _check_sliced(name, layer, index, num_layers, metadata)
    if metadata.tail is None or index not in metadata.tail.layers:
        return []
    return _disagree(
        f"{name}: is stored whole, but {TAIL}.moe_layers counts layer {index} as "
        "rank-sliced",
        index >= num_layers,
    )


def _check_dense(name: str, num_layers: int, metadata: Metadata) -> list[str]:
    index = layer_of(name, num_layers)
    if metadata.tail is None or index is None or index not in metadata.tail.layers:
        return []
    return _disagree(
        f"{name}: is dense, but {TAIL}.moe_layers counts layer {index} as rank-sliced",
        index >= num_layers,
    )


def _check_tail_stored(
    stored: Collection[str], num_layers: int, metadata: Metadata
) -> None:
    """Refuses a checkpoint that lacks the experts of a layer that the metadata has."""
    if metadata.tail is None:
        return
    layers = {layer_of(name, num_layers) for name in stored}
    # A draft may come without the trunk, and the trunk without the draft.
    if not any(at is not None and at < num_layers for at in layers):
        return
    for layer in metadata.tail.layers:
        if layer < num_layers and layer not in layers:
            raise MetadataError(
                f"{TAIL}.moe_layers counts layer {layer} as rank-sliced, but none of "
                "its experts is stored; fetch the missing file"
            )


def decoder_layers(text: Mapping[str, Any]) -> int:
    """`num_hidden_layers`; UNKNOWN_LAYERS if it is not stated."""
    value = text.get("num_hidden_layers")
    return value if type(value) is int and value >= 0 else UNKNOWN_LAYERS


def _disagree(what: str, is_draft: bool) -> list[str]:
    if is_draft:
        return [f"{what}; the tensors decide"]
    raise MetadataError(
        f"{what}; the metadata is of another checkpoint: fetch both anew"
    )


def _check_sliced(
    name: str, layer: ExpertLayer, index: int, num_layers: int, metadata: Metadata
) -> list[str]:
    tail = metadata.tail
    if layer.shared_h != (tail is not None and tail.shared_h):
        stored = "has" if layer.shared_h else "lacks"
        raise MetadataError(
            f"{name}: {stored} the vectors that shared_h_v1 has in shared_h, and "
            f"{TAIL}.rotation_layout says {'not ' if layer.shared_h else ''}so; fetch "
            "both anew"
        )
    if tail is None:
        return [f"{name}: is rank-sliced without {TAIL}; the tensors decide"]
    if layer.ranks != tail.ranks:
        raise MetadataError(
            f"{name}: is stored in {layer.ranks} slices, but {TAIL}.tp is {tail.ranks}"
            "; fetch the missing files"
        )
    for expert, codes in enumerate(layer.encodings):
        for code in codes:
            if code.codebook is not Codebook.MCG:
                raise TensorError(
                    f"{name}: expert {expert} has codebook {code.codebook.label}, but "
                    f"{TAIL}.codebook is mcg; every matrix needs its mcg tensor"
                )
    is_draft = index >= num_layers
    if index not in tail.layers:
        return _disagree(
            f"{name}: is rank-sliced, but {TAIL}.moe_layers ends before layer {index}"
            if index > tail.layers[-1]
            else f"{name}: is rank-sliced, but {TAIL}.moe_layers begins after it",
            is_draft,
        )
    width = tail.width(index)
    if width != layer.width:
        raise MetadataError(
            f"{name}: {layer.width} routed experts are stored, but "
            f"{TAIL}.experts_per_layer gives layer {index} {width or 'none'}; set it "
            f"to {layer.width}, or use the checkpoint that it describes"
        )
    _check_bits(name, layer, index, metadata, tail)
    return []


def _check_bits(
    name: str, layer: ExpertLayer, index: int, metadata: Metadata, tail: Tail
) -> None:
    declared = metadata.expert_bits(index, layer.width) or []
    for expert, (codes, k) in enumerate(zip(layer.encodings, declared, strict=True)):
        stored = [code.bits for code in codes]
        # One number cannot describe projections that differ. It then is a summary.
        if not min(stored) <= k <= max(stored) or (
            tail.bits_file is None and stored != [k] * 3
        ):
            raise MetadataError(
                f"{name}: expert {expert} is stored with {stored} bits in gate, up and "
                f"down, but {tail.bits_file or TAIL} gives it {k}; fetch both anew"
            )
        if tail.bits_file is not None and not tail.k_values.issuperset(stored):
            raise MetadataError(
                f"{name}: expert {expert} is stored with {stored} bits in gate, up and "
                f"down, but {TAIL}.k_values has {sorted(tail.k_values)}; add the others"
            )


def _check_sizes(name: str, layer: ExpertLayer, text: Mapping[str, Any]) -> None:
    """Stored sizes are the config's, filled up to whole blocks of 128."""
    hidden = _size(text, "hidden_size")
    if hidden is not None and layer.hidden != padded(hidden):
        raise TensorError(
            f"{name}: is stored for a hidden size of {layer.hidden}, but config.json "
            f"has hidden_size {hidden}; use the config of this checkpoint"
        )
    stored = layer.intermediate * layer.ranks
    size = _size(text, "moe_intermediate_size")
    # Slices have no padding, since their features follow one another.
    if size is not None and stored != (size if layer.sliced else padded(size)):
        raise TensorError(
            f"{name}: {stored} intermediate features are stored in all, but "
            f"config.json has moe_intermediate_size {size}; use the config of this "
            "checkpoint"
        )


def _check_head(linears: Mapping[str, Matrix], text: Mapping[str, Any]) -> None:
    head = linears.get("lm_head")
    hidden, vocabulary = _size(text, "hidden_size"), _size(text, "vocab_size")
    if head is None or hidden is None or vocabulary is None:
        return
    stored = head.in_features, head.out_features
    if stored != (padded(hidden), padded(vocabulary)):
        raise TensorError(
            f"lm_head: is stored as {head.in_features} x {head.out_features}, but "
            f"config.json has hidden_size {hidden} and vocab_size {vocabulary}; use "
            "the config of this checkpoint"
        )


def _size(text: Mapping[str, Any], field: str) -> int | None:
    value = text.get(field)
    return value if type(value) is int and value > 0 else None


def _codebook_warnings(
    metadata: Metadata,
    linears: Mapping[str, Matrix],
    experts: Mapping[str, ExpertLayer],
) -> list[str]:
    block = metadata.block
    if block is None:
        return []
    warnings = []
    stated = block.codebook
    stored = {matrix.codebook for matrix in linears.values()}
    stored |= {
        code.codebook
        for layer in experts.values()
        if not layer.sliced
        for codes in layer.encodings
        for code in codes
    }
    if stated is not None and stored - {stated}:
        labels = ", ".join(codebook.label for codebook in sorted(stored))
        warnings.append(
            f"quantization_config.codebook is {stated.label}, and the modules have "
            f"{labels}; each module's marker decides"
        )
    head = linears.get("lm_head")
    if head is not None and block.head_bits not in (None, head.bits):
        warnings.append(
            f"quantization_config.head_bits is {block.head_bits}, and lm_head has "
            f"{head.bits}; the tensor's shape decides"
        )
    return warnings


def _storage_warnings(
    metadata: Metadata,
    linears: Mapping[str, Matrix],
    experts: Mapping[str, ExpertLayer],
) -> list[str]:
    """`tensor_storage` may be incomplete and stale; it never decides anything."""
    wrong = []
    for module, entry in metadata.storage.items():
        if not isinstance(entry, Mapping) or entry.get("quant_format") != "exl3":
            continue
        bits = _stored_bits(module, linears, experts)
        if bits is not None and bits != entry.get("bits_per_weight"):
            wrong.append((module, entry.get("bits_per_weight"), bits))
    if not wrong:
        return []
    module, stated, bits = wrong[0]
    warning = (
        f"quantization_config.json: tensor_storage is wrong about {len(wrong)} modules "
        f"(first {module[:200]!r}: {brief(stated)} bits, stored with {bits}); the "
        "tensors decide"
    )
    return [warning]


def _stored_bits(
    module: str, linears: Mapping[str, Matrix], experts: Mapping[str, ExpertLayer]
) -> int | float | None:
    matrix = linears.get(module)
    if matrix is not None:
        return matrix.bits
    match = parse_name(f"{module}.trellis")
    layer = experts.get(match["experts"]) if match and match["experts"] else None
    if match is None or layer is None or not match["expert"].isdecimal():
        return None
    if int(match["expert"]) >= layer.width:
        return None
    projection = match["projection"]
    return layer.encodings[int(match["expert"])][layer.spelling.index(projection)].bits


def _ignore_warnings(
    metadata: Metadata,
    linears: Mapping[str, Matrix],
    experts: Mapping[str, ExpertLayer],
) -> list[str]:
    """A list of unquantized modules, such as `model.layers.78*`, may be stale."""
    ignored = {
        pattern.rstrip("*").rstrip("."): pattern
        for pattern in metadata.ignored
        if pattern.endswith("*")
    }
    for module in (*linears, *experts):
        parts = module.split(".")
        for end in range(1, len(parts) + 1):
            pattern = ignored.get(".".join(parts[:end]))
            if pattern is not None:
                warning = (
                    f"quantization_config.ignore has {pattern[:200]!r}, but {module} "
                    "is EXL3; the tensors decide"
                )
                return [warning]
    return []
