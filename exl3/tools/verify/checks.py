# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""What is checked of an engine's answers. Pure functions; no engine."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from exl3.tools.verify.questions import Answers, Completion, Prefill

#: How far the probabilities of all next tokens may add up to something other than 1.
#: Each is exact to 1e-6 of itself in FP32, so the sum is, too.
SUM_TOLERANCE = 1e-3
#: A completion that is shorter does not count as repeated.
REPEATED = 8
#: How far the likeliest token may lead a greedy one, in nats: a near tie. Two tokens in
#: one pass are summed in another order than one, so each of two logits may be rounded
#: to the next value. The logits that matter lie below 32, where BF16 has steps of
#: 1/8 and FP16 of 1/64; two of these. FP32 is held to FP16's: kernels of quantized
#: weights round inside.
NEAR_TIE = {"bfloat16": 0.25, "float16": 0.03125, "float32": 0.03125}
#: The same for a model that magnifies rounding, as routers do where experts tie: twice
#: what the plain engine's own tokens are led by when they are prefilled instead of
#: decoded, but no more than this. No rounding makes a token 20 times less likely.
MOST_NOISE = 3.0
#: A smaller share of accepted drafts is pointed out. A draft that knows nothing of its
#: trunk has no more.
LOW_ACCEPTANCE = 0.1


@dataclass(frozen=True)
class Check:
    """One line: what was checked, whether it holds, and the figure behind it."""

    name: str
    ok: bool
    figure: str
    value: float | None = None  # the figure for scripts, if it is one number


def check_prefills(prefills: Iterable[Prefill], prefix: str = "") -> Iterator[Check]:
    """Whether short prompts give finite log-probabilities that are probabilities."""
    for prefill in prefills:
        name = f"{prefix}prefill {prefill.tokens}"
        bad = [value for value in prefill.logprobs if not math.isfinite(value)]
        if bad:
            yield Check(name, False, f"a log-probability is {bad[0]}")
            continue
        # Written so that a NaN fails.
        ok = abs(prefill.total - 1) <= SUM_TOLERANCE
        yield Check(
            name, ok, f"probabilities sum to {prefill.total:.6f}", prefill.total
        )


def check_completions(
    completions: list[Completion], prefix: str = ""
) -> Iterator[Check]:
    """Whether greedy completions are numbers, say something, and move on."""
    tokens = sum(len(completion.tokens) for completion in completions)
    what = f"{len(completions)} completions, {tokens} tokens"
    yield _first_fault(f"{prefix}finite", completions, _not_finite, what)
    yield _first_fault(
        f"{prefix}not empty", completions, _empty, _sample(completions[0])
    )
    fewest = min(completions, key=lambda each: len(set(each.tokens)))
    what = f"{len(set(fewest.tokens))} or more different tokens in each completion"
    yield _first_fault(f"{prefix}not repeated", completions, _repeated, what)


def check_passage(logprobs: list[float], vocab_size: int) -> Check:
    """Whether the model finds English likelier than tokens drawn by lot.

    Wrong weights, other than broken ones, give finite and varied nonsense.
    """
    bits = -math.fsum(logprobs) / len(logprobs) / math.log(2)
    chance = math.log2(vocab_size)
    figure = f"{bits:.2f} bits a token of English; by lot {chance:.2f}"
    return Check("beats chance", bits < chance, figure, bits)


def check_drafts(plain: Answers, speculative: Answers) -> Iterator[Check]:
    """Whether drafts leave the output as it is, and how many are accepted.

    Where two tokens are as good as equally likely, either may come first, and the
    completions part there. So each token of the speculative engine is looked up in the
    plain one, after the same text: it has to be the likeliest, or in a near tie with
    it.

    Args:
        plain: Of an engine without drafts, which scored the other's completions.
        speculative: Of the engine with drafts.
    """
    pairs = list(zip(plain.completions, speculative.completions, strict=True))
    equal = sum(one.tokens == other.tokens for one, other in pairs)
    noise = max(lead for leads in plain.own_leads for lead in leads)
    tolerance = NEAR_TIE.get(plain.dtype, NEAR_TIE["bfloat16"])
    if noise > tolerance / 2:
        tolerance = min(2 * noise, MOST_NOISE)
    fault = None
    for (_, completion), leads in zip(pairs, plain.leads, strict=True):
        for index, lead in enumerate(leads):
            if fault is None and not lead <= tolerance:  # a NaN is a fault, too
                fault = (
                    f"{_label(completion)}: without drafts, token {index + 1} is "
                    f"{lead:.3f} less likely than the best, and no near tie "
                    f"({tolerance:.3g})"
                )
    leads = [lead for each in plain.leads for lead in each]
    ties = sum(lead > 0 for lead in leads)
    figure = (
        f"{equal} of {len(pairs)} completions equal; {len(leads) - ties} of "
        f"{len(leads)} tokens the likeliest, {ties} near ties (within {max(leads):.3f})"
    )
    yield Check("mtp output", fault is None, fault or figure, max(leads))
    drafted, accepted = speculative.drafted, speculative.accepted
    if not drafted:
        yield Check("mtp acceptance", False, "the engine drafted nothing")
        return
    share = accepted / drafted
    figure = f"{share:.1%} ({accepted} of {drafted} drafts)"
    if share < LOW_ACCEPTANCE:
        figure += ", low: the MTP layer does not know this trunk"
    yield Check("mtp acceptance", True, figure, share)


def _first_fault(
    name: str,
    completions: Iterable[Completion],
    fault_of: Callable[[Completion], str | None],
    figure: str,
) -> Check:
    for completion in completions:
        fault = fault_of(completion)
        if fault:
            return Check(name, False, f"{_label(completion)}: {fault}")
    return Check(name, True, figure)


def _not_finite(completion: Completion) -> str | None:
    for index, value in enumerate(completion.logprobs):
        if not math.isfinite(value):
            return f"the log-probability of token {index + 1} is {value}"
    return None


def _empty(completion: Completion) -> str | None:
    if not completion.tokens:
        return "no token"
    if completion.text is not None and not completion.text.strip():
        return f"nothing to see in {len(completion.tokens)} tokens"
    return None


def _repeated(completion: Completion) -> str | None:
    """All tokens are one, or all that is to be seen is one character.

    A greedy completion of a small model may go in circles; a circle of two tokens
    passes, and so does one that begins with something else.
    """
    tokens = completion.tokens
    if len(tokens) >= REPEATED and len(set(tokens)) == 1:
        return f"token {tokens[0]}, {len(tokens)} times"
    seen = "".join((completion.text or "").split())
    if len(seen) >= REPEATED and len(set(seen)) == 1:
        return f"{seen[0]!r}, {len(seen)} times"
    return None


def _label(completion: Completion) -> str:
    return f'"{completion.prompt}"'


def _sample(completion: Completion) -> str:
    if completion.text is None:
        return f"{len(completion.tokens)} tokens after {completion.prompt}"
    text = " ".join(completion.text.split())
    short = text if len(text) <= 40 else f"{text[:40].rstrip()}..."
    return f"{_label(completion)} goes on: {short}"
