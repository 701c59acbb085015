"""What forward returns besides o: the log-sum-exp, o in a given tensor; sinks; lengths of any integer."""

import pytest
import torch
from conftest import check_l_m, check_lse, check_o
from reference import attention

BANDS = [
    {},
    {"causal": True},
    {"causal": True, "offset": -20},
    {"window_size": (40, 30), "offset": 9},
    {"softmax_scale": -0.1},
]
HALF_DTYPES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("d", [64, 35, 128])
def test_lse(backend, dtype, band, d):
    """-inf where a row sees no key."""
    q, k, v = backend.qkv(d=d, dtype=dtype)
    expected = attention(q, k, v, **band)
    o, lse = backend.forward(q, k, v, return_lse=True, **band)
    assert o.dtype == dtype
    check_o(o, expected, dtype)
    check_lse(lse, expected)


def test_lse_of_chunks(backend, dtype):
    """With a state it is the log-sum-exp of all keys."""
    q, k, v = backend.qkv(dtype=dtype)
    state = backend.forward(q, k[:, :, :31], v[:, :, :31], return_state=True)
    o, lse = backend.forward(q, k[:, :, 31:], v[:, :, 31:], state=state, return_lse=True)
    expected = attention(q, k, v)
    assert o.dtype == dtype
    check_o(o, expected, dtype)
    check_lse(lse, expected)


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
@pytest.mark.parametrize("Nq", [1, 40, 150])
@pytest.mark.parametrize("d", [37, 64, 80, 128, 192, 256])
def test_lse_changes_no_bit_of_o(backend, dtype, Nq, d):
    """Of half types, in every tile: the kernel stores o as it does without lse."""
    q, k, v = backend.qkv(Nq=Nq, Nk=300, d=d, dtype=dtype)
    band = {"causal": True, "offset": backend.random.randint(-150, 150)}
    assert backend.explain(q, k, v, return_lse=True, **band) == backend.explain(q, k, v, **band)
    o, lse = backend.forward(q, k, v, return_lse=True, **band)
    assert torch.equal(o, backend.forward(q, k, v, **band))
    check_lse(lse, attention(q, k, v, **band))


