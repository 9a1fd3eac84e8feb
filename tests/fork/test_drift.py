# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The drift report, the table in UPSTREAM.toml, and whether that table is current."""

import os
import subprocess
import sys
import tomllib

import pytest

from tools.fork.drift import MARKER, compare, read_table, report, write_table
from tools.fork.drift_source import Sources
from tools.fork.drift_uses import find_uses
from tools.fork.errors import ForkError
from tools.fork.pins import PINS_FILE, REPO_ROOT, load_pins, select_machine
from tools.fork.wheel import obtain_wheel

BEFORE = '''
class Layer:
    """A docstring."""
    def __init__(self, config): self.width = config.width  # a comment
    def load(self, weights, *, fused=False):
        """Another."""
        return weights

def helper(a: int) -> int:
    return a
'''
OURS = """
from vllm.m.layers import Layer, helper
class Mine(Layer):
    def load(self, weights, *, fused=False):
        return super().load(weights), helper(self.width)
"""
PLACE = "vllm/m/layers.py"


@pytest.fixture
def drift(make_wheel, make_repo):
    """What a change of upstream's files changes for a fork, as {object: words}."""
    repo = make_repo({"vllm/ours.py": OURS})
    table = find_uses(Sources(make_wheel({PLACE: BEFORE}), repo))

    def against(files):
        changes = compare(table, Sources(make_wheel(files)))
        return {name: words for (_, name), words in changes.items()}

    return against


def test_the_same_code_in_other_words_is_no_change(drift):
    text = BEFORE.replace('"""Another."""', '"""Other\n        words."""')
    text = text.replace("# a comment", "").replace("return a\n", "return (a)  # why\n")
    assert text != BEFORE
    assert drift({PLACE: text + "\ndef more(): ...\n"}) == {}


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("return weights", "return None", {"Layer.load": "body changed"}),
        ("return a", "return -a", {"helper": "body changed"}),
        (
            "fused=False",
            "fused=True",
            {
                "Layer.load": "signature changed: (self, weights, *, fused=False) -> "
                "(self, weights, *, fused=True)"
            },
        ),
        (
            "(a: int) -> int",
            "(a: int) -> str",
            {"helper": "signature changed: (a: int) -> int -> (a: int) -> str"},
        ),
        (
            "class Layer:",
            "class Layer(list):",
            {"Layer": "signature changed: () -> (list)"},
        ),
        ("class Layer:", "@final\nclass Layer:", {"Layer": "body changed"}),
        ("class Layer:", "class Layer:\n    x = 1", {"Layer": "body changed"}),
        ("def load(", "def read(", {"Layer.load": "gone"}),
        ("def helper", "def helped", {"helper": "gone"}),
        ("class Layer", "class Layers", {"Layer": "gone"}),  # its methods go with it
        (
            "self.width = config.width",
            "self.width = 1",
            {"Layer.__init__": "body changed", "Layer.width": "body changed"},
        ),
    ],
)
def test_each_change_is_named(drift, old, new, expected):
    assert old in BEFORE
    assert drift({PLACE: BEFORE.replace(old, new, 1)}) == expected


def test_an_object_is_followed_to_another_module(drift):
    everything_moved = {"vllm/new.py": BEFORE}
    words = {"Layer": "moved to vllm.new", "helper": "moved to vllm.new"}
    assert drift(everything_moved) == words
    assert drift({**everything_moved, PLACE: "from vllm.new import *"}) == words


def test_a_moved_object_that_changed_says_both(drift):
    text = BEFORE.replace("return a", "return -a")
    assert drift({PLACE: BEFORE, "vllm/n.py": ""}) == {}
    assert drift({"vllm/new.py": text})["helper"] == "moved to vllm.new; body changed"


def test_a_method_is_followed_to_a_base_class(drift):
    text = BEFORE.replace("class Layer:", "class Root:") + "class Layer(Root): ...\n"
    words = drift({PLACE: text})
    assert words["Layer.load"] == "moved to Root.load"


def test_two_possible_homes_are_both_named(drift):
    words = drift({"vllm/a.py": BEFORE, "vllm/b.py": BEFORE})
    assert words["helper"] == "moved to vllm.a or vllm.b"


