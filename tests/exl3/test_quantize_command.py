# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""`exl3 quantize`: what it writes is what was asked for, and stands for the source."""

import json
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from exl3 import cli
from exl3.checkpoint.plan import read_checkpoint, read_config
from exl3.codec import scale
from exl3.format.constants import Codebook
from exl3.model import StreamedModel
from exl3.tools.shared.text import read_windows
from tests import reference_codec
from tests.checkpoints import make_config, make_tensors, save_checkpoint
from tests.exl3.interruptions import Hazards, contents
from tests.packs import write_pack

WIDTHS = [0, 2, 2]  # a dense layer, one with experts, and a draft layer
#: Relative squared error of Gaussian weights (tests/exl3/test_codec_viterbi.py), with
#: slack for few tiles and a rough search for the scale. Feedback, which makes outputs
#: better at the cost of weights, has twice as much; a wrong tile has a hundred times.
MOST_ERROR = {3: 0.0172 * 2.5, 4: 0.0044 * 2.5, 5: 0.0011 * 2.5, 6: 0.0003 * 2.5}


@pytest.fixture(scope="module", autouse=True)
def rough_search():
    """A matrix of 128 x 128 has 64 tiles; the search for its scale takes 150."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scale, "_SAMPLE", 8)
        yield


def write_source(path, model_type="glm_moe_dsa", widths=WIDTHS, drop=(), **fields):
    layers = len(widths) - 1 if model_type == "glm_moe_dsa" else len(widths)
    fields = {"hidden": 128, "moe_intermediate_size": 256, **fields}
    config = make_config(model_type, widths=widths, layers=layers, **fields)
    tensors = make_tensors(config, widths, mtp=len(widths) - layers)
    tensors = {name: at for name, at in tensors.items() if name not in drop}
    save_checkpoint(path, config, tensors)
    (path / "generation_config.json").write_text("{}\n")
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_source(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Words of the tokenizer."""
    file = tmp_path_factory.mktemp("text") / "text.txt"
    draw = random.Random(0)
    file.write_text(" ".join(f"w{draw.randrange(3, 512)}" for _ in range(3000)))
    return file


def quantize(*arguments):
    assert cli.main(["quantize", *map(str, arguments)]) == 0


