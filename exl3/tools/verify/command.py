# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""`exl3 verify`: whether the engine serves a checkpoint, and makes sense.

Reads the headers, boots the engine, prefills short prompts and completes some. With
--speculative it boots a second engine, which drafts with the checkpoint's MTP layer,
and compares the two. One line a check; then OK, or what failed. The exit code is 0 only
for OK.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from exl3.format.errors import CheckpointError
from exl3.tools.shared.arguments import count
from exl3.tools.verify.checks import (
    Check,
    check_completions,
    check_drafts,
    check_passage,
    check_prefills,
)
from exl3.tools.verify.engine import EngineError, ask, check_installed
from exl3.tools.verify.headers import Headers, read_headers
from exl3.tools.verify.questions import Answers, Questions

#: Long enough for every question, and short enough for any KV cache.
_CONTEXT = 512
_DRAFTS = {"method": "mtp", "num_speculative_tokens": 1}
_NAME_WIDTH = 18


def add_command(commands: Any) -> None:
    """Adds `verify` to the commands of `exl3`."""
    parser = commands.add_parser(
        "verify",
        help="boot the engine on a checkpoint and check what it says",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, metavar="PATH", help="the checkpoint")
    parser.add_argument(
        "--tp", type=count(), default=1, metavar="N", help="tensor-parallel ranks (1)"
    )
    parser.add_argument(
        "--speculative",
        action="store_true",
        help="also draft with the MTP layer: the output must stay the same",
    )
    parser.add_argument(
        "--dtype", default="auto", help="that the engine computes in (auto)"
    )
    parser.add_argument(
        "--engine-arg",
        action="append",
        default=[],
        type=_engine_argument,
        metavar="KEY=VALUE",
        help="an argument of vllm.LLM, its value as JSON or text, such as "
        "gpu_memory_utilization=0.8; may be given more than once",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints one line a check, and the verdict.

    Raises:
        ToolError: There is no engine to boot.
    """
    check_installed()
    checks = []
    for check in verify(options, ask):
        checks.append(check)
        if not options.json:
            state = "ok" if check.ok else "FAILED"
            print(
                f"{check.name.ljust(_NAME_WIDTH)} {state:6}  {check.figure}", flush=True
            )
    failed = [check.name for check in checks if not check.ok]
    if options.json:
        report = {
            "path": str(options.folder),
            "ok": not failed,
            "failed": failed,
            "checks": [_plain(check) for check in checks],
        }
        print(json.dumps(report, indent=2))
    else:
        print(f"FAILED: {', '.join(failed)}" if failed else "OK")
    return 1 if failed else 0


def verify(
    options: argparse.Namespace, ask: Callable[[Questions], Answers]
) -> Iterator[Check]:
    """Checks a checkpoint; gives each check as soon as it is known.

    Args:
        options: Of the command.
        ask: Boots an engine and asks it; raises EngineError.
    """
    try:
        headers = read_headers(
            options.folder, options.tp, speculative=options.speculative
        )
    except CheckpointError as error:
        yield Check("headers", False, str(error))
        return
    yield Check("headers", True, headers.summary)

    speculative = None
    if options.speculative:
        # It comes first, because the plain engine is asked about what it said.
        try:
            questions = _questions(options, headers, speculative_config=_DRAFTS)
            speculative = ask(questions)
        except EngineError as error:
            yield Check("mtp engine", False, str(error))
            return
        yield _ready("mtp engine", speculative)
        yield from check_prefills(speculative.prefills, "mtp ")
        yield from check_completions(speculative.completions, "mtp ")
    said = speculative.completions if speculative else []
    questions = _questions(
        options, headers, scored=[(each.prompt_tokens, each.tokens) for each in said]
    )
    try:
        plain = ask(questions)
    except EngineError as error:
        yield Check("engine", False, str(error))
        return
    yield _ready("engine", plain)
    yield from check_prefills(plain.prefills)
    yield from check_completions(plain.completions)
    if plain.passage:
        yield check_passage(plain.passage, headers.vocab_size)
    if speculative:
        yield from check_drafts(plain, speculative)


def _questions(
    options: argparse.Namespace,
    headers: Headers,
    scored: list[tuple[list[int], list[int]]] | None = None,
    **engine: Any,
) -> Questions:
    """The questions for an engine with the command's options, and some more."""
    arguments = {
        "tensor_parallel_size": options.tp,
        "dtype": options.dtype,
        "max_model_len": min(_CONTEXT, headers.context or _CONTEXT),
        "max_logprobs": -1,  # all tokens' probabilities are summed
        "skip_tokenizer_init": not headers.has_tokenizer,
        "disable_log_stats": False,  # drafts are counted among them
        **engine,
        **dict(options.engine_arg),
    }
    return Questions(
        str(options.folder),
        arguments,
        headers.has_tokenizer,
        headers.vocab_size,
        scored or [],
    )


def _ready(name: str, answers: Answers) -> Check:
    figure = f"ready after {answers.seconds:.1f} s, in {answers.dtype}"
    return Check(name, True, figure, answers.seconds)


def _plain(check: Check) -> dict[str, Any]:
    """A check for JSON, which knows neither NaN nor infinity."""
    value = check.value
    known = value is not None and math.isfinite(value)
    return {**asdict(check), "value": value if known else None}


def _engine_argument(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, not {text!r}")
    try:
        parsed = json.loads(value)
    except ValueError:
        parsed = value
    return key.replace("-", "_"), parsed
