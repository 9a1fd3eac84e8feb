# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The error that every refusal of a checkpoint raises; see `exl3.format.errors`."""

from exl3.format.errors import CheckpointError

__all__ = ["CheckpointError"]
