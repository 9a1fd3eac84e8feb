# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""What a server says of itself under /metrics."""

import re
from dataclasses import dataclass
from typing import Self

_SAMPLE = re.compile(r"^([a-z_:]+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Sample:
    """One line of the text format: a metric's value under its labels."""

    name: str
    labels: dict[str, str]
    value: float


def parse(text: str) -> list[Sample]:
    """The samples of a page in the text format."""
    return [
        Sample(name, dict(_LABEL.findall(labels)), float(value))
        for name, labels, value in _SAMPLE.findall(text)
    ]


@dataclass(frozen=True)
class Drafts:
    """Counts of speculative decoding, since the server's start or between two reads.

    A draft is proposed once a step and request, and has one token or more.
    """

    drafts: float
    tokens: float
    accepted: float

    @classmethod
    def of(cls, samples: list[Sample]) -> Self:
        """The counts of all engines together; zeros without speculative decoding."""

        def total(name: str) -> float:
            name = f"vllm:spec_decode_num_{name}_total"
            return sum(sample.value for sample in samples if sample.name == name)

        return cls(total("drafts"), total("draft_tokens"), total("accepted_tokens"))

    def since(self, earlier: "Drafts") -> "Drafts":
        """What was counted after an earlier read."""
        return Drafts(
            self.drafts - earlier.drafts,
            self.tokens - earlier.tokens,
            self.accepted - earlier.accepted,
        )

    @property
    def acceptance(self) -> float | None:
        """Accepted tokens as a fraction of the proposed ones."""
        return self.accepted / self.tokens if self.tokens else None

    @property
    def accepted_length(self) -> float | None:
        """Tokens a step and request: the accepted ones and the model's own."""
        return 1 + self.accepted / self.drafts if self.drafts else None


def kv_cache_tokens(samples: list[Sample]) -> int | None:
    """Tokens that the KV caches of all engines hold; None if the server is silent."""
    sizes = [
        sample.labels.get("kv_cache_size_tokens", "")
        for sample in samples
        if sample.name == "vllm:cache_config_info"
    ]
    numbers = [int(size) for size in sizes if size.isdigit()]
    return sum(numbers) if numbers else None
