"""Gradients of minimal_attn.flash_attn's functions, by float64 autograd."""

import itertools

import pytest
import torch
from reference import gradients, relative_error
from test_flash_attn import packed

from minimal_attn.flash_attn import flash_attn_func, flash_attn_varlen_func


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients(backend, deterministic):
    """Of flash_attn_func, sinks included."""
    tensors = [x.transpose(1, 2).detach() for x in backend.qkv()] + [backend.randn(4)]
    inputs = [t.clone().requires_grad_() for t in tensors]
    out = flash_attn_func(*inputs[:3], s_aux=inputs[3], causal=True, deterministic=deterministic)
    do = torch.randn_like(out)
    q, k, v, do_heads_first = (t.transpose(1, 2) for t in (*tensors[:3], do))
    exact = gradients(do_heads_first, q, k, v, wanted=["sinks"], sinks=tensors[3], causal=True)
    for x, y in zip(torch.autograd.grad(out, inputs, do), exact, strict=True):
        assert relative_error((x.transpose(1, 2) if x.dim() == 4 else x).double(), y) < 5e-6


def test_gradients_without_heads(backend):
    q, sinks = backend.randn(2, 3, 0, 8).requires_grad_(), backend.randn(0).requires_grad_()
    out = flash_attn_func(q, q, q, s_aux=sinks, deterministic=True)
    assert [x.shape for x in torch.autograd.grad(out.sum(), (q, sinks))] == [q.shape, sinks.shape]


SEQUENCES = {  # lengths of queries and of keys, options
    "self": ([33, 0, 70, 1], [33, 0, 70, 1], dict(causal=True)),
    "cross": ([5, 60, 0, 20], [40, 7, 12, 0], {}),
    "window": ([50, 9], [70, 80], dict(window_size=(20, 3), softmax_scale=0.3)),
    "one long": ([200, 1, 1, 1, 2], [150, 2, 1, 3, 1], dict(causal=True)),  # one sequence at a time
    "queries before all keys": ([60, 30], [7, 9], dict(causal=True)),
    "no key": ([4, 3], [0, 0], {}),
}


def packed_keys(backend, lengths):
    """The index of each sequence's keys, of how many in all, and arguments."""
    cu = list(itertools.accumulate([2, *lengths]))
    places = [torch.arange(*each) for each in itertools.pairwise(cu)]
    return places, cu[-1] + 1, dict(cu_seqlens_k=backend.ints(*cu))


def keys_in_use(backend, lengths):
    places, total, options = packed_keys(backend, [n + b % 3 for b, n in enumerate(lengths)])
    places = [at[:n] for at, n in zip(places, lengths, strict=True)]
    return places, total, options | dict(seqused_k=backend.ints(*lengths))


def keys_in_pages(backend, lengths):
    """Pages of 16 keys, of which the first sequence shares two with the last one."""
    n = -(-max(lengths) // 16) + 1
    table = torch.randperm(n * len(lengths) + 3)[: n * len(lengths)].view(-1, n)
    table[-1, :2] = table[0, :2]
    keys = (table[..., None] * 16 + torch.arange(16)).flatten(1)
    places = [row[:n] for row, n in zip(keys, lengths, strict=True)]
    table[:, -1] = 10**6  # behind all keys
    options = dict(seqused_k=backend.ints(*lengths), block_table=table.to(backend.device))
    return places, 16 * (n * len(lengths) + 3), options | dict(cu_seqlens_k=None)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("layout", [packed_keys, keys_in_use, keys_in_pages])
@pytest.mark.parametrize("name", SEQUENCES)
def test_gradients_of_packed_sequences(forced_backend, dtype, name, layout, with_sinks):
    """Of out and softmax_lse. Tokens of no sequence, here NaN, get 0."""
    backend, (lengths_q, lengths_k, options) = forced_backend, SEQUENCES[name]
    cu_q, total_q = backend.ints(*itertools.accumulate([2, *lengths_q])), sum(lengths_q) + 4
    places, total_k, of_keys = layout(backend, lengths_k)
    q, do = (backend.randn(total_q, 4, 40, dtype=dtype) for _ in range(2))
    k, v = (backend.randn(total_k, 2, 40, dtype=dtype) for _ in range(2))
    is_used = torch.zeros(total_k, dtype=torch.bool).index_fill(0, torch.cat(places), True).to(k.device)
    k[~is_used], v[~is_used] = torch.nan, torch.nan
    sinks, dlse = backend.randn(4) if with_sinks else None, backend.randn(4, total_q)
    inputs = [t.clone().requires_grad_() for t in (q, k, v, sinks) if t is not None]
    of_keys |= dict(cu_seqlens_q=cu_q, max_seqlen_q=max(lengths_q), max_seqlen_k=max(lengths_k))
    of_sinks = dict(s_aux=inputs[3]) if with_sinks else {}
    keys = inputs[1:3] if layout != keys_in_pages else [x.unflatten(0, (-1, 16)) for x in inputs[1:3]]
    results = flash_attn_varlen_func(
        inputs[0], *keys, return_attn_probs=True, **of_keys, **of_sinks, **options
    )
    outputs, above = list(results[:2]), [do, dlse]
    outside = torch.ones(total_q, dtype=torch.bool, device=q.device)
    expected = [torch.zeros_like(t, dtype=torch.float64) for t in inputs]
    for b in range(len(lengths_q)):
        rows, keys = slice(int(cu_q[b]), int(cu_q[b + 1])), places[b].to(k.device)
        outside[rows] = False
        one = [t[at].transpose(0, 1)[None] for t, at in ((do, rows), (q, rows), (k, keys), (v, keys))]
        known = options | (dict(sinks=sinks) if with_sinks else {})
        exact = gradients(*one, dlse=dlse[None, :, rows], wanted=["sinks"] * with_sinks, **known)
        for t, at, x in zip(expected[:3], (rows, keys, keys), exact, strict=False):
            t[at] += x[0].transpose(0, 1)
        if with_sinks:
            expected[3] += exact[3]
    above[1] = dlse.masked_fill(outside, 0)
    bound = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}[dtype]
    for x, t, y in zip(torch.autograd.grad(outputs, inputs, above), inputs, expected, strict=True):
        assert x.dtype == t.dtype and (x - y).norm() <= bound * max(y.norm(), 1)


