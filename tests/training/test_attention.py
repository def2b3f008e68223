"""Attention against the formula in float64, and against torch's own kernel."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from training import attention
from training.attention import attend

SHAPES = {"square": (3, 4, 33, 33), "fewer queries": (2, 2, 5, 64), "two keys": (1, 1, 1, 2)}
"""Rows, heads, queries, keys."""


def tensors(shape: tuple[int, int, int, int], spread: float = 1.0) -> list[Tensor]:
    """Queries, keys, values and the gradient of the result, in bfloat16, laid out as the model's are."""
    rows, heads, queries, keys = shape
    generator = torch.Generator().manual_seed(0)
    lengths = (queries, keys, keys, queries)
    drawn = [torch.randn(rows, length, heads, 16, generator=generator) for length in lengths]
    drawn[0] *= spread
    return [tensor.bfloat16().transpose(1, 2) for tensor in drawn]


def padding_mask(shape: tuple[int, int, int, int]) -> Tensor:
    rows, _, _, keys = shape
    lengths = torch.arange(keys, keys - rows, -1)
    return (torch.arange(keys) < lengths[:, None])[:, None, None, :]


def plain_attention(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None) -> Tensor:
    scores = query @ key.mT / query.shape[-1] ** 0.5
    if key_mask is not None:
        scores = scores.masked_fill(~key_mask, -torch.inf)
    return scores.softmax(-1) @ value


def result_and_gradients(function, inputs: list[Tensor], gradient: Tensor) -> list[Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    result = function(*leaves)
    result.backward(gradient)
    return [result.detach(), *(leaf.grad for leaf in leaves)]


def errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [float((here - there).norm() / there.norm()) for here, there in zip(found, exact, strict=True)]


@pytest.mark.parametrize("masked", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("spread", [1.0, 8.0])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_result_and_gradients_are_as_near_to_float64_as_those_of_torchs_kernel(shape, spread, masked):
    *inputs, gradient = tensors(shape, spread)
    mask = padding_mask(shape) if masked else None
    exact = result_and_gradients(
        lambda *leaves: plain_attention(*leaves, mask), [tensor.double() for tensor in inputs], gradient.double()
    )
    found = result_and_gradients(lambda *leaves: attend(*leaves, mask, 0.0), inputs, gradient)
    theirs = result_and_gradients(
        lambda *leaves: F.scaled_dot_product_attention(*leaves, attn_mask=mask), inputs, gradient
    )
    assert all(tensor.dtype == torch.bfloat16 for tensor in found)
    for name, error, their_error in zip("oqkv", errors(found, exact), errors(theirs, exact), strict=True):
        assert error <= 1.5 * their_error + 1e-3, name


@pytest.mark.parametrize("reason", ["float32", "dropout", "memory"])
def test_torchs_kernel_is_taken_where_keeping_the_weights_does_not_pay(monkeypatch, reason):
    *inputs, _ = tensors((2, 2, 8, 8))
    if reason == "float32":
        inputs = [tensor.float() for tensor in inputs]
    dropout = 0.5 if reason == "dropout" else 0.0
    if reason == "memory":
        monkeypatch.setattr(attention, "KEPT_BYTES", 2 * 2 * 8 * 8 * 2 - 1)
    monkeypatch.setattr(attention._KeptWeights, "apply", lambda *_: pytest.fail("its own function was called"))
    torch.manual_seed(0)
    found = attend(*inputs, None, dropout)
    torch.manual_seed(0)
    assert torch.equal(found, F.scaled_dot_product_attention(*inputs, dropout_p=dropout))
