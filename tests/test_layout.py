"""Where the numbers lie in memory: strides, views, alignment, and sizes beyond 16 and 32 bits."""

import os

import pytest
import torch
from conftest import check_o
from reference import attention


def misaligned(t, by=1):
    """The same values, beginning `by` elements behind an aligned address."""
    storage = torch.empty(t.numel() + by, dtype=t.dtype, device=t.device)
    return storage[by:].view(t.shape).copy_(t)


def tokens_first(t):
    """The same values in (B, N, H, d) storage, as a linear layer returns them."""
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def heads_last(t):
    return t.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)


def rows_apart(t, by=1):
    """A slice of wider rows: the row stride is d + by."""
    return torch.cat([t, torch.full_like(t[..., :by], torch.nan)], dim=-1)[..., : t.shape[-1]]


def every_second(t):
    """Every second batch, head and row of a tensor that is NaN elsewhere."""
    B, H, N, d = t.shape
    storage = torch.full((2 * B, 2 * H, 2 * N, d), torch.nan, dtype=t.dtype, device=t.device)
    storage[::2, ::2, ::2] = t
    return storage[::2, ::2, ::2]


def column_major(t):
    """The last dimension isn't contiguous: copied once."""
    return t.mT.contiguous().mT


def every_second_column(t):
    return t.repeat_interleave(2, dim=-1)[..., ::2]


LAYOUTS = [
    misaligned,
    tokens_first,
    heads_last,
    rows_apart,
    every_second,
    column_major,
    every_second_column,
    lambda t: misaligned(t, 2),
    lambda t: misaligned(t, 4),
    lambda t: rows_apart(t, 8),
    lambda t: misaligned(rows_apart(t, 3).contiguous(), 3),
]


@pytest.mark.parametrize("d", [40, 64, 65])
@pytest.mark.parametrize("layout", LAYOUTS, ids=range(len(LAYOUTS)))
def test_layouts(backend, dtype, layout, d):
    tensors = backend.qkv(d=d, dtype=dtype)
    for which in (0,), (1,), (2,), (0, 1, 2):
        backend.check(*(layout(t) if n in which else t for n, t in enumerate(tensors)), causal=True)


def test_one_tensor_for_all(backend, dtype):
    """The usual fused projection: q, k and v are slices of one tensor."""
    qkv = backend.randn(2, 70, 3, 4, 64, dtype=dtype)
    backend.check(*(t.transpose(1, 2) for t in qkv.unbind(2)), causal=True)
    x = backend.randn(2, 2, 70, 64, dtype=dtype)
    backend.check(x, x, x)


def test_overlapping_rows(backend, dtype):
    """Windows over one row of memory, aligned or not; and what is both expanded and unaligned."""
    for step, start in (8, 0), (8, 3), (5, 0):
        q, k, v = (
            t.flatten()[start:].as_strided((2, 4, 70, 64), (64, 128, step, 1))
            for t in backend.qkv(B=4, Hq=4, Hkv=4, dtype=dtype)
        )
        backend.check(q, k, v, causal=True)
    q, k, v = backend.qkv(d=65, dtype=dtype)
    backend.check(q[..., 1:], *(t[:1, :1, :, 1:].expand(2, 4, 90, 64) for t in (k, v)))


def test_expanded(backend, dtype):
    """Stride 0: one prefix of keys for all batches, one head for all, one key for all, one query for all."""
    q, k, v = backend.qkv(dtype=dtype)
    k1, v1 = (t[:1].expand_as(t) for t in (k, v))
    backend.check(q, k1, v1, causal=True)
    k1, v1 = (t[:, :1].expand_as(t) for t in (k, v))
    backend.check(q, k1, v1, causal=True)
    k1, v1, q1 = (t[:, :, :1].expand_as(t) for t in (k, v, q))
    backend.check(q1, k1, v1, causal=True)
    backend.check(q[:1, :1, :1].expand_as(q), k, v, causal=True)
    k1, v1, q1 = (t[..., :1].expand_as(t) for t in (k, v, q))
    # Channels that are all the same round all the same way, which adds up: so let the scores be small.
    backend.check(q1, k1, v1, causal=True, softmax_scale=1 / 640)


def test_lengths_and_state_need_not_be_contiguous(backend):
    q, k, v = backend.qkv(B=3)
    counts = backend.ints(50, 0, 20, 0, 90, 0)
    backend.check(q, k, v, seqlens_k=counts[::2], leftpad_k=backend.ints(7).expand(3))
    backend.check(q, k, v, offset=counts[::2])
    o, l, m = state = backend.forward(q, k, v, return_state=True)
    expected = backend.forward(q, k, v, state=state)
    turned = tokens_first(o), l.mT.contiguous().mT, rows_apart(m)
    shifted = column_major(o), misaligned(l), m
    for state in turned, shifted:
        assert all(map(torch.equal, backend.forward(q, k, v, state=state), expected))


def test_one_token_with_a_gap(backend, dtype):
    """The only row's numbers are two apart: the last stride counts however few rows there are."""
    q, k, v = (backend.randn(2, 2, 1, 80, dtype=dtype)[..., ::2] for _ in range(3))
    backend.check(q, k, v)


