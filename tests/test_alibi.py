"""alibi_slopes: a score is less by slope * |i + offset - j|. Values and gradients against float64."""

import pytest
import torch
from conftest import check_o
from reference import attention, gradients, relative_error
from test_backward import check, forms
from test_cu_seqlens import DOCUMENTS, captured_without_synchronising, drawn, same_bits
from test_key_ranges import RANGES
from test_prefix_k import MASKS
from test_softcap import SHAPES, check_decode, check_general, check_states_and_sinks

import minimal_attn
from minimal_attn import _stand_in, flash_attn, second_order


def slopes_for(b, *shape):
    """As models have them; for some heads 0 or below 0, so that far keys have the weight."""
    slopes = 2.0 ** -b.integers(1, 8, *shape)
    return torch.where(b.integers(0, 9, *shape) < 8, slopes, -b.integers(0, 1, *shape) / 1024)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients(backend, dtype, shape, softcap):
    B, Hq, Hkv, Nq, Nk, d = shape
    q, k, v = backend.qkv(B, Hq, Hkv, Nq, Nk, d, dtype=dtype)
    for options in dict(causal=True), dict(softmax_scale=-1.5 / d**0.5), dict(window_size=(40, 7), offset=3):
        shape = (B, Hq) if backend.random.random() < 0.5 else (Hq,)
        options |= dict(softcap=softcap, alibi_slopes=slopes_for(backend, *shape))
        check_general(backend, q, k, v, forms=forms(backend, dtype), **options)


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_masks(backend, dtype, mask, prefix):
    q, k, v = backend.qkv(dtype=dtype)
    options = MASKS[mask](backend, 2, 90) | dict(alibi_slopes=slopes_for(backend, 2, 4) / 4)
    options |= dict(prefix_k=backend.ints(4, 30)) if prefix else {}
    backend.check(q, k, v, **options)
    check(backend, torch.randn_like(q), q, k, v, **options)
    backend.check(q[:, :, :1], k, v, **options)


@pytest.mark.parametrize("make", DOCUMENTS)
def test_documents(backend, dtype, make):
    qkv, options = drawn(backend, make, dtype, front=3, behind=4)
    options |= dict(alibi_slopes=slopes_for(backend, 4), causal=True)
    check_general(backend, *qkv, **options)


@pytest.mark.parametrize("make", RANGES)
def test_key_ranges(backend, dtype, make):
    q, k, v = backend.qkv(dtype=dtype, Nq=200, Nk=180)
    options = dict(alibi_slopes=slopes_for(backend, 4) / 8, key_ranges=make(backend, 2, 200, 180))
    options["key_ranges"] = options["key_ranges"].to(backend.device)
    backend.check(q, k, v, **options)
    check(backend, torch.randn_like(q), q, k, v, **options)


def test_used_keys_of_documents(backend, dtype):
    qkv, options = drawn(backend, lambda b: ([5, 17, 30], [40, 17, 64]), dtype)
    options |= dict(alibi_slopes=slopes_for(backend, 4), seqused_k=backend.ints(33, 17, 0), causal=True)
    backend.check(*qkv, **options)


def test_decode(backend, dtype):
    """Pages in any order, lengths that only the device knows, few queries a key head."""
    q, k, v = backend.qkv(B=3, Hq=8, Hkv=2, Nq=2, Nk=16 * 20, d=128, dtype=dtype)
    lengths = backend.ints(320, 130, 200)
    check_decode(backend, q, k, v, alibi_slopes=slopes_for(backend, 3, 8), seqlens_k=lengths, causal=True)


@pytest.mark.parametrize("scale", [0.0, 1e-3, 30.0])
def test_large_and_small_scores(backend, dtype, scale):
    """Also where slopes make scores large: lse is then normalised again."""
    q, k, v = backend.qkv(Nq=130, Nk=150, dtype=dtype)
    slopes = torch.tensor([30.0, -0.5, 1e-3, 0.0], device=backend.device)
    options = dict(softmax_scale=scale / 8, alibi_slopes=slopes, causal=True, offset=-3)
    exact = attention(q, k, v, **options).o
    error = (backend.forward(q, k, v, **options).double() - exact).norm() / exact.norm()
    assert error < {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}[dtype]
    if scale < 30 or dtype == torch.float32:
        check(backend, torch.randn_like(q), q, k, v, **options)


