# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Reports of people who serve such checkpoints, each as a small input.

A case is met where a person meets it first: when the config and the headers are read,
in seconds and before any weight. These are the cases, and where the others are tested:

1. Shared vectors are declared without their schema.
2. The draft is rank-sliced too. Also tests/serving/test_exl3_logprobs.py.
3. Another family has rank-sliced names. Also there.
4. Bits differ within a layer and within an expert. Also there.
5. The index and the shards differ.
6. Two files give different bits.
7. `tensor_storage` is incomplete, or keyed otherwise.
8. One matrix covers several outputs: tests/quantization/test_exl3_linear.py.
9. A config class refuses to name a field that varies: tests/models.
10. Only the trunk is EXL3, or only the draft. Also tests/serving.
11. Signs are packed. Also tests/serving.
12. Every layer has a width of its own. Also tests/serving.
13. Routing groups do not divide a width.
14. A router's bias is wider than its gate.
15. Layers differ in how many experts have how many bits. Also tests/serving.
16. Ranks do not divide the experts that they share: tests/serving/test_exl3_matrix.py.
17. Widths have many spellings. Also tests/exl3/test_expert_widths.py.
19. Ranks cut inside a block of 128: tests/exl3/test_ranks.py.
20. Dimensions are padded where they are stored. Also tests/serving.
22. Tensors go straight to their place: tests/quantization/test_exl3_loading.py.
24. One token comes over and over: tests/serving/test_exl3_published_shape.py.
25. A checkpoint has a million tensors: tests/exl3/test_plan_scale.py.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from exl3.checkpoint.headers import read_folder
from exl3.checkpoint.plan import read_plan
from exl3.format.errors import CheckpointError
from tests.damage import with_json, with_tensors
from tests.packs import KINDS, LINEARS, Format, write_pack
from vllm.transformers_utils.config import get_config

EXPERTS = "model.layers.{}.mlp.experts"
EXPERT = "model.layers.1.mlp.experts.0.gate_proj"


#: Small enough to be written in no time; every size is still a multiple of 128.
SMALL = {"hidden": 128, "layers": 2, "experts": 3}


def plan(path):
    return read_plan(path, json.loads((path / "config.json").read_text()))


def assert_refused(path, *says):
    """The server refuses the checkpoint as it reads its config, in one line."""
    with pytest.raises(CheckpointError) as error:
        get_config(path, trust_remote_code=False)
    line = str(error.value)
    assert "\n" not in line
    for part in says:
        assert part in line, line


def change_tail(path, out, **fields):
    def change(config):
        config["hybrid_tr3_tail"] |= fields

    return with_json(path, out, change)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("packs")


@pytest.fixture(scope="module")
def sliced(folder):
    """Rank-sliced experts of 3 and 4 bits, in decoder layers 1 and 2 and the draft."""
    pack = write_pack(
        folder / "sliced",
        trunk={"experts"},
        formats=[Format(3), Format(4)],
        ranks=2,
        hidden=128,
        widths=[0, 4, 6, 8],
        shards=3,
    )
    return pack.path


@pytest.fixture(scope="module")
def plain(folder):
    """Plain EXL3 throughout."""
    formats = [Format(3), Format(4), Format(5, "mul1"), Format(6, "3inst")]
    pack = write_pack(
        folder / "plain", trunk={*LINEARS, "head"}, formats=formats, **SMALL
    )
    return pack.path


