# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""One point of a sweep: so many streams at once, prompts of one length."""

import io
import json
import sys
import tempfile
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.serving.metrics import Drafts
from benchmarks.serving.server import BenchmarkError, Server

#: Tokens that a prompt may gain when its text is made tokens again.
SLACK = 8


@dataclass(frozen=True)
class Point:
    """What was measured.

    Attributes:
        streams: Requests at once.
        prompt_tokens: Of one prompt.
        output_tokens: Of one answer.
        requests: How many were measured.
        decode: Tokens a second of all streams together, once they have begun.
        decode_each: The same of one stream: one over the mean time per output token.
        prefill: Prompt tokens a second, from a prompt to its first token. None for
            several streams, whose prompts wait for one another.
        first_token_ms: Median time to the first token.
        first_token_p99_ms: What one of a hundred waits at least.
        acceptance: Accepted draft tokens over proposed ones; None without drafts.
        accepted_length: Mean tokens a step and stream; None without drafts.
    """

    streams: int
    prompt_tokens: int
    output_tokens: int
    requests: int
    decode: float
    decode_each: float
    prefill: float | None
    first_token_ms: float
    first_token_p99_ms: float
    acceptance: float | None
    accepted_length: float | None


@dataclass(frozen=True)
class Load:
    """What is asked of a server.

    Attributes:
        streams: Requests at once.
        prompt: Tokens of a prompt.
        output: Tokens of an answer.
        rounds: Requests of each stream, one after the other.
        seed: Of the prompts. Prompts of two loads of a sweep must differ, or the second
            finds the first's in the prefix cache.
    """

    streams: int
    prompt: int
    output: int
    rounds: int
    seed: int


def measure(server: Server, tokenizer: str, load: Load) -> Point:
    """Puts a load on a server.

    Raises:
        BenchmarkError: `vllm bench serve` failed, or requests did.
    """
    before = Drafts.of(server.metrics())
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        bench(bench_options(server, tokenizer, load, file))
        result = json.loads(file.read_text())
    return point_of(result, load, Drafts.of(server.metrics()).since(before))


def bench_options(server: Server, tokenizer: str, load: Load, file: Path) -> list[str]:
    """The words after `vllm bench serve`, which has its figures written to a file."""
    return [
        *("--backend", "openai", "--base-url", server.url, "--model", server.model),
        *("--tokenizer", tokenizer, "--dataset-name", "random"),
        *("--random-input-len", str(load.prompt)),
        *("--random-output-len", str(load.output), "--ignore-eos"),
        *("--num-prompts", str(load.streams * load.rounds)),
        *("--max-concurrency", str(load.streams), "--seed", str(load.seed)),
        *("--temperature", "0", "--disable-tqdm"),
        *("--save-result", "--result-dir", str(file.parent)),
        *("--result-filename", file.name),
    ]


def bench(options: list[str]) -> None:
    """Runs `vllm bench serve` here, so that vLLM is imported once a sweep.

    Raises:
        BenchmarkError: It failed; what it wrote goes to stderr.
    """
    from vllm.benchmarks.serve import add_cli_args, main
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    written = io.StringIO()
    try:
        with redirect_stdout(written):
            main(parser.parse_args(options))
    except Exception as error:
        sys.stderr.write(written.getvalue())
        raise BenchmarkError(f"vllm bench serve: {error}") from error


def point_of(result: Mapping[str, Any], load: Load, drafts: Drafts) -> Point:
    """The point of a result of `vllm bench serve`.

    Raises:
        BenchmarkError: Requests failed, or answered with less than they should.
    """
    requests = load.streams * load.rounds
    if result["completed"] != requests:
        raise BenchmarkError(
            f"{result['failed']} of {requests} requests failed; see the server's log"
        )
    if result["total_output_tokens"] != requests * load.output:
        raise BenchmarkError(
            f"{result['total_output_tokens']} tokens were answered, not "
            f"{requests * load.output}; is there room for {load.prompt + load.output}?"
        )
    if not result["mean_tpot_ms"]:
        raise BenchmarkError("each answer came at once: there is no time for a token")
    # The text of random tokens may be a few more or fewer when it is tokens again.
    counted = result["total_input_tokens"] / requests
    decode_each = 1000 / result["mean_tpot_ms"]
    alone = load.streams == 1
    return Point(
        streams=load.streams,
        prompt_tokens=load.prompt,
        output_tokens=load.output,
        requests=requests,
        decode=load.streams * decode_each,
        decode_each=decode_each,
        prefill=1000 * counted / result["median_ttft_ms"] if alone else None,
        first_token_ms=result["median_ttft_ms"],
        first_token_p99_ms=result["p99_ttft_ms"],
        acceptance=drafts.acceptance,
        accepted_length=drafts.accepted_length,
    )


def prompt_lengths(longest: int) -> list[int]:
    """From 128 on, each four times the one before; the longest that fits comes last."""
    lengths = []
    length = 128
    while length < longest:
        lengths.append(length)
        length *= 4
    return [*lengths, longest]
