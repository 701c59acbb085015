"""cu_seqlens_q and cu_seqlens_k: packed documents in one batch. Values and gradients against float64."""

from itertools import pairwise

import pytest
import torch
from conftest import Backend
from test_backward import check, forms, grads
from torch import library

import minimal_attn

LENGTHS = 0, 0, 1, 2, 15, 16, 17, 33, 64, 65, 130


def lengths_of_self(b):
    n = b.random.choices(LENGTHS, k=b.random.randint(1, 7))
    return n, n


def lengths_of_cross(b):
    """Documents without queries, without keys, with fewer keys than queries."""
    k = b.random.randint(1, 7)
    return b.random.choices(LENGTHS, k=k), b.random.choices(LENGTHS, k=k)


def one(b):
    return [150], [170]


def none(b):
    return [], []


def many(b):
    n = [b.random.choice([1, 2, 3]) for _ in range(150)]
    return n, n


def same_bits(actual, expected):
    return all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))


def drawn(b, make, dtype, Hq=4, Hkv=2, d=64, front=0, behind=0, **options):
    """q, k, v (1, H, total, d) and cu_seqlens; `front` and `behind` are tokens of no document."""
    cu = []
    for n in make(b):
        t = torch.tensor([front, *n]).cumsum(0)
        cu.append(t.to(b.device, b.random.choice([torch.int32, torch.int64])))
    Nq, Nk = (int(x[-1]) + behind for x in cu)
    return b.qkv(1, Hq, Hkv, Nq, Nk, d, dtype=dtype), dict(cu_seqlens_q=cu[0], cu_seqlens_k=cu[1]) | options


def bounds_of(b, cu_seqlens):
    """Begin and end of one of the documents that have tokens, drawn."""
    bounds = [(x, y) for x, y in pairwise(cu_seqlens.tolist()) if x < y]
    return b.random.choice(bounds or [(0, 0)])