def test_the_report_groups_by_module_and_counts(make_wheel, make_repo):
    repo = make_repo({"vllm/ours.py": OURS})
    table = find_uses(Sources(make_wheel({PLACE: BEFORE}), repo))
    after = Sources(make_wheel({PLACE: BEFORE.replace("return a", "return -a")}))
    assert report(compare(table, after), table) == (
        "vllm.m.layers\n"
        "  helper: body changed  [call]\n"
        "1 of 5 objects that the fork uses changed"
    )


def test_writing_leaves_what_people_wrote(make_wheel, make_repo, tmp_path):
    pins_file = tmp_path / "UPSTREAM.toml"
    by_people = 'version = "1"  # odd   spacing\n\n[requirements]\nx = {a = "b"}\n'
    pins_file.write_text(by_people)
    upstream = BEFORE.replace("a: int", "a: int = 'é\"\\n'")
    repo = make_repo({"vllm/ours.py": OURS})
    uses = find_uses(Sources(make_wheel({PLACE: upstream}), repo))

    write_table(pins_file, uses)
    once = pins_file.read_text()
    write_table(pins_file, uses)

    assert pins_file.read_text() == once
    assert once.startswith(by_people + "\n" + MARKER)
    assert tomllib.loads(once)["requirements"] == {"x": {"a": "b"}}
    assert read_table(pins_file) == uses


@pytest.mark.parametrize(
    "text", ["", "drift = 1", "[drift.m]\nx = 1", "[drift.m]\nx = {use = []}", "a ="]
)
def test_a_broken_table_is_refused_in_one_line(tmp_path, text):
    pins_file = tmp_path / "UPSTREAM.toml"
    pins_file.write_text(text)
    with pytest.raises(ForkError, match=r"^UPSTREAM\.toml: .*--write$"):
        read_table(pins_file)


def run_drift(*arguments, **variables):
    return subprocess.run(
        [sys.executable, "-m", "tools.fork.drift", *arguments],
        env={**os.environ, **variables},
        cwd=REPO_ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command_fails_when_something_changed(make_wheel):
    wheel = make_wheel({})  # a release that has nothing of what the fork uses
    result = run_drift("--against", str(wheel))
    assert result.returncode == 1
    assert f"{wheel.name}: sha256 " in result.stderr
    assert result.stdout.splitlines()[-1].endswith("objects that the fork uses changed")


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "no such file"), ("not a zip", "File is not a zip file")],
)
def test_the_command_says_what_is_wrong_with_a_wheel(tmp_path, text, message):
    wheel = tmp_path / "vllm-1-py3-none-any.whl"
    if text:
        wheel.write_text(text)
    result = run_drift("--against", str(wheel))
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert message in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


def test_the_command_says_when_there_is_no_such_release():
    result = run_drift("--against", "0.0.1", PIP_NO_INDEX="1", PIP_FIND_LINKS="")
    assert result.returncode == 2
    message = result.stderr.splitlines()[-1]
    assert message.startswith("error: cannot fetch vllm==0.0.1 (ERROR: No matching")
    assert message.endswith("or give the path of a wheel")


@pytest.fixture(scope="module")
def pinned_wheel():
    pins = load_pins()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("VLLM_UPSTREAM_WHEEL", raising=False)
        return obtain_wheel(pins.wheel("cpu", select_machine()), pins.version)


def test_the_table_lists_what_the_fork_uses(pinned_wheel):
    """Also of upstream's private names: each one is in the table or this fails."""
    used = find_uses(Sources(pinned_wheel, REPO_ROOT))
    table = read_table(PINS_FILE)
    hint = "run python -m tools.fork.drift --write"
    missing = [".".join(key) for key in sorted(used.keys() - table.keys())]
    unused = [".".join(key) for key in sorted(table.keys() - used.keys())]
    assert missing == [], f"the fork uses these, and the table lacks them; {hint}"
    assert unused == [], f"the fork no longer uses these; {hint}"
    kinds = {key: use.kinds for key, use in used.items()}
    assert {key: use.kinds for key, use in table.items()} == kinds, hint


def test_the_table_describes_the_pinned_release(pinned_wheel):
    assert compare(read_table(PINS_FILE), Sources(pinned_wheel)) == {}
