# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""What no client should send gets an answer that says so.

schemathesis draws requests from the description that the server gives of itself: such
as fit it, and such as don't. Almost all of them are refused for the first thing that is
wrong with them. So most of them are sent as a request that is known to be right, with
one or two of their fields instead of its own, which reach the code behind the checks.
"""

import json
from functools import cache

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

#: How many tokens are asked for.
FEW = 4
MESSAGES = [{"role": "user", "content": "In the beginning"}]
#: A right request of every operation that takes one.
RIGHT = {
    "/tokenize": {"prompt": "In the beginning"},
    "/detokenize": {"tokens": [40, 41]},
    "/v1/completions": {"prompt": "In the beginning", "max_tokens": FEW},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": FEW},
    "/v1/chat/completions/batch": {"messages": [MESSAGES, MESSAGES], "max_tokens": FEW},
    "/v1/responses": {"input": "In the beginning", "max_output_tokens": FEW},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": FEW},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/generative_scoring": {
        "query": "In the beginning",
        "items": ["God", "man"],
        "label_token_ids": [40, 41],
    },
}
#: Operations that this server has and can't do: their answer is always 501.
NOT_IMPLEMENTED = {"/v1/systemone"}
#: It would start and stop engines on other machines.
LEFT_OUT = {"/scale_elastic_ep"}
#: Fields that say how many tokens are generated, which is no fault but takes long, and
#: how often. Without the former a request may go on until the context is full.
LENGTHS = ["max_tokens", "max_completion_tokens", "max_output_tokens"]
AMOUNTS = [*LENGTHS, "n", "best_of"]
SECONDS = 60


@pytest.fixture
def operations(server):
    """The server's operations by path."""
    return _operations(server.url)


@cache
def _operations(url):
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    found = {}
    for result in schema.get_all_operations():
        operation = result.ok()
        found.setdefault(operation.path, []).append(operation)
    return found


def modest(body, right):
    """The same body, asking for few tokens as the right one does."""
    given = [name for name in AMOUNTS if body.get(name) is not None]
    few = {name: min(body[name], FEW) for name in given if type(body[name]) is int}
    if not set(given).intersection(LENGTHS):
        few |= {name: right[name] for name in LENGTHS if name in right}
    return {**body, **few}


@st.composite
def requests_to(draw, operation, mode):
    """A case of schemathesis, most often one that is right but for some fields."""
    case = draw(operation.as_strategy(generation_mode=mode))
    if isinstance(case.body, dict):
        if operation.path in RIGHT and draw(st.integers(0, 3)):
            kept = draw(st.permutations(sorted(case.body)))[: draw(st.integers(1, 2))]
            kept = {field: case.body[field] for field in kept}
            case.body = {"model": "demo", **RIGHT[operation.path], **kept}
        case.body = modest(case.body, RIGHT.get(operation.path, {}))
    return case


def fault(case, session):
    """What is wrong with the answer to a case, or None."""
    try:
        reply = case.call(session=session, timeout=SECONDS)
    except requests.RequestException as error:
        return f"{type(error).__name__}: {error}"
    if reply.status_code < 500:
        return None
    if reply.status_code == 501 and case.path in NOT_IMPLEMENTED:
        return None
    return f"{reply.status_code}: {reply.text[:400]}"


def faults(operation, mode, examples):
    """What is wrong with the answers to so many requests, and each such request."""
    found = []
    session = requests.Session()

    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(requests_to(operation, mode))
    def ask(case):
        if said := fault(case, session):
            found.append(f"{said}\n  {case.method} {case.path} {_written(case.body)}")

    ask()
    return found


def _written(body):
    return json.dumps(body) if isinstance(body, dict | list) else repr(body)


@pytest.mark.parametrize(
    "examples",
    [
        pytest.param(8, id="short"),
        pytest.param(150, id="long", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("mode", GenerationMode)
@pytest.mark.parametrize("path", RIGHT)
def test_malformed_requests_are_refused(server, operations, path, mode, examples):
    for operation in operations[path]:
        found = faults(operation, mode, examples)
        assert not found, "\n".join(found)
    assert server.health() == 200
    server.wait_until_idle(SECONDS)


def test_the_right_requests_are_right(server, operations):
    """Else the others would be wrong for more than was put into them."""
    for path, body in RIGHT.items():
        reply = requests.post(server.url + path, json={"model": "demo", **body})
        assert reply.status_code == 200, f"{path}: {reply.text}"


def test_no_other_operation_fails(operations):
    for path in set(operations) - set(RIGHT) - LEFT_OUT:
        for operation in operations[path]:
            found = faults(operation, GenerationMode.POSITIVE, 4)
            assert not found, "\n".join(found)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"a":NaN}'])
@pytest.mark.parametrize("path", RIGHT)
def test_what_is_no_json_is_refused(server, path, body):
    headers = {"Content-Type": "application/json"}
    reply = requests.post(server.url + path, data=body, headers=headers)
    assert 400 <= reply.status_code < 500, reply.text
