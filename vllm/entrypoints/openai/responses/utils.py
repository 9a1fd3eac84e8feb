# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Extends how a Responses request becomes chat messages: any earlier answer is taken.

See docs/upstream/responses-earlier-answers.md.
"""

from typing import Any

from openai.types.responses import (
    ResponseOutputMessage,
    ResponseOutputRefusal,
    ResponseOutputText,
)

from vllm.entrypoints.openai.responses import utils_upstream as upstream
from vllm.fork import extend

_upstream_construct = upstream._construct_message_from_response_item


def _construct_message_from_response_item(item: Any, prev_msg: Any = None) -> Any:
    """Makes an item a chat message, or adds it to the one before, as upstream does.

    Upstream's takes the text of the first part of an earlier answer, which has any
    number of parts, refusals among them. So it is given the answer in one part.
    """
    if isinstance(item, ResponseOutputMessage):
        text = "".join(
            part.refusal if isinstance(part, ResponseOutputRefusal) else part.text
            for part in item.content
        )
        whole = ResponseOutputText(text=text, type="output_text", annotations=[])
        item = item.model_copy(update={"content": [whole]})
    return _upstream_construct(item, prev_msg)


extend(__name__, upstream)
