# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""What a command refuses that is no fault of a checkpoint."""


class ToolError(ValueError):
    """An argument or an output cannot be used.

    The message is one line: what it is about, why, and what to do.
    """
