# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""Extends upstream's ops: products by oneDNN, which torch.compile keeps in order.

See docs/upstream/cpu-compiled-order.md and docs/upstream/cpu-onednn-handler.md.
"""

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from vllm import _custom_ops_upstream as upstream
from vllm.fork import extend
from vllm.utils.torch_utils import direct_register_custom_op


class CPUDNNLGEMMHandler(upstream.CPUDNNLGEMMHandler):
    """Upstream's packed weight, which may be let go of while a graph is traced."""

    def __del__(self) -> None:
        """Frees the weight, if it is a real one, whatever mode torch is in.

        A process that ends sets the names of its modules to None, and frees it anyhow.
        """
        if FakeTensor is not None and not isinstance(self.handler_tensor, FakeTensor):
            with _disable_current_modes():
                super().__del__()


def onednn_mm(
    dnnl_handler: upstream.CPUDNNLGEMMHandler,
    x: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Upstream's `onednn_mm`, as an op that returns its result where it is compiled.

    Upstream's op writes into a buffer. Inductor may then run what reads the buffer,
    fused with a kernel of an earlier layer, before the buffer is written.

    Args:
        dnnl_handler: The packed weight.
        x: [..., in-features].
        bias: [out-features], or None.
    """
    if not torch.compiler.is_compiling():
        return _upstream_onednn_mm(dnnl_handler, x, bias)
    rows = x.reshape(-1, dnnl_handler.k)
    product = torch.ops.vllm.onednn_product(
        rows, bias, dnnl_handler.handler_tensor, dnnl_handler.n
    )
    return product.view(*x.shape[:-1], dnnl_handler.n)


def _onednn_product(
    x: torch.Tensor, bias: torch.Tensor | None, handler: torch.Tensor, size: int
) -> torch.Tensor:
    product = x.new_empty(x.shape[0], size)
    torch.ops._C.onednn_mm(product, x, bias, handler)
    return product


def _fake_onednn_product(
    x: torch.Tensor, bias: torch.Tensor | None, handler: torch.Tensor, size: int
) -> torch.Tensor:
    return x.new_empty(x.shape[0], size)


def onednn_scaled_mm(
    dnnl_handler: upstream.CPUDNNLGEMMHandler,
    x: torch.Tensor,
    output: torch.Tensor,
    input_scale: torch.Tensor | None,
    input_zp: torch.Tensor | None,
    input_zp_adj: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """As `onednn_mm`, of int8 activations; callers read `output`.

    Args:
        dnnl_handler: The packed weight.
        x: int8 [num_tokens, in-features].
        output: [num_tokens, out-features].
        input_scale: Of x, for all tokens or each.
        input_zp: Zero points of x.
        input_zp_adj: What the zero points add to each output.
        bias: [out-features], or None.
    """
    scales = input_scale, input_zp, input_zp_adj, bias
    if not torch.compiler.is_compiling():
        return _upstream_onednn_scaled_mm(dnnl_handler, x, output, *scales)
    product = torch.ops.vllm.onednn_scaled_product(
        x, *scales, dnnl_handler.handler_tensor, dnnl_handler.n, output.dtype
    )
    return output.copy_(product)


def _onednn_scaled_product(
    x: torch.Tensor,
    input_scale: torch.Tensor | None,
    input_zp: torch.Tensor | None,
    input_zp_adj: torch.Tensor | None,
    bias: torch.Tensor | None,
    handler: torch.Tensor,
    size: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    product = x.new_empty(x.shape[0], size, dtype=dtype)
    torch.ops._C.onednn_scaled_mm(
        product, x, input_scale, input_zp, input_zp_adj, bias, handler
    )
    return product


def _fake_onednn_scaled_product(
    x: torch.Tensor,
    input_scale: torch.Tensor | None,
    input_zp: torch.Tensor | None,
    input_zp_adj: torch.Tensor | None,
    bias: torch.Tensor | None,
    handler: torch.Tensor,
    size: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    return x.new_empty(x.shape[0], size, dtype=dtype)


direct_register_custom_op(
    "onednn_scaled_product",
    _onednn_scaled_product,
    fake_impl=_fake_onednn_scaled_product,
    dispatch_key="CPU",
)
direct_register_custom_op(
    "onednn_product",
    _onednn_product,
    fake_impl=_fake_onednn_product,
    dispatch_key="CPU",
)
_upstream_onednn_mm = upstream.onednn_mm
_upstream_onednn_scaled_mm = upstream.onednn_scaled_mm
extend(__name__, upstream)
