# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Each command of the pages is one that its program takes, and that a test runs.

A block of the language `bash` or `console` holds commands. A line `# needs a GPU`, or
`# no test: WHY`, excuses a block from being run by a test, not from being right.
"""

import argparse
import importlib.util
import itertools
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.serving import run
from exl3 import cli

REPO = Path(__file__).resolve().parents[2]
PAGES = [*REPO.glob("*.md"), *(REPO / "docs").rglob("*.md")]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXCUSE = re.compile(r"^# (needs .*\bGPUs?\b|no test: .+)", re.MULTILINE)

#: The first words of commands, the test that runs them, and what it has of them.
TESTED = {
    "exl3 compare": ("tests/exl3/test_compare.py", '"compare"'),
    "exl3 graft-mtp": ("tests/exl3/grafts.py", '"graft-mtp"'),
    "exl3 inspect": ("tests/exl3/test_inspect.py", '"inspect"'),
    "exl3 prune": ("tests/exl3/test_prune_command.py", '"prune"'),
    "exl3 quantize": ("tests/exl3/test_quantize_command.py", '"quantize"'),
    "exl3 verify": ("tests/serving/test_verify_engine.py", '"verify"'),
    "make install": (".ci/run", "make test"),  # which installs first
    "make serve": ("tests/serving/test_demo_server.py", "tools.serve_demo"),
    "make test": (".ci/run", "make test"),
    "make test-slow": (".github/workflows/nightly.yml", "make test-slow"),
    "pip download": ("tests/fork/test_wheel.py", "fetch"),
    "pip install": ("tests/fork/test_build.py", '"install"'),
    "pip wheel": ("tests/fork/test_build.py", '"wheel"'),
    "python -m benchmarks.serving.run": (
        "tests/serving/test_benchmark_served.py",
        '"benchmarks.serving.run"',
    ),
    "python -m benchmarks.serving.run compare": (
        "tests/tools/test_serving_benchmark.py",
        '"compare"',
    ),
    "python -m vllm.entrypoints.openai.api_server": (
        "tests/serving/test_refusals.py",
        "vllm.entrypoints.openai.api_server",
    ),
    "ray start": ("tests/serving/test_ray.py", "vllm_cpu"),
    # The same parser and the same function as the api_server's.
    "vllm serve": (
        "tests/serving/test_refusals.py",
        "vllm.entrypoints.openai.api_server",
    ),
}
#: Options of docker and ray that pages on serving speak of.
OF_OTHERS = {
    "--build-arg",
    "--device",
    "--entrypoint",
    "--head",
    "--ipc",
    "--network",
    "--no-healthcheck",
    "--shm-size",
    "--user",
}
PROGRAMS = ("docker", "exl3", "make", "pip", "python", "ray", "vllm")


@dataclass(frozen=True)
class Command:
    page: Path
    words: tuple[str, ...]
    excused: bool

    def __str__(self) -> str:
        return f"{self.page.relative_to(REPO)}: {' '.join(self.words)}"


def commands(page: Path, text: str) -> list[Command]:
    found = []
    for language, block in BLOCK.findall(text):
        lines = block.replace("\\\n", " ").splitlines()
        if language == "console":
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        elif language != "bash":
            continue
        excused = EXCUSE.search(block) is not None
        for line in lines:
            words = shlex.split(line, comments=True)
            for stop in ("|", "&&", ">", ";"):
                words = words[: words.index(stop)] if stop in words else words
            while words and re.fullmatch(r"[A-Za-z_0-9]+=.*", words[0]):
                del words[0]
            if words and words[0] not in ("export", "source"):
                found.append(Command(page, tuple(words), excused))
    return found


ALL = [command for page in PAGES for command in commands(page, page.read_text())]


def of(*programs: str) -> list[Command]:
    """The commands that start with one of some words; there are some."""
    found = [c for c in ALL if f"{' '.join(c.words)} ".startswith(programs)]
    assert found, programs
    return found


def test_it_finds_commands():
    text = """
