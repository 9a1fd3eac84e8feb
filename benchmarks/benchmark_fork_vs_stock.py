# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
r"""Decode speed of the fork as a ratio to stock vLLM, and whether their tokens agree.

    python benchmarks/benchmark_fork_vs_stock.py --stock VENV/bin/python \
        --model examples/demo-glm-dsa

Both engines stay up in one run and take turns, so that a change of the machine's speed
meets both. Stock has no sparse attention on the CPU, so a DSA checkpoint is served to
both under a DeepSeek-V3 config, which is the same model up to `index_topk` tokens.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PROMPT = [5, 17, 40, 8, 99, 250, 31, 77]

_CHILD = """
import json, sys, time
from vllm import LLM, SamplingParams, __version__
options = json.loads(sys.argv[1])
tokens = options.pop("tokens")
llm = LLM(**options)
params = SamplingParams(
    temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False
)
print("READY", __version__, flush=True)
for line in sys.stdin:
    prompt = json.loads(line)
    start = time.perf_counter()
    output = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    seconds = time.perf_counter() - start
    result = [seconds, list(output[0].outputs[0].token_ids)]
    print("DONE", json.dumps(result), flush=True)
"""


class Engine:
    """An engine in a process of its own, which waits until it is asked."""

    def __init__(self, python: str, options: dict[str, Any]) -> None:
        """Starts the engine and waits until it is ready."""
        environment = {
            **os.environ,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        self.process = subprocess.Popen(
            [python, "-c", _CHILD, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
            cwd=tempfile.gettempdir(),  # not the repository: each has its own vllm
        )
        self.version = self._read("READY")

    def generate(self, prompt: list[int]) -> tuple[float, list[int]]:
        """Seconds and greedy tokens for one prompt."""
        assert self.process.stdin is not None
        print(json.dumps(prompt), file=self.process.stdin, flush=True)
        seconds, tokens = json.loads(self._read("DONE"))
        return seconds, tokens

    def _read(self, word: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(word):
                return line.removeprefix(word).strip()
        raise SystemExit(f"the engine ended with code {self.process.wait()}")

    def stop(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.wait()


def dense_form(model: Path, folder: Path) -> Path:
    """A checkpoint under the config of the same model without sparse attention."""
    config = json.loads((model / "config.json").read_text())
    if "index_topk" not in config:
        return model
    config = {k: v for k, v in config.items() if not k.startswith("index")}
    config |= {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
    for file in model.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file.resolve())
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def main() -> int:
    """Prints the comparison; exit code 1 if tokens differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stock", required=True, help="Python with stock vLLM")
    parser.add_argument("--fork", default=sys.executable, help="Python with the fork")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--tokens", type=int, default=128, help="decoded a round")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as scratch:
        options = {
            "model": str(dense_form(args.model.resolve(), Path(scratch))),
            "max_model_len": 512,
            "skip_tokenizer_init": True,
            "tokens": args.tokens,
        }
        engines = {
            "fork": Engine(args.fork, options),
            "stock": Engine(args.stock, options),
        }
        for engine in engines.values():
            engine.generate(PROMPT)  # compiles what is compiled on first use
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        same = True
        for round_ in range(args.rounds):
            prompt = [token + round_ for token in PROMPT]
            # Who goes first alternates too.
            order = list(engines.items())[:: 1 if round_ % 2 else -1]
            outputs = {}
            for name, engine in order:
                taken, outputs[name] = engine.generate(prompt)
                seconds[name].append(taken)
            same = same and outputs["fork"] == outputs["stock"]
        for engine in engines.values():
            engine.stop()

    ratios = [s / f for f, s in zip(seconds["fork"], seconds["stock"], strict=True)]
    result = {
        "versions": {name: engine.version for name, engine in engines.items()},
        "tokens_per_second": {
            name: args.tokens / statistics.median(taken)
            for name, taken in seconds.items()
        },
        "fork_over_stock": statistics.median(ratios),
        "identical_tokens": same,
        "rounds": args.rounds,
    }
    for name, version in result["versions"].items():
        speed = result["tokens_per_second"][name]
        print(f"{name:5}  {version:22}  {speed:7.1f} tokens/s (median)")
    print(f"fork / stock: {result['fork_over_stock']:.3f} (median of pairs)")
    print(f"tokens identical in {args.rounds} rounds: {same}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