def refusal(capsys, *arguments):
    assert cli.main(["quantize", *map(str, arguments)]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("exl3: ") and err.count("\n") == 1
    return err


def tensors_of(folder):
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def plan_of(folder):
    return read_checkpoint(folder, read_config(folder)).plan


def decoded(tensors, module, codebook):
    """The weight `[n, k]` of a module, by the reference decoder."""
    parts = {
        field: tensors[f"{module}.{field}"].numpy()
        for field in ("trellis", "suh", "svh")
    }
    weight = reference_codec.dense_weight(
        parts["trellis"], parts["suh"], parts["svh"], codebook
    )
    return torch.from_numpy(weight).T


def relative_error(found, expected):
    expected = expected.double()
    return float((found - expected).square().sum() / expected.square().sum())


# --- Rank-sliced --------------------------------------------------------------------

SLICED = ("--rank-sliced", "--tp", "2", "--bits", "3.5")


@pytest.fixture(scope="module")
def sliced(source, text, tmp_path_factory):
    out = tmp_path_factory.mktemp("sliced") / "pack"
    quantize(source, out, *SLICED, "--text", text, "--threads", "3", "--tokens", "2048")
    return out


def test_slices_stand_for_their_part_of_the_weight(source, sliced):
    before, after = tensors_of(source), tensors_of(sliced)
    layers = plan_of(sliced).experts
    assert layers.keys() == {f"model.layers.{at}.mlp.experts" for at in (1, 2)}
    for name, layer in layers.items():
        assert (layer.width, layer.ranks, layer.sliced) == (2, 2, True)
        for expert in range(layer.width):
            bits = layer.matrix(expert, "gate").bits
            for projection in ("gate_proj", "up_proj", "down_proj"):
                module = f"{name}.{expert}.{projection}"
                whole = before[f"{module}.weight"]
                cuts = whole.chunk(2, dim=1 if projection == "down_proj" else 0)
                for rank, cut in enumerate(cuts):
                    found = decoded(after, f"{module}.rank{rank}", "mcg")
                    assert relative_error(found, cut) < MOST_ERROR[bits]


def test_the_mean_is_what_was_asked_for(sliced):
    layers = plan_of(sliced).experts
    trunk = layers["model.layers.1.mlp.experts"].encodings
    assert sorted(code.bits for code, _, _ in trunk) == [3, 4]
    assert all(len(set(codes)) == 1 for codes in trunk)
    draft = layers["model.layers.2.mlp.experts"].encodings
    assert {code.bits for codes in draft for code in codes} == {3}
    stored = json.loads((sliced / "bits_map.json").read_text())
    assert stored["1"]["k"] == [codes[0].bits for codes in trunk]


def test_all_else_is_as_it_was(source, sliced):
    before, after = tensors_of(source), tensors_of(sliced)
    kept = before.keys() & after.keys()
    assert {name for name in before if ".experts." not in name} == kept
    for name in kept:
        assert after[name].dtype == before[name].dtype
        assert torch.equal(after[name], before[name]), name
    assert plan_of(sliced).linears == {} and plan_of(sliced).warnings == ()
    config, original = (
        json.loads((at / "config.json").read_text()) for at in (sliced, source)
    )
    assert config.pop("hybrid_tr3_tail")["moe_layers"] == [1, 2]
    block = config.pop("quantization_config")
    assert (block["bits"], block["head_bits"]) == ("mixed", 16)
    assert block["calibration"] == {"rows": 4, "cols": 512}
    assert config == original
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (sliced / name).read_bytes() == (source / name).read_bytes()


def test_threads_change_no_byte(source, sliced, text, tmp_path):
    out = tmp_path / "pack"
    quantize(source, out, *SLICED, "--text", text, "--threads", "1", "--tokens", "2048")
    assert contents(out) == contents(sliced)


def test_a_map_and_a_dense_draft(source, tmp_path, capsys):
    bits_map = tmp_path / "map.json"
    bits_map.write_text(json.dumps({"1": {"k": [5, 3]}}))
    out = tmp_path / "pack"
    arguments = "--rank-sliced", "--tp", "1", "--bits-map", bits_map, "--mtp-bits", "16"
    quantize(source, out, *arguments, "--json")
    report = json.loads(capsys.readouterr().out)
    assert report["experts"] == {"1": [5, 3]}
    assert report["weights"]["routed experts"]["bits"] == 4
    assert report["bytes"] == sum(at.nbytes for at in tensors_of(out).values())
    assert report["source_bytes"] == sum(
        at.nbytes for at in tensors_of(source).values()
    )
    plan = plan_of(out)
    assert plan.warnings == ()
    (layer,) = plan.experts.values()
    assert [codes[0].bits for codes in layer.encodings] == [5, 3]
    config = read_config(out)
    assert config["hybrid_tr3_tail"]["moe_layers"] == [1, 1]
    assert config["quantization_config"]["ignore"] == ["model.layers.2*"]
    before, after = tensors_of(source), tensors_of(out)
    for name in before:
        if ".layers.2." in name:
            assert torch.equal(after[name], before[name])
    module = "model.layers.1.mlp.experts.0.down_proj"
    found = decoded(after, f"{module}.rank0", "mcg")
    assert relative_error(found, before[f"{module}.weight"]) < MOST_ERROR[5]


# --- Plain --------------------------------------------------------------------------

PLAIN = ("--bits", "3", "--attn-bits", "5", "--dense", "model.layers.1.self_attn.*")


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """Odd sizes, biases, and a head that is the embeddings."""
    return write_source(
        tmp_path_factory.mktemp("tied"),
        "glm4_moe",
        [0, 2],
        drop={"lm_head.weight"},
        moe_intermediate_size=160,
        intermediate_size=200,
        num_nextn_predict_layers=0,
        tie_word_embeddings=True,
    )


@pytest.fixture(scope="module")
def plain(tied, text, tmp_path_factory):
    out = tmp_path_factory.mktemp("plain") / "pack"
    quantize(tied, out, *PLAIN, "--text", text, "--tokens", "1024")
    return out


def test_a_plain_pack_stands_for_its_source(tied, plain):
    before, after = tensors_of(tied), tensors_of(plain)
    plan = plan_of(plain)
    rates = {module: matrix.bits for module, matrix in plan.linears.items()}
    assert rates.pop("lm_head") == 6
    assert set(rates.values()) == {5}
    (layer,) = plan.experts.values()
    assert not layer.sliced and layer.intermediate == 256
    codes = {code for codes in layer.encodings for code in codes}
    assert {(code.bits, code.codebook) for code in codes} == {(3, Codebook.MUL1)}
    rates |= {
        f"model.layers.1.mlp.experts.{expert}.{name}_proj": 3
        for expert in range(2)
        for name in ("gate", "up", "down")
    }
    assert "model.layers.0.self_attn.q_proj" in rates
    assert not any("layers.1.self_attn" in module for module in rates)
    for module, bits in rates.items():
        weight = before[f"{module}.weight"]
        n, k = weight.shape
        found = decoded(after, module, "mul1")
        assert all(size % 128 == 0 for size in found.shape)
        assert not found[n:].any()
        assert relative_error(found[:n, :k], weight) < MOST_ERROR[bits], module


def test_biases_are_filled_up(tied, plain):
    name = "model.layers.0.self_attn.q_proj.bias"
    before, after = tensors_of(tied)[name], tensors_of(plain)[name]
    assert after.dtype == torch.float16
    assert torch.equal(after[: len(before)], before.half())
    assert not after[len(before) :].any()


def test_a_tied_head_gets_its_own_matrix(tied, plain):
    embedding = "model.embed_tokens.weight"
    before, after = tensors_of(tied)[embedding], tensors_of(plain)
    assert torch.equal(after[embedding], before)
    assert relative_error(decoded(after, "lm_head", "mul1"), before) < MOST_ERROR[6]
    assert read_config(plain)["tie_word_embeddings"] is False


def test_its_list_of_tensors_is_whole(plain):
    stored = json.loads((plain / "quantization_config.json").read_text())
    listed = {
        name: (of["shape"], of["dtype"], of["n_bytes"])
        for entry in stored["tensor_storage"].values()
        for name, of in entry["stored_tensors"].items()
    }
    assert listed == {
        name: (list(at.shape), str(at.dtype), at.nbytes)
        for name, at in tensors_of(plain).items()
    }
    assert stored["bits"] == 3 and stored["head_bits"] == 6


def test_text_makes_outputs_nearer(tied, plain, text, tmp_path, capsys):
    out = tmp_path / "pack"
    quantize(tied, out, *PLAIN, "--json")
    report = json.loads(capsys.readouterr().out)
    assert report["calibration_tokens"] is None
    assert "calibration" not in read_config(out)["quantization_config"]
    tokens = read_windows(tied, text, 512, 2)

    def behind_all_layers(folder):
        model = StreamedModel.open(folder)
        hidden = model.embed(tokens)
        for layer in model.layers():
            hidden = layer(hidden)
        return hidden

    expected, with_text, without = map(behind_all_layers, (tied, plain, out))
    errors = [(of - expected).square().sum() for of in (with_text, without)]
    assert errors[0] < 0.9 * errors[1]


# --- What may go wrong ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "--bits, --bits-map: give one of the two"),
        (("--bits", "3", "--tp", "2"), "--rank-sliced, --tp: belong together"),
        (("--bits", "3", "--rank-sliced"), "--rank-sliced, --tp: belong together"),
        (("--bits", "3.5"), "--text tells"),
        (("--bits", "3", "--dense", "nothing"), "--dense nothing: matches no module"),
        (("--bits", "3", "--text", "nowhere.txt"), "nowhere.txt: No such file"),
        (("--bits-map", "nowhere.json"), "nowhere.json"),
        (("--bits", "3", "--rank-sliced", "--tp", "4"), "whole blocks of 128"),
    ],
)
def test_arguments_are_refused_in_one_line(source, tmp_path, capsys, arguments, says):
    assert says in refusal(capsys, source, tmp_path / "out", *arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--bits", "--attn-bits", "--tokens", "--threads"])
@pytest.mark.parametrize("value", ["0", "-3", "three", "nan"])
def test_numbers_that_are_none_are_refused(source, tmp_path, capsys, option, value):
    with pytest.raises(SystemExit) as ended:
        cli.main(["quantize", str(source), str(tmp_path / "out"), option, value])
    assert ended.value.code == 2
    assert option in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b" \n", b"\xff\xfe", b"w3 w4"])