def test_forms_of_results(backend, dtype):
    q, k, v = backend.qkv(dtype=dtype)
    check_states_and_sinks(backend, q, k, v, causal=True, alibi_slopes=slopes_for(backend, 4))


def test_slopes_of_0_are_none(backend, dtype):
    q, k, v = backend.qkv(dtype=dtype)
    slopes = torch.zeros(4, device=backend.device)
    expected = backend.forward(q, k, v, causal=True)
    actual = backend.forward(q, k, v, causal=True, alibi_slopes=slopes)
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(actual, expected, rtol=bound, atol=bound)
    strided = slopes_for(backend, 4, 2)[:, 1]  # any strides
    dense = backend.forward(q, k, v, alibi_slopes=strided.contiguous())
    assert torch.equal(backend.forward(q, k, v, alibi_slopes=strided), dense)


def test_offsets_beyond_all_keys(backend, dtype):
    """Those near 2^63 are as far as others that no key reaches."""
    q, k, v = backend.qkv(dtype=dtype)
    slopes = torch.ones(4, device=backend.device)
    for sign in 1, -1:
        offsets = sign * 2**40, sign * (2**63 - 1)
        far, farther = (backend.forward(q, k, v, alibi_slopes=slopes, offset=n) for n in offsets)
        assert torch.equal(far, farther)


