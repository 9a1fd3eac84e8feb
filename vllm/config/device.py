# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Says in one line that there is no GPU; upstream ends in a trace, even for --help.

See docs/upstream/no-device.md.
"""

from vllm.config import device_upstream as upstream
from vllm.fork import extend
from vllm.refusal import RefusedOptionError


def _post_init(self: upstream.DeviceConfig) -> None:
    """Upstream's choice of a device, where there is one to choose.

    Raises:
        RefusedOptionError: vLLM is to run, and found no device.
    """
    from vllm.platforms import current_platform

    if current_platform.device_type:
        _upstream_post_init(self)
    elif self.device == "auto":
        # The command line makes one, to show what the defaults are.
        self.device_type = ""
        self.device = None
    else:
        raise RefusedOptionError(
            "no GPU was found, and this build of vLLM runs on nothing else. nvidia-smi "
            "must list one where vLLM runs; a container is given them by --gpus all."
        )


_upstream_post_init = upstream.DeviceConfig.__post_init__
upstream.DeviceConfig.__post_init__ = _post_init
extend(__name__, upstream)
