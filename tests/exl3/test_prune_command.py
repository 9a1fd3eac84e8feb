# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""`exl3 prune` as a person runs it: budgets, what it prints, and what may go wrong."""

import json
import random
import subprocess
import sys

import pytest

from exl3 import cli
from exl3.checkpoint.expert_widths import resolve_widths
from exl3.checkpoint.plan import read_checkpoint, read_config
from exl3.tools.prune.layers import read_source
from exl3.tools.prune.record import RECORD_FILE
from tests.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.damage import with_json
from tests.exl3.interruptions import Hazards, contents
from tests.packs import write_pack


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prune") / "source"
    return write_checkpoint(folder, layers=5, shards=2)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    draw = random.Random(3)
    words = (f"w{draw.randrange(3, VOCAB_SIZE)}" for _ in range(600))
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(" ".join(words))
    return file


def run(*arguments):
    return cli.main(["prune", *map(str, arguments)])


def widths_of(folder):
    config = read_config(folder)
    return resolve_widths(config, read_checkpoint(folder, config).widths)


def test_a_ratio_by_text(source, text, tmp_path, capsys):
    out = tmp_path / "out"
    options = ["--text", text, "--tokens", 128, "--keep-ratio", 0.6, "--json"]
    assert run(source, out, *options) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert printed.err == ""  # no bar where nobody looks
    widths = widths_of(out)
    assert sum(widths[:5]) == 19 and widths[5] == 8
    assert len(set(widths[1:5])) > 1
    assert [len(layer["kept"]) for layer in report["layers"]] == list(widths[1:])
    assert all(0 < layer["saliency_kept"] <= 1 for layer in report["layers"])
    assert report["tokens"] == 128
    assert report["bytes"] == read_source(out).num_bytes({})
    assert report["source_bytes"] == read_source(source).num_bytes({})
    record = json.loads((out / RECORD_FILE).read_text())
    for layer in report["layers"]:
        assert record["layers"][str(layer["layer"])]["kept"] == layer["kept"]
    asked = {"--keep-ratio": 0.6, "--saliency": "reap", "--tokens": 128}
    assert record["request"].pop("--text").startswith("text.txt ")
    assert record["request"] == asked
    assert str(text.parent) not in (out / RECORD_FILE).read_text()


def test_a_dry_run_shows_the_same_and_writes_nothing(source, text, tmp_path, capsys):
    out, statistics = tmp_path / "out", tmp_path / "statistics.json"
    options = ["--target-size", "18MB", "--mtp-widths", 5]
    given = [*options, "--text", text, "--save-statistics", statistics]
    assert run(source, out, *given, "--dry-run") == 0
    shown = capsys.readouterr().out
    assert [file.name for file in tmp_path.iterdir()] == ["statistics.json"]
    assert run(source, out, *options, "--statistics", statistics) == 0
    assert capsys.readouterr().out == shown
    size = read_source(out).num_bytes({})
    assert size <= 18_000_000
    assert size + max(read_source(source).layers[1].expert_bytes) > 18_000_000
    assert shown.splitlines()[5].split() == [
        "5", "draft", "8", "5", shown.splitlines()[5].split()[-1],
    ]  # fmt: skip
    assert f"{size / 1e6:.1f} of" in shown.splitlines()[-1]


