# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""A million tensors are planned in seconds, and in memory that any machine has."""

import json
import subprocess
import sys

import pytest

from exl3.checkpoint import matrix, modules
from exl3.checkpoint.plan import read_plan
from tests.header_files import experts, write_folder, write_glm52
from tests.plans import CONFIG, L1

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
        tensors = experts(L1, width, ranks=2)
        write_folder(tmp_path / str(width), tensors)
        read_plan(tmp_path / str(width), CONFIG)
        counts.append(dict(calls))
    assert [count["read_matrix"] for count in counts] == [2, 2]
    assert [count["parse_name"] for count in counts] == [
        1 + width * 3 * 2 for width in (8, 64)
    ]


@pytest.mark.slow
def test_glm52_in_four_slices(tmp_path):
    tensors = write_glm52(tmp_path)
    assert tensors > 921_600
    command = [sys.executable, "-c", _MEASURE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    print(f"{tensors} tensors:", found)
    assert found["layers"] == 75
    assert found["peak_bytes"] < 1e9
    assert found["pickled_bytes"] < 2e6
    # About 5 s on an idle core; this bound holds on a busy one too.
    assert found["cpu_seconds"] < 40