def test_a_text_that_is_none_is_refused(source, tmp_path, capsys, content):
    file = tmp_path / "text.txt"
    file.write_bytes(content)
    line = refusal(capsys, source, tmp_path / "out", "--bits", "3", "--text", file)
    assert str(file) in line
    assert [at.name for at in tmp_path.iterdir()] == ["text.txt"]


def test_a_source_that_is_quantized_is_refused(tmp_path, capsys):
    pack = write_pack(tmp_path / "pack", layers=2, experts=2, mtp=0).path
    line = refusal(capsys, pack, tmp_path / "out", "--bits", "3")
    assert f"{pack}: is quantized already (exl3)" in line


def damaged(source, folder, name, change):
    shutil.copytree(source, folder)
    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file)
    tensors[name] = change(tensors[name])
    save_file(tensors, file)
    return folder


def with_nan(weight):
    weight[3, 5] = torch.nan
    return weight


@pytest.mark.parametrize("with_text", [False, True])
def test_a_weight_that_is_no_number_is_named(source, text, tmp_path, capsys, with_text):
    name = "model.layers.1.mlp.experts.1.up_proj.weight"
    broken = damaged(source, tmp_path / "broken", name, with_nan)
    more = ("--text", text) if with_text else ()
    only = "--attn-bits", "16", "--head-bits", "16"
    line = refusal(capsys, broken, tmp_path / "out", "--bits", "3", *only, *more)
    assert name.removesuffix(".weight") in line
    assert not (tmp_path / "out").exists()


