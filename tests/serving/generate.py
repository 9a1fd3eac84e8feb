# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Runs engines one after another in a process of its own, and reports their tokens.

    python -m tests.serving.generate < cases.json > results.json

Importing vLLM takes longer than a tiny model does, so several engines share one
import. They share nothing else: each is shut down before the next one starts.
"""

import gc
import json
import os
import socket
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

REPO = Path(__file__).resolve().parents[2]
#: Token ids of the prompts: a single token, and lengths on both sides of a KV block.
PROMPTS = [[7], list(range(5, 14)), list(range(40, 77))]
MTP = {"method": "mtp", "num_speculative_tokens": 1}


@dataclass(frozen=True)
class Case:
    """One engine: a checkpoint and the options that differ from the defaults below.

    `exact` has EXL3 weights keep every bit, so that a router with many experts chooses
    as the reference does.
    """

    model: str
    options: dict[str, Any] = field(default_factory=dict)
    max_tokens: int = 32
    prompts: list[list[int]] = field(default_factory=lambda: PROMPTS)
    exact: bool = False


@dataclass(frozen=True)
class Completion:
    """Greedy tokens with their log-probabilities, one entry a generated token."""

    tokens: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Result:
    """What one engine gave: completions in the order of the prompts, or an error."""

    completions: list[Completion]
    error: str | None
    drafted: int
    accepted: int


def run(*cases: Case) -> list[Result]:
    """Runs the cases in one new process.

    Args:
        cases: The engines to start, in order.

    Raises:
        RuntimeError: The process died; the message ends with what it wrote.
    """
    env = {
        **os.environ,
        # In one process an engine starts three times as fast. Ranks beyond the first
        # still get processes of their own.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }
    process = subprocess.run(
        [sys.executable, "-m", "tests.serving.generate"],
        input=json.dumps([asdict(case) for case in cases]),
        capture_output=True,
        text=True,
        cwd=REPO,
        env=env,
        check=False,
    )
    lines = [line for line in process.stdout.splitlines() if line.startswith("RESULT ")]
    if process.returncode or len(lines) != len(cases):
        tail = process.stderr[-6000:]
        raise RuntimeError(f"exit code {process.returncode}, {len(lines)} done\n{tail}")
    return [_result(json.loads(line.removeprefix("RESULT "))) for line in lines]


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _result(data: dict[str, Any]) -> Result:
    completions = [Completion(**completion) for completion in data.pop("completions")]
    return Result(completions, **data)


def _generate(case: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    options = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 128,
        "skip_tokenizer_init": True,
        "disable_log_stats": False,
        **case["options"],
    }
    try:
        llm = LLM(case["model"], **options)
    except Exception as error:
        # pydantic wraps a refusal in its own lines; the last one is ours.
        return {"completions": [], "error": str(error), "drafted": 0, "accepted": 0}
    params = SamplingParams(
        temperature=0,
        max_tokens=case["max_tokens"],
        ignore_eos=True,
        logprobs=1,
        detokenize=False,
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in case["prompts"]]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    completions = [
        {
            "tokens": list(output.outputs[0].token_ids),
            "logprobs": [
                step[token].logprob
                for step, token in zip(
                    output.outputs[0].logprobs, output.outputs[0].token_ids, strict=True
                )
            ],
        }
        for output in outputs
    ]
    counts = {
        metric.name: metric.value
        for metric in llm.get_metrics()
        if metric.name.startswith("vllm:spec_decode_num") and hasattr(metric, "value")
    }
    llm.llm_engine.engine_core.shutdown()
    return {
        "completions": completions,
        "error": None,
        "drafted": counts.get("vllm:spec_decode_num_draft_tokens", 0),
        "accepted": counts.get("vllm:spec_decode_num_accepted_tokens", 0),
    }


def _exact_ops() -> Any:
    """While it is entered, the ops of this process run in their bit-exact mode."""
    from exl3 import ops

    return patch.multiple(
        ops,
        linear=partial(ops.linear, exact=True),
        moe=partial(ops.moe, exact=True),
    )


def main() -> None:
    """Reads cases from stdin and writes one RESULT line for each."""
    from vllm.distributed import cleanup_dist_env_and_memory

    for case in json.load(sys.stdin):
        with _exact_ops() if case["exact"] else nullcontext():
            result = _generate(case)
        cleanup_dist_env_and_memory()
        gc.collect()
        print("RESULT", json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