```bash
# needs 2 GPUs
A=1 exl3 one \\
    --two "3 4"   # five
export B=2
```
```console
$ exl3 six | head
seven
```
```text
exl3 eight
```
"""
    assert commands(REPO, text) == [
        Command(REPO, ("exl3", "one", "--two", "3 4"), True),
        Command(REPO, ("exl3", "six"), False),
    ]


@pytest.mark.parametrize("command", ALL, ids=str)
def test_a_test_runs_it_or_it_says_why_not(command):
    line = " ".join(command.words)
    names = [name for name in TESTED if f"{line} ".startswith(f"{name} ")]
    assert names or command.excused, (
        f"{command}: no test runs it; name one in TESTED, or write in its block "
        "`# needs a GPU` or `# no test: WHY`"
    )
    for name in names:
        file, word = TESTED[name]
        assert word in (REPO / file).read_text(), f"{name}: {file} has no {word}"


@pytest.mark.parametrize("name", TESTED)
def test_a_row_of_the_table_is_of_some_command(name):
    of(f"{name} ")


def test_commands_are_marked_as_such():
    for page in PAGES:
        for language, block in BLOCK.findall(page.read_text()):
            first = block.split(maxsplit=1)[:1]
            if language in ("", "text") and first:
                assert first[0] not in PROGRAMS, f"{page}: mark the block as bash"


class Parser(argparse.ArgumentParser):
    """Raises what it would say, instead of leaving, and takes whole names only."""

    def __init__(self, **settings):
        super().__init__(**settings, allow_abbrev=False)

    def error(self, message):
        raise AssertionError(message)


@pytest.fixture(scope="module")
def exl3_parser():
    parser = Parser(prog="exl3")
    subparsers = parser.add_subparsers(required=True)
    for each in cli.COMMANDS:
        each.add_command(subparsers)
    return parser


def exl3_tools(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    (subparsers,) = (a for a in parser._actions if a.choices)
    return dict(subparsers.choices)


@pytest.mark.parametrize("command", of("exl3 "), ids=str)
def test_exl3_takes_it(command, exl3_parser):
    exl3_parser.parse_args(command.words[1:])


def options(parser: argparse.ArgumentParser) -> set[str]:
    named = {name for action in parser._actions for name in action.option_strings}
    return {name for name in named - {"--help"} if name.startswith("--")}


def test_the_page_of_a_tool_has_all_its_options(exl3_parser):
    for name, parser in exl3_tools(exl3_parser).items():
        page = (REPO / "docs" / "tools" / f"{name}.md").read_text()
        missing = options(parser) - set(re.findall(r"(?<![\w-])--[a-z-]+", page))
        assert not missing, f"docs/tools/{name}.md lacks {missing}"


def test_what_is_said_of_exl3_in_running_text(exl3_parser):
    tools = exl3_tools(exl3_parser)
    for page in PAGES:
        for code in re.findall(r"`exl3 ([^`]+)`", page.read_text()):
            name, *words = code.split()
            if name == "COMMAND":
                continue
            assert name in tools, f"{page}: there is no exl3 {name}"
            known = options(tools[name]) | {"--help"}
            for word in words:
                if word.startswith("--"):
                    assert word in known, f"{page}: exl3 {name} has no {word}"


@pytest.mark.parametrize("command", of("make "), ids=str)
def test_make_takes_it(command):
    makefile = (REPO / "Makefile").read_text()
    for word in command.words[1:]:
        name, is_variable, _ = word.partition("=")
        kind = r"(export )?{} *\?=" if is_variable else r"{}:.*## "
        pattern = kind.format(re.escape(name))
        assert re.search(f"^{pattern}", makefile, re.MULTILINE), f"make has no {name}"


@pytest.mark.parametrize(
    "command", of("python tools", "python benchmarks", "python -m "), ids=str
)
def test_python_finds_it_with_its_options(command):
    words = command.words[1:]
    if words[0] == "-m":
        words = words[1:]
        if words[0].startswith("vllm."):
            return  # below
        spec = importlib.util.find_spec(words[0])
        assert spec is not None and spec.origin is not None
        source = Path(spec.origin).read_text()
    else:
        source = (REPO / words[0]).read_text()
    for word in words[1:]:
        if word == "--":
            break  # the rest is for another program
        if word.startswith("--"):
            assert f'"{word.partition("=")[0]}"' in source


@pytest.mark.parametrize("command", of("docker "), ids=str)
def test_docker_finds_its_files(command):
    given = list(itertools.pairwise(command.words))
    files = [REPO / word for flag, word in given if flag == "-f"]
    for file in files:
        assert file.exists(), f"{file} is not there"
    for flag, word in given:
        if flag == "--build-arg":
            argument = re.compile(rf"^ARG {word.partition('=')[0]}\b", re.MULTILINE)
            assert argument.search(files[0].read_text()), f"{files[0]}: no ARG {word}"


@pytest.mark.parametrize("command", of("pip "), ids=str)
def test_pip_builds_what_is_here(command):
    extras = (REPO / "setup.py").read_text()
    for extra in re.findall(r"\.\[(\w+)\]", " ".join(command.words)):
        assert f'"{extra}"' in extras


@pytest.fixture(scope="module")
def server_parsers():
    """vLLM's own parsers, of `vllm serve` and of `vllm bench serve`."""
    from vllm.benchmarks.serve import add_cli_args
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Quiet(FlexibleArgumentParser):
        error = Parser.error

    serve, bench = Quiet(allow_abbrev=False), Quiet(allow_abbrev=False)
    add_cli_args(bench)
    return make_arg_parser(serve), bench


@pytest.mark.parametrize("command", of("python -m vllm.", "vllm "), ids=str)
def test_the_server_takes_it(command, server_parsers):
    serve, bench = server_parsers
    words = list(command.words)
    match words:
        case ["python", "-m", "vllm.entrypoints.openai.api_server", *options]:
            serve.parse_args(options)
        case ["vllm", "serve", model, *options]:
            serve.parse_args(["--model", model, *options])
        case ["vllm", "bench", "serve", *options]:
            bench.parse_args(options)
        case _:
            pytest.fail(f"{command}: not known; check it here")


def test_pages_on_serving_name_options_of_the_server(server_parsers):
    known = options(server_parsers[0]) | options(run.parser()) | OF_OTHERS
    for page in (REPO / "docs" / "serving").glob("*.md"):
        text = BLOCK.sub("", page.read_text())
        for code in re.findall(r"`([^`\n]+)`", text):
            if not code.startswith(("exl3 ", "docker ", "ray ")):
                named = set(re.findall(r"(?<![\w-])--[a-z-]+", code))
                assert named <= known, f"{page}: {named - known}"


def test_wrong_options_are_noticed(exl3_parser, server_parsers):
    for parser, words in (
        (exl3_parser, ["inspect", "DIR", "--gpu-mem", "4"]),
        (exl3_parser, ["inspect", "DIR", "--tp", "four"]),
        (server_parsers[0], ["--model", "DIR", "--tensor-parallel", "4"]),
        (server_parsers[1], ["--model", "DIR", "--concurrency", "4"]),
    ):
        with pytest.raises(AssertionError):
            parser.parse_args(words)
