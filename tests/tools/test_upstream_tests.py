# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The tool behind `make upstream-tests`, on toy tests and a toy vLLM."""

import io
import sys
import tarfile
from pathlib import Path

import pytest

from tools.fork.errors import ForkError
from tools.fork.wheel import sha256_of
from tools.upstream_tests.__main__ import check_version
from tools.upstream_tests.compare import broken, cause, check_groups_ran, table
from tools.upstream_tests.runner import Interpreter, Result, Run, run_group
from tools.upstream_tests.sdist import fetch_sdist, unpack_tests
from tools.upstream_tests.selection import (
    Group,
    Selection,
    UpstreamFile,
    choose,
    load_selection,
)

TOY_TESTS = {
    "test_plain.py": """
import os
import pytest

def test_passes(): pass
def test_fails(): assert 1 == 2, "one is not two"
@pytest.mark.skip(reason="needs CUDA")
def test_skipped(): pass
@pytest.mark.xfail
def test_expected_failure(): assert False
@pytest.fixture
def broken_teardown():
    yield
    raise ValueError("teardown")
def test_teardown(broken_teardown): pass
@pytest.fixture
def broken_setup(): raise ValueError("set-up")
def test_setup(broken_setup): pass
def test_forks():
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
def test_extras(from_extras): assert from_extras == 1
def test_environment():
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert "VLLM_FROM_THE_CALLER" not in os.environ
""",
    "test_bad_import.py": "import no_such_package\n",
    "test_dies_at_import.py": "import os\nos._exit(3)\n",
    "test_dies.py": """
import os, time

def test_before(): pass
def test_crash(): os._exit(5)
def test_between(): pass
def test_hang(): time.sleep(60)
def test_after(): pass
def test_left_out(): assert False
""",
}


# Stands for the real plugin, which is among the extras and not in this environment.
TOY_PLUGIN = """
import pytest

@pytest.fixture
def from_extras(): return 1
"""


