# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The library's ops. Nothing else touches `exl3._C`."""

import torch

#: The schemas that this file was written for; see kOpsVersion in bindings.cpp.
OPS_VERSION = 1

try:
    import exl3._C  # noqa: F401  (importing it registers the ops)
except ImportError as error:
    raise ImportError(
        f"exl3: the compiled ops are missing or do not load ({error}); "
        "build them with `pip install .` or `pip install -e .`"
    ) from error

_built = torch.ops.exl3.ops_version()
if _built != OPS_VERSION:
    raise ImportError(
        f"exl3: the compiled ops are version {_built} and this code needs "
        f"{OPS_VERSION}; build them anew with `pip install .` or `pip install -e .`"
    )


def ops_version() -> int:
    """Version of the compiled ops' schemas."""
    return torch.ops.exl3.ops_version()
