# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""docs/troubleshooting.md has every refusal, and the list is made as it says."""

import json
import re
import shutil

import pytest

from exl3.checkpoint.plan import read_config, read_plan
from exl3.format.errors import CheckpointError
from exl3.plans import PlanError
from exl3.plans import read as read_plans
from exl3.tools.shared.errors import ToolError
from exl3.tools.shared.text import read_text
from tools.troubleshooting import PAGE, REPO, collect, covers, fill_in, sections

SOURCE = """
from elsewhere import helper

LIMIT = 8


class OurError(ValueError):
    pass


def literal(file):
    raise OurError(f"{file}: is gone; fetch it " "again")


def constant(count):
    raise OurError(f"{count} is more than {LIMIT}")


def either(found):
    raise OurError("nothing was found" if found else f"only {found} were found")


def local(place):
    where = f"{place}.json: layer {place}"
    what = "is much too wide"
    if place:
        what = "has no width at all"
    raise OurError(f"{where} {what}; mend it")


def longer(size):
    what = f"a size of {size}"
    if size:
        what += ", and none was expected"
    raise OurError(f"{what}; mend it")


def need(condition, message):
    if not condition:
        raise OurError(message)


def callers(x):
    need(x > 1, f"x is {x}; it starts at 2")
    need(x < 9, "x ends at 9")


class Reader:
    def error(self, field, expected):
        return OurError(f"{self.where}.{field}: expected {expected}")

    def read(self):
        raise self.error("width", "a count of experts")


def returned(size):
    def problem(of):
        if of:
            return None
        return f"{of} does not divide {size}"

    raise OurError(f"{problem(size)}; use another")


def collected(problems, tp):
    problems.append(f"--tp {tp} needs as many GPUs")


def built_in():
    raise ValueError("a value of Python's")


def caught():
    raise RuntimeError("cancelled")
    return ValueError("made, and not raised")


def passed_on(error):
    raise OurError(str(error)) from error
"""


def test_it_reads_messages_from_source(tmp_path):
    folder = tmp_path / "tree"
    folder.mkdir()
    (folder / "module.py").write_text(SOURCE)
    assert collect(tmp_path, ["tree"]) == {
        "tree/module.py": [
            "…: is gone; fetch it again",
            "… is more than 8",
            "nothing was found",
            "only … were found",
            "….json: layer … is much too wide; mend it",
            "….json: layer … has no width at all; mend it",
            "a size of …; mend it",
            "a size of …, and none was expected; mend it",
            "x is …; it starts at 2",
            "x ends at 9",
            "….width: expected a count of experts",
            "… does not divide …; use another",
            "--tp … needs as many GPUs",
            "a value of Python's",
        ]
    }


def test_a_caller_in_another_file_counts(tmp_path):
    (tmp_path / "a.py").write_text(
        "class AError(Exception): pass\n"
        "def need(message):\n    raise AError(message)\n"
        "def use():\n    need('said in file a')\n"
    )
    (tmp_path / "b.py").write_text("from a import need\nneed('said in file b')\n")
    (tmp_path / "c.py").write_text("def need(x): ...\nneed('is another function')\n")
    found = collect(tmp_path, ["."])
    assert found == {"a.py": ["said in file a", "said in file b"]}


def test_sections_list_their_files_once():
    page = "<!-- refusals of a/ b.py -->\nold\n<!-- end -->\nkept\n"
    messages = {"a/x.py": ["one `two`", "three"], "a/y.py": ["three"], "c.py": ["no"]}
    assert fill_in(page, messages) == (
        "<!-- refusals of a/ b.py -->\n\n- `` one `two` ``\n- `three`\n\n"
        "<!-- end -->\nkept\n"
    )


@pytest.fixture(scope="module")
def messages() -> dict[str, list[str]]:
    return collect()


def test_every_refusal_is_on_the_page(messages):
    page = PAGE.read_text()
    assert sum(map(len, messages.values())) > 300
    assert fill_in(page, messages) == page, (
        "not in step: run python -m tools.troubleshooting --write"
    )


def test_every_file_has_one_section(messages):
    named = [name for section in sections(PAGE.read_text()) for name in section]
    for path in messages:
        having = [name for name in named if covers(name, path)]
        assert len(having) == 1, f"{path}: in the sections of {having}; name it in one"
    for name in named:
        assert any(covers(name, path) for path in messages), f"{name}: has no refusals"


def listed(page: str) -> list[re.Pattern[str]]:
    """Patterns of the listed messages that say more than a few words."""
    messages = re.findall(r"^- `+ ?(.*?) ?`+$", page, re.MULTILINE)
    return [
        re.compile(".*".join(map(re.escape, message.split("…"))))
        for message in messages
        if len(re.findall(r"[a-z]{2,}", message)) > 2
    ]


def refused(kind: type[Exception], call) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def test_what_is_raised_is_found_on_the_page(tmp_path):
    """Lines as a user sees them lead to an entry, other text does not."""
    (tmp_path / "config.json").write_text("[]")
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 16)
    (tmp_path / "text").write_bytes(b"")
    (tmp_path / "plans.json").write_text('{"plans": 1')
    lines = [
        refused(CheckpointError, lambda: read_config(tmp_path)),
        refused(CheckpointError, lambda: read_plan(tmp_path, {})),
        refused(ToolError, lambda: read_text(tmp_path / "text")),
        refused(PlanError, lambda: read_plans(tmp_path / "plans.json")),
    ]
    patterns = listed(PAGE.read_text())
    for line in lines:
        assert any(p.fullmatch(line) for p in patterns), f"not on the page: {line}"
    assert not any(p.fullmatch("the weather is fine") for p in patterns)


def test_examples_on_the_page_are_of_its_messages():
    page = PAGE.read_text()
    examples = "".join(re.findall(r"^```text\n(.*?)^```$", page, re.M | re.S))
    assert len(examples.splitlines()) == 4
    for line in examples.splitlines():
        assert any(p.fullmatch(line) for p in listed(page)), line


def test_the_index_can_be_rebuilt_as_the_page_says(tmp_path, monkeypatch):
    model = tmp_path / "DIR"
    shutil.copytree(REPO / "examples" / "demo-glm-dsa-ragged-exl3", model)
    (model / "model.safetensors.index.json").write_text('{"weight_map": 1}')
    config = json.loads((model / "config.json").read_text())
    refused(CheckpointError, lambda: read_plan(model, config))
    (block,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    monkeypatch.chdir(tmp_path)
    exec(block, {})
    assert read_plan(model, config).is_exl3