@pytest.mark.parametrize("packed", [False, True])
def test_deterministic(backend, packed):
    """The same gradients on every run, and torch.func and torch.compile take the option."""
    q, k, v = (backend.randn(2, 700, 4, 64, dtype=torch.bfloat16).requires_grad_() for _ in "qkv")
    cu_seqlens = backend.ints(0, 700, 1400)

    def attend(q, k, v):
        if not packed:
            return flash_attn_func(q, k, v, causal=True, deterministic=True)
        bounds = cu_seqlens, cu_seqlens, 700, 700
        flat = (x.flatten(0, 1) for x in (q, k, v))
        return flash_attn_varlen_func(*flat, *bounds, causal=True, deterministic=True).view_as(q)

    def loss(q, k, v):
        return attend(q, k, v).float().square().sum()

    do = torch.randn_like(q)
    torch.use_deterministic_algorithms(False)
    try:
        runs = [torch.autograd.grad(attend(q, k, v), (q, k, v), do) for _ in range(10)]
        by_func = torch.func.grad(loss, argnums=(0, 1, 2))(q, k, v)
        torch._dynamo.reset()
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")(q, k, v)
        by_compile = torch.autograd.grad(compiled, (q, k, v))
    finally:
        torch.use_deterministic_algorithms(True)
    assert all(torch.equal(x, y) for run in runs for x, y in zip(run, runs[0], strict=True))
    assert all(map(torch.equal, by_func, torch.autograd.grad(loss(q, k, v), (q, k, v))))
    assert all(map(torch.equal, by_func, by_compile))


@pytest.mark.parametrize("deterministic", [False, True])
def test_lengths_that_change_before_the_backward_pass_are_refused(backend, deterministic):
    q, _, _, cu_seqlens = packed(backend, [4, 5])
    q.requires_grad_()
    out = flash_attn_varlen_func(q, q, q, cu_seqlens, cu_seqlens, 9, 9, deterministic=deterministic)
    cu_seqlens[1] = 3
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_gradients_of_packed_sequences_under_autocast(backend):
    q, k, v, cu_seqlens = packed(backend, [7, 0, 23])
    inputs = [t.requires_grad_() for t in (q, k, v)]
    with torch.autocast(backend.device.type, dtype=torch.bfloat16):
        out = flash_attn_varlen_func(*inputs, cu_seqlens, cu_seqlens, 23, 23, causal=True)
    rounded = [t.detach().bfloat16().requires_grad_() for t in inputs]
    expected = flash_attn_varlen_func(*rounded, cu_seqlens, cu_seqlens, 23, 23, causal=True)
    assert torch.equal(out, expected)
    do = torch.randn_like(out)
    results = torch.autograd.grad(out, inputs, do), torch.autograd.grad(expected, rounded, do)
    for x, y in zip(*results, strict=True):
        assert x.dtype == torch.float32 and torch.equal(x, y.float())


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_of_packed_sequences_by_vmap(backend):
    q, k, v, cu_seqlens = packed(backend, [7, 0, 23])
    many = [torch.stack([t, t * 0.5]) for t in (q, k, v)]

    def loss(q, k, v):
        return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 23, 23, causal=True).square().sum()

    each = torch.func.grad(loss, argnums=(0, 1, 2))
    alone = [each(*(t[i] for t in many)) for i in range(2)]
    for x, *expected in zip(torch.vmap(each)(*many), *alone, strict=True):
        assert relative_error(x.double(), torch.stack(expected).double()) < 1e-6


def test_compiled_gradients_of_packed_sequences(backend):
    q, k, v, cu_seqlens = packed(backend, [7, 0, 23])
    inputs = [t.requires_grad_() for t in (q, k, v)]

    def loss(q, k, v):
        return flash_attn_varlen_func(q * 2, k, v, cu_seqlens, cu_seqlens, 23, 23, causal=True).square().sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(loss(*inputs), inputs)
    torch.testing.assert_close(torch.autograd.grad(compiled(*inputs), inputs), expected)
    torch.testing.assert_close(torch.func.grad(loss, argnums=(0, 1, 2))(*inputs), expected)


def test_compiled_with_any_longest(backend):
    """max_seqlen may be a SymInt."""
    torch._dynamo.reset()
    compiled = torch.compile(flash_attn_varlen_func, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in [7, 23], [40, 9]:
        q, k, v, cu_seqlens = packed(backend, lengths)
        arguments = q, k, v, cu_seqlens, cu_seqlens, max(lengths), max(lengths) + 1
        assert torch.equal(compiled(*arguments), flash_attn_varlen_func(*arguments))
