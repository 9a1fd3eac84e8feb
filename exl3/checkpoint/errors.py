# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The error that every refusal of a checkpoint raises."""


class CheckpointError(ValueError):
    """A checkpoint cannot be used. The message is one line that says what to do."""