def test_lse_of_large_scores(backend, dtype):
    """Where kernels subtract m before the scaling. Scores are exact."""
    q, k, v = (t.round() for t in backend.qkv(Nk=300, dtype=dtype))
    _, lse = backend.forward(q, k, v, softmax_scale=512.0, return_lse=True)
    check_lse(lse, attention(q, k, v, softmax_scale=512.0))


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_lse_needs_no_other_memory(cuda_backend, dtype):
    q, k, v = cuda_backend.qkv(Nq=1000, dtype=dtype)
    workspace = cuda_backend.explain(q, k, v, return_lse=True).workspace
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    o, lse = cuda_backend.forward(q, k, v, return_lse=True)
    in_blocks = sum((size + 511) // 512 * 512 for size in (o.nbytes, lse.nbytes, workspace))
    assert torch.cuda.max_memory_allocated() - before <= in_blocks


@pytest.mark.parametrize("Nq, Nk", [(0, 5), (5, 0), (1, 1)])
def test_lse_of_few_tokens(backend, dtype, Nq, Nk):
    q, k, v = backend.qkv(Nq=Nq, Nk=Nk, dtype=dtype)
    o, lse = backend.forward(q, k, v, return_lse=True)
    expected = attention(q, k, v)
    check_o(o, expected, dtype)
    check_lse(lse, expected)


@pytest.mark.parametrize("sinks_dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_sinks(backend, dtype, band, sinks_dtype):
    """A score more in each row, that isn't scaled and whose value is 0."""
    q, k, v = backend.qkv(B=3, Nq=backend.random.choice([1, 40, 130]), dtype=dtype)
    sinks = 3 * backend.randn(*backend.random.choice([(4,), (3, 4)]), dtype=sinks_dtype)
    sinks[..., 1], sinks[..., 2] = -torch.inf, 5  # none, and one that outweighs most keys
    expected = attention(q, k, v, sinks=sinks, **band)
    o = backend.check(q, k, v, sinks=sinks, **band)
    again, lse = backend.forward(q, k, v, sinks=sinks, return_lse=True, **band)
    assert torch.equal(o, again)
    check_lse(lse, expected)


def test_sinks_count_once_in_chunks(backend, dtype):
    q, k, v = backend.qkv(dtype=dtype)
    sinks = backend.randn(4)
    state = backend.forward(q, k[:, :, :31], v[:, :, :31], sinks=sinks, return_state=True)
    o, l, m = backend.forward(q, k[:, :, 31:], v[:, :, 31:], state=state)
    expected = attention(q, k, v, sinks=sinks)
    check_o(o, expected, dtype)
    check_l_m(l, m, expected)


def test_sinks_with_padding(backend, dtype):
    q, k, v = backend.qkv(B=4, dtype=dtype)
    backend.check(
        q,
        k,
        v,
        sinks=backend.randn(4),
        seqlens_k=backend.ints(90, 0, 17, 5),
        leftpad_k=backend.ints(3, 0, 17, 1),
    )


def windows_into_nan(backend, q, element):
    """Tensors of q's shape and of different strides, each within a larger tensor of NaN, and that tensor."""
    B, H, N, d = q.shape

    def nan(*shape):
        return torch.full(shape, torch.nan, dtype=q.dtype, device=q.device)

    for larger, part in (
        (nan(B, H, N, d), lambda t: t),
        (nan(B, N, H, d), lambda t: t.transpose(1, 2)),
        (nan(B, N, H, 2 * d + 1), lambda t: t.transpose(1, 2)[..., 1 : d + 1]),
        (nan(B, H, N + 3, d), lambda t: t[:, :, 2:-1]),
        (nan(2 * B, 3 * H, 2 * N, d), lambda t: t[::2, 1::3, ::2]),
        (nan(N, B, H, d), lambda t: t.permute(1, 2, 0, 3)),
    ):
        yield larger, part(larger)


@pytest.mark.parametrize("d", [64, 37, 256])
def test_out(backend, dtype, d):
    """The values of a call without it, there and nowhere else. On Hopper float32 has other last bits where
    rows of o aren't aligned to 16 bytes, since another epilogue stores them."""
    q, k, v = backend.qkv(Nq=130, Nk=150, d=d, dtype=dtype)
    for options in {}, {"causal": True, "sinks": backend.randn(4)}:
        expected = backend.forward(q, k, v, **options)
        for larger, out in windows_into_nan(backend, q, d):
            version = out._version
            assert backend.forward(q, k, v, out=out, **options) is out
            assert out._version > version
            if backend.name == "hopper" and dtype == torch.float32:
                torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
            else:
                assert torch.equal(out, expected)
            assert int(larger.isnan().sum()) == larger.numel() - out.numel()


def test_out_of_no_key(backend, dtype):
    q, k, v = backend.qkv(Nk=0, dtype=dtype)
    out = torch.full_like(q, torch.nan)
    assert not backend.forward(q, k, v, out=out).any()
    q, k, v = backend.qkv(Nq=0, dtype=dtype)
    assert backend.forward(q, k, v, out=q.clone()).shape == q.shape


def test_autograd_sees_that_out_changes(backend):
    """A backward pass that needs the old values is an error, as after any other operation in place."""
    x = backend.randn(2, 4, 70, 64).requires_grad_()
    out = backend.randn(2, 4, 70, 64)
    y = (x * out).sum()
    backend.forward(*backend.qkv(), out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    with torch.inference_mode():
        inference = torch.empty_like(out)
        assert torch.equal(backend.forward(out, out, out, out=inference), backend.forward(out, out, out))


INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32]


@pytest.mark.parametrize("integer", INTEGERS, ids=str)
def test_lengths_of_every_integer_dtype(backend, integer):
    q, k, v = backend.qkv(B=3, Nq=50)
    lengths, pads = ([backend.random.randint(0, 90) for _ in range(3)] for _ in range(2))
    offsets = [backend.random.randint(0, 60) for _ in range(3)]
    options = dict(
        causal=True,
        seqlens_k=torch.tensor(lengths),
        leftpad_k=torch.tensor(pads),
        offset=torch.tensor(offsets),
    )
    actual = backend.check(
        q, k, v, **{x: t.to(backend.device, integer) if x != "causal" else t for x, t in options.items()}
    )
    check_o(actual, attention(q, k, v, **options), q.dtype)


@pytest.mark.parametrize("integer", [torch.int16, torch.int64, torch.uint32], ids=str)
def test_lengths_beyond_the_keys(backend, integer):
    """The dtype's largest and smallest values are clamped like others."""
    q, k, v = backend.qkv()
    info = torch.iinfo(integer)
    lengths = torch.tensor([info.max, max(info.min, 0)], device=backend.device).to(integer)
    backend.check(q, k, v, seqlens_k=lengths)


def test_out_that_is_a_negative_view(backend):
    """PyTorch's own kernel for lazily negated tensors would corrupt the stack."""
    q, k, v = backend.qkv()
    with pytest.raises(ValueError, match="^out must not be a view with the negative bit"):
        backend.forward(q, k, v, out=torch._neg_view(torch.zeros_like(q)))
    out = torch.empty_like(q)
    backend.forward(torch._neg_view(q), k, torch._neg_view(v), out=out)
    assert torch.equal(out, backend.forward(-q, k, -v))


def test_out_overlaps_itself(backend):
    q, k, v = backend.qkv(B=2, Hq=2, Hkv=2, Nq=5, Nk=7, d=8)
    for strides in (16, 8, 1, 1), (80, 4, 8, 1), (40, 40, 8, 1):
        out = q.new_zeros(2000).as_strided(q.shape, strides)
        with pytest.raises(ValueError, match="^out must"):
            backend.forward(q, k, v, out=out)


def test_out_in_inference_mode(backend):
    """Autograd notices that a tensor that it has saved was overwritten."""
    q, k, v = backend.qkv()
    out, w = torch.zeros_like(q), torch.ones_like(q, requires_grad=True)
    y = (w * out).sum()
    with torch.inference_mode():
        backend.forward(q, k, v, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