def test_an_earlier_run_is_a_profile(source, text, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    assert run(source, first, "--widths", "8,3,6,2", "--text", text) == 0
    assert run(source, second, "--profile", first / RECORD_FILE) == 0
    assert widths_of(first) == (0, 8, 3, 6, 2, 8)
    one, other = contents(first), contents(second)
    assert (
        json.loads(one.pop(RECORD_FILE))["layers"]
        == (json.loads(other.pop(RECORD_FILE))["layers"])
    )
    assert one == other


def test_the_draft_has_a_budget_of_its_own(source, text, tmp_path):
    out = tmp_path / "out"
    options = ["--keep-ratio", 1, "--mtp-keep-ratio", 0.5, "--saliency", "frequency"]
    assert run(source, out, *options, "--text", text) == 0
    assert widths_of(out) == (0, 8, 8, 8, 8, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--keep-ratio", 0.5], "--text: is needed"),
        (["--keep-ratio", 0.2, "--text", "TEXT"], "give at least 0.25"),
        (["--target-size", "1MB", "--text", "TEXT"], "leaves 0 bytes of experts"),
        (["--widths", "8,8", "--text", "TEXT"], "has 2 widths, and 4 layers"),
        (["--widths", "4", "--text", "TEXT", "--floor", 3], "--floor: --widths says"),
        (
            ["--keep-ratio", 1, "--text", "TEXT", "--mtp-widths", 9],
            "gives layer 5 a width of 9",
        ),
        (["--keep-ratio", 1, "--text", "nowhere.txt"], "nowhere.txt: No such file"),
        (["--keep-ratio", 1, "--statistics", "no.json"], "no.json: No such file"),
        (["--keep-ratio", 1, "--statistics", "TEXT", "--text", "TEXT"], "--text: --st"),
        (["--profile", "no.json"], "no.json: No such file"),
        (["--profile", "no.json", "--text", "TEXT"], "--text: --profile names the exp"),
        (["--profile", "no.json", "--mtp-widths", 4], "--mtp-widths: --profile names"),
    ],
)
def test_refusals(source, text, tmp_path, capsys, options, message):
    out = tmp_path / "out"
    given = [text if option == "TEXT" else option for option in options]
    assert run(source, out, *given) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("exl3: ") and printed.err.count("\n") == 1
    assert message in printed.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "one of the arguments --keep-ratio --target-size --widths --profile"),
        (["--keep-ratio", "0"], "0 is no share"),
        (["--keep-ratio", "nan"], "nan is no share"),
        (["--keep-ratio", "half"], "half is no share"),
        (["--target-size", "big"], "'big' is no size"),
        (["--widths", "8,,7"], "is no count"),
        (["--widths", "8,-1"], "-1 is no count"),
        (["--keep-ratio", "1", "--widths", "8"], "not allowed with"),
        (["--keep-ratio", "1", "--floor", "0"], "0 is no count"),
        (["--keep-ratio", "1", "--tokens", "1"], "expected 2 or more"),
        (["--keep-ratio", "1", "--saliency", "luck"], "invalid choice"),
    ],
)
def test_arguments(source, tmp_path, capsys, options, message):
    with pytest.raises(SystemExit) as stopped:
        run(source, tmp_path / "out", *options)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_checkpoint_without_a_draft_has_no_budget_for_one(text, tmp_path, capsys):
    source = write_checkpoint(tmp_path / "source", model_type="qwen3_moe", mtp=0)
    options = ["--keep-ratio", 0.5, "--text", text]
    assert run(source, tmp_path / "bad", *options, "--mtp-widths", 4) == 1
    assert "has no MTP layer with routed experts" in capsys.readouterr().err
    assert run(source, tmp_path / "out", *options) == 0
    config = read_config(tmp_path / "out")
    assert sum(config["n_routed_experts_per_layer"]) == 8
    assert config["num_experts"] == max(config["n_routed_experts_per_layer"])
    assert "n_routed_experts" not in config


def test_a_pack_is_pruned_by_its_own_text(text, tmp_path):
    pack = write_pack(tmp_path / "pack", ranks=2)
    out = tmp_path / "out"
    assert run(pack.path, out, "--keep-ratio", 0.5, "--text", text) == 0
    config = read_config(out)
    plan = read_checkpoint(out, config).plan
    assert sum(layer.width for layer in plan.experts.values()) == 8 + 8
    assert not plan.warnings


@pytest.mark.parametrize("words", [2, 3, 511, 513])
def test_a_short_text_is_one_window(source, text, tmp_path, capsys, words):
    short = tmp_path / "short.txt"
    short.write_text(" ".join(text.read_text().split()[:words]))
    options = ["--keep-ratio", 0.5, "--text", short, "--dry-run", "--json"]
    assert run(source, tmp_path / "out", *options) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == min(words, 512)


def test_a_tokenizer_of_another_model(source, text, tmp_path, capsys):
    narrow = with_json(source, tmp_path / "narrow", lambda at: at.update(vocab_size=9))
    options = ["--keep-ratio", 0.5, "--text", text]
    assert run(narrow, tmp_path / "out", *options) == 1
    error = capsys.readouterr().err
    assert "tokenizer.json: gives the text a token" in error and "of 9;" in error
    assert not (tmp_path / "out").exists()


def test_another_request_does_not_go_on(source, text, tmp_path, capsys):
    partial = tmp_path / ".out.partial"
    options = ["--text", text, "--keep-ratio", 0.5]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("exl3.tools.prune.write.write_pruned", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(source, tmp_path / "out", *options)
    assert partial.is_dir()
    assert run(source, tmp_path / "out", *options) == 1
    assert "add --resume to finish it" in capsys.readouterr().err
    assert run(source, tmp_path / "out", *options, "--floor", 3, "--resume") == 1
    assert "--floor: None then, 3 now" in capsys.readouterr().err
    assert run(source, tmp_path / "out", *options, "--resume") == 0
    assert not partial.exists()


def test_help_needs_no_torch():
    code = (
        "import sys; from exl3 import cli\n"
        "try: cli.main(['prune', '--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.fixture
def hazards(text, tmp_path):
    def command(source, out):
        options = ["--keep-ratio", "0.5", "--text", text, "--tokens", "64"]
        return ["prune", source, out, *options]

    small = {"layers": 2, "experts": 4, "shards": 2}
    return Hazards(command, write_checkpoint(tmp_path / "of", **small), tmp_path)


@pytest.mark.parametrize("times", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_random_moments(hazards, times):
    hazards.check_kills(times, seed=times)


def test_a_limit_on_the_size_of_a_file(hazards):
    hazards.check_file_size_limit(2_000_000)


def test_what_is_refused(hazards):
    hazards.check_refusals()


def test_ctrl_c(hazards):
    hazards.check_ctrl_c()
