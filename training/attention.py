"""Scaled dot-product attention: torch's, and on the CPU one that takes less time for more memory.

In bfloat16 the backward pass of torch's flash kernel for CPUs runs at a quarter of the rate of matrix products, since
it computes the attention weights again in small blocks. Here they are kept, where that is at most `KEPT_BYTES` a layer:
forward and backward take 0.6 of the time, with the same rounding errors (products of queries and keys stay float32, as
in the kernel). In float32 it would bring a tenth. Figures: benchmarks/README.md.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

KEPT_BYTES = 2**27


def attend(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, dropout: float) -> Tensor:
    """softmax(query key^T / sqrt(D)) value of queries [B, heads, Q, D], keys and values [B, heads, L, D].

    `key_mask`: bool [B, 1, 1, L], true where a key counts (at least one in each row), or None; `dropout`: the
    probability for an attention weight to be dropped.
    """
    kept = query[..., 0].numel() * key.shape[2] * query.element_size()
    is_bf16_on_cpu = query.device.type == "cpu" and query.dtype == torch.bfloat16
    if is_bf16_on_cpu and not dropout and kept <= KEPT_BYTES and not torch.compiler.is_compiling():
        return _KeptWeights.apply(query, key, value, key_mask)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=key_mask, dropout_p=dropout)


class _KeptWeights(torch.autograd.Function):
    """Attention row by row of a batch, so that what is made on the way stays in the processor's cache."""

    @staticmethod
    def forward(ctx: FunctionCtx, query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None) -> Tensor:
        rows, heads, queried, size = query.shape
        weights = query.new_empty(rows, heads, queried, key.shape[2])
        context = torch.empty_like(query)
        scores = torch.empty(weights.shape[1:])
        for row in range(rows):
            queries, keys = query[row].float(), key[row].float()
            torch.baddbmm(scores, queries, keys.mT, beta=0, alpha=size**-0.5, out=scores)
            if key_mask is not None:
                scores.masked_fill_(~key_mask[row], -torch.inf)
            weights[row] = torch.softmax(scores, -1, out=scores)
            torch.bmm(weights[row], value[row], out=context[row])
        ctx.save_for_backward(query, key, value, weights)
        return context

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, weights = ctx.saved_tensors
        of_query, of_key, of_value = (torch.empty_like(tensor) for tensor in (query, key, value))
        scale = query.shape[-1] ** -0.5
        for row in range(len(query)):
            of_value[row] = weights[row].mT @ gradient[row]
            of_weights = gradient[row] @ value[row].mT
            # Softmax's own backward pass: sums of weights that are rounded alike cancel better than the gradient's.
            of_scores = torch.ops.aten._softmax_backward_data(of_weights, weights[row], -1, weights.dtype)
            of_scores *= scale
            of_query[row] = of_scores @ key[row]
            of_key[row] = of_scores.mT @ query[row]
        return of_query, of_key, of_value, None
