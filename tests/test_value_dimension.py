"""v and o with a head dimension d_v of their own (DeepSeek). Values and gradients against float64."""

import pytest
import torch
from conftest import check_o
from reference import attention
from test_backward import check, forms
from test_cu_seqlens import lengths_of_cross, lengths_of_self
from test_paged import Paged

import minimal_attn
from minimal_attn import flash_attn, second_order

SHAPES = [  # B, Hq, Hkv, Nq, Nk, d, d_v
    (2, 4, 2, 130, 200, 192, 128),
    (1, 2, 1, 300, 300, 192, 128),
    (2, 4, 2, 130, 200, 128, 192),
    (1, 4, 4, 70, 90, 64, 32),
    (1, 4, 1, 70, 90, 32, 64),
    (1, 2, 2, 200, 170, 96, 200),
    (1, 2, 1, 90, 190, 256, 40),
    (1, 2, 1, 90, 190, 160, 120),
    (2, 2, 2, 33, 70, 7, 5),
    (2, 2, 2, 33, 70, 5, 70),
    (1, 2, 2, 80, 80, 129, 1),
    (1, 1, 1, 1100, 1100, 192, 96),  # one head: hopper splits tiles of keys
    (2, 8, 2, 1, 700, 192, 128),
    (2, 8, 2, 3, 2100, 64, 128),
    (3, 6, 1, 1, 400, 80, 24),
]


