# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
r"""Measures a server through `vllm bench serve`: decoding, prefill, drafts, KV cache.

    python -m benchmarks.serving.run --url http://127.0.0.1:8000 --json running.json
    python -m benchmarks.serving.run --model DIR --mtp 0 3 --json a.json --plot a.svg \
        -- --tensor-parallel-size 4
    python -m benchmarks.serving.run compare a.json b.json

A server that is started is started once for each number of draft tokens of `--mtp`.
"""

import argparse
import datetime
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.serving.metrics import kv_cache_tokens
from benchmarks.serving.plot import plot
from benchmarks.serving.points import SLACK, Load, Point, measure, prompt_lengths
from benchmarks.serving.results import Result, Series, machine, read, write
from benchmarks.serving.server import BenchmarkError, Server, started
from benchmarks.serving.tables import comparison, table


def sweep(server: Server, name: str, args: argparse.Namespace) -> Series:
    """Measures every point that fits, one line of progress each."""
    longest = server.max_model_len - args.output - SLACK
    if longest < 1:
        raise BenchmarkError(
            f"--output {args.output}: the server has room for {server.max_model_len} "
            "tokens of a prompt and its answer; choose a smaller one"
        )
    cache = kv_cache_tokens(server.metrics())
    tokenizer = args.tokenizer or server.root
    points: list[Point] = []
    left_out: list[str] = []
    # What is compiled or allocated at the first request is not measured.
    measure(server, tokenizer, Load(1, min(64, longest), 4, 1, seed=0))
    for length in args.prompt or prompt_lengths(longest):
        for streams in args.streams:
            said = f"{name}, streams {streams}, prompts of {length}"
            if length > longest:
                left_out.append(f"{said}: {longest} is the longest that fits")
                continue
            if cache is not None and streams * (length + args.output) > cache:
                left_out.append(f"{said}: the KV cache holds {cache} tokens")
                continue
            print(said, file=sys.stderr, flush=True)
            seed = args.seed + len(points) + 1
            load = Load(streams, length, args.output, args.rounds, seed)
            points.append(measure(server, tokenizer, load))
    return Series(name, list(args.options), cache, points, left_out)


def run(args: argparse.Namespace) -> Result:
    """Measures the server at a URL, or one started for each number of drafts."""
    series = []
    if args.url:
        server = Server.at(args.url)
        series.append(sweep(server, args.label, args))
    else:
        for drafts in args.mtp:
            name = f"MTP {drafts}" if drafts else "no MTP"
            options = list(args.options)
            if drafts:
                method = {"method": "mtp", "num_speculative_tokens": drafts}
                options += ["--speculative-config", json.dumps(method)]
            log = Path(tempfile.gettempdir()) / f"{name.replace(' ', '-')}.log"
            print(f"{name}: starting; its log is {log}", file=sys.stderr, flush=True)
            with started(args.model, options, log) as server:
                series.append(sweep(server, name, args))
    today = datetime.date.today().isoformat()
    model = Path(server.root).name
    return Result(model, args.machine or machine(), server.version, today, series)


def parser() -> argparse.ArgumentParser:
    """The options of a sweep."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.run",
        usage="%(prog)s (--url URL | --model MODEL) [options] [-- words for the server]"
        "\n       %(prog)s compare A.json B.json",
    )
    add = made.add_argument
    which = made.add_mutually_exclusive_group(required=True)
    which.add_argument("--url", help="measure the server that runs there")
    which.add_argument("--model", help="start servers of this model and measure them")
    add("--mtp", type=int, nargs="+", default=[0, 1], help="draft tokens; 0: no MTP")
    add("--label", default="as it runs", help="name of what runs at --url")
    add("--machine", help="what it runs on, if not on this machine")
    add("--tokenizer", help="a folder or repository, if the model's is not here")
    add("--streams", type=int, nargs="+", default=[1, 2, 4, 8], help="at once")
    add("--prompt", type=int, nargs="+", help="tokens; from 128 to all that fit")
    add("--output", type=int, default=256, help="tokens of an answer, at least 2")
    add("--rounds", type=int, default=3, help="requests of each stream")
    add("--seed", type=int, default=0, help="another one gives other prompts")
    add("--json", type=Path, help="write the figures there")
    add("--plot", type=Path, help="draw them there, as .svg or .png")
    return made


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a sweep; `options` are the words for the server."""
    own, words = list(arguments), []
    if "--" in own:
        middle = own.index("--")
        own, words = own[:middle], own[middle + 1 :]
    made = parser()
    args = made.parse_args(own)
    if args.url and words:
        made.error("words for the server: the one at --url runs already; use --model")
    if args.output < 2:
        made.error(f"--output {args.output}: decoding is timed after the first token")
    if min([*args.streams, args.rounds, *(args.prompt or [1])]) < 1:
        made.error("--streams, --prompt and --rounds: each number is 1 or more")
    args.options = words
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, or compares two result files."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if arguments[:1] == ["compare"]:
            compare = argparse.ArgumentParser(prog=f"{parser().prog} compare")
            compare.add_argument("files", type=Path, nargs=2, metavar="FILE")
            files = compare.parse_args(arguments[1:]).files
            print(comparison(files, [read(file) for file in files]))
            return 0
        args = parse(arguments)
        result = run(args)
        if args.json:
            write(result, args.json)
        print(table(result))
        if args.plot:
            plot(result, args.plot)
    except BenchmarkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
