# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Random layers of routed experts, and what they compute, in float64."""

from dataclasses import dataclass
from functools import cache

import numpy as np

from tests.kernels.emulated.matrices import Matrix, make_matrix

HIDDEN = 256
INTERMEDIATE = 128
#: Distinct matrices of each projection. Prime, so that experts, slices and kinds meet
#: in all combinations; an expert has its own scales all the same.
POOL = 11
MIXED = ((32, 1), (48, 1), (64, 1), (96, 1))


@dataclass(frozen=True)
class Experts:
    """The op's tensors of one layer, and each virtual expert's float64 matrices."""

    tensors: dict[str, np.ndarray]
    dense: list[tuple[np.ndarray, np.ndarray, np.ndarray]]
    slices: int


@cache
def make_experts(
    width: int, slices: int = 1, kinds: tuple[tuple[int, int], ...] = MIXED
) -> Experts:
    """A layer of so many experts. Kinds differ from matrix to matrix of the pool."""
    rng = np.random.default_rng(width * 8 + slices)

    def pool(first: int, k: int, n: int) -> list[Matrix]:
        return [
            make_matrix(rng, k, n, *kinds[(first + i) % len(kinds)])
            for i in range(POOL)
        ]

    gates = pool(0, HIDDEN, INTERMEDIATE)
    ups = pool(1, HIDDEN, INTERMEDIATE)
    downs = pool(3, INTERMEDIATE, HIDDEN)
    w13, first = _slab([*gates, *ups])
    w2, second = _slab(downs)
    count = width * slices
    experts = np.empty((count, 3, 3), np.int64)
    vectors: dict[str, list] = {"suh13": [], "svh13": [], "suh2": [], "svh2": []}
    dense = []
    for i in range(count):
        # Three strides, so that no two projections choose alike.
        chosen = gates[i % POOL], ups[3 * i % POOL], downs[(5 * i + 2) % POOL]
        places = first[i % POOL], first[POOL + 3 * i % POOL], second[(5 * i + 2) % POOL]
        signs = [rng.choice([-1.0, 1.0], m.dense.shape[0]) for m in chosen]
        scales = [m.suh * s.astype(np.float16) for m, s in zip(chosen, signs)]
        for j, (matrix, place) in enumerate(zip(chosen, places)):
            experts[i, j] = place, matrix.words, matrix.codebook
        vectors["suh13"].append(scales[:2])
        vectors["svh13"].append([m.svh for m in chosen[:2]])
        vectors["suh2"].append(scales[2])
        vectors["svh2"].append(chosen[2].svh)
        dense.append(tuple(s[:, None] * m.dense for m, s in zip(chosen, signs)))
    tensors = {name: np.array(value) for name, value in vectors.items()}
    return Experts({"w13": w13, "w2": w2, "experts": experts, **tensors}, dense, slices)


def _slab(matrices: list[Matrix]) -> tuple[np.ndarray, np.ndarray]:
    sizes = [m.trellis.size for m in matrices]
    return np.concatenate([m.trellis.reshape(-1) for m in matrices]), np.cumsum(
        [0, *sizes]
    )[:-1]


def reference(
    layer: Experts,
    x: np.ndarray,
    ids: np.ndarray,
    weights: np.ndarray,
    expert_map: np.ndarray | None = None,
    limit: float = np.inf,
) -> np.ndarray:
    x = x.astype(np.float64)
    width = x.shape[1]
    out = np.zeros_like(x)
    for token, (chosen, shares) in enumerate(zip(ids, weights)):
        for expert, share in zip(chosen, shares):
            local = expert if expert_map is None or expert < 0 else expert_map[expert]
            if local < 0:
                continue
            for j in range(layer.slices):
                gate, up, down = layer.dense[local * layer.slices + j]
                g = np.minimum(x[token] @ gate[:width], limit)
                u = np.clip(x[token] @ up[:width], -limit, limit)
                out[token] += share * ((g / (1 + np.exp(-g)) * u) @ down)[:width]
    return out


def route(
    rng: np.random.Generator, tokens: int, top_k: int, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Different experts for each token, as a router chooses them."""
    ids = np.stack([rng.permutation(width)[:top_k] for _ in range(tokens)])
    return ids.astype(np.int32), rng.uniform(0.1, 1, ids.shape).astype(np.float32)
