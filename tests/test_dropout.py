"""dropout_p: which weights are dropped, values and gradients against float64, and the seed."""

import itertools
import math

import numpy
import pytest
import torch
from conftest import SHAPES_OF_MASKS, check_o
from reference import attention, gradients, relative_error, weights_of_dropout
from test_backward import check, forms
from test_cu_seqlens import DOCUMENTS, drawn
from test_key_ranges import RANGES
from test_prefix_k import MASKS
from test_softcap import SHAPES, check_decode, check_general
from torch.utils.checkpoint import checkpoint

import minimal_attn
from minimal_attn import flash_attn, second_order
from minimal_attn._dropout import draw_seed


def dropped(backend, p=0.3):
    return dict(dropout_p=p, dropout_seed=backend.seed())


@pytest.mark.parametrize("p", [0.1, 0.5, 0.95])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients(backend, dtype, shape, p):
    B, Hq, Hkv, Nq, Nk, d = shape
    q, k, v = backend.qkv(B, Hq, Hkv, Nq, Nk, d, dtype=dtype)
    for options in dict(causal=True), dict(softmax_scale=-1.5 / d**0.5), dict(window_size=(40, 7)):
        options |= dropped(backend, p)
        check_general(backend, q, k, v, forms=forms(backend, dtype), **options)


@pytest.mark.parametrize("mask", MASKS)
def test_masks(backend, dtype, mask):
    """Left padding, too: tiles of keys begin anywhere. And a second pass, of the first keys."""
    q, k, v = backend.qkv(dtype=dtype)
    options = MASKS[mask](backend, 2, 90) | dict(prefix_k=backend.ints(4, 30)) | dropped(backend)
    backend.check(q, k, v, **options)
    check(backend, torch.randn_like(q), q, k, v, **options)


@pytest.mark.parametrize("make", DOCUMENTS)
def test_documents(backend, dtype, make):
    qkv, options = drawn(backend, make, dtype, front=3, behind=4)
    options |= dict(causal=True) | dropped(backend)
    check_general(backend, *qkv, **options)


@pytest.mark.parametrize("make", RANGES)
def test_key_ranges(backend, dtype, make):
    q, k, v = backend.qkv(dtype=dtype, Nq=200, Nk=180)
    options = dict(key_ranges=make(backend, 2, 200, 180).to(backend.device)) | dropped(backend)
    backend.check(q, k, v, **options)
    for _ in forms(backend, dtype):
        check(backend, torch.randn_like(q), q, k, v, **options)


@pytest.mark.parametrize("shape", SHAPES_OF_MASKS)
def test_with_other_terms(backend, dtype, shape):
    B, Hq, _, Nq, Nk, _ = shape
    q, k, v = backend.qkv(*shape, dtype=dtype)
    options = dict(softcap=2.0, alibi_slopes=backend.randn(Hq).abs() / 8, causal=True) | dropped(backend)
    options |= dict(attn_mask=backend.randn(Nq, Nk) < 1, bias=backend.randn(B, 1, Nq, Nk))
    backend.check(q, k, v, **options)
    check(backend, torch.randn_like(q), q, k, v, **options)


def test_gradient_of_a_bias(backend, dtype):
    q, k, v = backend.qkv(dtype=dtype)
    bias = backend.randn(1, 4, 70, 90).requires_grad_()
    options, do = dict(causal=True) | dropped(backend), torch.randn_like(q)
    backend.forward(q, k, v, bias=bias, **options).backward(do)
    *_, exact = gradients(do, q, k, v, bias=bias.detach(), wanted=("bias",), **options)
    bound = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
    assert relative_error(bias.grad, exact) < bound


@pytest.mark.parametrize("d", [64, 128, 256])
def test_large_scores(backend, dtype, d):
    """Rows that are normalised again: there D is a sum over weights that aren't dropped."""
    q, k, v = backend.qkv(Nq=130, Nk=150, d=d, dtype=dtype)
    options = dict(softmax_scale=200 * d**-0.5, causal=True) | dropped(backend)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    do = torch.randn_like(q)
    actual = torch.autograd.grad(backend.forward(q, k, v, **options), (q, k, v), do)
    exact = gradients(do, q, k, v, **options)
    bound = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}[dtype]
    for x, y in zip(actual, exact, strict=True):
        assert relative_error(x.double(), y) < bound


