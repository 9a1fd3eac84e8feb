# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""What the serving benchmark makes of figures: points, tables, comparisons, plots."""

import json
import re
from dataclasses import replace

import pytest

from benchmarks.serving import run as run_module
from benchmarks.serving.metrics import Drafts, kv_cache_tokens, parse
from benchmarks.serving.plot import plot
from benchmarks.serving.points import Load, Point, point_of, prompt_lengths
from benchmarks.serving.results import Result, Series, read, write
from benchmarks.serving.run import main
from benchmarks.serving.server import BenchmarkError, Server
from benchmarks.serving.tables import comparison, table

METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="demo"} 100.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="demo"} 1e+02
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="demo"} 600.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="demo"} 450.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 190.0
vllm:cache_config_info{engine="0",kv_cache_size_tokens="8192",x="a\\"b"} 1.0
vllm:cache_config_info{engine="1",kv_cache_size_tokens="8192",x="None"} 1.0
process_resident_memory_bytes 6.4e+08
"""
#: What `vllm bench serve` writes, and more that is not read.
BENCH = {
    "completed": 6,
    "failed": 0,
    "total_input_tokens": 600,
    "total_output_tokens": 60,
    "output_throughput": 33.0,
    "mean_tpot_ms": 20.0,
    "median_ttft_ms": 50.0,
    "p99_ttft_ms": 80.0,
}
NO_DRAFTS = Drafts(0, 0, 0)
HEAD = """\
| streams | prompt | decode tok/s | each | prefill tok/s | TTFT ms | p99 | accepted \
| length |
|-:|-:|-:|-:|-:|-:|-:|-:|-:|"""
#: A table, without what only aligns it.
TABLE = f"""\
demo on 4x card, vLLM 0.32.0+hetero.1, 2026-11-30

MTP 3: answers of 64 tokens, KV cache 8,192 tokens

{HEAD}
| 1 | 128 | 100 | 100 | 2,560 | 50.0 | 80.0 | 75.0% | 3.25 |
| 8 | 2048 | 1,234 | 154 | - | 50.0 | 80.0 | 75.0% | 3.25 |
left out: 8 streams: too many

no MTP: answers of 64 tokens, KV cache unknown

{HEAD}
| 1 | 128 | 100 | 100 | 2,560 | 50.0 | 80.0 | - | - |"""


def point(streams=1, prompt=128, decode=100.0, **fields):
    fields = {
        "prefill": 2560.0 if streams == 1 else None,
        "acceptance": 0.75,
        "accepted_length": 3.25,
        **fields,
    }
    return Point(
        streams=streams,
        prompt_tokens=prompt,
        output_tokens=64,
        requests=3 * streams,
        decode=decode,
        decode_each=decode / streams,
        first_token_ms=50.0,
        first_token_p99_ms=80.0,
        **fields,
    )


def series(*points, name="MTP 3", cache=8192, left_out=()):
    return Series(name, ["--dtype", "float32"], cache, list(points), list(left_out))


def result(*each):
    return Result("demo", "4x card", "0.32.0+hetero.1", "2026-11-30", list(each))


def test_drafts_are_counted_over_all_engines():
    drafts = Drafts.of(parse(METRICS))
    assert drafts == Drafts(200, 600, 450)
    assert drafts.acceptance == 0.75
    assert drafts.accepted_length == 3.25  # 2.25 of 3 drafted tokens, and one more


def test_drafts_are_counted_between_two_reads():
    assert Drafts(200, 600, 450).since(Drafts(100, 300, 150)) == Drafts(100, 300, 300)


def test_without_drafts_there_is_no_acceptance():
    drafts = Drafts.of(parse("vllm:num_requests_running 0\n"))
    assert drafts.acceptance is None and drafts.accepted_length is None


def test_the_kv_cache_is_that_of_all_engines():
    assert kv_cache_tokens(parse(METRICS)) == 16384


@pytest.mark.parametrize("text", ["", METRICS.replace("8192", "None")])
def test_a_silent_server_has_a_kv_cache_of_unknown_size(text):
    assert kv_cache_tokens(parse(text)) is None


def test_a_point_of_one_stream():
    found = point_of(BENCH, Load(1, 100, 10, 6, seed=1), Drafts(200, 600, 450))
    assert found.decode == found.decode_each == 50
    assert found.prefill == 2000  # 100 tokens in 50 ms
    assert (found.first_token_ms, found.first_token_p99_ms) == (50, 80)
    assert (found.acceptance, found.accepted_length) == (0.75, 3.25)


def test_several_streams_decode_together_and_have_no_prefill_of_their_own():
    found = point_of(BENCH, Load(3, 100, 10, 2, seed=1), NO_DRAFTS)
    assert (found.decode, found.decode_each) == (150, 50)
    assert found.prefill is None and found.acceptance is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"completed": 5, "failed": 1}, "1 of 6 requests failed"),
        ({"total_output_tokens": 59}, "59 tokens were answered, not 60"),
        ({"mean_tpot_ms": 0.0}, "each answer came at once"),
    ],
)
def test_a_point_of_failed_requests_is_none(fields, message):
    with pytest.raises(BenchmarkError, match=message):
        point_of({**BENCH, **fields}, Load(3, 100, 10, 2, seed=1), NO_DRAFTS)


@pytest.mark.parametrize(
    ("longest", "lengths"),
    [
        (2000, [128, 512, 2000]),
        (2048, [128, 512, 2048]),
        (100, [100]),
        (131000, [128, 512, 2048, 8192, 32768, 131000]),
    ],
)
def test_prompt_lengths_reach_to_what_fits(longest, lengths):
    assert prompt_lengths(longest) == lengths


class Sweep:
    """A server of 1,024 tokens, and what was measured on it."""

    def __init__(self, patch):
        self.loads = []
        server = Server("http://server", "demo", "/models/demo", 1024, "0.32.0")
        patch.setattr(run_module, "measure", self.measure)
        patch.setattr(Server, "at", lambda url: server)
        patch.setattr(
            Server, "metrics", lambda _: parse(METRICS.replace("8192", "1024"))
        )

    def measure(self, server, tokenizer, load):
        self.loads.append(load)
        return point(load.streams, load.prompt)


@pytest.fixture
def sweep(monkeypatch):
    return Sweep(monkeypatch)


def test_a_sweep_measures_what_fits_and_says_what_does_not(sweep, tmp_path, capsys):
    file = tmp_path / "a.json"
    options = ["--streams", "1", "4", "--prompt", "100", "900", "2000"]
    command = ["--url", "http://server", *options, "--output", "64"]
    assert main([*command, "--json", str(file)]) == 0
    (found,) = read(file).series
    _, *measured = sweep.loads  # after one to warm up
    assert [(load.streams, load.prompt) for load in measured] == [
        (1, 100), (4, 100), (1, 900),
    ]  # fmt: skip
    assert len({load.seed for load in sweep.loads}) == len(sweep.loads)
    assert found.kv_cache_tokens == 2048
    assert found.left_out == [
        "as it runs, streams 4, prompts of 900: the KV cache holds 2048 tokens",
        "as it runs, streams 1, prompts of 2000: 952 is the longest that fits",
        "as it runs, streams 4, prompts of 2000: 952 is the longest that fits",
    ]
    assert capsys.readouterr().out.strip() == table(read(file))


def test_answers_that_do_not_fit_are_refused(sweep, capsys):
    assert main(["--url", "http://server", "--output", "1020"]) == 1
    assert capsys.readouterr().err == (
        "error: --output 1020: the server has room for 1024 tokens of a prompt and its "
        "answer; choose a smaller one\n"
    )


def test_nobody_at_the_url_is_said_in_one_line(capsys):
    assert main(["--url", "http://127.0.0.1:9"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: http://127.0.0.1:9: no vLLM server answers")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--url", "u", "--", "--dtype", "float32"], "use --model"),
        (["--url", "u", "--output", "1"], "--output 1"),
        (["--url", "u", "--streams", "0"], "1 or more"),
        ([], "--url --model is required"),
    ],
)
def test_options_that_mean_nothing_are_refused(words, message, capsys):
    with pytest.raises(SystemExit):
        main(words)
    assert message in capsys.readouterr().err


def test_a_table():
    plain = point(acceptance=None, accepted_length=None)
    found = table(
        result(
            series(point(), point(8, 2048, 1234.5), left_out=["8 streams: too many"]),
            series(plain, name="no MTP", cache=None),
        )
    )
    assert re.sub(" +", " ", re.sub("-+:", "-:", found)) == TABLE


@pytest.fixture
def files(tmp_path):
    """Two result files that share a series and one point of it."""
    a = result(series(point(), point(2)), series(point(), name="no MTP"))
    b = result(series(point(decode=150.0, accepted_length=None), point(4), cache=4096))
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, each in zip(paths, (a, b)):
        write(each, path)
        assert read(path) == each
    return paths


def test_two_files_side_by_side(files, capsys):
    assert main(["compare", *map(str, files)]) == 0
    lines = capsys.readouterr().out.splitlines()
    about = "demo on 4x card, vLLM 0.32.0+hetero.1, 2026-11-30"
    assert lines[:2] == [f"A: {files[0]}: {about}", f"B: {files[1]}: {about}"]
    assert lines[3] == "MTP 3: KV cache 8,192 / 4,096 (0.50x) tokens"
    cells = [cell.strip() for cell in lines[-1].strip("|").split("|")]
    assert cells == [
        "1",
        "128",
        "100 / 150 (1.50x)",
        "2,560 / 2,560 (1.00x)",
        "50.0 / 50.0 (1.00x)",
        "3.25 / -",
    ]
    assert len(lines) == 8  # what only one has is left out


def test_nothing_to_compare_is_said(files, capsys):
    other = replace(read(files[1]), series=[series(point(), name="no drafts")])
    write(other, files[1])
    assert main(["compare", *map(str, files)]) == 1
    assert "nothing to compare" in capsys.readouterr().err
    with pytest.raises(BenchmarkError, match=r"\(MTP 3, no MTP\) and .* \(no drafts\)"):
        comparison(files, [read(file) for file in files])


def test_tables_are_aligned(files):
    lines = [line for line in table(read(files[0])).splitlines() if line[:1] == "|"]
    assert len({len(line) for line in lines}) == 1


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps({"series": [{}]})])
def test_a_file_that_is_no_result_is_named(tmp_path, text, capsys):
    file = tmp_path / "x.json"
    file.write_text(text)
    assert main(["compare", str(file), str(file)]) == 1
    assert capsys.readouterr().err.startswith(f"error: {file}: is no result file: ")


@pytest.mark.parametrize("points", [[], [point()], [point(), point(8), point(1, 512)]])
def test_a_plot_is_drawn(tmp_path, points):
    file = tmp_path / "plot.svg"
    plot(result(series(*points)), file)
    assert "<!-- Decoding -->" in file.read_text()
