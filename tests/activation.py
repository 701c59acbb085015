"""What the tests of F.scaled_dot_product_attention and of activate() share."""

import pytest
import torch
from conftest import ERROR_BOUND
from torch import nn
from torch.nn import functional as F

import minimal_attn

HAS_REGISTRY = hasattr(nn.attention, "restore_flash_attention_impl")


def check(actual, expected, dtype, factor=3.0):
    """`expected` is of float64; every row within what rounding explains, as far as values don't cancel."""
    assert actual.dtype == dtype and actual.shape == expected.shape
    error = (actual.double() - expected).norm() / expected.norm()
    assert error <= factor * ERROR_BOUND[dtype], error


def active_name():
    return nn.attention.current_flash_attention_impl() if HAS_REGISTRY else None


@pytest.fixture(autouse=True)
def ends_inactive():
    yield
    assert active_name() is None
    before = dict(minimal_attn._C.sdpa_calls())
    q = torch.zeros(1, 1, 2, 8)
    F.scaled_dot_product_attention(q, q, q)
    assert dict(minimal_attn._C.sdpa_calls()) == before


def heads(randn, dtype, Nq=50, Nk=70, d=64):
    return randn(2, 4, Nq, d, dtype=dtype), randn(2, 4, Nk, d, dtype=dtype), randn(2, 4, Nk, d, dtype=dtype)


def left_to_pytorch(randn):
    """A call that reaches our operators and leaves them, and why."""
    q, k, v = heads(randn, torch.float32)
    if q.is_cuda:
        mask = randn(50, 70)
        return "PyTorch: attn_mask is given", lambda: F.scaled_dot_product_attention(q, k, v, mask)
    q, k, v = (x.double() for x in (q, k, v))
    why = "PyTorch: the dtype is not float32, float16 or bfloat16"
    return why, lambda: F.scaled_dot_product_attention(q, k, v)


def passed_on(randn):
    """Calls of the function that PyTorch's kernels serve: (why, tensors, options)."""
    q = randn(2, 4, 5, 8)
    wide = randn(2, 4, 5, 520)
    return [
        *([("attn_mask is given", (q[0], q[0], q[0], randn(5, 5)), {})] if q.is_cuda else []),
        *([("dropout_p is not 0", (q, q, q), {"dropout_p": 0.3})] if q.is_cuda else []),
        ("dtype", (q.double(),) * 3, {}),
        ("head dimension", (wide,) * 3, {}),
        ("head dimension", (q, q, wide), {}),
        (None, (q, q, wide.requires_grad_()), {}),  # two reasons on a GPU
        ("empty", (q, q[:, :, :0], q[:, :, :0]), {}),
        ("empty", (q[:0],) * 3, {}),
        ("class", (q.as_subclass(type("Own", (torch.Tensor,), {})), q, q), {}),
    ]
