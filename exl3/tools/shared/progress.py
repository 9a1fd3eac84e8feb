# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Shows how far long work is."""

from typing import Any


def progress_bar(
    total: int | float, unit: str, description: str, *, done: int | float = 0
) -> Any:
    """A bar with rate and time left on stderr; silent if that is no terminal.

        with progress_bar(len(layers), "layer", "pruning", done=resumed) as bar:
            for layer in layers:
                ...
                bar.update()

    Args:
        total: Units of work in all.
        unit: What is counted, such as "layer" or "B".
        description: What is being done, in a word or two.
        done: Units that an earlier run has done; the rate does not count them.

    Returns:
        A `tqdm.tqdm`.
    """
    from tqdm import tqdm

    return tqdm(
        total=total,
        initial=done,
        unit=unit if len(unit) == 1 else f" {unit}",
        unit_scale=len(unit) == 1,
        desc=description,
        disable=None,  # only where stderr is a terminal
        dynamic_ncols=True,
    )
