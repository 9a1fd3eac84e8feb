# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Writes the pack of a checkpoint: its tensors, its metadata and the files beside."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from exl3.checkpoint.headers import read_folder
from exl3.checkpoint.metadata import QUANTIZATION_FILE
from exl3.format.metadata import UNQUANTIZED_BITS
from exl3.format.tail import TAIL
from exl3.model import StreamedModel, TensorSource
from exl3.tools.quantize import metadata
from exl3.tools.quantize.bits import expert_bits
from exl3.tools.quantize.convert import Converter
from exl3.tools.quantize.plan import Part
from exl3.tools.quantize.recipe import Bits, Recipe
from exl3.tools.quantize.text import Text, measure_sensitivities
from exl3.tools.quantize.workers import Workers
from exl3.tools.shared.companions import companions
from exl3.tools.shared.progress import progress_bar
from exl3.tools.shared.staging import StagedCheckpoint
from exl3.tools.shared.text import read_windows

#: What a report calls the weights of each kind, in the trunk and in MTP layers.
_KINDS = {
    ("expert", False): "routed experts",
    ("expert", True): "routed experts of MTP",
    ("linear", False): "other linear layers",
    ("linear", True): "other linear layers of MTP",
    ("head", False): "lm_head",
}


def write_pack(
    source: Path,
    target: Path,
    *,
    config: Mapping[str, Any],
    parts: Sequence[Part],
    num_layers: int,
    recipe: Recipe,
    text_file: Path | None,
    window: int,
    tokens: int,
    seed: int,
    threads: int,
    request: Mapping[str, Any],
    resume: bool,
) -> dict[str, Any]:
    """Encodes a checkpoint.

    Args:
        source: Its folder.
        target: The folder to make.
        config: Its `config.json`.
        parts: What becomes of its tensors.
        num_layers: Decoder layers.
        recipe: What is asked for.
        text_file: The calibration text, if there is one.
        window: Tokens of a window of it.
        tokens: Tokens of it to read at most.
        seed: Decides the random signs.
        threads: Cores to use.
        request: What decides the result, to be compared when a run is resumed.
        resume: Whether to finish what a stopped run left.

    Returns:
        The report, as JSON.

    Raises:
        CheckpointError: The source cannot be encoded.
        ToolError: An argument or the output cannot be used.
    """
    with (
        StagedCheckpoint(target, request, resume, sources=[source]) as out,
        Workers(threads) as workers,
    ):
        text = None
        if text_file is not None:
            windows = read_windows(source, text_file, window, tokens // window)
            text = Text(StreamedModel.open(source), windows)
        sensitivities = None
        if recipe.is_mixed and text is not None:
            with progress_bar(num_layers, "layer", "measuring") as bar:
                sensitivities = measure_sensitivities(text, out, workers, bar)
        bits = expert_bits(parts, num_layers, recipe, sensitivities)
        done = sum(part.num_weights for part in parts if out.has(part.name))
        total = sum(part.num_weights for part in parts)
        tensors = text.model.tensors if text else TensorSource.open(source)
        with progress_bar(total, "w", "encoding", done=done) as bar:
            Converter(tensors, parts, recipe, bits, workers, seed, bar).run(out, text)
        rows = None if text is None else len(text.tokens)
        _write_metadata(config, parts, num_layers, recipe, bits, rows, window, out)
        for file in companions(source):
            if file.name not in ("config.json", QUANTIZATION_FILE):
                out.copy(file)
        notes = {part.layer: out.note(part.name) for part in parts}
    return {
        "folder": str(target),
        "weights": _figures(notes, num_layers),
        "experts": {str(layer): row for layer, row in bits.items()},
        "calibration_tokens": None if rows is None else rows * window,
        "bytes": sum(header.num_bytes for header in read_folder(target)),
        "source_bytes": sum(part.num_bytes for part in parts),
    }


def _write_metadata(
    config: Mapping[str, Any],
    parts: Sequence[Part],
    num_layers: int,
    recipe: Recipe,
    bits: Mapping[int, Sequence[Bits]],
    rows: int | None,
    window: int,
    out: StagedCheckpoint,
) -> None:
    more: dict[str, Any] = {}
    if rows is not None:
        more["calibration"] = {"rows": rows, "cols": window}
    drafts = [
        at.layer for at in parts if at.layer is not None and at.layer >= num_layers
    ]
    if drafts and recipe.mtp_bits == UNQUANTIZED_BITS:
        more["ignore"] = [f"model.layers.{layer}*" for layer in drafts]
    block = metadata.quantization_config(
        round(recipe.bits, 4) if recipe.ranks is None else "mixed",
        recipe.head_bits,
        recipe.codebook,
        **more,
    )
    changed: dict[str, Any] = {"quantization_config": block}
    if recipe.ranks is not None:
        changed[TAIL] = metadata.rank_sliced_tail(bits, recipe.ranks)
        out.write_json(metadata.BITS_MAP_FILE, metadata.bits_map(bits))
    written = {**config, **changed}
    has_head = any(of.module == "lm_head" for part in parts for of in part.linears)
    for name in ("text_config", None):
        of = written if name is None else written.get(name)
        if not isinstance(of, dict):
            continue
        of = dict(of)
        if recipe.ranks is not None:  # readers look in either
            of[TAIL] = changed[TAIL]
        if has_head and of.get("tie_word_embeddings"):
            of["tie_word_embeddings"] = False
        written = of if name is None else {**written, name: of}
    out.write_json("config.json", written)
    storage = {"tensor_storage": metadata.tensor_storage(out.headers())}
    out.write_json(QUANTIZATION_FILE, block | storage)


def _figures(
    notes: Mapping[int | None, Mapping[str, Any]], num_layers: int
) -> dict[str, Any]:
    """Matrices, mean bits and mean relative error of each kind of weights."""
    found: dict[str, dict[str, float]] = {}
    for (kind, of_draft), label in _KINDS.items():
        rows = [
            note[kind]
            for layer, note in notes.items()
            if kind in note and (layer is not None and layer >= num_layers) == of_draft
        ]
        if rows:
            weights = sum(row["weights"] for row in rows)
            matrices = sum(row["matrices"] for row in rows)
            found[label] = {
                "weights": weights,
                "matrices": matrices,
                "bits": sum(row["bits"] for row in rows) / weights,
                "relative_error": sum(row["error"] for row in rows) / matrices,
            }
    return found
