# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Bytes of KV cache a token takes, and whether a machine can hold a checkpoint."""

import json

import pytest

from exl3 import cli
from exl3.checkpoint.plan import survey
from exl3.checkpoint.problems import Problems
from exl3.tools.inspect import workspace
from exl3.tools.inspect.kv_cache import KvCache, has_indexer, kv_cache
from exl3.tools.inspect.memory import ALLOWANCE, GIB, MULTIPROCESSORS, UTILIZATION
from exl3.tools.inspect.weights import RankWeights, Weights
from tests.header_files import dense, experts, linear, write_folder

MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_key_value_heads": 128}
DSA = {**MLA, "index_topk": 2048, "index_head_dim": 128}
GQA = {"num_key_value_heads": 4, "head_dim": 128, "num_attention_heads": 32}


@pytest.mark.parametrize(
    ("text", "size", "dtype", "trunk", "draft"),
    [
        # DeepSeek-V3: 70,272 bytes of 61 layers, whatever the ranks.
        (MLA, 1, "bfloat16", 61 * 1152, 1152),
        (MLA, 16, "bfloat16", 61 * 1152, 1152),
        (MLA, 8, "fp8", 61 * 576, 576),
        # Sparse: fp8 has its own layout, and each layer a key of the indexer.
        (DSA, 8, "bfloat16", 61 * (1152 + 132), 1152 + 132),
        (DSA, 8, "fp8", 61 * (656 + 132), 656 + 132),
        # Three of four layers use the choice of the layer before.
        (
            {**DSA, "index_topk_pattern": "FSSS" * 15 + "F"},
            8,
            "fp8",
            61 * 656 + 16 * 132,
            656 + 132,
        ),
        # Grouped queries: keys and values of a rank's heads, and of one at least.
        (GQA, 1, "bfloat16", 61 * 2 * 4 * 128 * 2, 2 * 4 * 128 * 2),
        (GQA, 4, "fp8", 61 * 2 * 128, 2 * 128),
        (GQA, 8, "fp8", 61 * 2 * 128, 2 * 128),
        ({**GQA, "full_attention_interval": 4}, 1, "fp8", 15 * 1024, 1024),
        (
            {**GQA, "layer_types": ["linear_attention"] * 60 + ["full_attention"]},
            1,
            "fp8",
            1024,
            1024,
        ),
        (
            {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 32},
            1,
            "fp8",
            61 * 2 * 4096,
            2 * 4096,
        ),
    ],
)
def test_bytes_of_a_token(text, size, dtype, trunk, draft):
    found = kv_cache(text, 61, 1, size, dtype)
    assert isinstance(found, KvCache)
    assert (found.trunk, found.draft) == (trunk, draft)


def test_a_config_that_does_not_tell_gives_no_figure():
    assert kv_cache({}, 4, 0, 1, "fp8") is None
    assert kv_cache({"num_key_value_heads": 8, "head_dim": "x"}, 4, 0, 1, "fp8") is None


def test_which_layers_have_an_indexer():
    text = {"index_topk_freq": 4}
    assert [at for at in range(12) if has_indexer(text, at, 12)] == [0, 1, 5, 9]
    assert has_indexer(text, 12, 12)  # a draft


def test_only_what_a_server_holds_counts(tmp_path):
    """A draft shares the embedding and head; some indexers are stored and not built."""
    config = {
        **DSA,
        "num_hidden_layers": 2,
        "num_nextn_predict_layers": 1,
        "vocab_size": 512,
        "index_topk_pattern": "FS",
    }
    indexer = "self_attn.indexer.wk"
    tensors = dense("model.embed_tokens", 128, 512) | dense("lm_head", 128, 512)
    for layer in range(3):
        tensors |= dense(f"model.layers.{layer}.{indexer}", 128, 128)
    tensors |= dense("model.layers.2.embed_tokens", 128, 512)
    tensors |= linear("model.layers.2.shared_head.head", 128, 512)
    tensors |= linear("model.layers.2.eh_proj", 256, 128)
    # Left over beside the matrix that replaces it.
    tensors |= dense("model.layers.0.mlp.down_proj", 128, 128)
    tensors |= linear("model.layers.0.mlp.down_proj", 128, 128, 4)
    folder = write_folder(tmp_path, tensors, config)
    found = survey(folder, config, Problems())
    tables, square = 2 * 2 * 128 * 512, 2 * 128 * 128
    matrix = 128 * 128 // 2 + 2 * 128 * 2
    assert RankWeights(found, config).on(1) == Weights(
        tables + square + matrix, square + 2 * 256 * 128
    )


@pytest.mark.parametrize("is_exl3", [True, False])
def test_tied_embeddings_are_held_once_unless_the_head_is_exl3(tmp_path, is_exl3):
    config = {"num_hidden_layers": 1, "vocab_size": 512, "tie_word_embeddings": True}
    make = linear if is_exl3 else dense
    tensors = dense("model.embed_tokens", 128, 512) | make("lm_head", 128, 512)
    found = survey(write_folder(tmp_path, tensors, config), config, Problems())
    head = 128 * 512 // 2 + 2 * (128 + 512) if is_exl3 else 0
    assert RankWeights(found, config).on(1) == Weights(2 * 128 * 512 + head, 0)


