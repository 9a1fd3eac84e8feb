# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""An earlier answer of the model, sent back to /v1/responses, keeps all of its text."""

import pytest
from openai.types.responses import ResponseOutputMessage

from vllm.entrypoints.openai.responses.utils import construct_input_messages


def text(said):
    return {"type": "output_text", "text": said, "annotations": []}


def refusal(said):
    return {"type": "refusal", "refusal": said}


def answer(*parts):
    return ResponseOutputMessage.model_validate(
        {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": parts,
        }
    )


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([], ""),
        ([text("In the beginning")], "In the beginning"),
        ([text("In the "), text("beginning")], "In the beginning"),
        ([refusal("No.")], "No."),
        ([text("Well. "), refusal("No.")], "Well. No."),
    ],
    ids=["nothing", "a text", "two texts", "a refusal", "both"],
)
def test_an_answer_is_a_message_with_all_of_its_text(parts, said):
    item = answer(*parts)
    found = construct_input_messages(request_input=[item])
    assert found == [{"role": "assistant", "content": said}]
    assert len(item.content) == len(parts), "the request itself is left alone"


def test_an_answer_joins_the_call_before_it():
    call = {"role": "assistant", "tool_calls": [{"id": "1"}]}
    found = construct_input_messages(request_input=[call, answer(text("Amen."))])
    assert found == [{**call, "content": "Amen."}]