def test_a_weight_of_another_quantization_is_named(source, tmp_path, capsys):
    name = "model.layers.1.mlp.experts.1.up_proj.weight"

    def eight_bits(weight):
        return weight.to(torch.float8_e4m3fn)

    broken = damaged(source, tmp_path / "broken", name, eight_bits)
    only = "--attn-bits", "16", "--head-bits", "16"
    line = refusal(capsys, broken, tmp_path / "out", "--bits", "3", *only)
    assert name in line and "another quantization" in line


def test_a_request_that_changed_is_not_resumed(source, text, tmp_path, capsys):
    broken = damaged(
        source,
        tmp_path / "broken",
        "model.layers.2.mlp.experts.1.up_proj.weight",
        with_nan,
    )
    only = "--attn-bits", "16", "--head-bits", "16"
    out = tmp_path / "out"
    refusal(capsys, broken, out, "--bits", "3", *only)
    assert (tmp_path / ".out.partial").is_dir()
    line = refusal(capsys, broken, out, "--bits", "4", *only, "--resume")
    assert "bits: 3 then, 4 now" in line


def rough_main(arguments):
    """In a process of its own."""
    scale._SAMPLE = 8
    return cli.main(arguments)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_whatever_stops_it(text, tmp_path):
    """Measuring, encoding and writing are all in reach."""
    source = write_source(tmp_path / "source", moe_intermediate_size=128)

    def command(source, out):
        sliced = "--rank-sliced", "--tp", "1", "--bits", "3.5"
        return ["quantize", source, out, *sliced, "--text", text, "--tokens", "4096"]

    hazards = Hazards(command, source, tmp_path, rough_main)
    hazards.check_refusals()
    hazards.check_file_size_limit(200_000)
    hazards.check_ctrl_c()
    hazards.check_kills(20)
