# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""`exl3 verify` on an engine that is made up: each fault is caught, by name."""

import json
import math
import sys
from dataclasses import asdict, replace

import pytest

from exl3 import cli
from exl3.tools.verify import command, engine
from exl3.tools.verify.engine import EngineError
from exl3.tools.verify.questions import (
    LENGTHS,
    PROMPTS,
    Answers,
    Completion,
    Prefill,
)
from tests.checkpoints import write_checkpoint
from tests.damage import with_json

#: More than a model of 512 tokens has by lot: log(512) is 6.2.
LIKELY = -1.5
SOUND = Answers(
    seconds=3.0,
    dtype="bfloat16",
    prefills=[Prefill(length, [LIKELY] * length, 1.00001) for length in LENGTHS],
    completions=[
        Completion(prompt, [3, 4], list(range(9, 21)), [LIKELY] * 12, " and so on")
        for prompt in PROMPTS
    ],
    passage=[LIKELY] * 20,
    leads=[],
    own_leads=[],
    drafted=0,
    accepted=0,
)


class FakeEngine:
    """Answers as told, and as often as it is asked; keeps what it was asked."""

    def __init__(self, plain=SOUND, drafting=SOUND, leads=None, error=None):
        self.plain, self.drafting, self.leads = plain, drafting, leads
        self.error = error
        self.asked = []

    def __call__(self, questions):
        self.asked.append(questions)
        if self.error and self.error[0] in ("both", self._kind(questions)):
            raise EngineError(self.error[1])
        if "speculative_config" in questions.options:
            return replace(self.drafting, drafted=100, accepted=70)
        leads = [[0.0] * len(tokens) for _, tokens in questions.scored]
        own = self.plain.own_leads or leads
        return replace(self.plain, leads=self.leads or leads, own_leads=own)

    @staticmethod
    def _kind(questions):
        return "mtp" if "speculative_config" in questions.options else "plain"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("verify") / "checkpoint"
    write_checkpoint(path, model_type="glm_moe_dsa", widths=[0, 4, 6, 5])
    return path


@pytest.fixture
def verify(checkpoint, monkeypatch, capsys):
    """Runs the command with a made-up engine: exit code and lines."""

    def run(fake, *arguments, path=checkpoint):
        monkeypatch.setattr(command, "check_installed", lambda: None)
        monkeypatch.setattr(command, "ask", fake)
        code = cli.main(["verify", str(path), *arguments])
        return code, capsys.readouterr().out.splitlines()

    return run


def failed(lines):
    """The names of the checks that failed, of which the last line is a summary."""
    names = [line[:18].strip() for line in lines if line[19:25] == "FAILED"]
    assert lines[-1] == (f"FAILED: {', '.join(names)}" if names else "OK")
    return names


def with_completion(index, **fields):
    """Sound answers but for one completion."""
    completions = list(SOUND.completions)
    completions[index] = replace(completions[index], **fields)
    return replace(SOUND, completions=completions)


def with_prefill(index, **fields):
    prefills = list(SOUND.prefills)
    prefills[index] = replace(prefills[index], **fields)
    return replace(SOUND, prefills=prefills)


def test_a_sound_engine_is_ok(verify):
    code, lines = verify(FakeEngine())
    assert failed(lines) == []
    assert code == 0
    names = [line[:18].strip() for line in lines[:-1]]
    assert names == [
        *("headers", "engine"),
        *(f"prefill {length}" for length in (1, 2, 5, 8, 9)),
        *("finite", "not empty", "not repeated", "beats chance"),
    ]


def test_a_sound_draft_is_ok(verify):
    fake = FakeEngine()
    code, lines = verify(fake, "--speculative")
    assert failed(lines) == []
    assert code == 0
    assert any("mtp prefill 9" in line for line in lines)
    assert "6 of 6 completions equal" in lines[-3]
    assert lines[-2].endswith("70.0% (70 of 100 drafts)")
    drafting, plain = fake.asked
    assert drafting.options["speculative_config"]["method"] == "mtp"
    assert "speculative_config" not in plain.options
    # What the drafting engine said is what the plain one is asked about.
    assert plain.scored == [([3, 4], list(range(9, 21)))] * len(PROMPTS)


