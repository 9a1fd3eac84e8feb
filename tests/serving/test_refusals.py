# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""What cannot be served is refused at start, in one line that names the cause."""

import json
import subprocess
import sys

import pytest

from tests.serving.generate import Case, free_port, run


def variant(path, out, **fields):
    """The same checkpoint under a config that differs in some fields."""
    out.mkdir()
    for file in path.iterdir():
        if file.name != "config.json":
            (out / file.name).symlink_to(file)
    config = json.loads((path / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, **fields}))
    return str(out)


@pytest.fixture(scope="module")
def refused(checkpoints, tmp_path_factory):
    folder = tmp_path_factory.mktemp("refused")
    unequal = checkpoints.path("deepseek_v3", unequal=True)
    sparse = checkpoints.path("glm_moe_dsa", unequal=True)
    cases = {
        "width off by one": Case(
            variant(unequal, folder / "w", n_routed_experts_per_layer=[0, 7, 6, 8])
        ),
        "groups": Case(variant(unequal, folder / "g", n_group=4, topk_group=2)),
        "lora": Case(str(unequal), {"enable_lora": True}),
        "context": Case(str(sparse), {"max_model_len": 513}),
    }
    return dict(zip(cases, run(*cases.values()), strict=True))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("width off by one", ["layer 2 a width of 6", "has 5 rows"]),
        ("groups", ["layer 1 has 7 routed experts", "n_group 4"]),
        ("lora", ["--enable-lora", "[5, 7, 8]"]),
        ("context", ["513", "512", "index_topk"]),
    ],
)
def test_refused_by_name(refused, name, says):
    error = refused[name].error
    assert error is not None
    lines = [line for line in error.splitlines() if all(part in line for part in says)]
    assert len(lines) == 1, error


def test_the_server_ends_with_one_line(checkpoints, tmp_path):
    unequal = checkpoints.path("deepseek_v3", unequal=True)
    bad = variant(unequal, tmp_path / "bad", n_routed_experts_per_layer=[0, 7, 6, 8])
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    server = subprocess.run(
        [*command, "--model", bad, "--port", str(free_port())],
        capture_output=True,
        text=True,
        check=False,
    )
    last = server.stderr.splitlines()[-1]
    assert last.startswith("error: config.json: n_routed_experts_per_layer gives layer")
    assert "Traceback" not in server.stderr
    assert server.returncode == 1
