# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Hugging Face's own implementation in float32, as the reference for logprobs."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, logging

from tests.checkpoints import save_checkpoint
from tests.serving.generate import PROMPTS, Completion

# transformers has no MTP layer, and would list its tensors as unexpected.
logging.set_verbosity_error()

#: A router bias that no score outweighs: an expert with it is never chosen.
_NEVER = -1e9


def load_reference(path: Path) -> torch.nn.Module:
    """A checkpoint of equal widths in transformers, in float32."""
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def widen(path: Path, out: Path) -> Path:
    """Makes the same model with equal widths, which transformers can hold.

    Every layer gets as many experts as the widest has. The added ones are zero, and
    their correction bias keeps the router from choosing them, so the model computes
    the same function.

    Args:
        path: A checkpoint with a correction bias in every router.
        out: The folder to write.
    """
    config = json.loads((path / "config.json").read_text())
    widest = max(config.pop("n_routed_experts_per_layer"))
    tensors: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        tensors |= load_file(file)
    for name, gate in [
        item for item in tensors.items() if "mlp.gate.weight" in item[0]
    ]:
        layer = name.removesuffix("gate.weight")
        width = len(gate)
        added = torch.zeros(widest - width, gate.shape[1], dtype=gate.dtype)
        tensors[name] = torch.cat([gate, added])
        bias = tensors[f"{layer}gate.e_score_correction_bias"]
        never = torch.full((widest - width,), _NEVER, dtype=bias.dtype)
        tensors[f"{layer}gate.e_score_correction_bias"] = torch.cat([bias, never])
        for expert in range(width, widest):
            for projection in ("gate_proj", "up_proj", "down_proj"):
                like = tensors[f"{layer}experts.0.{projection}.weight"]
                tensors[f"{layer}experts.{expert}.{projection}.weight"] = (
                    torch.zeros_like(like)
                )
    save_checkpoint(out, {**config, "n_routed_experts": widest}, tensors)
    return out


@torch.inference_mode()
def compare(
    model: torch.nn.Module,
    completions: list[Completion],
    prompts: list[list[int]] = PROMPTS,
) -> float:
    """Checks greedy completions against the reference.

    Args:
        model: From `load_reference`.
        completions: One for each prompt.
        prompts: What the engine was given.

    Returns:
        The largest difference of a token's log-probability.

    Raises:
        AssertionError: A token is not the reference's best, or there are none.
    """
    worst = 0.0
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.tokens
        ids = torch.tensor([prompt + completion.tokens])
        logits = model(ids).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1)
        tokens = torch.tensor(completion.tokens)
        assert logprobs.argmax(-1).tolist() == completion.tokens
        reference = logprobs.gather(1, tokens[:, None]).squeeze(1)
        difference = (reference - torch.tensor(completion.logprobs)).abs().max()
        worst = max(worst, difference.item())
    return worst