NAN, INF = math.nan, math.inf
FAULTS = {
    "NaN in a prefill": (with_prefill(2, logprobs=[LIKELY, NAN]), "prefill 5"),
    "infinite prefill": (with_prefill(0, logprobs=[-INF]), "prefill 1"),
    "no probabilities": (with_prefill(4, total=0.99), "prefill 9"),
    "too much probability": (with_prefill(3, total=1.01), "prefill 8"),
    "NaN among all tokens": (with_prefill(1, total=NAN), "prefill 2"),
    "NaN later": (with_completion(1, logprobs=[LIKELY] * 11 + [NAN]), "finite"),
    "no token": (with_completion(0, tokens=[], logprobs=[], text=""), "not empty"),
    "only blanks": (with_completion(5, text=" \n\n "), "not empty"),
    "one token": (with_completion(2, tokens=[0] * 12, text="!" * 12), "not repeated"),
    # As three tokens of two, three and four exclamation marks.
    "one character": (with_completion(3, text="!! !!! !!!!"), "not repeated"),
    "nonsense": (replace(SOUND, passage=[-7.0] * 20), "beats chance"),
    "NaN of English": (replace(SOUND, passage=[NAN] * 20), "beats chance"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught_by_name(verify, name):
    answers, check = FAULTS[name]
    code, lines = verify(FakeEngine(plain=answers))
    assert failed(lines) == [check]
    assert code == 1


@pytest.mark.parametrize("name", [name for name in FAULTS if "passage" not in name])
def test_a_fault_of_drafting_is_caught_by_name(verify, name):
    answers, check = FAULTS[name]
    code, lines = verify(FakeEngine(drafting=answers), "--speculative")
    of_trunk = check == "beats chance"  # the plain engine's alone
    assert failed(lines) == ([] if of_trunk else [f"mtp {check}"])
    assert code == (0 if of_trunk else 1)


def test_a_fault_names_prompt_and_token(verify):
    _, lines = verify(FakeEngine(plain=FAULTS["NaN later"][0]))
    assert any(f'"{PROMPTS[1]}"' in line and "token 12" in line for line in lines)


@pytest.mark.parametrize(
    "fields",
    [
        {"tokens": [5, 6] * 6},  # a circle of two
        {"tokens": [5, *[6] * 11]},  # stuck, but not from the start
        {"tokens": [5] * 3, "logprobs": [LIKELY] * 3, "text": "yes yes yes"},  # short
        {"text": "!!!!!!!"},  # short, too
        {"text": None},  # no tokenizer
    ],
)
def test_what_is_not_repeated(verify, fields):
    _, lines = verify(FakeEngine(plain=with_completion(0, **fields)))
    assert failed(lines) == []


@pytest.mark.parametrize(
    ("dtype", "lead", "ok"),
    [
        ("bfloat16", 0.25, True),  # two steps of a logit
        ("bfloat16", 0.3, False),
        ("float32", 0.25, False),
        ("float32", 0.03, True),
        ("float16", 0.05, False),
        ("float32", NAN, False),
    ],
)
def test_drafts_may_change_a_near_tie_and_nothing_else(verify, dtype, lead, ok):
    leads = [[0.0] * 12 for _ in PROMPTS]
    leads[4][7] = lead
    drafting = with_completion(4, tokens=[*range(9, 16), 99, *range(17, 21)])
    plain = replace(SOUND, dtype=dtype)
    code, lines = verify(FakeEngine(plain, drafting, leads), "--speculative")
    assert failed(lines) == ([] if ok else ["mtp output"])
    assert code == (0 if ok else 1)
    line = lines[-3]
    if ok:
        assert "5 of 6 completions equal; 71 of 72 tokens the likeliest" in line
    else:
        assert f'"{PROMPTS[4]}"' in line
        assert "token 8" in line


@pytest.mark.parametrize(
    ("noise", "lead", "ok"),
    [
        (0.5, 0.9, True),  # twice what prefill and decoding differ by
        (0.5, 1.1, False),
        (9.0, 3.1, False),  # that is no rounding any more
    ],
)
def test_a_model_that_magnifies_rounding_may_do_so_with_drafts(verify, noise, lead, ok):
    leads = [[0.0] * 11 + [lead] for _ in PROMPTS]
    plain = replace(SOUND, own_leads=[[0.0, noise]])
    _, lines = verify(FakeEngine(plain, leads=leads), "--speculative")
    assert failed(lines) == ([] if ok else ["mtp output"])


@pytest.mark.parametrize(
    ("drafted", "accepted", "ok", "says"),
    [
        (200, 4, True, "2.0% (4 of 200 drafts), low"),
        (200, 0, True, "0.0% (0 of 200 drafts), low"),
        (0, 0, False, "drafted nothing"),
    ],
)
def test_few_accepted_drafts_are_no_fault_but_no_drafts_are(
    verify, drafted, accepted, ok, says
):
    class Drafting(FakeEngine):
        def __call__(self, questions):
            answers = super().__call__(questions)
            return replace(answers, drafted=drafted, accepted=accepted)

    code, lines = verify(Drafting(), "--speculative")
    assert failed(lines) == ([] if ok else ["mtp acceptance"])
    assert says in lines[-2]
    assert code == (0 if ok else 1)


def test_a_refusal_of_the_engine_is_its_line(verify):
    line = "model.layers.2.mlp.gate.suh: holds NaN"
    code, lines = verify(FakeEngine(error=("both", line)))
    assert failed(lines) == ["engine"]
    assert lines[1].endswith(line)
    assert code == 1


@pytest.mark.parametrize(
    ("kind", "check"), [("mtp", "mtp engine"), ("plain", "engine")]
)
def test_either_engine_may_fail(verify, kind, check):
    fake = FakeEngine(error=(kind, "the engine ended with exit code 3"))
    code, lines = verify(fake, "--speculative")
    assert failed(lines) == [check]
    assert code == 1


def test_headers_are_read_before_an_engine_is_booted(verify, checkpoint, tmp_path):
    def other_width(config):
        config["n_routed_experts_per_layer"][2] = 7

    bad = with_json(checkpoint, tmp_path / "bad", other_width)
    fake = FakeEngine()
    code, lines = verify(fake, path=bad)
    assert failed(lines) == ["headers"]
    assert "n_routed_experts_per_layer" in lines[0]
    assert fake.asked == []
    assert code == 1


def test_a_missing_folder_is_one_line(verify, tmp_path):
    code, lines = verify(FakeEngine(), path=tmp_path / "nothing")
    assert failed(lines) == ["headers"]
    assert str(tmp_path / "nothing") in lines[0]
    assert code == 1


def test_a_checkpoint_without_a_draft_is_not_asked_to_draft(verify, tmp_path):
    path = tmp_path / "qwen"
    write_checkpoint(path, model_type="qwen3_moe")
    fake = FakeEngine()
    _, lines = verify(fake, "--speculative", path=path)
    assert failed(lines) == ["headers"]
    assert "no MTP layer" in lines[0]
    assert fake.asked == []
    assert failed(verify(fake, path=path)[1]) == []


def test_options_reach_the_engine(verify):
    fake = FakeEngine()
    arguments = ["--engine-arg", "enforce-eager=true", "--engine-arg", "seed=3"]
    arguments += ["--engine-arg", "kv_cache_dtype=fp8", "--dtype", "float32"]
    verify(fake, *arguments)
    options = fake.asked[0].options
    assert options["enforce_eager"] is True
    assert options["seed"] == 3
    assert options["kv_cache_dtype"] == "fp8"
    assert options["dtype"] == "float32"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--tp", "0"],
        ["--tp", "two"],
        ["--engine-arg", "seed"],
        ["--engine-arg", "=3"],
    ],
)
def test_a_wrong_argument_ends_with_two(verify, arguments):
    with pytest.raises(SystemExit) as exit:
        verify(FakeEngine(), *arguments)
    assert exit.value.code == 2


