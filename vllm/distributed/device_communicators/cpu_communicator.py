# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""How CPU ranks talk, also those on several machines. See docs/upstream/ray-cpu.md."""

from vllm.distributed.device_communicators import cpu_communicator_upstream as upstream
from vllm.fork import extend


class CpuCommunicator(upstream.CpuCommunicator):
    """Upstream's, which uses shared memory only where the ranks do share it."""

    def _all_group_ranks_share_shm_group_name(self) -> bool:
        """Whether the ranks of this group can talk through shared memory.

        The name alone is the port of the rendezvous, so ranks on several machines
        agree on it too.
        """
        # Imported late: it imports the communicators.
        from vllm.distributed.parallel_state import in_the_same_node_as

        same_name = super()._all_group_ranks_share_shm_group_name()
        return same_name and all(in_the_same_node_as(self.cpu_group))


extend(__name__, upstream)
