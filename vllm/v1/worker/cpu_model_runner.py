# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""The CPU model runner, also as a later stage of a pipeline.

See docs/upstream/cpu-pipeline-parallel.md.
"""

from vllm.distributed import get_pp_group
from vllm.fork import extend
from vllm.v1.worker import cpu_model_runner_upstream as upstream


class CPUModelRunner(upstream.CPUModelRunner):
    """Upstream's, which has the buffers that a later pipeline stage receives into."""

    def load_model(self, load_dummy_weights: bool = False) -> None:
        """Loads the model, and allocates what the stage before sends.

        Upstream allocates that in the profile run, which the CPU skips in eager mode
        with a KV cache of a given size.
        """
        super().load_model(load_dummy_weights)
        if not get_pp_group().is_first_rank:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens,
                dtype=self.model_config.dtype,
                device=self.device,
            )


extend(__name__, upstream)