def toy_interpreter(root: Path, files: dict[str, str]) -> Interpreter:
    """This interpreter, in a folder of toy tests beside a toy vLLM."""
    files = files | {
        "vllm/__init__.py": '__version__ = "1.2.3"\n',
        "extras/pytest_asyncio/__init__.py": "",
        "extras/pytest_asyncio/plugin.py": TOY_PLUGIN,
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return Interpreter(Path(sys.executable), root / "extras", root, root / "work")


@pytest.fixture(scope="module")
def toy_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """What all toy tests give."""
    interpreter = toy_interpreter(tmp_path_factory.mktemp("toy"), TOY_TESTS)
    run = Run()
    arguments = [*TOY_TESTS, "--deselect=test_dies.py::test_left_out"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_FROM_THE_CALLER", "1")
        # 4 s: a pytest that only starts has a limit of its own.
        run_group(interpreter, "toy", arguments, 4.0, run)
    return run


@pytest.mark.parametrize(
    ("node_id", "outcome", "reason"),
    [
        ("test_plain.py::test_passes", "passed", ""),
        ("test_plain.py::test_fails", "failed", "one is not two"),
        ("test_plain.py::test_skipped", "skipped", "needs CUDA"),
        ("test_plain.py::test_expected_failure", "xfailed", ""),
        ("test_plain.py::test_teardown", "error", "teardown"),
        ("test_plain.py::test_setup", "error", "set-up"),
        ("test_plain.py::test_forks", "passed", ""),
        ("test_plain.py::test_extras", "passed", ""),
        ("test_plain.py::test_environment", "passed", ""),
        ("test_bad_import.py", "error", "no_such_package"),
        ("test_dies_at_import.py", "crashed", "toy.log"),
        ("test_dies.py::test_before", "passed", ""),
        ("test_dies.py::test_crash", "crashed", "toy.log"),
        ("test_dies.py::test_between", "passed", ""),
        ("test_dies.py::test_hang", "timed out", "4 s"),
        ("test_dies.py::test_after", "passed", ""),
    ],
)
def test_runner_records_each_outcome(
    toy_run: Run, node_id: str, outcome: str, reason: str
) -> None:
    result = toy_run.results[node_id]
    assert result.outcome == outcome
    assert reason in result.reason


def test_runner_stops_when_its_only_file_dies(tmp_path: Path) -> None:
    interpreter = toy_interpreter(tmp_path, TOY_TESTS)
    results = run_group(interpreter, "toy", ["test_dies_at_import.py"], 4.0, Run())
    assert {name: r.outcome for name, r in results.items()} == {
        "test_dies_at_import.py": "crashed"
    }


def test_runner_records_nothing_else(toy_run: Run) -> None:
    assert len(toy_run.results) == 16
    assert toy_run.vllm == "1.2.3"


def test_run_survives_its_file(toy_run: Run, tmp_path: Path) -> None:
    toy_run.save(tmp_path / "results.json")
    assert Run.load(tmp_path / "results.json") == toy_run


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"results": {"a": {"x": 1}}}'])
def test_load_names_a_file_that_is_no_run(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ForkError, match=r"other\.json"):
        Run.load(path)


PASSED, FAILED = Result("passed"), Result("failed", "wrong")


def test_broken_counts_failed_skipped_and_absent() -> None:
    stock = Run(
        results={
            "t::kept": PASSED,
            "t::failed": PASSED,
            "t::skipped": PASSED,
            "t::absent": PASSED,
            "t::expected": Result("xfailed"),
            "t::neither": FAILED,
            "t::mended": FAILED,
        }
    )
    fork = Run(
        results={
            "t::kept": PASSED,
            "t::failed": FAILED,
            "t::skipped": Result("skipped", "why"),
            "t::expected": FAILED,
            "t::neither": FAILED,
            "t::mended": PASSED,
        }
    )
    worse = broken(stock, fork)
    assert sorted(worse) == ["t::absent", "t::expected", "t::failed", "t::skipped"]
    assert worse["t::absent"].outcome == "not collected"


FILE = UpstreamFile("tests/test_a.py", "it is ours")
GROUP = Group("a", "All of it", (FILE,))


def test_table_shows_counts_causes_and_what_broke() -> None:
    stock = Run(
        vllm="1.0",
        results={
            "tests/test_a.py::one": PASSED,
            "tests/test_a.py::two": PASSED,
            "tests/test_a.py::three": Result("skipped", "Skipped: needs CUDA"),
            "tests/test_a.py::four": Result("error", "huggingface.co is away"),
            "tests/test_a.py::five": Result("skipped", "not on cuda"),
            "tests/test_ab.py::other": PASSED,
        },
    )
    fork = Run(
        vllm="1.0+ours",
        results=stock.results | {"tests/test_a.py::two": FAILED},
    )
    page = table(stock, fork, Selection("", 1.0, (GROUP,), {"tests/b.py": "no"}))
    assert "| `test_a.py` | 5 | 2 | 1 | 2: needs a GPU; 1: needs a model hub |" in page
    assert "**1**.\n- `tests/test_a.py::two`: failed" in page
    assert "| `b.py` | no |" in page


def test_cause_quotes_what_it_does_not_know() -> None:
    assert cause(Result("failed", "a | b")) == "failed, a \\| b"
    assert cause(Result("timed out")) == "timed out"
    assert (
        cause(Result("error", "ModuleNotFoundError: No module named 'torchvision'"))
        == "needs torchvision"
    )


def test_a_group_that_passes_nothing_is_refused() -> None:
    check_groups_ran(Run(results={"tests/test_a.py::one": PASSED}), [GROUP])
    with pytest.raises(ForkError, match="group a: no test passes on stock"):
        check_groups_ran(Run(results={"tests/test_a.py::one": FAILED}), [GROUP])


def test_stock_taken_for_the_fork_is_refused() -> None:
    with pytest.raises(ForkError, match=r"fork: .*vLLM 1\.0 in /x, expected 1\.0\+o"):
        check_version("fork", Run(vllm="1.0", path="/x"), "1.0+ours")


def test_selection_gives_a_reason_for_every_file() -> None:
    selection = load_selection()
    files = [file for group in selection.groups for file in group.files]
    assert len(files) >= 30
    assert all(file.why and file.path.startswith("tests/") for file in files)
    assert all(selection.left_out.values())


def test_choose_keeps_the_order_asked_for_and_names_a_stranger() -> None:
    other = Group("b", "More", (FILE,))
    selection = Selection("", 1.0, (GROUP, other), {})
    assert choose(selection, []) == (GROUP, other)
    assert choose(selection, ["b"]) == (other,)
    with pytest.raises(ForkError, match="no group 'c'; choose of a, b"):
        choose(selection, ["c"])


HEAD = 'sdist_sha256 = "00"\nlimit_seconds = 1\n[left_out]\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEAD, "field 'groups' is missing"),
        (
            HEAD + '[[groups]]\nname = "a"\ncovers = "b"\n'
            'files = [{path = "t", why = "w"}, {path = "t", why = "w"}]',
            "t is listed twice",
        ),
        (
            HEAD + '[[groups]]\nname = "a"\ncovers = "b"\n'
            'files = [{path = "t", reason = "w"}]',
            "reason",
        ),
        ("groups = ", "chosen.toml"),
    ],
)
def test_selection_names_the_fault(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "chosen.toml"
    path.write_text(text)
    with pytest.raises(ForkError, match=message):
        load_selection(path)


def test_file_arguments() -> None:
    file = UpstreamFile(
        "t.py", "why", only=("test_a", "test_b"), without=("test_b[1]",)
    )
    assert file.arguments() == [
        "t.py::test_a",
        "t.py::test_b",
        "--deselect=t.py::test_b[1]",
    ]


def write_sdist(path: Path, files: dict[str, str], **links: str) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
        for name, target in links.items():
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, target
            archive.addfile(link)
    return path


def test_unpack_writes_tests_alone(tmp_path: Path) -> None:
    sdist = write_sdist(
        tmp_path / "s.tar.gz",
        {
            "vllm-0.0.1/tests/conftest.py": "here",
            "vllm-0.0.1/tests/sub/data.txt": "there",
            "vllm-0.0.1/vllm/__init__.py": "",
            "vllm-0.0.1/pyproject.toml": "settings",
            "vllm-0.0.1/examples/pyproject.toml": "",
            "vllm-0.0.1/setup.py": "",
        },
        **{"vllm-0.0.1/tests/link": "/etc/passwd"},
    )
    target = tmp_path / "out"
    target.mkdir()
    (target / "stale.py").touch()
    unpack_tests(sdist, target)
    found = {str(p.relative_to(target)) for p in target.rglob("*") if not p.is_dir()}
    assert found == {"pyproject.toml", "tests/conftest.py", "tests/sub/data.txt"}
    assert (target / "tests" / "sub" / "data.txt").read_text() == "there"


@pytest.mark.parametrize("name", ["vllm-0.0.1/tests/../../../x", "/tests/x"])
def test_unpack_refuses_a_path_that_leaves(tmp_path: Path, name: str) -> None:
    sdist = write_sdist(tmp_path / "s.tar.gz", {name: "out"})
    with pytest.raises(ForkError, match="leaves its folder"):
        unpack_tests(sdist, tmp_path / "out")


def test_unpack_refuses_an_sdist_without_tests(tmp_path: Path) -> None:
    sdist = write_sdist(tmp_path / "s.tar.gz", {"vllm-0.0.1/setup.py": ""})
    with pytest.raises(ForkError, match=r"s\.tar\.gz: there is no tests/"):
        unpack_tests(sdist, tmp_path / "out")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for its only index; its sdist must not be executed."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    write_sdist(
        folder / "vllm-0.0.1.tar.gz",
        {
            "vllm-0.0.1/PKG-INFO": "Metadata-Version: 2.1\nName: vllm\nVersion: 0.0.1",
            "vllm-0.0.1/pyproject.toml": "[build-system]\nrequires = ['torch']\n"
            "build-backend = 'setuptools.build_meta'\n",
            "vllm-0.0.1/setup.py": "raise SystemExit('executed')",
        },
    )
    return folder


def test_fetch_saves_the_pinned_sdist_once(index: Path, tmp_path: Path) -> None:
    origin = index / "vllm-0.0.1.tar.gz"
    pinned = sha256_of(origin)
    first = fetch_sdist("0.0.1", pinned, tmp_path / "cache")
    assert sha256_of(first) == pinned
    origin.unlink()
    assert fetch_sdist("0.0.1", pinned, tmp_path / "cache") == first


def test_fetch_refuses_another_hash(index: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ForkError, match=r"can't fetch the sdist of vllm 0\.0\.1: .*hash"
    ):
        fetch_sdist("0.0.1", "0" * 64, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_fetch_refuses_a_changed_file_in_the_cache(tmp_path: Path) -> None:
    (tmp_path / "vllm-0.0.1.tar.gz").write_bytes(b"else")
    with pytest.raises(ForkError, match=f"pinned is {'0' * 64}: delete the file"):
        fetch_sdist("0.0.1", "0" * 64, tmp_path)


def test_fetch_says_what_pip_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(ForkError, match="No matching distribution"):
        fetch_sdist("9.9.9", "0" * 64, tmp_path)