def test_the_workspace_is_the_sum_of_what_may_overlap(tmp_path):
    """Layers in turn share; shared experts and a draft have their own."""
    config = {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    config |= {"num_experts_per_tok": 2, "hidden_size": 256}
    tensors = linear("lm_head", 256, 1024)
    tensors |= dense("model.layers.0.input_layernorm", 1, 256)
    for layer in (1, 2):
        tensors |= experts(f"model.layers.{layer}", 4, ranks=2, intermediate=512)
        for name in ("gate_proj", "up_proj"):
            module = f"model.layers.{layer}.mlp.shared_experts.{name}"
            tensors |= linear(module, 256, 512)
    found = survey(write_folder(tmp_path, tensors, config), config, Problems())
    plan = found.checkpoint.plan

    def need(size):
        columns, slices = 2 * 512 // size, 2 // size
        linear = workspace.linear_bytes(256, columns, 2, MULTIPROCESSORS)
        moe = workspace.moe_bytes(2, 256, 256, 4, slices, MULTIPROCESSORS)
        return linear + moe

    for size in (1, 2):
        told = workspace.workspace_bytes(plan, config, size, MULTIPROCESSORS)
        assert told == 2 * need(size)


@pytest.fixture
def pack(tmp_path):
    """Two GiB of weights, half of which ranks can share."""
    config = {
        **MLA,
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "hidden_size": 16384,
        "max_position_embeddings": 2**20,
    }
    tensors = dense("model.layers.0.mlp.gate_proj", 16384, 32768)
    tensors |= dense("model.layers.0.self_attn.q_a_proj", 16384, 32768)
    return write_folder(tmp_path, tensors, config)


def inspect(pack, capsys, *options):
    code = cli.main(["inspect", str(pack), "--json", *options])
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert err.splitlines() == [f"exl3: {line}" for line in report["problems"]]
    assert code == bool(report["problems"])
    return report


def test_the_tokens_that_fit_are_what_the_rest_holds(pack, capsys):
    report = inspect(pack, capsys, "--gpu-memory", "8", "--gpus", "2")
    one, two = report["memory"]
    assert (one["weights"], two["weights"]) == (2 * GIB, int(1.5 * GIB))
    for memory in (one, two):
        rest = int(8 * GIB * UTILIZATION) - ALLOWANCE - memory["weights"]
        rest -= memory["workspace"]
        for dtype, bytes_of_token in (("bfloat16", 1152), ("fp8", 576)):
            assert memory["kv_bytes"][dtype] == bytes_of_token
            assert memory["kv_tokens"][dtype] == rest // bytes_of_token // 64 * 64


LONG = ["--max-model-len", "1000000"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--gpu-memory", "8"], None),
        (["--gpu-memory", "5", "--tp", "1"], "needs 2.0 GiB for weights"),
        (["--gpu-memory", "5", "--tp", "1"], "use --tensor-parallel-size 2"),
        (["--gpu-memory", "4"], "use more or larger GPUs, or fewer bits per weight"),
        (
            ["--gpu-memory", "4.7", "--gpus", "2"],
            "--gpu-memory 4.7 on 2 GPUs is too small",
        ),
        (["--gpu-memory", "4.7", "--gpus", "4"], None),
        (["--gpu-memory", "5", "--tp", "4", *LONG], "ask for at most 6"),
        (["--gpu-memory", "5.5", "--tp", "4", *LONG], "use --kv-cache-dtype fp8"),
        (["--gpu-memory", "6", "--tp", "4", *LONG], None),
        (["--max-model-len", "2000000"], "max_position_embeddings is 1048576"),
        (["--tp", "4", "--gpus", "2"], "--tp 4 needs as many GPUs"),
    ],
)
def test_a_machine_that_is_too_small_is_refused_with_a_way_out(
    pack, capsys, options, says
):
    problems = inspect(pack, capsys, *options)["problems"]
    assert len(problems) == (says is not None)
    if says:
        assert says in problems[0]


@pytest.mark.parametrize(
    "options",
    [["--tp", "0"], ["--gpu-memory", "nan"], ["--gpu-memory", "-1"], ["--gpus", "x"]],
)
def test_arguments_that_are_no_figures_are_usage_errors(pack, options, capsys):
    with pytest.raises(SystemExit) as error:
        cli.main(["inspect", str(pack), *options])
    assert error.value.code == 2


def test_the_table_has_the_figures(pack, capsys):
    assert cli.main(["inspect", str(pack), "--gpu-memory", "5.2"]) == 0
    text = capsys.readouterr().out
    rows = {line.split()[0]: line for line in text.splitlines() if "GiB" in line}
    assert "2.00 GiB (too much)" in rows["1"] and rows["1"].endswith(" none")
    assert "1.12 GiB" in rows["8"] and "1.12 KiB" in rows["8"]
    assert "3 GiB are allowed for activations" in text
