# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""What the images and the compose file promise, read from the files themselves."""

import argparse
import fnmatch
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from tests.docker.dockerfile import read_stages

REPO = Path(__file__).resolve().parents[2]
DOCKERFILES = ("Dockerfile", "Dockerfile.cpu")
HEALTH = "http://127.0.0.1:8000/health"


@pytest.fixture(params=DOCKERFILES)
def stages(request):
    return read_stages(REPO / "docker" / request.param)


def test_bases_from_outside_are_pinned_by_a_tag_of_one_day(stages):
    outside = {stage.base for stage in stages.values()} - stages.keys()
    assert outside
    for base in outside:
        assert re.fullmatch(r"\S+:\S*-20\d{6}-\S+|\S+@sha256:[0-9a-f]{64}", base), base


def test_both_images_stand_on_the_same_base():
    bases = [
        next(iter(read_stages(REPO / "docker" / name).values())).base
        for name in DOCKERFILES
    ]
    assert len(set(bases)) == 1


def test_what_runs_is_no_stage_that_builds(stages):
    *_, last = stages.values()
    assert last.name == "runtime"
    assert last.base == "python"
    assert stages["python"].base not in stages
    assert last.all("COPY") == []
    base_and_last = shlex.split(" ".join(stages["python"].all("RUN") + last.all("RUN")))
    for word in ("pip", "make", "nvcc", "cmake", "git", "python3-venv"):
        assert not [found for found in base_and_last if found.startswith(word)], word


def test_requirements_have_a_layer_that_does_not_depend_on_the_wheel(stages):
    """BuildKit takes a layer again if what is mounted into its step is the same."""
    install = [run for run in stages["runtime"].all("RUN") if "bin/pip" in run]
    requirements, fork = install
    assert mounted(requirements) == ["/opt/pip", "/requirements.txt"]
    assert mounted(fork) == ["/opt/pip", "/dist"]
    assert "install --no-deps " in fork
    assert "> /requirements.txt" in stages["build"].all("RUN")[-1]


def mounted(run: str) -> list[str]:
    """What a step of the image sees of the stage before it."""
    return re.findall(r"--mount=type=bind,from=build,source=(\S+?),", run)


def test_sources_come_after_what_their_edits_need_not_fetch_again(stages):
    instructions = stages["build"].instructions
    sources = instructions.index(("COPY", ". ."))
    for word in ("apt-get", "pip==", "make nvcc"):
        steps = [i for i, (_, rest) in enumerate(instructions) if word in rest]
        assert all(step < sources for step in steps), word


def test_pips_settings_are_a_secret_and_in_no_layer(stages):
    for stage in stages.values():
        for run in stage.all("RUN"):
            fetches = re.search(r"pip install|pip wheel|make nvcc|install -r", run)
            secret = "--mount=type=secret,id=pip.conf,target=/etc/pip.conf" in run
            assert bool(fetches) == secret, run
        assert not [name for name in stage.all("ARG") if "PIP" in name]


def test_a_compiler_is_there_as_triton_and_inductor_ask_for_one(stages):
    packages = shlex.split(stages["python"].only("RUN"))
    assert {"g++", "python3-dev", "ca-certificates"} <= set(packages)
    # Upstream's compiled CPU code is linked with it, and its wheel does not bring it.
    assert ("libnuma1" in packages) == ("target=cpu" in str(target(stages)))


def target(stages):
    (command,) = [run for run in stages["build"].all("RUN") if "pip wheel" in run]
    return re.search(r"VLLM_TARGET_DEVICE=(cpu|cuda)", command)[0].replace(
        "VLLM_TARGET_DEVICE", "target"
    )


def test_each_builds_for_its_target():
    targets = [target(read_stages(REPO / "docker" / name)) for name in DOCKERFILES]
    assert targets == ["target=cuda", "target=cpu"]


def test_the_server_is_started_as_upstreams(stages):
    runtime = stages["runtime"]
    server = ["python", "-m", "vllm.entrypoints.openai.api_server"]
    assert json.loads(runtime.only("ENTRYPOINT")) == server
    assert runtime.all("CMD") == []
    path = re.search(r"\bPATH=(\S+)", " ".join(runtime.all("ENV")))[1]
    assert path == "/opt/vllm/bin:$PATH"


def test_it_does_not_run_as_root(stages):
    words = [word for word, _ in stages["runtime"].instructions]
    assert stages["runtime"].only("USER") == "1000:1000"
    (user,) = [run for run in stages["runtime"].all("RUN") if "useradd" in run]
    assert "--uid 1000 --create-home" in user
    assert words.index("USER") > max(i for i, w in enumerate(words) if w == "RUN")


def test_health_is_asked_of_the_server(stages):
    options, _, command = stages["runtime"].only("HEALTHCHECK").partition("CMD ")
    assert "--start-period=" in options
    python, dash_c, code = json.loads(command)
    assert (python, dash_c) == ("python", "-c")
    compile(code, "healthcheck", "exec")
    assert HEALTH in code
    assert stages["runtime"].only("EXPOSE") == "8000"


def test_pip_is_pinned(stages):
    (install,) = [run for run in stages["build"].all("RUN") if "pip install" in run]
    assert re.search(r"install --upgrade pip==[\d.]+$", install)


def test_it_does_not_count_itself_among_upstreams_users(stages):
    assert "VLLM_NO_USAGE_STATS=1" in stages["runtime"].only("ENV")