@pytest.mark.parametrize("return_state", [False, True])
def test_o_has_the_stride_order_of_q(backend, dtype, return_state):
    q, k, v = backend.qkv(B=3, Nq=50, dtype=dtype)

    def o(q):
        results = backend.forward(q, k, v, return_state=return_state)
        return results[0] if return_state else results

    assert o(q).is_contiguous()
    assert o(tokens_first(q)).transpose(1, 2).is_contiguous()
    assert o(heads_last(q)).permute(2, 0, 1, 3).is_contiguous()
    # Dense where q isn't, too; one token or one head leaves the order open.
    wide = backend.randn(3, 50, 4, 72, dtype=dtype).transpose(1, 2)
    assert o(wide[..., :64]).transpose(1, 2).is_contiguous()
    views = [
        q[:1].expand_as(q),
        q[:, :1].expand_as(q),
        q[:, :, :1].expand_as(q),
        column_major(q),
        every_second(q),
    ]
    for view in [*views, tokens_first(q)[:, :1], tokens_first(q)[:, :, :1], tokens_first(q)[:1]]:
        k, v = (t[: view.shape[0], : view.shape[1]] for t in (k, v))
        result = o(view)
        assert result.shape == view.shape and result.stride(-1) == 1
        assert result.untyped_storage().nbytes() == result.numel() * result.element_size()


def test_inputs_are_not_modified(backend, dtype):
    q, k, v = backend.qkv(dtype=dtype)
    inputs = [q, k, v, backend.ints(50, 90), backend.ints(3, -4), backend.ints(5, 6)]
    inputs += backend.forward(q, k, v, return_state=True)
    before = [t.clone() for t in inputs]
    q, k, v, seqlens_k, leftpad_k, offset, *state = inputs
    options = dict(seqlens_k=seqlens_k, leftpad_k=leftpad_k, offset=offset, causal=True)
    results = backend.forward(q, k, v, **options, state=tuple(state))
    assert all(map(torch.equal, inputs, before))
    assert not {t.data_ptr() for t in results} & {t.data_ptr() for t in inputs}


@pytest.mark.parametrize("B, Hq, Hkv", [(1, 70_000, 70_000), (1, 70_000, 1), (70_000, 1, 1), (300, 300, 150)])
def test_more_than_65535_heads(backend, dtype, B, Hq, Hkv):
    backend.check(*backend.qkv(B=B, Hq=Hq, Hkv=Hkv, Nq=2, Nk=3, d=4, dtype=dtype))


def free_bytes(device):
    if device.type == "cuda":
        return torch.cuda.mem_get_info()[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("dimension", [0, 1, 2])
def test_strides_beyond_32_bits(backend, dimension):
    """The last batch, head or row begins more than 2^31 elements behind the first; the rest is unused."""
    elements = 2**31 + 2**20
    if free_bytes(backend.device) < 3 * 2 * elements:
        pytest.skip("too little memory for 2^31 elements")
    torch.utils.deterministic.fill_uninitialized_memory = False  # the CPU has only to provide what is used
    shape = [2, 2, 33, 8]
    strides = [33 * 2 * 8, 33 * 8, 8, 1]
    strides[dimension] = 2**31 // (shape[dimension] - 1) + 64
    storage = torch.empty(elements, dtype=torch.float16, device=backend.device)
    far = storage.as_strided(shape, strides)
    for which in range(3):
        tensors = list(backend.qkv(Hq=2, Nq=33, Nk=33, d=8, dtype=torch.float16))
        tensors[which] = far.copy_(tensors[which])
        backend.check(*tensors, causal=True)


def test_tensors_beyond_32_bits(cuda_backend):
    """q and o hold more than 2^31 elements; rows from both ends and around the limit are compared."""
    backend, d = cuda_backend, 64
    Nq = 2**31 // d + 300
    if free_bytes(backend.device) < 3 * 2 * Nq * d:
        pytest.skip("too little memory for 2^31 elements, twice")
    torch.utils.deterministic.fill_uninitialized_memory = False  # it would be 4 GB more to write
    k, v = (backend.randn(1, 1, 5, d, dtype=torch.float16) for _ in range(2))
    q = torch.empty(1, 1, Nq, d, dtype=torch.float16, device=backend.device)
    rows = [slice(0, 2), slice(2**31 // d - 2, 2**31 // d + 2), slice(Nq - 2, Nq)]
    for some in rows:
        q[:, :, some] = backend.randn(1, 1, some.stop - some.start, d, dtype=torch.float16)
    o = backend.forward(q, k, v)
    for some in rows:
        check_o(o[:, :, some], attention(q[:, :, some], k, v), torch.float16)


def test_keys_beyond_32_bits(cuda_backend):
    backend, d = cuda_backend, 128
    Nk = 2**31 // d + 77
    if free_bytes(backend.device) < 3 * 2 * Nk * d:
        pytest.skip("too little memory for 2^31 elements")
    torch.utils.deterministic.fill_uninitialized_memory = False
    k = torch.zeros(1, 1, Nk, d, dtype=torch.float16, device=backend.device)
    q, end, _ = backend.qkv(B=1, Hq=1, Hkv=1, Nq=3, Nk=200, d=d, dtype=torch.float16)
    k[:, :, -200:] = end
    o = backend.forward(q, k, k, window_size=(150, 0))
    check_o(o, attention(q, end, end, window_size=(150, 0)), torch.float16)