def test_results_but_o_are_those_without(backend, dtype):
    q, k, v = backend.qkv(dtype=dtype)
    options = dropped(backend)
    o, lse = backend.forward(q, k, v, return_lse=True, **options)
    torch.testing.assert_close(lse, backend.forward(q, k, v, return_lse=True)[1])
    backend.check(q, k, v, sinks=backend.randn(4), **options)
    check(backend, torch.randn_like(q), q, k, v, sinks=backend.randn(4), **options)
    check(backend, torch.randn_like(q), q, k, v, dlse=backend.randn(2, 4, 70), **options)


def test_paged_decode(backend, dtype):
    q, k, v = backend.qkv(B=3, Hq=8, Hkv=2, Nq=1, Nk=16 * 20, d=128, dtype=dtype)
    check_decode(backend, q, k, v, seqlens_k=backend.ints(320, 130, 200), causal=True, **dropped(backend))


def test_all_or_none(backend, dtype):
    q, k, v = (x.requires_grad_() for x in backend.qkv(dtype=dtype))
    seed = backend.seed()
    o = backend.forward(q, k, v, dropout_p=1, dropout_seed=seed)
    assert not o.any()
    assert not any(x.any() for x in torch.autograd.grad(o.sum(), (q, k, v)))
    for p in 0, None, 0.0, 1e-6:
        assert torch.equal(backend.forward(q, k, v, dropout_p=p, dropout_seed=seed), backend.forward(q, k, v))
    o = backend.forward(q, k, v, dropout_p=65535 / 65536, dropout_seed=seed)
    assert o.isfinite().all()


def test_share(seed):
    """Of 2^22 weights, within 4 standard deviations; neighbours and heads are independent."""
    generator = torch.Generator().manual_seed(seed)
    for p in 0.1, 0.37, 1 / 65536, 0.9:
        kept = weights_of_dropout(p, torch.randint(2**62, (1,), generator=generator), 2, 2, 1024, 1024) > 0
        n = kept.numel()
        assert abs(int(kept.sum()) - n * (1 - p)) < 4 * math.sqrt(n * p * (1 - p)) + 1
        x = kept.double() - (1 - p)
        pairs = (
            x[..., 1:] * x[..., :-1],
            x[..., 8:] * x[..., :-8],
            x[:, :, 8:] * x[:, :, :-8],
            x[:, 0] * x[:, 1],
        )
        for pair in (*pairs, x[0] * x[1]):
            assert abs(pair.sum()) < 5 * p * (1 - p) * math.sqrt(pair.numel()) + 2


def test_mask_of_a_seed(backend):
    seed = backend.seed()
    kept = minimal_attn.dropout_mask(seed, 0.2, (2, 3, 37, 50))
    assert kept.device.type == backend.device.type
    assert torch.equal(kept.cpu(), weights_of_dropout(0.2, seed, 2, 3, 37, 50) > 0)
    identity = torch.eye(50, device=backend.device).expand(2, 3, 50, 50)
    P = backend.forward(*backend.qkv(2, 3, 3, 37, 50, 50)[:2], identity, dropout_p=0.2, dropout_seed=seed)
    assert torch.equal(P != 0, kept)
    for wrong in seed.float(), torch.zeros(2, dtype=torch.int64):
        with pytest.raises(ValueError, match="^dropout_seed must be one int64, but is torch"):
            minimal_attn.dropout_mask(wrong, 0.2, (1, 1, 2, 2))
    with pytest.raises(ValueError, match="^dropout_p must be from 0 to 1, but was 2"):
        minimal_attn.dropout_mask(seed, 2, (1, 1, 2, 2))


@pytest.mark.parametrize(
    "zero", [0, 0.0, None, numpy.float32(0), numpy.int64(0), torch.tensor(0.0)], ids=repr
)
def test_no_seed_is_drawn_for_nothing(backend, zero):
    """PyTorch's generator stays where it is, and torch.vmap refuses no random numbers."""
    x = backend.randn(3, 1, 2, 8, 16)
    seeds = torch.cuda.get_rng_state if backend.device.type == "cuda" else torch.get_rng_state
    before = seeds()
    for forward in backend.forward, second_order.forward:
        assert torch.equal(
            torch.vmap(lambda x, f=forward: f(x, x, x, dropout_p=zero))(x),
            forward(*[x.flatten(0, 1)] * 3).unflatten(0, (3, 1)),
        )
    assert torch.equal(seeds(), before)


