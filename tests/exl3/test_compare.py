# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""`exl3 compare`: its figures against other code's, servers, and what it refuses."""

import json
import math
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from exl3.cli import main
from exl3.model import StreamedModel
from exl3.tools.compare.measure import Scores, divergence
from exl3.tools.compare.windows import cut
from tests.checkpoints import (
    VOCAB_SIZE,
    make_config,
    make_tensors,
    save_checkpoint,
    write_checkpoint,
)
from tests.packs import write_pack
from tools.demo_model import compare as demo
from tools.demo_model.load import load_checkpoint

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "examples" / "demo-glm-dsa"
PACK = ROOT / "examples" / "demo-glm-dsa-ragged-exl3"
SIZE = {"layers": 2, "experts": 2, "mtp": 0}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two checkpoints that differ in their weights, and a text in their words."""
    folder = tmp_path_factory.mktemp("pair")
    for seed, name in enumerate("ab"):
        write_checkpoint(folder / name, seed=seed, **SIZE)
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(3, VOCAB_SIZE, (100,), generator=generator).tolist()
    (folder / "text").write_text(" ".join(f"w{word}" for word in words))
    return folder


def compare_json(capsys, *arguments):
    """What the command prints with --json."""
    assert main(["compare", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refusal(capsys, *arguments):
    """The line that the command is refused with."""
    assert main(["compare", *map(str, arguments)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1 and printed.err.startswith("exl3: ")
    return printed.err


def test_the_figures_are_the_demo_tools(tmp_path, capsys):
    """tools.demo_model runs a module of its own, and sums in another way."""
    heldout = (ROOT / "tests" / "demo_model" / "heldout.txt").read_text()
    file = tmp_path / "text"
    file.write_text(heldout[:1500])
    found = compare_json(capsys, SOURCE, PACK, "--text", file, "--window", 128)
    text = cut(SOURCE, file, 128, 128, None)
    reference, pack = load_checkpoint(SOURCE), load_checkpoint(PACK)
    expected = [demo.outputs(reference, window) for window in text.windows]
    wanted = demo.compare(expected, pack, text.windows, text.num_bytes)
    assert found["b"]["bits_per_byte"] == pytest.approx(wanted.bits_per_byte, rel=1e-5)
    ratio = found["b"]["bits_per_byte"] / found["a"]["bits_per_byte"]
    assert ratio == pytest.approx(wanted.bits_per_byte_ratio, rel=1e-5)
    assert found["kl"]["mean"] == pytest.approx(wanted.kl, rel=1e-3)
    assert found["top1_agreement"] == pytest.approx(wanted.top1)
    assert found["tokens"] == sum(len(window) - 1 for window in text.windows)
    # The model is trained on such text: it is neither right nor lost.
    assert 0.8 < found["a"]["bits_per_byte"] < 2
    assert found["kl"]["mean"] > 1e-4 and not found["kl"]["is_lower_bound"]


def test_the_figures_are_the_definitions(pair, capsys):
    """One window, computed here from the logits."""
    a, b, text = pair / "a", pair / "b", pair / "text"
    found = compare_json(capsys, a, b, "--text", text)
    words = text.read_text()
    tokens = torch.tensor([int(word[1:]) for word in words.split()])
    logits_a, logits_b = logits(a, tokens[:-1]), logits(b, tokens[:-1])
    scored_bytes = len(words) - len(words.split()[0])
    for side, of_side in (("a", logits_a), ("b", logits_b)):
        nats = F.cross_entropy(of_side, tokens[1:], reduction="sum").item()
        bits = nats / math.log(2) / scored_bytes
        assert found[side]["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    p, q = logits_a.double().softmax(1), logits_b.double().softmax(1)
    kl = (p * (p / q).log()).sum(1)
    assert found["kl"]["direction"] == "KL(A || B)"
    assert found["kl"]["mean"] == pytest.approx(kl.mean().item(), rel=1e-5)
    assert found["kl"]["quantiles"]["1.0"] == pytest.approx(kl.max().item(), rel=1e-5)
    same = (p.argmax(1) == q.argmax(1)).double().mean().item()
    assert found["top1_agreement"] == pytest.approx(same)


def logits(folder, tokens):
    """`[T, V]` of token ids `[T]`."""
    model = StreamedModel.open(folder)
    hidden = model.embed(tokens[None])
    for layer in model.layers():
        hidden = layer(hidden)
    return model.head(hidden)[0]


def test_a_model_is_no_distance_from_itself(pair, capsys):
    found = compare_json(
        capsys, pair / "a", pair / "a", "--text", pair / "text", "--window", 16
    )
    assert found["kl"]["mean"] == 0 and found["top1_agreement"] == 1
    assert found["windows"] == 7  # 99 tokens, 15 a window
    assert found["tokens"] == 99


def test_a_pack_is_close_to_its_twin(tmp_path, pair, capsys):
    pack = write_pack(tmp_path / "pack", **SIZE)
    found = compare_json(capsys, pack.twin, pack.path, "--text", pair / "text")
    assert 0 <= found["kl"]["mean"] < 1e-6 and found["top1_agreement"] == 1


def test_table_and_plot(pair, capsys, tmp_path):
    file = tmp_path / "plot.svg"
    command = [
        "compare",
        str(pair / "a"),
        str(pair / "b"),
        "--text",
        str(pair / "text"),
    ]
    assert main([*command, "--plot", str(file)]) == 0
    printed = capsys.readouterr().out
    assert f"A  {pair / 'a'}" in printed and "KL(A || B)" in printed
    assert "99 tokens" in printed and "lower bound" not in printed
    # matplotlib draws letters as paths, and leaves the words in comments.
    assert "KL(A || B) of a token, nats" in file.read_text()


@pytest.mark.parametrize("length", [1, 2, 5, 512])
def test_counting_tokens_as_one_gives_a_lower_bound(length):
    """Against sums over a dictionary, for what two servers would give."""
    generator = torch.Generator().manual_seed(length)
    of_a, of_b = (
        (3 * torch.randn(4, VOCAB_SIZE, generator=generator)).log_softmax(1)
        for _ in range(2)
    )
    exact = divergence(Scores(of_a), Scores(of_b))
    best_a, best_b = Scores(*of_a.topk(length)), Scores(*of_b.topk(length))
    for a, b in (
        (best_a, best_b),
        (best_a, Scores(of_b)),
        (Scores(of_a), best_b),
    ):
        found = divergence(a, b)
        wanted = [lumped(a, b, row) for row in range(4)]
        torch.testing.assert_close(
            found, torch.tensor(wanted).double(), rtol=1e-4, atol=1e-5
        )
        assert (found <= exact + 1e-5).all()
        if length == VOCAB_SIZE:
            torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)


def lumped(a, b, row):
    """The divergence at one position, of plain numbers."""

    def given(scores):
        tokens = range(VOCAB_SIZE) if scores.tokens is None else scores.tokens[row]
        return dict(zip(map(int, tokens), scores.logprobs[row].exp().tolist()))

    p, q = given(a), given(b)
    both = p.keys() & q.keys()
    pairs = [(p[token], q[token]) for token in both]
    rest = 1 - sum(p[token] for token in both), 1 - sum(q[token] for token in both)
    pairs.append((max(rest[0], 1e-7), max(rest[1], 1e-7)))
    return sum(one * math.log(one / other) for one, other in pairs)


def test_windows_predict_every_token_but_the_first_once(tmp_path):
    file = tmp_path / "text"
    file.write_text("W é ü ß € 漢 , 😀 and so on")
    text = cut(SOURCE, file, 5, 2048, None)
    joined = torch.cat([text.windows[0], *(window[1:] for window in text.windows[1:])])
    whole = cut(SOURCE, file, None, 2048, None)
    assert torch.equal(joined, whole.windows[0]) and len(whole.windows) == 1
    assert all(len(window) == 5 for window in text.windows[:-1])
    assert text.num_tokens == whole.num_tokens == len(joined) - 1
    first = len("W")  # the tokenizer's first token of this text
    assert text.num_bytes == whole.num_bytes == len(file.read_bytes()) - first
    some = cut(SOURCE, file, 5, 2048, 1)
    assert len(some.windows) == 1 and some.num_bytes < text.num_bytes


# Servers. A small one here speaks vLLM's protocol; tests/serving asks the real one.


class FakeServer(ThreadingHTTPServer):
    """Serves a checkpoint's log-probabilities as vLLM does.

    Attributes:
        requests_seen: Paths and bodies.
        wrong: What to do wrong: an error's message for completions, "no logprobs",
            "not a number" or "other tokens".
    """

    daemon_threads = True

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.wrong = None
        self.requests_seen = []
        self.address = f"http://127.0.0.1:{self.server_port}"

    def prompt_logprobs(self, tokens, count):
        """As in a completion's choice: None, then a dictionary a position."""
        logprobs = logits(self.folder, torch.tensor(tokens)).log_softmax(1)
        given = [None]
        for row, target in zip(logprobs, tokens[1:]):
            best = row.topk(len(row) if count == -1 else count).indices.tolist()
            given.append(
                {
                    str(token): {"logprob": row[token].item(), "rank": 1}
                    for token in {*best, target}
                }
            )
        return given


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        self.server.requests_seen.append((self.path, dict(self.headers)))
        self.answer({"data": [{"id": "tiny", "max_model_len": 65}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests_seen.append((self.path, body))
        wrong = self.server.wrong
        if self.path == "/tokenize":
            tokens = [int(word[1:]) for word in body["prompt"].split()]
            self.answer({"tokens": tokens[1:] if wrong == "other tokens" else tokens})
        elif wrong == "not a number":
            given = [None, *[{"5": {"logprob": math.nan}}] * (len(body["prompt"]) - 1)]
            self.answer({"choices": [{"text": "", "prompt_logprobs": given}]})
        elif wrong == "no logprobs":
            self.answer({"choices": [{"text": ""}]})
        elif wrong and wrong != "other tokens":
            self.answer({"error": {"message": wrong}}, 400)
        else:
            given = self.server.prompt_logprobs(body["prompt"], body["prompt_logprobs"])
            self.answer({"choices": [{"text": "", "prompt_logprobs": given}]})

    def answer(self, content, status=200):
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@pytest.fixture
def server(pair):
    server = FakeServer(pair / "b")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_server_that_gives_all_is_as_good_as_a_checkpoint(pair, server, capsys):
    options = ["--text", pair / "text", "--window", 40]
    wanted = compare_json(capsys, pair / "a", pair / "b", *options)
    url = f"{server.address}/v1/"
    found = compare_json(capsys, pair / "a", url, *options, "--logprobs", -1)
    assert found["b"]["name"] == url
    for side in "ab":
        bits = wanted[side]["bits_per_byte"]
        assert found[side]["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    assert found["kl"]["mean"] == pytest.approx(wanted["kl"]["mean"], rel=1e-4)
    assert found["top1_agreement"] == wanted["top1_agreement"]


def test_a_server_that_gives_some_bounds_the_divergence(pair, server, capsys):
    options = ["--text", pair / "text", "--window", 40, "--logprobs", 5]
    wanted = compare_json(capsys, pair / "a", pair / "b", *options)
    for a, b in ((pair / "a", server.address), (server.address, pair / "a")):
        found = compare_json(capsys, a, b, *options)
        assert found["kl"]["is_lower_bound"]
        assert found["top1_agreement"] == wanted["top1_agreement"]
        assert found["kl"]["mean"] > 0
    forward = compare_json(capsys, pair / "a", server.address, *options)
    assert forward["kl"]["mean"] < wanted["kl"]["mean"]
    bits = wanted["b"]["bits_per_byte"]
    assert forward["b"]["bits_per_byte"] == pytest.approx(bits, rel=1e-5)


def test_two_servers(pair, server, capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    options = ["--text", pair / "text", "--tokenizer", pair / "a"]
    found = compare_json(capsys, server.address, server.address, *options)
    assert found["kl"]["mean"] == 0 and found["top1_agreement"] == 1
    assert found["window"] == 64  # one token of the server's context is generated
    headers = dict(server.requests_seen)["/v1/models"]
    assert headers["Authorization"] == "Bearer secret"
    body = dict(server.requests_seen)["/v1/completions"]
    assert body["model"] == "tiny" and body["prompt_logprobs"] == 20


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        (
            "Requested prompt logprobs of 20,\n which is greater than max allowed: 5",
            (
                "answers 400 to /v1/completions: Requested prompt logprobs of 20, "
                "which is greater than max allowed: 5"
            ),
        ),
        ("no logprobs", "gives no prompt_logprobs; use a server of vLLM"),
        ("not a number", "gives NaN on the text; check what it serves"),
        ("other tokens", "makes other tokens of the text than the tokenizer of"),
    ],
)
def test_a_server_that_cannot_be_used(pair, server, capsys, wrong, line):
    server.wrong = wrong
    found = refusal(capsys, pair / "a", server.address, "--text", pair / "text")
    assert f"{server.address}: {line}" in found


def test_a_server_that_is_not_there(pair, server, capsys):
    server.shutdown()
    server.server_close()
    found = refusal(capsys, pair / "a", server.address, "--text", pair / "text")
    assert f"{server.address}/v1/models: " in found and "Connection refused" in found


def test_two_servers_need_a_tokenizer(pair, server, capsys):
    found = refusal(capsys, server.address, server.address, "--text", pair / "text")
    assert "--tokenizer: A and B are both servers" in found


@pytest.mark.parametrize("name", ["nowhere", "localhost:8000", "ftp://localhost"])
def test_a_side_that_is_no_folder(pair, capsys, name):
    found = refusal(capsys, pair / "a", name, "--text", pair / "text")
    assert f"{name}: is no folder; name a checkpoint's folder, or" in found


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (None, "No such file or directory; give a file of plain text"),
        (b"", "is empty; give"),
        (b" \n", "is empty; give"),
        (b"w5 \xff", "byte 3 is not UTF-8; give"),
        (b"w5", "is a single token; give more text"),
    ],
)
def test_a_text_that_cannot_be_read(pair, capsys, tmp_path, content, line):
    file = tmp_path / "text"
    if content is not None:
        file.write_bytes(content)
    found = refusal(capsys, pair / "a", pair / "b", "--text", file)
    assert f"{file}: {line}" in found


def test_a_checkpoint_that_gives_no_numbers(pair, capsys, tmp_path):
    config = make_config("deepseek_v3", **SIZE)
    tensors = make_tensors(config, [2, 2], mtp=0)
    tensors["model.layers.1.self_attn.o_proj.weight"][3, 5] = math.inf
    broken = save_checkpoint(tmp_path / "broken", config, tensors)
    found = refusal(capsys, pair / "a", broken, "--text", pair / "text")
    assert f"{broken}: model.layers.1 gives infinities or NaN" in found


def test_other_vocabularies(pair, capsys, tmp_path):
    other = write_checkpoint(tmp_path / "c", **SIZE)
    tokenizer = other / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"w5": 5', '"w5x": 5'))
    found = refusal(capsys, pair / "a", other, "--text", pair / "text")
    assert f"{tokenizer}: the token 'w5" in found
    found = refusal(capsys, pair / "a", SOURCE, "--text", pair / "text")
    assert f"{pair / 'a'} has 512 and {SOURCE} has 1024" in found
    tokenizer.unlink()
    found = refusal(capsys, pair / "a", other, "--text", pair / "text")
    assert f"{tokenizer}: is not there" in found


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--window", 4096], "--window 4096: the models read at most 2048 tokens"),
        (["--plot", "a.bmp2"], "--plot a.bmp2: the ending names no format; use"),
        (["--plot", "no/a.png"], "--plot no/a.png: there is no folder no; make it"),
    ],
)
def test_options_that_cannot_be_used(pair, capsys, options, line):
    command = [pair / "a", pair / "b", "--text", pair / "text", *options]
    assert line in refusal(capsys, *command)


@pytest.mark.parametrize(
    "options", [["--window", "1"], ["--limit", "0"], ["--logprobs", "0"]]
)
def test_options_that_mean_nothing(capsys, options):
    with pytest.raises(SystemExit) as exit:
        main(["compare", "a", "b", "--text", "c", *options])
    assert exit.value.code == 2
    assert options[1] in capsys.readouterr().err
