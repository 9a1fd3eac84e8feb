# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The one error that composing the fork raises."""


class ForkError(Exception):
    """The fork cannot be composed. The message is one line that says what to do."""