def test_an_image_for_several_machines_has_ray_and_what_nccl_loads_for_rdma():
    stages = read_stages(REPO / "docker" / "Dockerfile")
    assert stages["build"].all("RUN")[-1].endswith("*.whl ray > /requirements.txt")
    packages = shlex.split(stages["python"].only("RUN"))
    assert {"libibverbs1", "ibverbs-providers"} <= set(packages)


# --- The build context ------------------------------------------------------------


def is_ignored(path: str) -> bool:
    """Whether .dockerignore leaves a path out: its last rule that matches decides."""
    ignored = False
    for line in (REPO / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        rule = line.removeprefix("!")
        parents = [path, *(str(parent) for parent in Path(path).parents)][:-1]
        names = [*parents, *(Path(parent).name for parent in parents)]
        pattern = rule.removeprefix("**/")
        candidates = names if rule != pattern else parents
        if any(fnmatch.fnmatch(candidate, pattern) for candidate in candidates):
            ignored = not line.startswith("!")
    return ignored


@pytest.mark.parametrize(
    "path",
    [
        "setup.py",
        "UPSTREAM.toml",
        "README.md",
        "LICENSE",
        "requirements/nvcc.txt",
        "tools/fork/compose.py",
        "tools/preflight.py",
        "vllm/fork.py",
        "exl3/ops.py",
        "csrc/exl3/kernels/words.h",
        "csrc/cuda.cmake",
    ],
)
def test_what_a_build_reads_is_sent_to_it(path):
    assert (REPO / path).exists()
    assert not is_ignored(path)


@pytest.mark.parametrize(
    "path",
    [
        ".git/config",
        ".venv/bin/python",
        "build/composed-cpu/vllm/envs.py",
        "examples/demo-glm-dsa/config.json",
        "tests/conftest.py",
        "docker/Dockerfile",
        "exl3/_C.abi3.so",
        "vllm/__pycache__/fork.pyc",
        "csrc/emu/cuda.h",
    ],
)
def test_what_it_does_not_read_is_not_sent(path):
    assert is_ignored(path)


# --- Four GPUs, or as many as one says ----------------------------------------------


@pytest.fixture(scope="module")
def service():
    compose = yaml.safe_load((REPO / "docker" / "compose.tp4.yaml").read_text())
    return compose["services"]["vllm"]


def as_compose_reads(text: str, variables: dict[str, str]) -> str:
    """Puts variables in: `${NAME}`, `${NAME:-default}` and `${NAME:?message}`."""

    def value(match: re.Match) -> str:
        name, kind, words = match.groups()
        if name in variables:
            return variables[name]
        assert kind == ":-", f"{name} must be set: {words}"
        return words

    return re.sub(r"\$\{(\w+)(?:(:[-?])([^}]*))?\}", value, text)


def test_the_servers_own_parser_takes_the_flags(service):
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    flags = [as_compose_reads(word, {"MODEL": "pack"}) for word in service["command"]]
    parser = make_arg_parser(FlexibleArgumentParser())
    args: argparse.Namespace = parser.parse_args(flags)
    assert args.model == "/models/pack"
    assert args.served_model_name == ["pack"]
    assert args.tensor_parallel_size == 4
    assert args.speculative_config == {"method": "mtp", "num_speculative_tokens": 3}
    assert args.shutdown_timeout < seconds(service["stop_grace_period"])


def seconds(words: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([sm])", words).groups()
    return int(number) * {"s": 1, "m": 60}[unit]


def test_as_many_gpus_as_ranks(service):
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    ranks = [f for f in service["command"] if f.startswith("--tensor-parallel-size")]
    assert ranks == [f"--tensor-parallel-size={device['count']}"]
    assert as_compose_reads(device["count"], {}) == "4"
    assert as_compose_reads(device["count"], {"GPUS": "2"}) == "2"
    assert device["driver"] == "nvidia"
    assert device["capabilities"] == ["gpu"]


def test_the_image_is_the_one_of_the_dockerfile(service):
    build = service["build"]
    assert (REPO / "docker" / build["context"]).resolve() == REPO
    assert (REPO / build["dockerfile"]).is_file()


def test_ranks_have_shared_memory_and_pinned_memory(service):
    assert service["shm_size"] == "32gb"
    assert service["ulimits"]["memlock"] == -1


def test_models_are_read_only_and_a_volume_keeps_what_was_compiled(service):
    models, home = service["volumes"]
    assert as_compose_reads(models, {"MODELS": "/m"}) == "/m:/models:ro"
    runtime = read_stages(REPO / "docker" / "Dockerfile")["runtime"]
    # A new volume is as the folder was in the image, so it belongs to the user.
    assert home.partition(":")[2] == runtime.only("WORKDIR")


def test_nothing_listens_to_the_network_unasked(service):
    (ports,) = service["ports"]
    assert as_compose_reads(ports, {}) == "127.0.0.1:8000:8000"


def test_a_server_that_fails_starts_again_and_one_that_was_stopped_does_not(service):
    assert service["restart"] == "unless-stopped"
    assert service["init"] is True


def test_every_value_is_explained():
    """Each setting of the service has a comment above it, or is one of a group's."""
    lines = (REPO / "docker" / "compose.tp4.yaml").read_text().splitlines()
    start = lines.index("    ipc: private")
    unexplained = [
        line
        for before, line in zip(lines[start:], lines[start + 1 :])
        if re.match(r"      \S", line)
        and not line.strip().startswith("#")
        and not before.strip().startswith("#")
    ]
    assert unexplained == []
