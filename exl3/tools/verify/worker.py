# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The process of one engine, which `exl3 verify` starts.

    python -m exl3.tools.verify.worker QUESTIONS ANSWERS

Reads the one JSON file and writes the other: the answers, or why there are none.
"""

import json
import math
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

from exl3.tools.verify.questions import (
    LENGTHS,
    MAX_TOKENS,
    PASSAGE,
    PROMPTS,
    Answers,
    Completion,
    Prefill,
    Questions,
)

_COUNTS = "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens"


class _Engine:
    """An engine with the questions' options."""

    def __init__(self, questions: Questions):
        from vllm import LLM  # type: ignore[attr-defined]

        self.questions = questions
        started = time.monotonic()
        self.llm = LLM(questions.path, **questions.options)
        self.seconds = time.monotonic() - started
        config = self.llm.llm_engine.model_config
        self.dtype = str(config.dtype).removeprefix("torch.")

    def answers(self) -> Answers:
        """Asks everything."""
        # The short prefills come first and each by itself: in a batch they would be
        # one long one.
        prefills = [self._prefill(length) for length in LENGTHS]
        completions = self._complete()
        passage = []
        if self.questions.has_tokenizer:
            output = self._score([self._encode(PASSAGE)])[0]
            passage = _own_logprobs(output)
        scored = self.questions.scored
        own = [(each.prompt_tokens, each.tokens) for each in completions]
        leads = self._lead(scored)
        own_leads = self._lead(own) if scored else []
        counts = {
            metric.name: metric.value
            for metric in self.llm.get_metrics()
            if metric.name in _COUNTS
        }
        drafted, accepted = (int(counts.get(name, 0)) for name in _COUNTS)
        return Answers(
            self.seconds,
            self.dtype,
            prefills,
            completions,
            passage,
            leads,
            own_leads,
            drafted,
            accepted,
        )

    def shut_down(self) -> None:
        """Ends the engine's own processes."""
        self.llm.llm_engine.engine_core.shutdown()

    def _prefill(self, length: int) -> Prefill:
        prompt = self._tokens(PASSAGE)[:length]
        output = self._generate([prompt], max_tokens=1, logprobs=-1, prompt_logprobs=0)
        steps = output[0].outputs[0]
        step = steps.logprobs[0]
        total = math.fsum(math.exp(entry.logprob) for entry in step.values())
        chosen = step[steps.token_ids[0]].logprob
        return Prefill(length, [*_own_logprobs(output[0]), chosen], total)

    def _complete(self) -> list[Completion]:
        prompts = [self._tokens(prompt) for prompt in PROMPTS]
        outputs = self._generate(
            prompts,
            max_tokens=MAX_TOKENS,
            logprobs=0,
            detokenize=self.questions.has_tokenizer,
        )
        completions = []
        for prompt, tokens, output in zip(PROMPTS, prompts, outputs, strict=True):
            generated = output.outputs[0]
            logprobs = [
                step[token].logprob
                for step, token in zip(
                    generated.logprobs, generated.token_ids, strict=True
                )
            ]
            has_text = self.questions.has_tokenizer
            completions.append(
                Completion(
                    prompt if has_text else f"tokens {tokens}",
                    tokens,
                    list(generated.token_ids),
                    logprobs,
                    generated.text if has_text else None,
                )
            )
        return completions

    def _lead(self, said: list[tuple[list[int], list[int]]]) -> list[list[float]]:
        """By how much the likeliest token leads each token that was generated."""
        outputs = self._score([prompt + tokens for prompt, tokens in said])
        return [
            _leads(output)[len(prompt) - 1 :]
            for (prompt, _), output in zip(said, outputs, strict=True)
        ]

    def _score(self, prompts: list[list[int]]) -> list[Any]:
        """Prefills prompts, with the logprobs of each token and the likeliest one."""
        return self._generate(prompts, max_tokens=1, prompt_logprobs=1)

    def _generate(self, prompts: list[list[int]], **params: Any) -> list[Any]:
        from vllm import SamplingParams  # type: ignore[attr-defined]

        if not prompts:
            return []
        params = {"temperature": 0, "detokenize": False, **params}
        return self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            SamplingParams(**params),
            use_tqdm=False,
        )

    def _tokens(self, text: str) -> list[int]:
        """A text's token ids; without a tokenizer, ids as good as any others."""
        if self.questions.has_tokenizer:
            return self._encode(text)
        return [ord(letter) % self.questions.vocab_size for letter in text]

    def _encode(self, text: str) -> list[int]:
        return self.llm.get_tokenizer().encode(text)


def _own_logprobs(output: Any) -> list[float]:
    """Logprobs of a prompt's own tokens, without the first, which follows nothing."""
    return [
        step[token].logprob
        for step, token in zip(
            output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True
        )
    ]


def _leads(output: Any) -> list[float]:
    """How far the likeliest token leads each token of a prompt, without the first."""
    return [
        max(entry.logprob for entry in step.values()) - own
        for step, own in zip(
            output.prompt_logprobs[1:], _own_logprobs(output), strict=True
        )
    ]


def _reply(questions: Questions) -> dict[str, Any]:
    """The answers, or the error, as JSON takes them."""
    from vllm.refusal import collected_refusals, refusal_in

    with collected_refusals() as of_processes:
        try:
            engine = _Engine(questions)
            answers = engine.answers()
            engine.shut_down()
        except Exception as error:
            traceback.print_exc()
            refusal = refusal_in(error) or of_processes()
            lines = [line for line in str(error).splitlines() if line.strip()]
            told = (
                f"{type(error).__name__}: {lines[0].strip() if lines else 'no message'}"
            )
            return {"refusal": refusal, "error": told}
    return {"answers": asdict(answers)}


def main() -> None:
    """Answers one file of questions."""
    questions, answers = map(Path, sys.argv[1:])
    reply = _reply(Questions(**json.loads(questions.read_text())))
    answers.write_text(json.dumps(reply))


if __name__ == "__main__":
    main()
