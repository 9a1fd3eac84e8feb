# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
r"""An EXL3 pack against its BF16 original, both served over the API in one run.

    python benchmarks/benchmark_pack_vs_bf16.py \
        --bf16 examples/demo-glm-dsa-ragged --pack examples/demo-glm-dsa-ragged-exl3

Both servers stay up and take turns, so that a change of the machine's speed meets both.
Prints decode and prefill speed, memory, and the time to load the weights beside that of
a plain read of the same files.
"""

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

# The first token of every prompt differs from round to round, so that no cache helps.
_VOCABULARY = 500
_START_SECONDS = 600


class Server:
    """The OpenAI server over one model."""

    def __init__(self, model: Path, options: list[str], log: Path) -> None:
        """Starts the server and waits until it answers."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.model = model
        self.log = log
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(model), "--served-model-name", "model"]
        command += ["--host", "127.0.0.1", "--port", str(port), *options]
        environment = {"VLLM_CPU_KVCACHE_SPACE": "1", **os.environ}
        with log.open("w") as stream:
            self.process = subprocess.Popen(
                command, stdout=stream, stderr=stream, env=environment
            )
        deadline = time.monotonic() + _START_SECONDS
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise SystemExit(
                    f"{model} was not served; its log ends with\n"
                    + log.read_text()[-2000:]
                )
            time.sleep(0.5)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as reply:
                return reply.status == 200
        except OSError:
            return False

    def complete(self, prompt: list[int], tokens: int) -> float:
        """Seconds that a greedy completion takes."""
        fields = {
            "model": "model",
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps(fields).encode(),
            {"Content-Type": "application/json"},
        )
        start = time.perf_counter()
        with urllib.request.urlopen(request, timeout=600) as reply:
            used = json.load(reply)["usage"]["completion_tokens"]
        seconds = time.perf_counter() - start
        if used != tokens:
            raise SystemExit(f"{self.model}: {used} tokens came instead of {tokens}")
        return seconds

    def load_seconds(self) -> float:
        """Seconds that the weights took to load, by the server's own log."""
        found = re.findall(
            r"Loading weights took ([\d.]+) seconds", self.log.read_text()
        )
        return sum(map(float, found))

    def resident_bytes(self) -> int:
        """Memory of the server and its workers; shared pages count once."""
        total = 0
        for pid in _descendants(self.process.pid):
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            found = re.search(r"^Pss: +(\d+) kB", rollup, re.M)
            total += int(found[1]) * 1024 if found else 0
        return total

    def stop(self) -> None:
        """Ends the server."""
        self.process.terminate()
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _descendants(pid: int) -> list[int]:
    found = [pid]
    for parent in found:
        children = Path(f"/proc/{parent}/task/{parent}/children")
        found += map(int, children.read_text().split())
    return found


def weight_files(model: Path) -> list[Path]:
    """The files that hold a model's weights."""
    return sorted(model.glob("*.safetensors"))


def read_seconds(model: Path) -> float:
    """Seconds of a plain read of a model's weights, the median of five."""
    taken = []
    for _ in range(5):
        start = time.perf_counter()
        for file in weight_files(model):
            file.read_bytes()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def measure(servers: dict[str, Server], args: argparse.Namespace) -> dict[str, Any]:
    """Speeds of the servers, which take turns, and their memory."""
    decode: dict[str, list[float]] = {name: [] for name in servers}
    prefill: dict[str, list[float]] = {name: [] for name in servers}
    for round_ in range(-1, args.rounds):  # the first one only warms up
        first = 3 + (round_ + 1) % _VOCABULARY
        short = [first, 17, 40, 8]
        long = [first, *(3 + i * 7 % _VOCABULARY for i in range(args.prompt - 1))]
        for name, server in list(servers.items())[:: 1 if round_ % 2 else -1]:
            prompt_only = server.complete(short, 1)
            whole = server.complete(short, args.tokens + 1)
            long_prompt = server.complete(long, 1)
            if round_ >= 0:
                decode[name].append(args.tokens / (whole - prompt_only))
                prefill[name].append(args.prompt / long_prompt)
    result: dict[str, Any] = {}
    for name, server in servers.items():
        result[name] = {
            "model": str(server.model),
            "decode_tokens_per_second": statistics.median(decode[name]),
            "prefill_tokens_per_second": statistics.median(prefill[name]),
            "weight_bytes": sum(f.stat().st_size for f in weight_files(server.model)),
            "resident_bytes": server.resident_bytes(),
            "load_seconds": server.load_seconds(),
            "read_seconds": read_seconds(server.model),
        }
    for what, speeds in ("decode", decode), ("prefill", prefill):
        pairs = zip(speeds["pack"], speeds["bf16"], strict=True)
        result[f"{what}_pack_over_bf16"] = statistics.median(p / b for p, b in pairs)
    return result


def print_table(result: dict[str, Any]) -> None:
    """Prints a row a figure, a column a server."""
    rows = {
        "decode, tokens/s": ("decode_tokens_per_second", 1),
        "prefill, tokens/s": ("prefill_tokens_per_second", 1),
        "weights, MB": ("weight_bytes", 1e-6),
        "memory (PSS), MB": ("resident_bytes", 1e-6),
        "load, s": ("load_seconds", 1),
        "plain read, s": ("read_seconds", 1),
    }
    print(f"{'':20}{'BF16':>12}{'EXL3':>12}{'EXL3/BF16':>12}")
    for title, (key, scale) in rows.items():
        bf16, pack = (result[name][key] for name in ("bf16", "pack"))
        speed = key.removesuffix("_tokens_per_second")
        ratio = result.get(f"{speed}_pack_over_bf16", pack / bf16 if bf16 else 0)
        print(f"{title:20}{bf16 * scale:12.3f}{pack * scale:12.3f}{ratio:12.3f}")


def main() -> None:
    """Starts both servers, measures, and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bf16", type=Path, required=True, help="a model folder")
    parser.add_argument("--pack", type=Path, required=True, help="the same as EXL3")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=128, help="decoded a round")
    parser.add_argument("--prompt", type=int, default=384, help="prefilled a round")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("options", nargs="*", help="after --: options of both servers")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as scratch:
        servers: dict[str, Server] = {}
        try:
            for name, model in ("bf16", args.bf16), ("pack", args.pack):
                log = Path(scratch) / f"{name}.log"
                servers[name] = Server(model, args.options, log)
            result = measure(servers, args)
        finally:
            for server in servers.values():
                server.stop()
    result |= {key: getattr(args, key) for key in ("rounds", "tokens", "prompt")}
    print_table(result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
