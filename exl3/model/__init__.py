# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Runs a checkpoint in torch, one layer in memory at a time."""

from exl3.model.experts import RoutedExperts
from exl3.model.layer import DraftLayer, StreamedLayer
from exl3.model.stream import StreamedModel
from exl3.model.tensors import TensorSource

__all__ = [
    "DraftLayer",
    "RoutedExperts",
    "StreamedLayer",
    "StreamedModel",
    "TensorSource",
]