def test_errors_of_python():
    """What computes by itself says the same as forward: dropout_mask, and second_order in float64."""
    q, seed = torch.randn(1, 1, 4, 8, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
    for p, error in (math.nan, ValueError), (2, ValueError), ("x", TypeError), (True, TypeError):
        with pytest.raises(error, match="^dropout_p must be"):
            minimal_attn.dropout_mask(seed, p, (1, 1, 2, 2))
        with pytest.raises(error, match="^dropout_p must be"):
            second_order.forward(q, q, q, dropout_p=p, dropout_seed=seed)
    for wrong in 5, torch.zeros(1).to_sparse(), seed.int():
        with pytest.raises((TypeError, ValueError), match="^dropout_seed must be"):
            second_order.forward(q, q, q, dropout_p=0.5, dropout_seed=wrong)
    with pytest.raises(ValueError, match="^shape must be"):
        minimal_attn.dropout_mask(seed, 0.5, (1, 2, 2))


def test_exports_without_dropout(backend):
    """minimal_attn.onnx refuses what it doesn't translate: an argument that is given, but 0, isn't."""
    from minimal_attn import onnx

    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            o = minimal_attn.forward(q, k, v, causal=True)
            return o + minimal_attn.scaled_dot_product_attention(q, k, v)

    graph = torch.export.export(Model(), backend.qkv(1, 2, 2, 8, 8, 16)).graph
    calls = [x for x in graph.nodes if "minimal_attn" in str(x.target)]
    assert calls
    names = [a.name for a in torch.ops.minimal_attn.forward.default._schema.arguments]
    for call in calls:
        given = dict(zip(names, call.args, strict=False)) | call.kwargs
        assert not any(given.get(name) for name in names if name not in onnx._TRANSLATED)


def test_the_generator_gives_the_seed(backend):
    q, k, v = backend.qkv()
    torch.manual_seed(3)
    first, second = (backend.forward(q, k, v, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(backend.forward(q, k, v, dropout_p=0.5), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_generator_stays_where_no_seed_is_needed(dtype):
    """It did not in second_order in float64, which also refused dropout_seed=None beside 0."""
    q = torch.randn(1, 1, 4, 8, dtype=dtype)
    before = torch.get_rng_state()
    for options in (
        dict(dropout_p=0.0, dropout_seed=None),
        dict(dropout_p=0.0),
        dict(dropout_p=0.5, dropout_seed=torch.zeros(1, dtype=torch.int64)),
    ):
        functions = [second_order.forward] + [minimal_attn.forward] * (dtype == torch.float32)
        for forward in functions:
            forward(q, q, q, **options)
    assert torch.equal(torch.get_rng_state(), before)


def test_checkpoint(backend):
    """The forward pass that is computed again drops the same weights."""
    tensors = [x.requires_grad_() for x in backend.qkv()]

    def attend(q, k, v):
        return backend.forward(q, k, v, dropout_p=0.5, causal=True)

    torch.manual_seed(3)
    expected = torch.autograd.grad(attend(*tensors).square().sum(), tensors)
    torch.manual_seed(3)
    actual = torch.autograd.grad(checkpoint(attend, *tensors, use_reentrant=False).square().sum(), tensors)
    assert all(map(torch.equal, actual, expected))


def test_compiled(backend):
    """Another seed each time, the same in both passes."""
    tensors = [x.requires_grad_() for x in backend.qkv()]

    @torch.compile(fullgraph=True)
    def attend(q, k, v):
        return backend.forward(q, k, v, dropout_p=0.5)

    o = attend(*tensors)
    assert not torch.equal(o, attend(*tensors))
    # o is linear in v: so the gradient in v tells which weights were dropped.
    [dv] = torch.autograd.grad((o * o.detach()).sum(), tensors[2])
    torch.testing.assert_close((dv * tensors[2]).sum(), o.square().sum())


def test_graph(cuda_backend):
    """Each replay draws a seed."""
    q, k, v = cuda_backend.qkv()
    cuda_backend.forward(q, k, v, dropout_p=0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = cuda_backend.forward(q, k, v, dropout_p=0.5)
    results = []
    for _ in range(2):
        graph.replay()
        results.append(o.clone())
    assert not torch.equal(*results)


def test_second_order(backend):
    q, k, v = (x.requires_grad_() for x in backend.qkv(Nq=9, Nk=20, d=8))
    options = dict(causal=True) | dropped(backend)
    o = second_order.forward(q, k, v, backend=backend.name, **options)
    torch.testing.assert_close(o, backend.forward(q, k, v, **options))
    exact = second_order.forward(q.double(), k.double(), v.double(), **options)
    torch.testing.assert_close(o.double(), exact, rtol=1e-4, atol=1e-5)
    [dq] = torch.autograd.grad(o.square().sum(), q, create_graph=True)
    [second] = torch.autograd.grad(dq.sum(), k)
    q, k = q.detach().double().requires_grad_(), k.detach().double().requires_grad_()
    o = second_order.forward(q, k, v.detach().double(), **options)
    [dq] = torch.autograd.grad(o.square().sum(), q, create_graph=True)
    [expected] = torch.autograd.grad(dq.sum(), k)
    torch.testing.assert_close(second.double(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("d, d_v", [(40, 64), (96, 32), (192, 128), (64, 200)])
def test_value_dimensions(backend, dtype, d, d_v):
    q, k, v = (backend.randn(2, 4, N, n, dtype=dtype) for N, n in ((70, d), (90, d), (90, d_v)))
    options = dict(causal=True) | dropped(backend)
    backend.check(q, k, v, **options)
    check(backend, torch.randn_like(backend.forward(q, k, v)), q, k, v, **options)


@pytest.mark.parametrize("d", [64, 128, 192, 256])
def test_hopper_drops_itself(cuda_backend, dtype, d):
    """In float32, and beside a softcap, portable's kernels do."""
    q, k, v = cuda_backend.qkv(Nq=200, Nk=300, d=d, dtype=dtype)
    for options in {}, dict(softcap=3.0):
        options |= dict(dropout_p=0.1, dropout_seed=cuda_backend.seed())
        for backward in False, True:
            own = cuda_backend.explain(q, k, v, backward=backward, **options)
            other = minimal_attn.explain(q, k, v, backward=backward, backend="portable", **options)
            if cuda_backend.name == "hopper":
                is_portable = dtype == torch.float32 or "softcap" in options
                assert (own.threads == other.threads) == is_portable


def test_chunks(backend, dtype):
    """Each call with a state has a seed of its own, whose j counts from its first key."""
    q, k, v = backend.qkv(dtype=dtype)
    seeds = backend.seed(), backend.seed()
    state = backend.forward(
        q, k[:, :, :50], v[:, :, :50], return_state=True, dropout_p=0.3, dropout_seed=seeds[0]
    )
    o, _, _ = backend.forward(
        q, k[:, :, 50:], v[:, :, 50:], state=state, dropout_p=0.3, dropout_seed=seeds[1]
    )
    Z = torch.cat(
        [weights_of_dropout(0.3, seed, 2, 4, 70, n) for seed, n in zip(seeds, (50, 40), strict=True)], 3
    )
    S = (q.double() @ k.double().repeat_interleave(2, 1).mT) / 8
    exact = (S.softmax(-1) * Z.to(q.device)) @ v.double().repeat_interleave(2, 1)
    assert (
        relative_error(o.double(), exact)
        < {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    )


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_flash_attn(forced_backend, dtype, deterministic, packed):
    """The seed is the generator's. With deterministic=True the passes are called by hand."""
    q, k, v = (x.transpose(1, 2).contiguous() for x in forced_backend.qkv(B=1, dtype=dtype))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    options = dict(dropout_p=0.25, causal=True, deterministic=deterministic)
    torch.manual_seed(5)
    if packed:
        cu = [forced_backend.ints(0, n // 3, n) for n in (70, 90)]
        o = flash_attn.flash_attn_varlen_func(*(x[0] for x in leaves), *cu, 70, 90, **options)[None]
        documents = dict(cu_seqlens_q=cu[0], cu_seqlens_k=cu[1])
    else:
        o, documents = flash_attn.flash_attn_func(*leaves, **options), {}
    torch.manual_seed(5)
    seed = draw_seed(q, 0.1)
    heads_first = [x.detach().transpose(1, 2) for x in leaves]
    options = dict(dropout_p=0.25, dropout_seed=seed, causal=True, **documents)
    check_o(o.transpose(1, 2), attention(*heads_first, **options), dtype)
    do = torch.randn_like(o)
    expected = gradients(do.transpose(1, 2), *heads_first, **options)
    bound = {torch.float32: 5e-6, torch.float16: 5e-3, torch.bfloat16: 3e-2}[dtype]
    for x, y in zip(torch.autograd.grad(o, leaves, do), expected, strict=True):
        assert relative_error(x.transpose(1, 2).double(), y) < bound


@pytest.mark.parametrize("packed", [False, True])
def test_S_dmask(forced_backend, dtype, packed):
    """exp(score - the row's largest score) of all keys, negative where the seed drops the weight."""
    backend, p = forced_backend, 0.25
    q, k, v = (x.transpose(1, 2).contiguous() for x in backend.qkv(B=1 if packed else 2, Nk=300, dtype=dtype))
    options = dict(causal=True, window_size=(200, 0), softcap=3.0, alibi_slopes=backend.randn(4).abs() / 8)
    sinks, documents, call = backend.randn(4), {}, dict(dropout_p=p, return_attn_probs=True) | options
    torch.manual_seed(5)
    if packed:
        cu_q, cu_k = backend.ints(1, 30, 30, 69), backend.ints(2, 290, 295, 298)
        documents = dict(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
        bounds = cu_q, cu_k, 39, 290
        S = flash_attn.flash_attn_varlen_func(q[0], k[0], v[0], *bounds, s_aux=sinks, **call)[2]
        places = list(zip(*(itertools.pairwise(cu.tolist()) for cu in (cu_q, cu_k)), strict=True))
    else:
        S, places = flash_attn.flash_attn_func(q, k, v, s_aux=sinks, **call)[2], [((0, 70), (0, 300))]
    torch.manual_seed(5)
    Z = weights_of_dropout(p, draw_seed(q, p), len(q), 4, 70, 300).to(q.device)
    identity = torch.eye(300, device=q.device).expand(len(q), 2, 300, 300)
    P = attention(q.transpose(1, 2), k.transpose(1, 2), identity, **options, **documents).o  # P I = P
    exact = torch.where(Z > 0, P, -P) / P.amax(-1, keepdim=True).clamp(min=1e-300)
    assert S.dtype == dtype and S.shape == (3 if packed else 2, 4, 128, 384)
    expected = torch.zeros_like(S, dtype=torch.float64)
    for b, (rows, columns) in enumerate(places):
        one, of_one = slice(*rows), slice(*columns)
        part = exact[:, :, one, of_one]
        expected[slice(b, b + 1) if packed else slice(None), :, : part.shape[2], : part.shape[3]] = part
    bound = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    assert (S.double() - expected).abs().max() < bound
    assert torch.equal((S < 0)[expected.abs() > 1e-3], (expected < 0)[expected.abs() > 1e-3])


def test_S_dmask_is_empty(forced_backend):
    """Where keys are copied for gradients, other weights are dropped than without."""
    q, k, v = (x[0].transpose(0, 1) for x in forced_backend.qkv())
    bounds = forced_backend.ints(0, 70), forced_backend.ints(0, 90), 70, 90
    options = dict(return_attn_probs=True, seqused_k=forced_backend.ints(50))
    for p in 0.0, None, 0.25:
        options |= dict(dropout_p=p)
        assert flash_attn.flash_attn_varlen_func(q, k, v, *bounds, **options)[2].numel() == 0
        pages = dict(block_table=forced_backend.ints(0)[None])
        assert (
            flash_attn.flash_attn_varlen_func(q, k[None], v[None], *bounds, **pages, **options)[2].numel()
            == 0
        )


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(dropout_p=-0.1), "dropout_p must be None or from 0 to 1, but was -0.1"),
        (dict(dropout_p=1.5), "dropout_p must be None or from 0 to 1, but was 1.5"),
        (dict(dropout_p=math.nan), "dropout_p must be None or from 0 to 1, but was nan"),
        (dict(dropout_p=0.5, dropout_seed=torch.zeros(1)), "dropout_seed must be int64, but is float32"),
        (
            dict(dropout_p=0.5, dropout_seed=torch.zeros(2).long()),
            r"dropout_seed must have one .* shape \[2\]",
        ),
        (dict(dropout_p=0.5, dropout_seed=torch.zeros(1).long().to("meta")), "dropout_seed must be on q's"),
    ],
)
def test_errors(backend, options, message):
    q, k, v = backend.qkv()
    if "meta" not in str(options) and "dropout_seed" in options:
        options["dropout_seed"] = options["dropout_seed"].to(backend.device)
    with pytest.raises(ValueError, match=f"^{message}"):
        backend.forward(q, k, v, **options)
    with pytest.raises(TypeError, match="^dropout_p must be a number or None, but was 'x'"):
        backend.forward(q, k, v, dropout_p="x")
    with pytest.raises(ValueError, match="^dropout_seed must be given"):
        minimal_attn.backward(q, q, k, v, q, q[..., 0], None, dropout_p=0.5)


@pytest.mark.sanitizer
@pytest.mark.parametrize("d", [32, 72, 136])
def test_for_sanitizers(backend, dtype, d):
    q, k, v = (x.requires_grad_() for x in backend.qkv(1, 2, 1, 40, 70, d, dtype))
    options = dict(leftpad_k=backend.ints(5), causal=True) | dropped(backend)
    backend.forward(q, k, v, **options).sum().backward()
