# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The errors that refuse a checkpoint, one class for each kind of violated rule.

A message is one line: the file, tensor or field, both values, and what to do.
"""


class CheckpointError(ValueError):
    """A checkpoint cannot be used."""


class FileError(CheckpointError):
    """A file is missing, damaged, or contradicts the index."""


class MetadataError(CheckpointError):
    """A field of the metadata is missing, malformed, or contradicts another."""


class TensorError(CheckpointError):
    """A tensor is missing, misshaped, or contradicts another tensor."""


class UnsupportedFormatError(CheckpointError):
    """The checkpoint is in another format, or in one that resembles EXL3."""


class RankError(CheckpointError):
    """A checkpoint cannot be cut for this many ranks."""
