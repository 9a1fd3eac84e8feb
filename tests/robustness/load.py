# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Many clients at once, of whom some hang up in the middle."""

import asyncio
import json
import random
from dataclasses import dataclass

import aiohttp

#: Token ids that a prompt may hold, the specials left out.
IDS = range(8, 400)
LONGEST_PROMPT = 512
MOST_TOKENS = 64


@dataclass(frozen=True)
class Request:
    """A request for greedy tokens.

    `hang_up_after` is the number of events that its client reads, None for all.
    """

    prompt: list[int]
    max_tokens: int
    hang_up_after: int | None


def draw(rng):
    """A request; half of all lengths are below the square root of the greatest."""
    tokens = _length(rng, MOST_TOKENS)
    return Request(
        prompt=rng.choices(IDS, k=_length(rng, LONGEST_PROMPT)),
        max_tokens=tokens,
        # A third hang up: some before the first token, some between any two.
        hang_up_after=rng.randrange(tokens) if rng.random() < 1 / 3 else None,
    )


def _length(rng, greatest):
    """At random from 1 to `greatest`, each power of two as often as the others."""
    return int((greatest + 1) ** rng.random())


async def _client(session, requests):
    """Sends requests until there are none left; what went wrong with any, in words."""
    wrong = []
    for request in requests:
        fields = {
            "model": "demo",
            "prompt": request.prompt,
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async with session.post("/v1/completions", json=fields) as reply:
            if reply.status != 200:
                wrong.append(f"{reply.status}: {await reply.text()}")
                continue
            events = []
            while request.hang_up_after is None or len(events) < request.hang_up_after:
                line = await reply.content.readline()
                if not line:
                    break
                if line.startswith(b"data: "):
                    events.append(line[6:].strip())
            else:
                reply.close()  # in the middle; the connection is not used again
                continue
        if len(events) < 3 or events[-1] != b"[DONE]":
            wrong.append(f"the stream ended with {events[-1:]}")
            continue
        found = json.loads(events[-2])["usage"]["completion_tokens"]
        if found != request.max_tokens:
            wrong.append(f"{found} tokens, not {request.max_tokens}")
    return wrong


def run_load(url, *, clients, requests, seed):
    """Has clients send so many requests together, a new one as soon as one is over.

    Returns:
        What went wrong, a line each.
    """
    rng = random.Random(seed)
    left = iter([draw(rng) for _ in range(requests)])

    async def run():
        async with aiohttp.ClientSession(
            url,
            connector=aiohttp.TCPConnector(limit=clients),
            timeout=aiohttp.ClientTimeout(total=600),
        ) as session:
            return await asyncio.gather(
                *(_client(session, left) for _ in range(clients))
            )

    return [line for lines in asyncio.run(run()) for line in lines]
