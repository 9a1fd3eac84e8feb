# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""A million tensors are planned in seconds, and in memory that any machine has."""

import json
import resource
import subprocess
import sys

import pytest

from exl3.checkpoint import matrix, modules
from exl3.checkpoint.plan import read_plan
from tests.header_files import experts, write_folder, write_glm52
from tests.plans import CONFIG, L0_NORM, L1

# Measured in a process of its own: peak memory includes the interpreter.
_MEASURE = """
import json, pickle, resource, sys, time
from pathlib import Path
from exl3.checkpoint.expert_widths import resolve_widths
from exl3.checkpoint.plan import read_checkpoint, read_config
folder = Path(sys.argv[1])
begin, cpu = time.perf_counter(), time.process_time()
config = read_config(folder)
found = read_checkpoint(folder, config)
assert resolve_widths(config, found.widths) is None  # one width throughout
print(json.dumps({
    "seconds": time.perf_counter() - begin,
    "cpu_seconds": time.process_time() - cpu,
    "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    "pickled_bytes": len(pickle.dumps(found)),
    "layers": len(found.plan.experts),
}))
"""


def test_the_work_for_a_name_does_not_grow_with_their_number(tmp_path, monkeypatch):
    """One expression for a module, and one look at each kind of matrix."""
    calls = {"parse_name": 0, "read_matrix": 0}

    def counted(module, name):
        original = getattr(module, name)

        def count(*args):
            calls[name] += 1
            return original(*args)

        monkeypatch.setattr(module, name, count)

    counted(modules, "parse_name")
    counted(matrix, "read_matrix")
    counts = []
    for width in (8, 64):
        calls.update(parse_name=0, read_matrix=0)
        tensors = L0_NORM | experts(L1, width, ranks=2)
        write_folder(tmp_path / str(width), tensors)
        read_plan(tmp_path / str(width), CONFIG)
        counts.append(dict(calls))
    assert [count["read_matrix"] for count in counts] == [2, 2]
    assert [count["parse_name"] for count in counts] == [
        2 + width * 3 * 2 for width in (8, 64)
    ]


@pytest.fixture(scope="module")
def glm52(tmp_path_factory):
    folder = tmp_path_factory.mktemp("glm52")
    tensors = write_glm52(folder)
    assert tensors > 921_600
    return folder, tensors


@pytest.mark.slow
def test_glm52_in_four_slices(glm52):
    folder, tensors = glm52
    command = [sys.executable, "-c", _MEASURE, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    print(f"{tensors} tensors:", found)
    assert found["layers"] == 75
    assert found["peak_bytes"] < 1e9
    assert found["pickled_bytes"] < 2e6
    # About 5 s on an idle core; this bound holds on a busy one too.
    assert found["cpu_seconds"] < 40


@pytest.mark.slow
def test_glm52_is_inspected(glm52):
    folder, tensors = glm52
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "exl3.cli", "inspect", str(folder), "--json"]
    done = subprocess.run(
        [*command, "--gpu-memory", "96", "--gpus", "4", "--max-model-len", "65536"],
        capture_output=True,
        text=True,
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(
        f"{tensors} tensors: {seconds:.1f} s, {after.ru_maxrss / 1024:.0f} MB at most"
    )
    report = json.loads(done.stdout)
    assert report["tensors"] == tensors
    assert report["bits_per_weight"] == 3.5
    assert report["exl3_weights"] == 75 * 256 * 3 * 6144 * 2048
    assert report["layers"][3]["experts"] == {"3": 128, "4": 128}
    assert report["tensor_parallel"] == [1, 2, 4, 8, 16]
    one, _, four = report["memory"]
    # Slices are shared out; what is dense and whole on every GPU is not.
    assert one["weights"] / 4 < four["weights"] < one["weights"] / 3.8
    assert four["kv_bytes"] == {"bfloat16": 78 * (1152 + 132), "fp8": 78 * (656 + 132)}
    assert four["kv_tokens"]["bfloat16"] > 0 and not one["kv_tokens"]["bfloat16"]
    # About 6.5 s of an idle core; this bound holds on a busy one too.
    assert seconds < 30
    assert after.ru_maxrss * 1024 < 1e9