class TestMetadata:
    def test_1_shared_vectors_without_their_schema(self, sliced, tmp_path):
        path = change_tail(sliced, tmp_path / "x", rotation_layout="shared_h_v1")
        assert_refused(path, "hybrid_tr3_tail", "shared_h_tensor_schema")

    def test_2_the_draft_is_rank_sliced_like_the_trunk(self, sliced):
        experts = plan(sliced).experts
        assert list(experts) == [EXPERTS.format(layer) for layer in (1, 2, 3)]
        assert {layer.ranks for layer in experts.values()} == {2}

    def test_3_names_are_understood_in_every_family(self, tmp_path):
        pack = write_pack(
            tmp_path / "x",
            model_type="qwen3_moe",
            trunk={"experts"},
            ranks=2,
            hidden=128,
        )
        assert list(plan(pack.path).experts) == [EXPERTS.format(n) for n in (1, 2)]

    def test_4_every_projection_has_bits_of_its_own(self, tmp_path):
        bits = (3, 4, 5, 6)
        pack = write_pack(
            tmp_path / "x",
            trunk={"experts"},
            formats=[Format(k) for k in bits],
            **SMALL | {"experts": 4},
        )
        layer = plan(pack.path).experts[EXPERTS.format(1)]
        stored = [[code.bits for code in expert] for expert in layer.encodings]
        assert stored[:4] == [[3, 4, 5], [6, 3, 4], [5, 6, 3], [4, 5, 6]]

    def test_5_a_shard_that_the_index_does_not_list(self, sliced, tmp_path):
        def forget(index):
            index["weight_map"] = {
                name: file
                for name, file in index["weight_map"].items()
                if not file.startswith("model-00003")
            }

        file = "model.safetensors.index.json"
        path = with_json(sliced, tmp_path / "x", forget, file)
        assert_refused(path, "model-00003-of-00003.safetensors")

    def test_5_tensors_that_a_shard_lacks(self, sliced, tmp_path):
        path = with_tensors(sliced, tmp_path / "x", lambda tensors: None)
        shard = path / "model-00001-of-00003.safetensors"
        tensors = load_file(shard)
        lost = [name for name in tensors if name.endswith("trellis")][:2]
        for name in lost:
            del tensors[name]
        save_file(tensors, shard)
        assert_refused(path, *lost, shard.name)

    @pytest.mark.parametrize("stored", [{"bits": 3.0}, {"bits": 2.25}])
    def test_6_two_files_that_disagree_about_bits(self, plain, tmp_path, stored):
        path = with_json(
            plain,
            tmp_path / "x",
            lambda block: block.update(stored),
            "quantization_config.json",
        )
        found = plan(path)
        assert found.linears == plan(plain).linears
        (warning,) = [line for line in found.warnings if line.startswith("bits")]
        for part in ("quantization_config.json", "config.json", str(stored["bits"])):
            assert part in warning

    @pytest.mark.parametrize("hint", ["absent", "empty", "of another model"])
    def test_7_tensor_storage_is_no_more_than_a_hint(self, plain, tmp_path, hint):
        def change(block):
            if hint == "absent":
                del block["tensor_storage"]
            else:
                storage = block["tensor_storage"]
                kept = storage.pop(EXPERT)
                storage.clear()
                if hint == "of another model":
                    storage["model.layers.9.mlp.experts.0.gate_proj"] = kept

        path = with_json(plain, tmp_path / "x", change, "quantization_config.json")
        assert plan(path).linears == plan(plain).linears
        assert plan(path).experts == plan(plain).experts

    @pytest.mark.parametrize("part", ["trunk", "draft"])
    def test_10_trunk_and_draft_are_each_by_their_own_tensors(self, tmp_path, part):
        kinds = {"trunk": (), "draft": ()} | {part: LINEARS}
        found = plan(write_pack(tmp_path / "x", **kinds, **SMALL).path)
        layers = {int(name.split(".")[2]) for name in {*found.linears, *found.experts}}
        assert layers == ({0, 1} if part == "trunk" else {2})

    def test_11_packed_signs(self, tmp_path):
        options = {"trunk": {"attention"}, **SMALL}
        signs = write_pack(tmp_path / "signs", legacy_signs=True, **options).path
        scales = write_pack(tmp_path / "scales", **options).path
        fields = {header.name.rpartition(".")[2] for header in read_folder(signs)}
        assert {"su", "sv"} <= fields
        assert plan(signs).linears == plan(scales).linears


class TestWidths:
    def test_12_every_layer_has_a_width_of_its_own(self, sliced):
        widths = [layer.width for layer in plan(sliced).experts.values()]
        assert widths == [4, 6, 8]
        config = get_config(sliced, trust_remote_code=False)
        assert config.resolved_expert_widths == [0, 4, 6, 8]
        assert config.n_routed_experts == 8

    def test_12_a_width_off_by_one_is_refused_with_its_layer(self, sliced, tmp_path):
        def change(config):
            config["n_routed_experts_per_layer"] = [0, 4, 7, 8]

        path = with_json(sliced, tmp_path / "x", change)
        assert_refused(
            path, "layer 2 a width of 7", "layers.2.mlp.gate.weight", "6 rows"
        )

    def test_13_groups_that_do_not_divide_a_width(self, sliced, tmp_path):
        def group(config):
            config |= {"n_group": 4, "topk_group": 2}

        path = with_json(sliced, tmp_path / "x", group)
        assert_refused(path, "layer 1 has 4 routed experts", "4 groups")

    def test_14_a_bias_wider_than_its_gate(self, sliced, tmp_path):
        bias = "model.layers.2.mlp.gate.e_score_correction_bias"

        def widen(tensors):
            tensors[bias] = torch.zeros(8)

        path = with_tensors(sliced, tmp_path / "x", widen)
        gate = "model.layers.2.mlp.gate.weight"
        assert_refused(path, bias, "[8]", gate, "[6, 128]")

    def test_15_layers_differ_in_how_many_experts_have_how_many_bits(self, sliced):
        found = plan(sliced).experts
        counts = [
            sum(code.bits == 3 for code, _, _ in layer.encodings)
            for layer in found.values()
        ]
        assert counts == [2, 3, 4]

    @pytest.mark.parametrize(
        "widths", [{"1": 4, "2": 6}, {"1": 4, "2": 6, "3": 8}, [4, 6, 8]]
    )
    def test_17_other_spellings_of_the_widths(self, sliced, tmp_path, widths):
        def spell(config):
            config["n_routed_experts_per_layer"] = widths
            config["n_routed_experts"] = 8

        path = with_json(sliced, tmp_path / "x", spell)
        config = get_config(path, trust_remote_code=False)
        assert config.resolved_expert_widths == [0, 4, 6, 8]


class TestShapes:
    def test_20_a_width_that_is_padded_where_it_is_stored(self, tmp_path):
        pack = write_pack(tmp_path / "x", moe_intermediate_size=704, mtp=0, **SMALL)
        (layer,) = plan(pack.path).experts.values()
        assert layer.intermediate == 768
        shared = plan(pack.path).linears["model.layers.1.mlp.shared_experts.up_proj"]
        assert shared.out_features == 768


def test_every_kind_of_module_is_found(tmp_path):
    """What upstream builds without a quantization config is no exception."""
    pack = write_pack(
        tmp_path / "x", model_type="deepseek_v32", trunk=set(KINDS), **SMALL
    )
    found = plan(pack.path)
    for module in (
        "lm_head",
        "model.layers.1.mlp.gate",
        "model.layers.1.self_attn.indexer.wk",
        "model.layers.2.eh_proj",
        "model.layers.2.shared_head.head",
    ):
        assert module in found.linears