DOCUMENTS = lengths_of_self, lengths_of_cross, one, none, many
OPTIONS = {
    "full": {},
    "causal": dict(causal=True),
    "window": dict(window_size=(20, 3)),
    "causal window": dict(window_size=(7, 0), softmax_scale=-0.1),
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("make", DOCUMENTS)
def test_values_and_gradients(backend, dtype, make, options):
    shape = backend.random.choice([dict(), dict(Hq=3, Hkv=1, d=33), dict(Hq=2, Hkv=2, d=128), dict(d=200)])
    qkv, options = drawn(backend, make, dtype, front=3, behind=4, **shape, **OPTIONS[options])
    found = backend.explain(*qkv, **options)
    assert found.kernel.endswith((", ranges", ", by sequence")) and found.workspace > 0
    backend.check(*qkv, **options)
    for _ in forms(backend, dtype):
        check(backend, torch.randn_like(qkv[0]), *qkv, **options)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_a_document_that_falls_back(cuda_backend, d):
    """hopper's fallback has other bits. No document beside it takes it: 256 is a multiple of all tiles."""
    b = cuda_backend
    if b.name != "hopper":
        pytest.skip("a fallback of hopper")
    q, k, v = b.qkv(1, 4, 2, 1024, 1024, d)
    cu = torch.arange(0, 1025, 256, device=b.device)
    bad, others = slice(256, 512), [*range(256), *range(512, 1024)]
    for causal in False, True:
        options = dict(cu_seqlens_q=cu, cu_seqlens_k=cu, causal=causal)
        expected = b.forward(q, k, v, **options)
        assert torch.equal(expected, b.forward(q, k, v, **options))
        for of_v, x in (False, torch.inf), (False, 1e30), (True, torch.nan), (True, 1e30), (True, 1e-30):
            dirty = [k.clone(), v.clone()]
            dirty[of_v][:, :, bad, 5] *= x
            o = b.forward(q, *dirty, **options)
            assert torch.equal(o[:, :, others], expected[:, :, others])
            assert not torch.equal(o[:, :, bad], expected[:, :, bad])


def test_as_single_calls(backend, dtype):
    """Each document has what it has alone, sinks and the log-sum-exp too."""
    (q, k, v), options = drawn(backend, lengths_of_cross, dtype, causal=True)
    sinks = backend.randn(4)
    o, lse = backend.forward(q, k, v, sinks=sinks, return_lse=True, **options)
    bounds = zip(options["cu_seqlens_q"].tolist(), options["cu_seqlens_k"].tolist(), strict=True)
    for (q0, k0), (q1, k1) in pairwise(bounds):
        parts = q[:, :, q0:q1], k[:, :, k0:k1], v[:, :, k0:k1]
        alone = backend.forward(*parts, sinks=sinks, return_lse=True, causal=True)
        bound = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(o[:, :, q0:q1], alone[0], rtol=bound, atol=bound)
        torch.testing.assert_close(lse[:, :, q0:q1], alone[1], rtol=1e-5, atol=1e-4)


def test_with_key_ranges(backend, dtype):
    """Ranges count from the first token of all, and a query sees what both leave."""
    (q, k, v), options = drawn(backend, lengths_of_cross, dtype, behind=5, causal=True)
    begin = backend.integers(0, max(k.shape[2], 1), 1, q.shape[2], 1, dtype=torch.int32)
    options["key_ranges"] = torch.cat([begin, begin + 40], -1)
    backend.check(q, k, v, **options)
    check(backend, torch.randn_like(q), q, k, v, **options)


def test_sinks_and_dlse(backend, dtype):
    qkv, options = drawn(backend, lengths_of_self, dtype, behind=70, causal=True)
    backend.check(*qkv, sinks=backend.randn(4), **options)
    dlse = backend.randn(*qkv[0].shape[:3])
    check(backend, torch.randn_like(qkv[0]), *qkv, dlse=dlse, **options)


@pytest.mark.parametrize("d", [64, 256])
def test_tokens_of_no_document_may_be_nan(backend, dtype, d):
    """o is 0 there. o and gradients are those without NaN."""
    for make in lengths_of_cross, many, none:
        (q, k, v), options = drawn(backend, make, dtype, d=d, front=2, behind=150, causal=True)
        do, dirty = torch.randn_like(q), [x.clone() for x in (q, k, v)]
        dirty_do = do.clone()
        for x, cu in zip((dirty_do, *dirty), ("q", "q", "k", "k"), strict=True):
            first, *_, last = options[f"cu_seqlens_{cu}"].tolist() * 2
            x[:, :, :first] = x[:, :, last:] = torch.nan
        o = backend.forward(*dirty, **options)
        assert not o[:, :, : int(options["cu_seqlens_q"][0])].any()
        assert not o[:, :, int(options["cu_seqlens_q"][-1]) :].any()
        # float32 rows beside a NaN in q are computed by hopper's fallback, or without AMX: rounded otherwise.
        torch.testing.assert_close(o, backend.forward(q, k, v, **options), rtol=1e-5, atol=1e-5)
        for x, y in zip(
            grads(backend, dirty_do, *dirty, **options), grads(backend, do, q, k, v, **options), strict=True
        ):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_a_document_of_nan_stays_alone(backend, dtype):
    """Forward, with an Inf or NaN in q, k and v, in whatever tile documents meet; also with a state."""
    for make in lengths_of_cross, lengths_of_self, many:
        d = backend.random.choice([24, 64, 128, 256])
        (q, k, v), options = drawn(backend, make, dtype, d=d, causal=True)
        q0, q1 = bounds_of(backend, options["cu_seqlens_q"])
        k0, k1 = (int(options["cu_seqlens_k"][options["cu_seqlens_q"].tolist().index(x)]) for x in (q0, q1))
        dirty = [x.clone() for x in (q, k, v)]
        bad = backend.random.choice([torch.nan, torch.inf])
        dirty[0][:, :, q0:q1] = dirty[1][:, :, k0:k1] = dirty[2][:, :, k0:k1] = bad
        others = [i for i in range(q.shape[2]) if not q0 <= i < q1]
        state = [backend.forward(q, k, v, return_state=True)] * backend.random.randint(0, 1)
        options |= dict(state=state[0]) if state else dict(return_state=True)
        for x, y in zip(backend.forward(*dirty, **options), backend.forward(q, k, v, **options), strict=True):
            torch.testing.assert_close(x[:, :, others], y[:, :, others], rtol=1e-2, atol=1e-2)
        plain = dict(options)
        plain.pop("state", plain.pop("return_state", None))
        o, expected = (backend.forward(*x, **plain) for x in (dirty, (q, k, v)))
        torch.testing.assert_close(o[:, :, others], expected[:, :, others], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("causal", [False, True])
def test_a_nan_behind_all_keys_of_a_tile_stays_alone(backend, dtype, causal):
    """The last tile of V of the first 64 queries has it, but none of them sees a key of its document."""
    (q, k, v), options = drawn(backend, lambda b: [[100, 100]] * 2, dtype, causal=causal)
    expected = backend.forward(q, k, v, **options)[:, :, :100]
    k[:, :, 100:] = v[:, :, 100:] = torch.nan
    o = backend.forward(q, k, v, **options)[:, :, :100]
    torch.testing.assert_close(o, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("d", [64, 256])
def test_same_bits_on_every_run(backend, dtype, d):
    """Documents without queries, and keys that a window hides, don't hold up the order of dq."""
    for make in lengths_of_self, lengths_of_cross, many:
        qkv, options = drawn(backend, make, dtype, d=d, front=100, behind=300, window_size=(9, 0))
        do = torch.randn_like(qkv[0])
        first, *others = (grads(backend, do, *qkv, **options) for _ in range(3))
        assert all(same_bits(first, other) for other in others)


def test_state_and_pages(backend):
    (q, k, v), options = drawn(backend, one, torch.float32)
    state = minimal_attn.forward(q, k, v, return_state=True)
    alone = backend.forward(q, k, v, return_state=True, **options)
    joined = backend.forward(q, k, v, state=state, **options)
    for x, y in zip(joined, minimal_attn.merge(state, alone), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
    pages = [x.unflatten(2, (10, 17)).transpose(1, 2)[0].contiguous() for x in (k, v)]
    table = torch.arange(10, device=backend.device)[None]
    paged = backend.forward(q, *pages, block_table=table, **options)
    torch.testing.assert_close(paged, alone[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "change, error",
    [
        (lambda a: a.pop("cu_seqlens_q"), "^cu_seqlens_q must be given with cu_seqlens_k"),
        (lambda a: a.pop("cu_seqlens_k"), "^cu_seqlens_k must be given with cu_seqlens_q"),
        (lambda a: a.update(cu_seqlens_k=a["cu_seqlens_k"][:-1]), r"^cu_seqlens_k must have shape \(doc"),
        (lambda a: a.update(cu_seqlens_q=a["cu_seqlens_q"][:0]), r"^cu_seqlens_q must have shape \(doc"),
        (lambda a: a.update(cu_seqlens_q=a["cu_seqlens_q"][None]), r"^cu_seqlens_q must have shape \(doc"),
        (lambda a: a.update(cu_seqlens_q=a["cu_seqlens_q"].float()), "^cu_seqlens_q must be int32 or"),
        (lambda a: a.update(cu_seqlens_q=a["cu_seqlens_q"].to("meta")), "^cu_seqlens_q must be on q's"),
        (lambda a: a.update(cu_seqlens_q=[0, 1]), "cu_seqlens_q must be a dense tensor or None"),
        (lambda a: a.update(seqlens_k=a["cu_seqlens_k"][1:2]), "seqlens_k must be None with cu_seqlens_q"),
        (lambda a: a.update(leftpad_k=a["cu_seqlens_k"][1:2]), "leftpad_k must be None with cu_seqlens_q"),
        (lambda a: a.update(offset=0), "offset must be None with cu_seqlens_q"),
        (lambda a: a.update(offset=a["cu_seqlens_k"][1:2]), "offset must be None with cu_seqlens_q"),
    ],
)
def test_errors(backend, change, error):
    qkv, options = drawn(backend, one, torch.float32)
    change(options)
    for call in backend.forward, backend.explain:
        with pytest.raises((ValueError, TypeError), match=error) as raised:
            call(*qkv, **options)
        assert "\n" not in str(raised.value)


def test_more_than_one_batch(backend):
    _, options = drawn(backend, one, torch.float32)
    with pytest.raises(ValueError, match="q must have all documents in one batch with cu_seqlens_q"):
        backend.forward(*backend.qkv(B=2), **options)


@pytest.mark.parametrize("wrong", [[-1, 5], [0, 5, 3], [0, 171], [2, 1, 9], [0, 2**40]])
def test_wrong_values_on_a_cpu(wrong):
    b = Backend("cpu", 0)
    (q, k, v), _ = drawn(b, one, torch.float32)
    right = torch.tensor([0] * len(wrong))
    for name, other in ("cu_seqlens_q", "cu_seqlens_k"), ("cu_seqlens_k", "cu_seqlens_q"):
        options = {name: torch.tensor(wrong), other: right}
        for call in b.forward, b.explain:
            with pytest.raises(ValueError, match=f"^{name} must never decrease.*end at 1"):
                call(q, k, v, **options)
        with pytest.raises(ValueError, match=f"{name} must never decrease"):
            minimal_attn.backward(q, q, k, v, q, q[..., 0].contiguous(), None, **options)


@pytest.mark.parametrize("d", [64, 256])
def test_any_values_on_a_gpu(cuda_backend, d):
    """Nothing is read or written out of bounds, and no call hangs. Tokens of no document are 0."""
    b = cuda_backend
    for dtype in torch.float16, torch.float32:
        q, k, v = b.qkv(1, 4, 2, 300, 280, d, dtype=dtype)
        for low, high in (0, 300), (-(2**31), 2**31 - 1), (-9, 400):
            cu = [b.integers(low, high, 40, dtype=torch.int32) for _ in "qk"]
            o = b.forward(q, k, v, cu_seqlens_q=cu[0], cu_seqlens_k=cu[1], causal=True)
            assert o.isfinite().all()
            for x in grads(b, torch.randn_like(q), q, k, v, cu_seqlens_q=cu[0], cu_seqlens_k=cu[1]):
                assert x.isfinite().all()


@pytest.mark.parametrize(
    "cu_q, cu_k",
    [
        ([0, 0, 300], [0, 280, 280]),
        ([0, 192, 300], [0, 200, 200]),
        ([0, 0, 128, 300], [0, 200, 200, 280]),
    ],
)
@pytest.mark.parametrize("d", [64, 256])
def test_blind_tiles_behind_the_first_keys(backend, dtype, d, cu_q, cu_k):
    """Documents without keys fill whole tiles of queries: there a range is {b, b} with b above 0."""
    q, k, v = backend.qkv(1, 4, 2, 300, 280, d, dtype=dtype)
    options = dict(cu_seqlens_q=backend.ints(*cu_q), cu_seqlens_k=backend.ints(*cu_k), causal=True)
    backend.check(q, k, v, **options)
    check(backend, torch.randn_like(q), q, k, v, **options)


def captured_without_synchronising(step):
    """A graph of step(), and the tensors that a replay fills. An eager call must not synchronise, either."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    return graph, captured


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_replay_with_other_lengths(cuda_backend, dtype):
    """A graph reads cu_seqlens anew, in both passes. Nothing synchronises."""
    b = cuda_backend
    qkv, options = drawn(b, lambda b: [[60, 0, 40, 90]] * 2, dtype, behind=20, causal=True)
    inputs, do = [x.requires_grad_() for x in qkv], torch.randn_like(qkv[0])
    options = {x: y.int() if "cu" in x else y for x, y in options.items()}

    def step():
        o = b.forward(*inputs, **options)
        return o.detach(), *torch.autograd.grad(o, inputs, do)

    graph, captured = captured_without_synchronising(step)
    for cu in [0, 10, 20, 150, 210], [5, 5, 6, 7, 8], [0, 0, 0, 0, 0]:
        for name in "cu_seqlens_q", "cu_seqlens_k":
            options[name].copy_(torch.tensor(cu))
        graph.replay()
        assert same_bits(captured, step())


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(backend, dynamic):
    (q, k, v), options = drawn(backend, lambda b: [[60, 0, 40, 9]] * 2, torch.float32, causal=True)
    q.requires_grad_(), k.requires_grad_(), v.requires_grad_()

    def step(q, k, v, cu_seqlens_q, cu_seqlens_k, causal):
        return backend.forward(q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, causal=causal)

    def results(step):
        o = step(q, k, v, **options)
        return o, *torch.autograd.grad(o.sum(), (q, k, v))

    torch.compiler.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    assert same_bits(results(compiled), results(step))


def test_opcheck(backend):
    (q, k, v), options = drawn(backend, lengths_of_self, torch.float32, causal=True)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    tests = "test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
    library.opcheck(torch.ops.minimal_attn.forward.default, inputs, options, test_utils=tests)


def test_vmap(backend):
    """Of q, k and v, and of cu_seqlens, too."""
    (q, k, v), options = drawn(backend, lambda b: [[30, 0, 40, 9]] * 2, torch.float32, causal=True)
    q = torch.stack([q, 2 * q, -q])
    mapped = torch.vmap(lambda q: backend.forward(q, k, v, **options))(q)
    assert same_bits(mapped, [backend.forward(x, k, v, **options) for x in q])
    cu = torch.stack([options.pop("cu_seqlens_q").int(), torch.zeros(5, dtype=torch.int32, device=q.device)])
    options.pop("cu_seqlens_k")

    def call(x, cu):
        return backend.forward(x, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, return_lse=True, **options)

    mapped = torch.vmap(call)(q[:2], cu)
    for i in range(2):
        assert same_bits([x[i] for x in mapped], call(q[i], cu[i]))
    assert torch.vmap(call)(q[:0], cu[:0])[0].shape == (0, *q.shape[1:])
