# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The bits of every routed expert, by what the recipe asks for."""

import math
from collections.abc import Mapping, Sequence

from exl3.format.metadata import UNQUANTIZED_BITS
from exl3.tools.quantize.allocate import allocate_bits
from exl3.tools.quantize.plan import Part
from exl3.tools.quantize.recipe import Bits, Recipe
from exl3.tools.shared.errors import ToolError

#: How far the mean may be from what was asked for.
TOLERANCE = 0.01


def expert_bits(
    parts: Sequence[Part],
    num_layers: int,
    recipe: Recipe,
    sensitivities: Mapping[int, Sequence[float]] | None = None,
) -> dict[int, list[Bits]]:
    """Gives every routed expert its bits.

    Args:
        parts: What is to be encoded.
        num_layers: Decoder layers.
        recipe: What is asked for.
        sensitivities: How much each expert's errors matter, by global layer index;
            needed if `recipe.is_mixed`.

    Returns:
        Bits by global layer index, of the layers whose experts are encoded.

    Raises:
        ToolError: The recipe does not fit the experts.
    """
    widths = {
        part.layer: part.experts.width
        for part in parts
        if part.experts is not None and part.layer is not None
    }
    trunk = {layer: width for layer, width in widths.items() if layer < num_layers}
    found: dict[int, list[Bits]] = {
        layer: [_whole(recipe.mtp_bits)] * width for layer, width in widths.items()
    }
    if recipe.bits_map is not None:
        return found | _mapped(recipe.bits_map, widths, trunk, num_layers, recipe)
    if not recipe.is_mixed:
        return found | {
            layer: [_whole(recipe.bits)] * width for layer, width in trunk.items()
        }
    if not trunk:
        raise ToolError(
            f"--bits {recipe.bits}: mixes bits over routed experts, and none are to be "
            "encoded; give a whole number, or --attn-bits for a rate such as 3.5"
        )
    if sensitivities is None:
        raise ToolError(
            f"--bits {recipe.bits}: gives more bits to experts whose errors matter more"
            ", which --text tells; name a file of text, or give a whole number"
        )
    return found | _mixed(recipe.bits, trunk, sensitivities)


def _mixed(
    mean: Bits, trunk: Mapping[int, int], sensitivities: Mapping[int, Sequence[float]]
) -> dict[int, list[Bits]]:
    low, high = math.floor(mean), math.ceil(mean)
    count = sum(trunk.values())
    spare = round(count * (mean - low))
    if abs(low + spare / count - mean) > TOLERANCE:
        near = [low + extra / count for extra in (spare - 1, spare, spare + 1)]
        below = max(at for at in near if at < mean)
        above = min(at for at in near if at > mean)
        raise ToolError(
            f"--bits {mean}: {count} routed experts of {low} or {high} bits come to "
            f"{below:.4g} or {above:.4g} on average; ask for one of these, or give "
            "--bits-map"
        )
    keyed = {
        (layer, expert): sensitivities[layer][expert]
        for layer, width in trunk.items()
        for expert in range(width)
    }
    chosen = allocate_bits(keyed, mean, (low, high))
    return {
        layer: [chosen[layer, expert] for expert in range(width)]
        for layer, width in trunk.items()
    }


def _mapped(
    bits_map: Mapping[int, Sequence[Bits]],
    widths: Mapping[int, int],
    trunk: Mapping[int, int],
    num_layers: int,
    recipe: Recipe,
) -> dict[int, list[Bits]]:
    missing = sorted(trunk.keys() - bits_map.keys())
    if missing:
        raise ToolError(
            f"--bits-map: has no layer {missing[0]}, which has {trunk[missing[0]]} "
            f"routed experts; the layers that have some are {sorted(trunk)}"
        )
    found = {}
    for layer, row in bits_map.items():
        if layer >= num_layers and recipe.mtp_bits == UNQUANTIZED_BITS:
            raise ToolError(
                f"--bits-map: has the MTP layer {layer}, and --mtp-bits 16 leaves it "
                "as it is; leave one of them out"
            )
        width = widths.get(layer, 0)
        if len(row) != width:
            raise ToolError(
                f"--bits-map: layer {layer} has {len(row)} bits, and {width} routed "
                "experts are to be encoded there; give one for each"
            )
        found[layer] = [_whole(bits) for bits in row]
    return found


def _whole(bits: Bits) -> Bits:
    """3 for 3.0."""
    return int(bits) if bits == int(bits) else bits
