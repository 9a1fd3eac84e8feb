# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""What an engine is asked, and what it answers. Imports neither torch nor vLLM."""

from dataclasses import dataclass, field
from typing import Any

#: Prompts of these lengths are prefilled, each alone: sizes on both sides of what
#: kernels switch at.
LENGTHS = (1, 2, 5, 8, 9)
#: Generated tokens of a completion.
MAX_TOKENS = 48
PROMPTS = (
    "The capital of France is",
    "In the beginning",
    "1, 2, 3, 4, 5, 6,",
    "And the king said to his servants,",
    "Once upon a time there was",
    "Water is made of",
)
#: A few sentences of English. Any trained model finds them likelier than chance.
PASSAGE = (
    "The man went up to the city in the morning, and when he came to the gate he saw a "
    "great number of people. They said to him: where is your house, and who is your "
    "father? And he said that he was the son of a king from a land far away."
)


@dataclass(frozen=True)
class Questions:
    """One engine, and what it is asked.

    `scored` are completions of another engine, as pairs of prompt and generated token
    ids: how likely does this engine find them?
    """

    path: str
    options: dict[str, Any]  # arguments of vllm.LLM
    has_tokenizer: bool  # else prompts are made of token ids
    vocab_size: int
    scored: list[tuple[list[int], list[int]]] = field(default_factory=list)


@dataclass(frozen=True)
class Prefill:
    """One prompt of few tokens."""

    tokens: int
    logprobs: list[float]  # of the prompt's tokens, without the first; of the next one
    total: float  # sum of the probabilities of the next token


@dataclass(frozen=True)
class Completion:
    """One greedy completion. `logprobs` has one entry a generated token."""

    prompt: str
    prompt_tokens: list[int]
    tokens: list[int]
    logprobs: list[float]
    text: str | None  # what a person sees; None without a tokenizer


@dataclass(frozen=True)
class Answers:
    """What one engine answered. Log-probabilities are natural."""

    seconds: float  # until the engine was ready
    dtype: str  # that it computes in, such as "bfloat16"
    prefills: list[Prefill]
    completions: list[Completion]
    passage: list[float]  # logprobs of PASSAGE's tokens; none without a tokenizer
    #: By how much the likeliest token leads each token of `scored`, and each of the
    #: engine's own completions, when all of it is prefilled. None without `scored`.
    leads: list[list[float]]
    own_leads: list[list[float]]
    drafted: int
    accepted: int
