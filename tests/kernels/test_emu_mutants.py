# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Faults seeded into the dense kernels: each must be caught, by its name."""

from pathlib import Path

import numpy as np
import pytest

from tests.kernels.emulated.matrices import Matrix, make_matrix
from tests.kernels.emulated.mutant import Mutant
from tests.kernels.emulated.ops import EmulatedOps, EmulatorFault, Run, Shard
from tests.reference_codec import rotate

SCHEDULES = (0, 1, 2, 3, 5, 7)


LOOP_BARRIER = "ptx::wait_copies<kStages - 2>();\n      __syncthreads();"
RELEASE = "  __threadfence();\n  __syncthreads();\n  if (threadIdx.x == 0) {"
ACQUIRE = "    __threadfence();\n  }\n  __syncthreads();\n"
TAIL = """      }
      ptx::commit_copies();  // an empty group keeps the count right at the end
"""

MUTANTS = [
    Mutant(
        "no barrier in the main loop",
        "pipeline.cuh",
        LOOP_BARRIER,
        "ptx::wait_copies<kStages - 2>();",
        "in-flight|race|uninitialized",
    ),
    Mutant(
        "barrier before the wait",
        "pipeline.cuh",
        LOOP_BARRIER,
        "__syncthreads();\n      ptx::wait_copies<kStages - 2>();",
        "in-flight|race",
    ),
    Mutant(
        "wait for one group too few",
        "pipeline.cuh",
        "ptx::wait_copies<kStages - 2>",
        "ptx::wait_copies<kStages - 1>",
        "in-flight",
    ),
    Mutant(
        "no empty groups at the end of k",
        "pipeline.cuh",
        TAIL,
        "        ptx::commit_copies();\n      }\n",
        "in-flight",
    ),
    Mutant(
        "a stage is filled while it is read",
        "pipeline.cuh",
        "int writing = kStages - 1;",
        "int writing = 0;",
        "race|in-flight",
    ),
    Mutant(
        "rows that don't exist are read",
        "pipeline.cuh",
        "row < from.rows",
        "true",
        "out-of-bounds",
    ),
    Mutant(
        "a strip is read from between two words",
        "pipeline.cuh",
        "from.strip + int64_t{step}",
        "from.strip + 1 + int64_t{step}",
        "misaligned",
    ),
    Mutant(
        "activations are stored without the swizzle",
        "pipeline.cuh",
        "(column ^ (row & 7)) * kChunkBytes",
        "column * kChunkBytes",
        "wrong",
    ),
    Mutant(
        "ldmatrix names rows that its lanes don't have",
        "pipeline.cuh",
        "lane % 16 * kRowBytes",
        "lane % 32 * kRowBytes",
        "out-of-bounds|misaligned|wrong|uninitialized",
    ),
    Mutant(
        "activations are read before the launch before ended",
        "pipeline.cuh",
        "    ptx::wait_for_previous_launch();\n",
        "",
        "unordered",
    ),
    Mutant(
        "the result overwrites stages that are being read",
        "gemm.cuh",
        "  __syncthreads();  // the stages are read; now they hold the result\n",
        "",
        "race",
    ),
    Mutant(
        "rows are transformed before all columns are there",
        "gemm.cuh",
        "  store_result<kRows>(base, sums);\n  __syncthreads();\n",
        "  store_result<kRows>(base, sums);\n",
        "race|uninitialized",
    ),
    Mutant(
        "one stage of k too many",
        "gemm.cuh",
        "operands.end_stage = stages * (split + 1) / splits;",
        "operands.end_stage = stages * (split + 1) / splits + 1;",
        "out-of-bounds|wrong",
    ),
    Mutant(
        "a warp leaves early",
        "gemm.cuh",
        "  if (splits > 1) {",
        "  if (warp == 7) return;\n  if (splits > 1) {",
        "divergence",
    ),
    Mutant(
        "a barrier in one branch only",
        "gemm.cuh",
        "  if (splits > 1) {",
        "  if (warp < 4) __syncthreads();\n  if (splits > 1) {",
        "divergence",
    ),
    Mutant(
        "splits share one part",
        "gemm.cuh",
        "(int64_t{i} * tiles + tile) * kPartFloats<kRows>",
        "(int64_t{i * 0} * tiles + tile) * kPartFloats<kRows>",
        "unordered",
    ),
    Mutant(
        "parts are added in the order of arrival",
        "gemm.cuh",
        "    clear(sums);\n    for (int i = 0; i < splits; ++i) "
        "add_part<kRows>(part(i), sums);",
        "    for (int i = 0; i < splits; ++i) {\n"
        "      if (i != split) add_part<kRows>(part(i), sums);\n    }",
        "schedule",
    ),
    Mutant(
        "the flag's bytes are not allocated",
        "gemm.cuh",
        "constexpr int kFlagBytes = 16;",
        "constexpr int kFlagBytes = 0;",
        "out-of-bounds",
    ),
    Mutant(
        "the result goes to the scales",
        "gemm.cuh",
        "store_four(p.out, index",
        "store_four(const_cast<uint16_t*>(p.svh), index",
        "read-only|out-of-bounds",
    ),
    Mutant(
        "no fence before the counter",
        "split.cuh",
        RELEASE,
        RELEASE.replace("  __threadfence();\n", "", 1),
        "unordered",
    ),
    Mutant(
        "no barrier before the counter",
        "split.cuh",
        RELEASE,
        RELEASE.replace("  __syncthreads();\n", "", 1),
        "unordered",
    ),
    Mutant(
        "no fence after the counter",
        "split.cuh",
        ACQUIRE,
        ACQUIRE.replace("    __threadfence();\n", "", 1),
        "unordered",
    ),
    Mutant(
        "no barrier before the flag is read",
        "split.cuh",
        ACQUIRE,
        ACQUIRE.replace("  __syncthreads();\n", "", 1),
        "race|uninitialized|divergence",
    ),
    Mutant(
        "the counter isn't set back",
        "split.cuh",
        "atomicInc(counter, last) == last",
        "atomicInc(counter, 1u << 30) == last",
        "counters|wrong|uninitialized",
    ),
    Mutant(
        "parts are read through the read-only cache",
        "split.cuh",
        "ptx::load_global(part",
        "ptx::load_constant(part",
        "unordered",
    ),
    Mutant(
        "half a warp transforms",
        "transform.cuh",
        "  hadamard_128(values, threadIdx.x % 32);",
        "  if (threadIdx.x % 32 < 16) hadamard_128(values, threadIdx.x % 32);",
        "deadlock",
    ),
    Mutant(
        "halves meet each other's activations",
        "transform.cuh",
        "odd = {__byte_perm(four.x, 0, 0x3232)",
        "odd = {__byte_perm(four.x, 0, 0x1010)",
        "wrong",
    ),
    Mutant(
        "the largest value of a warp counts as the row's",
        "quantize.cuh",
        "ptx::load_shared<float>(base + warp * 4)",
        "ptx::load_shared<float>(base)",
        "wrong",
    ),
    Mutant(
        "no barrier before the largest values are read",
        "quantize.cuh",
        "  __syncthreads();\n",
        "",
        "race|uninitialized",
    ),
    Mutant(
        "the tensor core's other operand",
        "pipeline.cuh",
        "(pass * kStageTiles + tile) * kOperands",
        "(pass + tile) * kOperands",
        "wrong",
    ),
    Mutant(
        "a split counts the activations of all of k",
        "integers.cuh",
        "i < from.end_stage;",
        "i < from.k / kStageDepth;",
        "wrong",
    ),
    Mutant(
        "clamped values are counted without an atomic",
        "elements.cuh",
        "atomicAdd(counter, static_cast<unsigned long long>(clamped))",
        "ptx::store_global(counter, ptx::load_global(counter) + clamped)",
        "race|unordered|wrong",
    ),
    Mutant(
        "values beyond fp16 become infinite",
        "transform.cuh",
        "count_clamped(p.clamped, clamp_to_half(values));",
        "count_clamped(p.clamped, 0);",
        "wrong",
    ),
    Mutant(
        "inputs narrower than stored are read to the end",
        "elements.cuh",
        "aligned && count >= 4",
        "aligned",
        "out-of-bounds|wrong",
    ),
    Mutant(
        "the ring is not closed",
        "trellis.cuh",
        "word < 0 ? word + kRingWords : word",
        "word",
        "out-of-bounds|wrong|uninitialized|race|in-flight",
    ),
    Mutant(
        "a tile's words are read before they are there",
        "dequantize.cuh",
        "    __syncwarp();\n    const TileOperands",
        "    const TileOperands",
        "race|uninitialized",
    ),
    Mutant(
        "a tile is overwritten while it is read",
        "dequantize.cuh",
        "    __syncwarp();  // the tile before is decoded\n",
        "",
        "race",
    ),
]


