"""prefix_k: the first keys of a batch or document stay visible. Values and gradients against float64."""

import pytest
import torch
from conftest import DTYPES, SHAPES_OF_MASKS, Backend
from test_backward import check, forms, grads
from test_cu_seqlens import DOCUMENTS, captured_without_synchronising, drawn, lengths_of_cross, same_bits
from test_key_ranges import RANGES, chunks
from torch import library

import minimal_attn

SHAPES = [  # B, Hq, Hkv, Nq, Nk, d
    *SHAPES_OF_MASKS,
    (3, 6, 1, 1, 400, 80),
]
MASKS = {
    "causal": lambda b, B, Nk: dict(causal=True, window_size=(9, 0)),
    "window": lambda b, B, Nk: dict(window_size=(20, 3), softmax_scale=-0.3),
    "left alone": lambda b, B, Nk: dict(window_size=(0, -1)),
    "offset": lambda b, B, Nk: dict(causal=True, window_size=(5, 9), offset=b.random.randint(-20, Nk)),
    "offsets": lambda b, B, Nk: dict(window_size=(3, 1), offset=ints(b, B, -40, Nk)),
    "lengths": lambda b, B, Nk: dict(causal=True, window_size=(12, 0), seqlens_k=ints(b, B, -3, Nk + 3)),
    "left padding": lambda b, B, Nk: dict(window_size=(7, 4), leftpad_k=ints(b, B, -3, Nk + 3)),
    "all": lambda b, B, Nk: dict(
        **dict(causal=True, window_size=(9, 0), seqlens_k=ints(b, B, Nk // 2, Nk)),
        **dict(leftpad_k=ints(b, B, 0, Nk // 2), offset=ints(b, B, 0, Nk)),
    ),
    "padding on both sides": lambda b, B, Nk: dict(
        window_size=(9, 0), seqlens_k=ints(b, B, Nk // 2, Nk), leftpad_k=ints(b, B, 0, Nk // 2)
    ),
    "no left bound": lambda b, B, Nk: dict(causal=True),
}


def ints(b, n, low, high):
    """Of either dtype."""
    return b.integers(low, high, n, dtype=b.random.choice([torch.int32, torch.int64]))


def prefix_of(b, n, Nk):
    """Zero, a few keys, around a tile's end, all keys, more than there are."""
    values = [b.random.choice([0, 1, 4, 15, 16, 17, 64, 65, Nk, Nk + 9, 2**31 - 1]) for _ in range(n)]
    return torch.tensor(values, device=b.device, dtype=b.random.choice([torch.int32, torch.int64]))


def drawn_batches(b, shape, dtype, mask="causal"):
    B, Hq, Hkv, Nq, Nk, d = shape
    options = dict(prefix_k=prefix_of(b, B, Nk)) | MASKS[mask](b, B, Nk)
    return b.qkv(B, Hq, Hkv, Nq, Nk, d, dtype=dtype), options


def drawn_documents(b, make, dtype, **options):
    qkv, options = drawn(b, make, dtype, **options)
    return qkv, options | dict(prefix_k=prefix_of(b, len(options["cu_seqlens_q"]) - 1, 20))


def check_gradients(b, q, k, v, **options):
    check(b, torch.randn_like(q), q, k, v, **options)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients(backend, dtype, shape, mask):
    qkv, options = drawn_batches(backend, shape, dtype, mask)
    backend.check(*qkv, **options)
    for _ in forms(backend, dtype):
        check_gradients(backend, *qkv, **options)


@pytest.mark.parametrize("window", [(5, 0), (30, 2)])
@pytest.mark.parametrize("make", DOCUMENTS)
def test_documents(backend, dtype, make, window):
    qkv, options = drawn_documents(backend, make, dtype, front=3, behind=4, window_size=window)
    backend.check(*qkv, **options)
    check_gradients(backend, *qkv, **options)
    check_gradients(backend, *qkv, causal=True, **options)


@pytest.mark.parametrize("make", RANGES)
def test_with_key_ranges(backend, dtype, make):
    """They hide of the window and of the first keys."""
    qkv, options = drawn_batches(backend, SHAPES[0], dtype, "window")
    options["key_ranges"] = make(backend, 2, 70, 90).to(backend.device)
    backend.check(*qkv, **options)
    check_gradients(backend, *qkv, **options)


def test_with_documents_and_key_ranges(backend, dtype):
    (q, k, v), options = drawn_documents(backend, lengths_of_cross, dtype, behind=5, window_size=(4, 4))
    begin = backend.integers(0, max(k.shape[2], 1), 1, q.shape[2], 1, dtype=torch.int32)
    options["key_ranges"] = torch.cat([begin, begin + 40], -1)
    backend.check(q, k, v, **options)
    check_gradients(backend, q, k, v, **options)


def test_sinks_and_dlse(backend, dtype):
    for qkv, options in (
        drawn_batches(backend, SHAPES[0], dtype),
        drawn_documents(backend, lengths_of_cross, dtype, behind=70, window_size=(9, 0)),
    ):
        backend.check(*qkv, sinks=backend.randn(4), **options)
        check_gradients(backend, *qkv, sinks=backend.randn(4), **options)
        check_gradients(backend, *qkv, dlse=backend.randn(*qkv[0].shape[:3]), **options)


def test_forms_of_results(backend, dtype):
    """lse, state, out and an earlier state, of other keys, say the same."""
    qkv, options = drawn_batches(backend, SHAPES[0], dtype, "all")
    o, lse = backend.forward(*qkv, return_lse=True, **options)
    state = backend.forward(*qkv, return_state=True, **options)
    out = torch.empty_like(o)
    assert backend.forward(*qkv, out=out, **options) is out and torch.equal(out, o)
    torch.testing.assert_close(state[0].to(dtype), o)
    torch.testing.assert_close(state[2] + state[1].log(), lse)
    earlier = minimal_attn.forward(*backend.qkv(dtype=dtype), return_state=True)
    joined = backend.forward(*qkv, state=earlier, **options)
    for x, y in zip(joined, minimal_attn.merge(earlier, state), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_gradients_of_a_state(backend):
    """Keys in two calls, each with first keys of its own; then as one mask."""
    (q, k, v), _ = drawn_batches(backend, SHAPES[0], torch.float32)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    first, second = [x[:, :, :50] for x in (k, v)], [x[:, :, 50:] for x in (k, v)]
    options = dict(causal=True, window_size=(9, 0), prefix_k=backend.ints(4, 60))
    state = backend.forward(q, *first, offset=20, return_state=True, **options)
    options["prefix_k"] = backend.ints(0, 7)
    o, l, m = backend.forward(q, *second, offset=-30, state=state, **options)
    options["prefix_k"] = backend.ints(4, 57)
    whole = backend.forward(q, k, v, offset=20, **options)
    torch.testing.assert_close(o, whole, rtol=1e-5, atol=1e-5)
    do = torch.randn_like(o)
    actual, expected = (torch.autograd.grad(x, inputs, do) for x in (o, whole))
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("page_size", [16, 18])
@pytest.mark.parametrize("Nq", [1, 40])
def test_pages(backend, dtype, page_size, Nq):
    """Kernels that read pages, and those for which they are copied."""
    B, Nk = 2, page_size * 12
    q, k, v = backend.qkv(B, 4, 2, Nq, Nk, 64, dtype=dtype)
    options = dict(prefix_k=prefix_of(backend, B, Nk)) | MASKS["padding on both sides"](backend, B, Nk)
    pages = [x.unflatten(2, (12, page_size)).transpose(1, 2).flatten(0, 1).contiguous() for x in (k, v)]
    table = torch.arange(B * 12, device=backend.device).view(B, 12)
    paged = backend.forward(q, *pages, block_table=table, **options)
    bound = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(paged, backend.forward(q, k, v, **options), rtol=bound, atol=bound)


def test_decode(backend, dtype):
    """One query of each batch over a long cache, as StreamingLLM has it."""
    q, k, v = backend.qkv(3, 4, 1, 1, 3000, 128, dtype=dtype)
    options = dict(causal=True, window_size=(200, 0), prefix_k=backend.ints(4, 4, 4))
    backend.check(q, k, v, **options)
    backend.check(q, k, v, seqlens_k=backend.ints(3000, 150, 1701), **options)


def test_as_concatenated_keys(backend):
    """The definition in other words: first keys, then the window's."""
    q, k, v = backend.qkv(Nq=1, Nk=500)
    o = backend.forward(q, k, v, window_size=(99, 0), prefix_k=backend.ints(4, 4))
    seen = [torch.cat([x[:, :, :4], x[:, :, 400:]], 2) for x in (k, v)]
    torch.testing.assert_close(o, backend.forward(q, *seen), rtol=1e-5, atol=1e-5)


def test_without_a_left_bound_nothing_changes(backend, dtype):
    (q, k, v), options = drawn_batches(backend, SHAPES[0], dtype)
    for band in {}, dict(causal=True), dict(window_size=(-1, 3)):
        found = [backend.forward(q, k, v, **band, prefix_k=p) for p in (None, options["prefix_k"])]
        assert same_bits(*found)
        explained = [backend.explain(q, k, v, **band, prefix_k=p) for p in (None, options["prefix_k"])]
        assert explained[0] == explained[1]


def test_zero_changes_no_value(backend):
    (q, k, v), _ = drawn_batches(backend, SHAPES[0], torch.float32)
    o, expected = (
        backend.forward(q, k, v, window_size=(9, 0), prefix_k=p) for p in (backend.ints(0, 0), None)
    )
    torch.testing.assert_close(o, expected, rtol=1e-5, atol=1e-6)


def test_what_no_query_sees_may_be_nan(backend, dtype):
    """Outside leftpad_k and seqlens_k, and of no document, in both passes."""
    q, k, v = backend.qkv(dtype=dtype)
    lengths = dict(seqlens_k=backend.ints(50, 33), leftpad_k=backend.ints(3, 20))
    options = dict(window_size=(9, 0), prefix_k=backend.ints(7, 2**31 - 1), **lengths)
    dirty = [x.clone() for x in (k, v)]
    for x in dirty:
        x[0, :, 50:] = x[0, :, :3] = x[1, :, 33:] = x[1, :, :20] = torch.nan
    do = torch.randn_like(q)
    assert same_bits(grads(backend, do, q, *dirty, **options), grads(backend, do, q, k, v, **options))
    (q, k, v), options = drawn_documents(backend, lengths_of_cross, dtype, behind=150, window_size=(9, 0))
    dirty, do = [x.clone() for x in (k, v)], torch.randn_like(q)
    for x in dirty:
        x[:, :, int(options["cu_seqlens_k"][-1]) :] = torch.nan
    assert same_bits(grads(backend, do, q, *dirty, **options), grads(backend, do, q, k, v, **options))


def test_queries_without_keys_may_be_nan(backend, dtype):
    q, k, v = backend.qkv(Nq=90, dtype=dtype)
    options = dict(causal=True, window_size=(9, 0), offset=-40, prefix_k=backend.ints(4, 20))
    dirty, do = q.clone(), torch.randn_like(q)
    dirty[:, :, :40] = torch.nan
    dirty_do = do.where(~dirty.isnan(), torch.nan)
    for x, y in zip(
        grads(backend, dirty_do, dirty, k, v, **options), grads(backend, do, q, k, v, **options), strict=True
    ):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_same_bits_on_every_run(backend, dtype):
    for qkv, options in (
        drawn_batches(backend, (2, 4, 2, 400, 500, 64), dtype),
        drawn_documents(backend, lengths_of_cross, dtype, window_size=(9, 0)),
    ):
        do = torch.randn_like(qkv[0])
        first, *others = (grads(backend, do, *qkv, **options) for _ in range(3))
        assert all(same_bits(first, other) for other in others)


def test_backward_by_hand_into_float32(backend, dtype):
    (q, k, v), options = drawn_batches(backend, SHAPES[0], dtype)
    do, state = torch.randn_like(q), backend.forward(q, k, v, return_state=True, **options)
    found, rounded = (
        minimal_attn.backward(do, q, k, v, *state, backend=backend.name, out_dtype=x, **options)
        for x in (torch.float32, None)
    )
    assert same_bits([x.to(dtype) for x in found], rounded)


def test_empty_shapes(backend):
    for B, Nq, Nk in ((0, 5, 5), (2, 0, 5), (2, 5, 0)):
        q, k, v = (x.requires_grad_() for x in backend.qkv(B=B, Nq=Nq, Nk=Nk))
        options = dict(window_size=(1, 0), prefix_k=torch.full((B,), 3, device=backend.device))
        o = backend.forward(q, k, v, **options)
        o.sum().backward()
        assert o.shape == q.shape and not o.any() and not q.grad.any() and not k.grad.any()
        assert backend.explain(q, k, v, **options).backend == backend.name


def test_explain(backend, dtype):
    """Both parts, forward and backward."""
    q, k, v = backend.qkv(dtype=dtype)
    options = dict(window_size=(5, 0), prefix_k=backend.ints(4, 4))
    for backward in False, True:
        found = backend.explain(q, k, v, backward=backward, **options)
        assert all(found.kernel.split(" and for prefix_k "))
    options["key_ranges"] = chunks(backend, 2, 70, 90).to(backend.device)
    assert backend.explain(q, k, v, **options).kernel.endswith(", ranges")


@pytest.mark.parametrize(
    "prefix, error",
    [
        (lambda: torch.zeros(3, dtype=torch.int32), r"^prefix_k must have shape \(B,\) = \(2,\)"),
        (lambda: torch.zeros(2, 1, dtype=torch.int32), r"^prefix_k must have shape \(B,\) = \(2,\)"),
        (lambda: torch.zeros(2), "^prefix_k must be int32 or another integer type"),
        (lambda: torch.zeros(2, dtype=torch.bool), "^prefix_k must be int32 or another integer type"),
        (lambda: torch.zeros(2, dtype=torch.int32, device="meta"), "^prefix_k must be on q's device"),
        (lambda: 4, "prefix_k must be a dense tensor or None"),
    ],
)
@pytest.mark.parametrize("window_size", [(-1, -1), (5, 0)])
def test_errors(backend, prefix, error, window_size):
    q, k, v = backend.qkv()
    prefix = prefix()
    if isinstance(prefix, torch.Tensor) and prefix.device.type == "cpu":
        prefix = prefix.to(backend.device)
    for call in backend.forward, backend.explain:
        with pytest.raises((ValueError, TypeError), match=error) as raised:
            call(q, k, v, prefix_k=prefix, window_size=window_size)
        assert "\n" not in str(raised.value)


def test_errors_of_documents(backend):
    qkv, options = drawn_documents(backend, lengths_of_cross, torch.float32, window_size=(9, 0))
    for wrong in options["cu_seqlens_q"], options["prefix_k"][None], options["prefix_k"][:-1]:
        with pytest.raises(ValueError, match=r"^prefix_k must have shape \(documents,\) with cu_seq"):
            backend.forward(*qkv, **options | dict(prefix_k=wrong))


def test_negative_values_on_a_cpu():
    b = Backend("cpu", 0)
    q, k, v = b.qkv()
    options = dict(prefix_k=torch.tensor([3, -2]), window_size=(5, 0))
    for call in b.forward, b.explain:
        with pytest.raises(ValueError, match="^prefix_k must be at least 0, but has -2$"):
            call(q, k, v, **options)
    with pytest.raises(ValueError, match="^prefix_k must be at least 0, but has -2$"):
        minimal_attn.backward(q, q, k, v, q, q[..., 0].contiguous(), None, **options)


def test_any_values_on_a_gpu(cuda_backend):
    """They are clamped: nothing is read or written out of bounds."""
    b = cuda_backend
    for dtype in torch.float16, torch.float32:
        q, k, v = b.qkv(2, 4, 2, 300, 280, 64, dtype=dtype)
        lengths = dict(window_size=(9, 0), seqlens_k=b.ints(-(2**31), 2**31 - 1), leftpad_k=b.ints(0, 200))
        for values in (-1, -(2**31)), (2**31 - 1, 0), (2**63 - 1, -(2**63)):
            dtype_of_values = torch.int64 if max(values) > 2**31 else torch.int32
            prefix = torch.tensor(values, device=b.device, dtype=dtype_of_values)
            clamped = prefix.clamp(0, 280)
            for options in dict(window_size=(9, 0)), lengths:
                actual, expected = (b.forward(q, k, v, prefix_k=x, **options) for x in (prefix, clamped))
                assert torch.equal(actual, expected)
                assert all(x.isfinite().all() for x in grads(b, q, q, k, v, prefix_k=prefix, **options))
        q, k, v = (x[:1] for x in (q, k, v))
        cu = [b.integers(-9, 400, 40, dtype=torch.int32) for _ in "qk"]
        prefix = b.integers(-(2**31), 2**31 - 1, 39, dtype=torch.int32)
        options = dict(cu_seqlens_q=cu[0], cu_seqlens_k=cu[1], window_size=(3, 0), prefix_k=prefix)
        assert b.forward(q, k, v, **options).isfinite().all()
        assert all(x.isfinite().all() for x in grads(b, q, q, k, v, **options))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("packed", [False, True])
def test_replay_with_other_values(cuda_backend, dtype, packed):
    """A graph reads prefix_k anew, in both passes. Nothing synchronises."""
    b = cuda_backend
    if packed:
        qkv, options = drawn_documents(b, lambda b: [[60, 0, 40, 90]] * 2, dtype, window_size=(9, 0))
    else:
        qkv, options = drawn_batches(b, (4, 2, 2, 70, 90, 64), dtype, "padding on both sides")
    options = {x: y.int() if isinstance(y, torch.Tensor) else y for x, y in options.items()}
    inputs, do = [x.requires_grad_() for x in qkv], torch.randn_like(qkv[0])

    def step():
        o = b.forward(*inputs, **options)
        return o.detach(), *torch.autograd.grad(o, inputs, do)

    graph, captured = captured_without_synchronising(step)
    for values in [0, 1, 2, 3], [70, 0, 4, 4]:
        options["prefix_k"].copy_(torch.tensor(values))
        graph.replay()
        assert same_bits(captured, step())


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_compile(backend, dynamic, packed):
    if packed:
        qkv, options = drawn_documents(backend, lambda b: [[60, 0, 40, 9]] * 2, torch.float32)
    else:
        qkv, options = drawn_batches(backend, SHAPES[0], torch.float32, "left padding")
    options |= dict(window_size=(9, 0), causal=True)
    inputs = [x.requires_grad_() for x in qkv]

    def results(step):
        o = step(*inputs, **options)
        return o, *torch.autograd.grad(o.sum(), inputs)

    torch.compiler.reset()
    compiled = torch.compile(backend.forward, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    assert same_bits(results(compiled), results(backend.forward))


def test_opcheck(backend):
    """Of documents; test_operator.py has batches."""
    (q, k, v), options = drawn_documents(backend, lengths_of_cross, torch.float32, window_size=(9, 0))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    tests = "test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
    library.opcheck(torch.ops.minimal_attn.forward.default, inputs, options, test_utils=tests)


def test_vmap(backend):
    """Of q and prefix_k, in batches and in documents."""
    for (q, k, v), options in (
        drawn_batches(backend, SHAPES[0], torch.float32),
        drawn_documents(backend, lambda b: [[30, 0, 40, 9]] * 2, torch.float32, window_size=(9, 0)),
    ):
        q, prefix = torch.stack([q, -q]), torch.stack([options.pop("prefix_k")] * 2)
        prefix[1] = prefix[1].flip(0)

        def call(q, prefix, k=k, v=v, options=options):
            return backend.forward(q, k, v, prefix_k=prefix, return_lse=True, **options)

        mapped = torch.vmap(call)(q, prefix)
        for i in range(2):
            for x, y in zip(mapped, call(q[i], prefix[i]), strict=True):
                assert torch.equal(x[i], y)


def test_onnx_refuses_it():
    pytest.importorskip("onnxscript")
    from minimal_attn.onnx import _Call

    q, k, v = Backend("cpu", 0).qkv()
    with pytest.raises(NotImplementedError, match="prefix_k must be None in an export to ONNX"):
        _Call(q, k, v, prefix_k=torch.zeros(2, dtype=torch.int32))


def test_long(backend):
    """Many tiles, of which the second part meets few."""
    Hq = 2 if backend.name == "cpu" else 8
    for dtype in DTYPES:
        qkv, options = drawn_batches(backend, (1, Hq, 1, 700, 2200, 64), dtype)
        backend.check(*qkv, **options)
        check_gradients(backend, *qkv, **options)
