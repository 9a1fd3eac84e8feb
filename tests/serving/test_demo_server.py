# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""`make serve`: the demo model answers over the OpenAI API, in English."""

import json
import re
import signal
import subprocess
import sys
import urllib.request

import pytest

from exl3.cli import main
from tests.serving.generate import REPO, free_port

MODEL = REPO / "examples" / "demo-glm-dsa-ragged-exl3"

#: The commonest words of English. In running text they are about half of all words;
#: in a soup of letters or syllables next to none.
COMMON = set(
    re.findall(
        r"\w+",
        """
    the and of that to in he shall unto for i his a they be is him not them it with
    all thou thy was which my me said but ye their have will thee from as are when
    this out were upon by you up there hath then people came had into on her come
    one we before your also day man us men let who no so their at went our if now an
    she lord god king house son children land israel hand earth heaven
    """,
    )
)


class Server:
    def __init__(self, port):
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "tools.serve_demo"]
        self.process = subprocess.Popen(
            [*command, "--model", str(MODEL), "--port", str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=REPO,
        )
        self.log = []
        for line in self.process.stdout:
            self.log.append(line)
            if line.startswith("ready: "):
                self.curl = next(self.process.stdout)
                return
        raise AssertionError("".join(self.log[-40:]))

    def post(self, path, **fields):
        request = urllib.request.Request(
            f"{self.url}{path}",
            json.dumps({"model": "demo", **fields}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            return json.load(reply)


@pytest.fixture(scope="module")
def server():
    server = Server(free_port())
    yield server
    server.process.send_signal(signal.SIGTERM)
    server.process.communicate(timeout=60)


def assert_english(text):
    assert text.isascii(), text
    words = re.findall(r"[a-z]+", text.lower())
    assert len(words) >= 15, text
    assert sum(word in COMMON for word in words) >= 0.35 * len(words), text
    # Greedy text of so small a model goes in circles, but not on one spot.
    assert len(set(words)) >= 0.2 * len(words), text


@pytest.mark.parametrize(
    "prompt",
    ["In the beginning God created", "And the king said unto his servants,"],
)
def test_it_completes_a_sentence_in_english(server, prompt):
    reply = server.post("/v1/completions", prompt=prompt, max_tokens=48, temperature=0)
    assert_english(reply["choices"][0]["text"])
    assert reply["usage"]["completion_tokens"] == 48


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_it_samples_in_english(server, seed):
    """At the temperature of the model's own generation_config.json."""
    prompt = "And the king said unto his servants,"
    reply = server.post("/v1/completions", prompt=prompt, max_tokens=48, seed=seed)
    assert_english(reply["choices"][0]["text"])


def test_it_chats(server):
    messages = [{"role": "user", "content": "Blessed is the man that"}]
    reply = server.post(
        "/v1/chat/completions",
        messages=messages,
        min_tokens=32,  # the psalm may be a short one
        max_tokens=48,
        temperature=0,
    )
    assert_english(reply["choices"][0]["message"]["content"])


def test_the_line_to_try_works(server):
    reply = subprocess.run(
        ["sh", "-c", server.curl], capture_output=True, text=True, check=True
    )
    assert_english(json.loads(reply.stdout)["choices"][0]["text"])


def test_the_draft_is_used(server):
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as reply:
        metrics = reply.read().decode()

    def total(name):
        values = re.findall(rf"^vllm:{name}{{[^}}]*}} ([\d.e+]+)$", metrics, re.M)
        return sum(float(value) for value in values)

    drafted = total("spec_decode_num_draft_tokens_total")
    assert drafted > 0
    # The card's figure is about 0.7; half of it still means a trained draft.
    assert total("spec_decode_num_accepted_tokens_total") > 0.35 * drafted


def test_it_is_compared_with_its_checkpoint(server, capsys):
    """The server's log-probabilities are those of the checkpoint in float32."""
    text = REPO / "tests" / "demo_model" / "heldout.txt"
    command = ["compare", str(MODEL), server.url, "--text", str(text), "--json"]
    assert main([*command, "--window", "256", "--limit", "4"]) == 0
    found = json.loads(capsys.readouterr().out)
    bits = found["a"]["bits_per_byte"]
    # BF16 and 8-bit activations: 0.0004 nats and 99.4 % were measured.
    assert found["b"]["bits_per_byte"] == pytest.approx(bits, rel=5e-3)
    assert 0 < found["kl"]["mean"] < 3e-3 and found["kl"]["is_lower_bound"]
    assert found["top1_agreement"] > 0.98
