"""Plain attention: how exact it is, for every dtype, length, head dimension and ratio of heads."""

import pytest
import torch
from conftest import ERROR_BOUND
from reference import attention, relative_error
from torch.nn.functional import scaled_dot_product_attention

import minimal_attn


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("N", [9, 100, 512, 1024])
def test_error(backend, dtype, N, d, causal):
    """Within the bound, and never more than 1.2 times the error of SDPA."""
    q, k, v = backend.qkv(B=1 + 2048 // N, Hq=2, Hkv=2, Nq=N, Nk=N, d=d, dtype=dtype)
    expected = attention(q, k, v, causal=causal).o
    error = relative_error(backend.forward(q, k, v, causal=causal), expected)
    assert error <= ERROR_BOUND[dtype]
    peers_error = relative_error(scaled_dot_product_attention(q, k, v, is_causal=causal), expected)
    assert error <= 1.2 * peers_error


def test_error_of_many_keys(backend, dtype):
    q, k, v = backend.qkv(B=1, Hq=2, Hkv=1, Nq=128, Nk=8192, dtype=dtype)
    expected = attention(q, k, v).o
    error = relative_error(backend.forward(q, k, v), expected)
    assert error <= ERROR_BOUND[dtype]
    peers_error = relative_error(scaled_dot_product_attention(q, k, v, enable_gqa=True), expected)
    assert error <= 1.2 * peers_error


@pytest.mark.parametrize("d", [1, 2, 7, 8, 31, 40, 64, 80, 96, 127, 128, 129, 160, 192, 255, 256])
def test_head_dimension(backend, dtype, d):
    backend.check(*backend.qkv(d=d, dtype=dtype))
    backend.check(*backend.qkv(d=d, dtype=dtype, Nq=17, Nk=130), causal=True)


@pytest.mark.parametrize("Nk", [0, 1, 2, 15, 31, 32, 33, 64, 65, 127, 128, 129, 257])
def test_lengths(backend, dtype, Nk):
    for Nq in (0, 1, 3, 31, 32, 33, 64, 100, 128, 129, 200):
        q, k, v = backend.qkv(B=1, Hq=2, Hkv=2, Nq=Nq, Nk=Nk, d=32, dtype=dtype)
        backend.check(q, k, v)
        backend.check(q, k, v, causal=True)


@pytest.mark.parametrize("Hq, Hkv", [(1, 1), (3, 1), (6, 3), (8, 2), (5, 5), (32, 8)])
def test_heads(backend, dtype, Hq, Hkv):
    backend.check(*backend.qkv(Hq=Hq, Hkv=Hkv, dtype=dtype, d=40), causal=True)


@pytest.mark.parametrize(
    "B, Hq, Hkv, Nq", [(0, 2, 2, 5), (2, 2, 2, 0), (1, 0, 1, 5), (0, 0, 1, 0), (1, 0, 0, 3)]
)
def test_nothing_to_compute(backend, dtype, B, Hq, Hkv, Nq):
    q, k, v = backend.qkv(B=B, Hq=Hq, Hkv=Hkv, Nq=Nq, dtype=dtype)
    if Hkv:
        backend.check(q, k, v)
    assert backend.forward(q, k, v).shape == q.shape


@pytest.mark.parametrize("scale", [0, 0.0, -0.3, 1, 1e-30, -1e-6, 0.7])
def test_softmax_scale(backend, dtype, scale):
    backend.check(*backend.qkv(dtype=dtype, d=16), softmax_scale=scale)


@pytest.mark.parametrize("scale", [1e6, -1e6, 1e30, -3e35])
def test_huge_softmax_scale(backend, dtype, scale):
    """Only the largest scores count: small whole numbers times the scale, so that ties are exact."""
    q, k = (backend.integers(-2, 2, 2, 2, N, 16, dtype=dtype) for N in (50, 90))
    v = backend.randn(2, 2, 90, 16, dtype=dtype)
    backend.check(q, k, v, softmax_scale=scale)


def test_auto_chooses_a_backend(backend):
    q, k, v = backend.qkv()
    torch.testing.assert_close(minimal_attn.forward(q, k, v), backend.forward(q, k, v))


def test_same_bits_on_every_run(backend, dtype):
    q, k, v = backend.qkv(B=3, Hq=4, Nq=300, Nk=700, dtype=dtype)
    first = backend.forward(q, k, v, causal=True, return_state=True)
    for _ in range(5):
        again = backend.forward(q, k, v, causal=True, return_state=True)
        assert all(map(torch.equal, first, again))


def test_scale_of_the_whole_sum(backend):
    """Parts of q.k times the scale are beyond float32, q.k times the scale isn't."""
    q = torch.ones(1, 1, 1, 32, device=backend.device)
    k = torch.cat([q[..., :16], -q[..., 16:]], dim=-1)
    torch.testing.assert_close(backend.forward(q, k, q, softmax_scale=1e38), q, rtol=0, atol=0)