def drawn(backend, shape, dtype):
    """q, k, v and a gradient in o."""
    B, Hq, Hkv, Nq, Nk, d, d_v = shape
    q, k, _ = backend.qkv(B, Hq, Hkv, Nq, Nk, d, dtype=dtype)
    return q, k, backend.randn(B, Hkv, Nk, d_v, dtype=dtype), backend.randn(B, Hq, Nq, d_v, dtype=dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(backend, dtype, shape):
    q, k, v, do = drawn(backend, shape, dtype)
    for options in {}, dict(causal=True), dict(window_size=(40, 7), softmax_scale=-0.1):
        backend.check(q, k, v, **options)
        for _ in forms(backend, dtype):
            check(backend, do, q, k, v, **options)


MASKS = {
    "lengths": lambda b: dict(seqlens_k=b.ints(33, 0), causal=True),
    "left padding": lambda b: dict(leftpad_k=b.ints(70, 12), seqlens_k=b.ints(80, 90)),
    "ranges": lambda b: dict(key_ranges=torch.sort(b.integers(0, 90, 2, 70, 2).long(), -1).values),
    "prefix_k": lambda b: dict(window_size=(9, 3), prefix_k=b.ints(4, 40)),
    "softcap": lambda b: dict(softcap=1.5, causal=True),
    "sinks": lambda b: dict(sinks=b.randn(4), causal=True),
}


@pytest.mark.parametrize("d, d_v", [(192, 128), (40, 96)])
@pytest.mark.parametrize("mask", MASKS)
def test_masks(backend, dtype, mask, d, d_v):
    q, k, v, do = drawn(backend, (2, 4, 2, 70, 90, d, d_v), dtype)
    options = MASKS[mask](backend)
    backend.check(q, k, v, **options)
    check(backend, do, q, k, v, **options)


@pytest.mark.parametrize("d, d_v", [(192, 128), (40, 96)])
def test_gradients_at_large_scores(backend, dtype, d, d_v):
    q, k, v, do = drawn(backend, (2, 4, 2, 70, 90, d, d_v), dtype)
    check(backend, do, q, k, v, softmax_scale=3.0)


@pytest.mark.parametrize("d, d_v", [(192, 128), (40, 96)])
@pytest.mark.parametrize("make", [lengths_of_self, lengths_of_cross])
def test_documents(backend, dtype, make, d, d_v):
    cu = [torch.tensor([3, *n]).cumsum(0).to(backend.device) for n in make(backend)]
    q, k, v, do = drawn(backend, (1, 4, 2, int(cu[0][-1]) + 4, int(cu[1][-1]) + 4, d, d_v), dtype)
    options = dict(cu_seqlens_q=cu[0], cu_seqlens_k=cu[1], causal=True)
    backend.check(q, k, v, **options)
    check(backend, do, q, k, v, **options)


@pytest.mark.parametrize("d, d_v", [(192, 128), (40, 96)])
@pytest.mark.parametrize("Nq", [1, 70])
def test_pages(backend, dtype, Nq, d, d_v):
    cache = Paged(backend, d=d, dtype=dtype)
    values = backend.randn(*cache.k.shape[:3], d_v, dtype=dtype)
    values.masked_fill_(cache.k[..., :1].isnan(), torch.nan)
    q = backend.randn(3, 4, Nq, d, dtype=dtype)
    o = backend.forward(q, cache.k, values, causal=True, **cache.options())
    table = cache.table.long().clamp(0, len(cache.k) - 1)
    k, v = (x[table].transpose(1, 2).flatten(2, 3) for x in (cache.k, values))
    check_o(o, attention(q, k, v, causal=True, seqlens_k=cache.lengths), dtype)


def test_few_queries_by_sequence(backend, dtype):
    lengths, n = [500, 1, 130, 1100], 4
    cu_q = torch.arange(n + 1, device=backend.device, dtype=torch.int32)
    cu_k = torch.tensor([0, *lengths], device=backend.device).cumsum(0)
    q, k, v, _ = drawn(backend, (1, 8, 2, n, sum(lengths), 192, 128), dtype)
    backend.check(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True)


def test_states_and_out(backend, dtype):
    q, k, v, do = drawn(backend, (2, 4, 2, 70, 90, 72, 40), dtype)
    expected = attention(q, k, v)
    state = backend.forward(q, k[:, :, :33], v[:, :, :33], return_state=True)
    assert state[0].shape == (2, 4, 70, 40)
    check_o(backend.forward(q, k[:, :, 33:], v[:, :, 33:], state=state)[0], expected, dtype)
    transposed = q.transpose(1, 2).contiguous().transpose(1, 2)
    o = backend.forward(transposed, k, v)
    assert o.transpose(1, 2).is_contiguous()
    out = torch.empty_like(o)
    assert backend.forward(q, k, v, out=out) is out
    check_o(out, expected, dtype)


def test_widths_are_their_own(backend):
    """Some columns of v give the same columns of o."""
    q, k, v, _ = drawn(backend, (1, 2, 2, 100, 120, 64, 64), torch.float32)
    whole = backend.forward(q, k, v)
    for d_v in 8, 40:
        narrow = backend.forward(q, k, v[..., :d_v])
        torch.testing.assert_close(narrow, whole[..., :d_v], rtol=1e-5, atol=1e-6)


def test_kernel_of_its_own(backend, dtype):
    """hopper has tiles for V of 128 columns beside K of 192."""
    if backend.name != "hopper" or dtype == torch.float32:
        pytest.skip("a kernel of hopper")
    q, k, v, _ = drawn(backend, (1, 2, 2, 300, 300, 192, 128), dtype)
    for backward in False, True:
        narrow, square = (backend.explain(q, k, x, backward=backward) for x in (v, k))
        assert narrow.d == square.d == 192 and narrow.shared_memory != square.shared_memory


def test_flash_attn(backend, dtype):
    q, k, v, _ = drawn(backend, (2, 4, 2, 70, 90, 192, 128), dtype)
    o = flash_attn.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)
    assert o.shape == (2, 70, 4, 128)
    check_o(o.transpose(1, 2), attention(q, k, v, causal=True), dtype)


def test_second_order(backend):
    q, k, v, _ = (x.requires_grad_() for x in drawn(backend, (1, 2, 1, 5, 7, 6, 3), torch.float32))
    o = second_order.forward(q, k, v, causal=True)
    check_o(o, attention(q, k, v, causal=True), torch.float32)
    [dq] = torch.autograd.grad(o.square().sum(), q, create_graph=True)
    twice = torch.autograd.grad(dq.square().sum(), (q, k, v))
    o64 = attention(*(x.double() for x in (q, k, v)), causal=True).o
    [dq64] = torch.autograd.grad(o64.square().sum(), q, create_graph=True)
    for x, y in zip(twice, torch.autograd.grad(dq64.square().sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(x, y.float(), rtol=1e-3, atol=1e-4)


def test_flops(backend):
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v, do = drawn(backend, (2, 4, 2, 70, 90, 24, 16), torch.float32)
    q.requires_grad_()
    with FlopCounterMode(display=False) as forward:
        o = minimal_attn.forward(q, k, v)
    assert forward.get_total_flops() == 2 * 2 * 4 * 70 * 90 * (24 + 16)
    with FlopCounterMode(display=False) as backward:
        o.backward(do)
    assert backward.get_total_flops() == 2 * 2 * 4 * 70 * 90 * (3 * 24 + 2 * 16)