def test_json_holds_the_same(verify):
    code, lines = verify(FakeEngine(plain=FAULTS["NaN later"][0]), "--json")
    report = json.loads("\n".join(lines), parse_constant=pytest.fail)
    assert report["ok"] is False
    assert report["failed"] == ["finite"]
    assert [check["name"] for check in report["checks"] if not check["ok"]] == [
        "finite"
    ]
    assert code == 1


def test_json_has_no_nan(verify):
    fake = FakeEngine(plain=FAULTS["NaN of English"][0])
    _, lines = verify(fake, "--json")
    report = json.loads("\n".join(lines), parse_constant=pytest.fail)
    assert report["checks"][-1] == {
        "name": "beats chance",
        "ok": False,
        "figure": "nan bits a token of English; by lot 9.00",
        "value": None,
    }


def test_without_vllm_there_is_one_line(checkpoint, monkeypatch, capsys):
    monkeypatch.setattr(engine.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["verify", str(checkpoint)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert "vLLM is not installed" in captured.err


# --- A process in the engine's place ------------------------------------------------


@pytest.fixture
def worker(monkeypatch, tmp_path):
    """Has `ask` start some lines of Python instead of an engine."""
    monkeypatch.setattr(engine.tempfile, "tempdir", str(tmp_path))

    def ask(code):
        script = tmp_path / "python"
        body = tmp_path / "body.py"
        body.write_text(f"import json, os, sys\nsys.argv = sys.argv[3:]\n{code}\n")
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {body} "$@"\n')
        script.chmod(0o755)
        monkeypatch.setattr(engine.sys, "executable", str(script))
        return engine.ask(command.Questions("path", {}, True, 512))

    return ask


def logs(folder):
    return list(folder.glob("exl3-verify-*"))


def test_a_dead_engine_leaves_its_log(worker, tmp_path):
    with pytest.raises(EngineError, match="exit code 3; its log: ") as error:
        worker("print('last words', flush=True); os._exit(3)")
    (log,) = logs(tmp_path)
    assert str(error.value).endswith(str(log))
    assert log.read_text() == "last words\n"


def test_a_killed_engine_is_told_as_such(worker):
    with pytest.raises(EngineError, match=r"ended by SIGKILL, as .* memory"):
        worker("os.kill(os.getpid(), 9)")


def test_an_error_is_its_first_line_and_a_log(worker, tmp_path):
    reply = {"refusal": None, "error": "ValueError: no room"}
    with pytest.raises(EngineError, match=r"^ValueError: no room; its log: "):
        worker(f"open(sys.argv[2], 'w').write(json.dumps({reply}))")
    assert len(logs(tmp_path)) == 1


def test_a_refusal_needs_no_log(worker, tmp_path):
    reply = {"refusal": "config.json: is wrong", "error": "X"}
    with pytest.raises(EngineError, match=r"^config.json: is wrong$"):
        worker(f"open(sys.argv[2], 'w').write(json.dumps({reply}))")
    assert logs(tmp_path) == []


def test_an_answer_leaves_nothing_behind(worker, tmp_path):
    reply = json.dumps({"answers": asdict(SOUND)})
    code = f"print('noise'); open(sys.argv[2], 'w').write({reply!r})"
    assert worker(code) == SOUND
    assert logs(tmp_path) == []
