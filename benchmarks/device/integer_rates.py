# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""How many integer and half instructions a multiprocessor does in a clock.

Decoding is made of these. Where they are few, a kernel cannot use the memory's whole
bandwidth, whatever it does: so the rates belong to the figures.
"""

from typing import Any

import torch

THREADS = 1024
CHAINS = 8  # independent, to hide each instruction's own delay
ROUNDS = 512

OPERATIONS = {
    "SHF": "shf.r.wrap.b32 %0, %0, %1, 5;",
    "LOP3": "lop3.b32 %0, %0, %1, 0x3b603b60, 0x6a;",
    "PRMT": "prmt.b32 %0, %0, %1, 0x5410;",
    "IDP": "dp4a.u32.u32 %0, %0, %1, %0;",
    "IMAD": "mad.lo.u32 %0, %0, %1, %0;",
    "HADD2": "add.rn.f16x2 %0, %0, %1;",
    "HFMA2": "fma.rn.f16x2 %0, %0, %1, %0;",
}

_SOURCE = """
extern "C" __global__ void rate(unsigned* out, long long* clocks, unsigned operand) {{
  unsigned v[{chains}];
  for (int i = 0; i < {chains}; ++i) v[i] = threadIdx.x + i;
  __syncthreads();
  const long long start = clock64();
  for (int round = 0; round < {rounds}; ++round) {{
{body}
  }}
  __syncthreads();
  const long long end = clock64();
  unsigned sum = 0;
  for (int i = 0; i < {chains}; ++i) sum += v[i];
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
  if (threadIdx.x == 0) clocks[blockIdx.x] = end - start;
}}
"""


def measure(device: torch.device) -> dict[str, Any]:
    """Instructions a clock and multiprocessor; or why there are none."""
    compile_kernel = getattr(torch.cuda, "_compile_kernel", None)
    if compile_kernel is None:
        return {"skipped": ["instruction rates: this torch compiles no kernels"]}
    blocks = torch.cuda.get_device_properties(device).multi_processor_count
    out = torch.empty(blocks * THREADS, dtype=torch.int32, device=device)
    clocks = torch.empty(blocks, dtype=torch.int64, device=device)
    rates = {}
    for name, operation in OPERATIONS.items():
        body = "\n".join(
            f'    asm volatile("{operation}" : "+r"(v[{i}]) : "r"(operand));'
            for i in range(CHAINS)
        )
        try:
            kernel = compile_kernel(
                _SOURCE.format(chains=CHAINS, rounds=ROUNDS, body=body), "rate"
            )
            for _ in range(2):
                kernel((blocks, 1, 1), (THREADS, 1, 1), (out, clocks, 3))
            torch.cuda.synchronize()
        except Exception as error:  # an interface of torch's own
            return {"skipped": [f"instruction rates: {error}"], "per_clock": rates}
        rates[name] = CHAINS * ROUNDS * THREADS / clocks.double().median().item()
    return {"per_clock": rates}