def build(overlay: Path | None) -> EmulatedOps:
    """The smallest build that has all of what mutants change."""
    return EmulatedOps([48], [16], overlay=overlay, optimize="-O0")


def linear(
    ops: EmulatedOps, x: np.ndarray, matrix: Matrix, run: Run, **plan
) -> np.ndarray:
    return ops.linear(
        x.astype(np.float32),
        matrix.trellis.reshape(-1),
        matrix.suh[None],
        matrix.svh,
        None,
        [Shard(128, 0, 128, 48, matrix.codebook)],
        run=run,
        **plan,
    )


def verdict(ops: EmulatedOps) -> str:
    """The first fault's message, "wrong", "schedule", or nothing."""
    rng = np.random.default_rng(0)
    matrix = make_matrix(rng, 384, 128, 48, 1)
    of_bytes = make_matrix(rng, 384, 128, 48, 2)
    dense = matrix.dense
    x = rng.normal(size=(13, 300)).astype(np.float32)
    wide = np.zeros((13, 384))
    wide[:, :300] = x
    want = wide @ dense
    beyond = int((np.abs(rotate(1e8 * wide * matrix.suh)) > 65504).sum())
    first = None
    try:
        for schedule in SCHEDULES:
            run = Run(schedule=schedule, launches=2)
            inner = ops.dequantize(matrix.trellis, matrix.suh, matrix.svh, 1, run)
            if not np.abs(inner - dense).max() < 1e-5:
                return "wrong"
            for splits in (1, 3):
                got = linear(ops, x, matrix, run, splits=splits)
                if not np.sqrt(np.mean((got - want) ** 2)) < 3e-4 * want.std():
                    return "wrong"
            unrounded = linear(ops, x, matrix, run, unrounded=True)
            if not np.sqrt(np.mean((unrounded - got) ** 2)) < 3e-4 * want.std():
                return "wrong"
            exact = linear(ops, x, of_bytes, run)
            integers = linear(ops, x, of_bytes, run, unrounded=True, splits=3)
            if not np.sqrt(np.mean((integers - exact) ** 2)) < 4e-4 * exact.std():
                return "wrong"
            huge = linear(ops, 1e8 * x, matrix, run)
            if not (np.isfinite(huge).all() and ops.clamped == 2 * beyond):
                return "wrong"
            if first is None:
                first = got
            elif not np.array_equal(first, got):
                return "schedule"
    except EmulatorFault as fault:
        return str(fault)
    return ""


def test_the_kernels_as_they_are() -> None:
    assert verdict(build(None)) == ""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    mutant.check(verdict(build(mutant.write(tmp_path))))