def test_wrong_slopes(backend):
    q, k, v = backend.qkv()
    slopes = backend.randn(4)

    def refuses(error, match, slopes):
        with pytest.raises(error, match=match) as found:
            backend.forward(q, k, v, alibi_slopes=slopes)
        assert "\n" not in str(found.value)

    refuses(ValueError, "^alibi_slopes must be float32, but is float64$", slopes.double())
    refuses(ValueError, "^alibi_slopes must be float32, but is int32$", slopes.int())
    shape = r"^alibi_slopes must have shape \(Hq,\) = \(4,\) or \(B, Hq\), but has shape "
    refuses(ValueError, shape + r"\[2\]$", slopes[:2])
    refuses(ValueError, shape + r"\[4, 2\]$", slopes.expand(2, 4).T)
    refuses(ValueError, shape + r"\[\]$", slopes[0])
    refuses(TypeError, "^alibi_slopes must be a dense tensor or None, but was 0.5", 0.5)
    refuses(ValueError, "^alibi_slopes must be on q's device", slopes.to("meta"))
    refuses(RuntimeError, "^alibi_slopes must not require grad, but do: ", slopes.requires_grad_())
    heads = [x.transpose(1, 2).requires_grad_() for x in (q, k, v)]
    for deterministic in False, True:
        with pytest.raises(RuntimeError, match="^alibi_slopes must not require grad, but do"):
            flash_attn.flash_attn_func(*heads, alibi_slopes=slopes, deterministic=deterministic)
    with torch.no_grad():
        backend.forward(q, k, v, alibi_slopes=slopes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_graph(cuda_backend, dtype):
    """Nothing synchronises; a replay reads lengths and slopes anew."""
    inputs = [x.requires_grad_() for x in cuda_backend.qkv(dtype=dtype)]
    lengths, do = cuda_backend.ints(90, 50), torch.randn_like(inputs[0])
    slopes = slopes_for(cuda_backend, 4)

    def step():
        o = cuda_backend.forward(*inputs, alibi_slopes=slopes, causal=True, seqlens_k=lengths)
        return o.detach(), *torch.autograd.grad(o, inputs, do)

    graph, captured = captured_without_synchronising(step)
    for values in [90, 50], [3, 0]:
        lengths.copy_(torch.tensor(values)), slopes.mul_(0.5)
        graph.replay()
        assert same_bits(captured, step())


@pytest.mark.skipif(minimal_attn._C.score() != "", reason="second_order knows ALiBi alone")
@pytest.mark.parametrize(
    "options",
    [{}, dict(offset=2), dict(seqlens_k=torch.tensor([4, 2])), dict(cu_seqlens_q=True)],
    ids=lambda x: "-".join(x),
)
def test_second_derivatives(backend, options):
    q, k, v = (x.double().cpu().requires_grad_() for x in backend.qkv(B=2, Hq=2, Nq=3, Nk=4, d=2))
    slopes = torch.tensor([0.3, -0.2])
    if options.get("cu_seqlens_q"):
        q, k, v = (x[:1].detach().requires_grad_() for x in (q, k, v))
        options = dict(cu_seqlens_q=torch.tensor([0, 1, 3]), cu_seqlens_k=torch.tensor([0, 3, 4]))
    options = dict(alibi_slopes=slopes, causal=True) | options
    torch.autograd.gradgradcheck(lambda *t: second_order.forward(*t, **options), (q, k, v))
    if backend.name == "cpu":
        x, y, z = (t.detach().float().requires_grad_() for t in (q, k, v))
        o = second_order.forward(x, y, z, **options)
        torch.testing.assert_close(o, minimal_attn.forward(x, y, z, **options))
        torch.testing.assert_close(second_order.forward(q, k, v, **options).float(), o)


@pytest.mark.sanitizer
@pytest.mark.parametrize("d", [64, 128, 256])
def test_sanitizer(backend, dtype, d):
    q, k, v = backend.qkv(B=1, Hq=2, Hkv=1, Nq=130, Nk=140, d=d, dtype=dtype)
    options = dict(alibi_slopes=slopes_for(backend, 2))
    check(backend, torch.randn_like(q), q, k, v, causal=True, **options)
    backend.check(q[:, :, :1], k, v, **options)


@pytest.mark.parametrize("deterministic", [False, True])
def test_flash_attn(forced_backend, dtype, deterministic):
    """Its three functions and the private ones pass slopes on, in both passes."""
    b = forced_backend
    q, k, v = (x.transpose(1, 2) for x in b.qkv(B=2, Nq=30, Nk=40, dtype=dtype))
    heads, slopes, do = [x.transpose(1, 2) for x in (q, k, v)], slopes_for(b, 4), torch.randn_like(q)
    options = dict(causal=True, alibi_slopes=slopes, deterministic=deterministic)
    exact = attention(*heads, causal=True, alibi_slopes=slopes)
    expected = gradients(do.transpose(1, 2), *heads, causal=True, alibi_slopes=slopes)

    def check_gradients(found):
        for x, y in zip(found, expected, strict=True):
            assert relative_error(x.transpose(1, 2).double(), y) < 2e-2

    for given in slopes, slopes.expand(2, -1):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        o = flash_attn.flash_attn_func(*leaves, **options | dict(alibi_slopes=given))
        check_o(o.detach().transpose(1, 2), exact, dtype)
        check_gradients(torch.autograd.grad(o, leaves, do))
    packed = [x.flatten(0, 1).clone().requires_grad_() for x in (q, k, v)]
    bounds = b.ints(0, 30, 60), b.ints(0, 40, 80), 30, 40
    o = flash_attn.flash_attn_varlen_func(*packed, *bounds, **options)
    check_o(o.detach().view_as(q).transpose(1, 2), exact, dtype)
    found = torch.autograd.grad(o, packed, do.flatten(0, 1))
    check_gradients([x.view(2, -1, *x.shape[1:]) for x in found])
    new, old = [x[:, 35:].clone() for x in (k, v)], [x.clone() for x in (k, v)]
    for x in old:
        x[:, 35:] = 0
    cache = dict(cache_seqlens=b.ints(35, 35), causal=True, alibi_slopes=slopes.expand(2, -1))
    o = flash_attn.flash_attn_with_kvcache(q, *old, *new, **cache)
    check_o(o.transpose(1, 2), exact, dtype)
    if dtype == torch.float32:
        return
    fixed = dict(dropout_p=0.0, softmax_scale=0.125, softcap=0.0, alibi_slopes=slopes, causal=True)
    fixed |= dict(window_size_left=-1, window_size_right=-1)
    o, lse, *_ = _stand_in._flash_attn_forward(q, k, v, **fixed, return_softmax=False)
    check_o(o.transpose(1, 2), exact, dtype)
    found = [torch.empty_like(x) for x in (q, k, v)]
    _stand_in._flash_attn_backward(do, q, k, v, o, lse, *found, **fixed, deterministic=deterministic)
    check_gradients(found)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("uses", [False, True])
def test_slopes_of_each_sequence(forced_backend, dtype, deterministic, uses):
    """Packed sequences of any lengths, tokens of none in front and behind, NaN where no query looks."""
    b = forced_backend
    lengths_q, lengths_k, used = (5, 0, 30, 1, 7), (9, 4, 40, 0, 7), (9, 4, 33, 0, 2)
    q, k, v = (x[0].transpose(0, 1) for x in b.qkv(B=1, Nq=48, Nk=66, dtype=dtype))
    starts = [torch.tensor([n, *of]).cumsum(0).tolist() for n, of in ((2, lengths_q), (3, lengths_k))]
    slopes, do = b.randn(5, 4), torch.randn_like(q)
    options = dict(causal=True, softmax_scale=0.3, deterministic=deterministic, return_attn_probs=True)
    options |= dict(seqused_k=b.ints(*used)) if uses else {}
    k[:3] = v[:3] = k[63:] = v[63:] = q[:2] = q[45:] = torch.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o, lse, _ = flash_attn.flash_attn_varlen_func(
        *leaves, b.ints(*starts[0]), b.ints(*starts[1]), 30, 40, alibi_slopes=slopes, **options
    )
    found = torch.autograd.grad(o, leaves, do)
    wanted_o, wanted_lse = torch.zeros_like(o).double(), torch.full_like(lse, -torch.inf)
    wanted = [torch.zeros_like(x).double() for x in leaves]
    for n, (i, j) in enumerate(zip(starts[0][:-1], starts[1][:-1], strict=True)):
        rows, keys = slice(i, i + lengths_q[n]), slice(j, j + (used if uses else lengths_k)[n])
        if not (lengths_q[n] and keys.stop > keys.start):
            continue
        heads = [
            x.detach()[of].transpose(0, 1)[None] for x, of in zip(leaves, (rows, keys, keys), strict=True)
        ]
        given = dict(causal=True, softmax_scale=0.3, alibi_slopes=slopes[n])
        exact = attention(*(x.double() for x in heads), **given)
        wanted_o[rows], wanted_lse[:, rows] = exact.o[0].transpose(0, 1), (exact.m + exact.l.log())[0].float()
        parts = gradients(do[rows].transpose(0, 1)[None], *heads, **given)
        for x, y, of in zip(wanted, parts, (rows, keys, keys), strict=True):
            x[of] = y[0].transpose(0, 1)
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(o.double(), wanted_o, rtol=bound, atol=bound)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-2, atol=1e-2)
    for x, y in zip(found, wanted, strict=True):
        assert relative_error(x.double(), y) < bound


def test_S_dmask_of_slopes_of_each_sequence(forced_backend):
    """Sequences of one length are as a batch."""
    b = forced_backend
    q, k, v = (x.transpose(1, 2) for x in b.qkv(B=2, Nq=30, Nk=40))
    options = dict(alibi_slopes=b.randn(2, 4), dropout_p=0.4, return_attn_probs=True)
    torch.manual_seed(0)
    o, lse, S = flash_attn.flash_attn_func(q, k, v, **options)
    torch.manual_seed(0)
    bounds = b.ints(0, 30, 60), b.ints(0, 40, 80), 30, 40
    packed = flash_attn.flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), *bounds, **options)
    torch.testing.assert_close(packed[0].view_as(o), o)
    torch.testing.assert_close(packed[1].view(4, 2, 30).transpose(0, 1), lse)
    torch.testing.assert_close(packed[2][:, :, :30], S[:, :, :30])
