"""Head dimensions d and d_v from 257 to 512 (Gemma, SAM). Values and gradients against float64."""

import pytest
import torch
from test_backward import check
from test_cu_seqlens import drawn, lengths_of_self

SHAPES = [  # B, Hq, Hkv, Nq, Nk, d, d_v
    (2, 4, 2, 70, 150, 512, 512),
    (1, 2, 1, 200, 170, 320, 320),
    (1, 2, 2, 33, 90, 257, 257),
    (1, 2, 1, 150, 130, 512, 100),
    (1, 2, 1, 70, 90, 64, 400),
    (1, 4, 1, 3, 300, 288, 256),
    (3, 4, 1, 1, 400, 512, 512),
]


def kernel_reached(backend, q, k, v, **options):
    """Half types have kernels of portable, if a block may have enough memory; else paper computes on GPUs."""
    for backward in False, True:
        kernel = backend.explain(q, k, v, backward=backward, **options).kernel
        if backend.name in ("hopper", "portable"):
            memory = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
            is_fast = q.dtype != torch.float32 and (memory >= 201 << 10 or not backward)
            assert kernel.startswith("half" if is_fast else "Algorithm")


@pytest.mark.parametrize("options", [{}, dict(causal=True), dict(window_size=(30, 5), softcap=3.0)], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(backend, dtype, shape, options):
    B, Hq, Hkv, Nq, Nk, d, d_v = shape
    q, k, _ = backend.qkv(B, Hq, Hkv, Nq, Nk, d, dtype=dtype)
    v, do = backend.randn(B, Hkv, Nk, d_v, dtype=dtype), backend.randn(B, Hq, Nq, d_v, dtype=dtype)
    kernel_reached(backend, q, k, v, **options)
    backend.check(q, k, v, **options)
    check(backend, do, q, k, v, **options)


def test_masks(backend, dtype):
    q, k, v = backend.qkv(Nq=70, Nk=90, d=300, dtype=dtype)
    for options in (
        dict(seqlens_k=backend.ints(33, 0), causal=True, sinks=backend.randn(4)),
        dict(leftpad_k=backend.ints(70, 12), window_size=(9, 3), prefix_k=backend.ints(4, 40)),
        dict(softmax_scale=1.5),
    ):
        if "softmax_scale" not in options:
            backend.check(q, k, v, **options)
        check(backend, torch.randn_like(q), q, k, v, **options)


def test_documents(backend, dtype):
    qkv, options = drawn(backend, lengths_of_self, dtype, d=400, front=3, behind=4, causal=True)
    backend.check(*qkv, **options)
    check(backend, torch.randn_like(qkv[0]), *qkv, **options)


def test_a_nan_of_another_document(backend, dtype):
    """It reaches no row of o, in none of the columns."""
    q, k, v = backend.qkv(1, 2, 2, 100, 100, 512, dtype=dtype)
    cu = backend.ints(0, 45, 100)
    expected = backend.forward(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu)
    v[:, :, 50, 3] = v[:, :, 50, 400] = torch.nan
    o = backend.forward(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu)
    torch.testing.assert_close(o[:, :, :45], expected[:, :, :45], rtol=2e-2, atol=2e-2)
    assert o[:, :, 45:, [3, 400]].isnan().all()


def test_a_nan_behind_a_row(backend, dtype):
    """Rows skip tiles of keys on their own where paper computes: what row 0 has met says nothing of row 1."""
    q, k, v = backend.qkv(1, 2, 2, 40, 130, 320, dtype=dtype)
    ranges = torch.stack([backend.ints(*[100, 0] * 20), backend.ints(*[110, 8] * 20)], -1)[None]
    expected = backend.forward(q, k, v, key_ranges=ranges)
    v[:, :, 9] = torch.nan
    o = backend.forward(q, k, v, key_ranges=ranges)
    torch.testing.assert_close(o, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("Nq", [1, 70])
@pytest.mark.parametrize("d, d_v", [(512, 512), (64, 400), (320, 512)])
def test_pages(backend, dtype, Nq, d, d_v):
    """Of two caches, and where no kernel reads pages."""
    q, _, _ = backend.qkv(2, 4, 2, Nq, 1, d, dtype=dtype)
    k, v = (backend.randn(30, 2, 16, n, dtype=dtype) for n in (d, d_v))
    table = torch.randperm(30, device=backend.device)[:20].view(2, 10).int()
    whole = [x[table.long()].transpose(1, 2).flatten(2, 3) for x in (k, v)]
    options = dict(seqlens_k=backend.ints(137, 160), causal=True)
    expected = backend.forward(q, *whole, **options)
    o = backend.forward(q, k, v, block_table=table, **options)
    torch.testing.assert_close(o, expected, rtol=2e-2, atol=2e-2)


def test_states(backend, dtype):
    q, k, v = backend.qkv(d=512, dtype=dtype)
    state = backend.forward(q, k[:, :, :33], v[:, :, :33], return_state=True)
    o, l, m = backend.forward(q, k[:, :, 33:], v[:, :, 33:], state=state)
    whole, lse = backend.forward(q, k, v, return_lse=True)
    torch.testing.assert_close(o.to(dtype), whole, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(m + l.log(), lse, rtol=1e-4, atol=1e-4)
