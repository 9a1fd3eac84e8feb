# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""A model behind vLLM's HTTP server."""

import json
import math
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exl3.tools.compare.measure import Scores
from exl3.tools.shared.errors import ToolError
from exl3.tools.shared.progress import progress_bar

#: A window of a large model on a slow machine takes minutes.
_TIMEOUT_S = 1800
#: What a request may carry as `Authorization: Bearer`.
_KEY_VARIABLE = "OPENAI_API_KEY"


class Server:
    """Asks a server for log-probabilities of its prompt.

    Attributes:
        name: The address.
        longest: Tokens that it reads at once: its context, less the one token that
            every request generates.
        vocabulary: None: only some log-probabilities of a position are given.
    """

    vocabulary: int | None = None

    def __init__(self, address: str, logprobs: int):
        """Asks which model is served.

        Args:
            address: Such as `http://localhost:8000`, with or without `/v1`.
            logprobs: Tokens to ask for at each position; -1 for all.

        Raises:
            ToolError: There is no such server, or it serves no model.
        """
        self.name = address
        self._root = address.rstrip("/").removesuffix("/v1")
        self._logprobs = logprobs
        self._scores: list[Scores] = []
        models = self._ask("/v1/models").get("data") or []
        if not models or "id" not in models[0]:
            raise ToolError(f"{address}: serves no model; start a server for one")
        self._model = models[0]["id"]
        self.longest = int(models[0].get("max_model_len") or 2049) - 1

    def check_tokens(self, text: str, tokens: list[int], folder: Path) -> None:
        """Refuses a server that makes other tokens of a text.

        Raises:
            ToolError: It does.
        """
        request = {"model": self._model, "prompt": text, "add_special_tokens": False}
        found = self._ask("/tokenize", request).get("tokens")
        if found != tokens:
            raise ToolError(
                f"{self.name}: makes other tokens of the text than the tokenizer of "
                f"{folder} does; a divergence needs one vocabulary, so compare models "
                "with one tokenizer"
            )

    def read(self, windows: Sequence[Tensor]) -> None:
        """Asks about windows of token ids, one after another."""
        with progress_bar(len(windows), "window", self._model) as bar:
            for window in windows:
                self._scores.append(self._read(window.tolist()))
                bar.update()

    def scores(self, window: int, begin: int, end: int) -> Scores:
        """What it gave at positions `[begin, end)` of a window."""
        scores = self._scores[window]
        assert scores.tokens is not None
        return Scores(scores.logprobs[begin:end], scores.tokens[begin:end])

    def _read(self, tokens: list[int]) -> Scores:
        request = {
            "model": self._model,
            "prompt": tokens,
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": self._logprobs,
        }
        choices = self._ask("/v1/completions", request).get("choices") or [{}]
        given = choices[0].get("prompt_logprobs")
        if not isinstance(given, list) or len(given) != len(tokens):
            raise ToolError(
                f"{self.name}: gives no prompt_logprobs; use a server of vLLM"
            )
        positions = given[1:]  # nothing comes before the first token
        width = max(len(position) for position in positions)
        ids = torch.full((len(positions), width), -1)
        logprobs = torch.full((len(positions), width), -math.inf)
        for row, position in enumerate(positions):
            ids[row, : len(position)] = torch.tensor([int(token) for token in position])
            values = [entry["logprob"] for entry in position.values()]
            logprobs[row, : len(position)] = torch.tensor(values)
        if logprobs.isnan().any():
            raise ToolError(
                f"{self.name}: gives NaN on the text; check what it serves with "
                "exl3 verify"
            )
        return Scores(logprobs, ids)

    def _ask(self, path: str, content: Any = None) -> Any:
        """What the server answers to a request, as JSON."""
        request = urllib.request.Request(
            self._root + path,
            data=None if content is None else json.dumps(content).encode(),
            headers={"Content-Type": "application/json"},
        )
        if key := os.environ.get(_KEY_VARIABLE):
            request.add_header("Authorization", f"Bearer {key}")
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
                found = json.load(answer)
        except urllib.error.HTTPError as error:
            reason = f"answers {error.code} to {path}: {_message(error)}"
            raise ToolError(f"{self.name}: {reason}") from error
        except (OSError, HTTPException, ValueError) as error:
            cause = error.reason if isinstance(error, urllib.error.URLError) else error
            raise ToolError(
                f"{self._root}{path}: {cause}; check the address, and that the server "
                "runs"
            ) from error
        if not isinstance(found, dict):
            raise ToolError(
                f"{self._root}{path}: answers with something else than a JSON object; "
                "check the address"
            )
        return found


def _message(error: urllib.error.HTTPError) -> str:
    """What the body of an error says, in one line."""
    try:
        body = error.read(10_000).decode(errors="replace")
    except OSError:
        return error.reason
    try:
        content = json.loads(body)
        content = content.get("error", content)
        message = content.get("message") or content.get("detail") or body
    except (ValueError, AttributeError):
        message = body or error.reason
    return " ".join(str(message).split())[:300]
