# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Loads the emulated CUDA kernels into a worker of vLLM, whichever process it is in."""

from tests.kernels.emulated import torch_ops

torch_ops.load()


class EmulatedKernels:
    """Adds nothing: an engine that names it as `worker_extension_cls` imports this."""
