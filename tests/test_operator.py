"""PyTorch's view: the operator's schema, shapes without data, autocast, vmap, __torch_function__, FLOPs."""

import subprocess
import sys
import threading

import pytest
import torch
from torch import library
from torch._subclasses.fake_tensor import FakeTensorMode

import minimal_attn
from minimal_attn.flash_attn import flash_attn_varlen_func as varlen

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def keywords(backend):
    """Each keyword alone, given in one way or another."""
    return {
        "nothing": {},
        "causal": {"causal": True},
        "window_size": {"window_size": (20, 3)},
        "softmax_scale": {"softmax_scale": 0.3},
        "softmax_scale as int": {"softmax_scale": 1},
        "seqlens_k": {"seqlens_k": backend.ints(33, 90)},
        "leftpad_k": {"leftpad_k": backend.ints(0, 12)},
        "offset": {"causal": True, "offset": 7},
        "negative offset": {"causal": True, "offset": -7},
        "offset tensor": {"causal": True, "offset": backend.ints(5, 50)},
        "backend": {"backend": backend.name},
        "sinks": {"sinks": backend.randn(4)},
        "sinks of a batch": {"sinks": backend.randn(2, 4, dtype=torch.float64)},
        "key_ranges": {"key_ranges": backend.integers(-9, 99, 2, 70, 2, dtype=torch.int32)},
        "key_ranges of all batches": {"key_ranges": backend.integers(0, 90, 1, 70, 2, dtype=torch.int64)},
        "prefix_k": {"window_size": (9, 0), "prefix_k": backend.ints(4, 70)},
        "softcap": {"softcap": 2.0},
        "alibi_slopes": {"alibi_slopes": backend.randn(4)},
        "alibi_slopes of a batch": {"alibi_slopes": backend.randn(2, 4)},
        "attn_mask": {"attn_mask": backend.randn(70, 90) < 0.7},
        "attn_mask of batches": {"attn_mask": backend.randn(2, 1, 1, 90) < 0.7},
        "additive attn_mask": {"attn_mask": backend.randn(4, 70, 1)},
        "bias": {"bias": backend.randn(2, 4, 70, 90), "attn_mask": backend.randn(90) < 0.5},
        "dropout": {"dropout_p": 0.3, "dropout_seed": backend.seed()},
        "block_table": {"block_table": backend.integers(-1, 2, 2, 3, dtype=torch.int32)},
        "return_lse": {"return_lse": True},
        "return_state": {"return_state": True},
        "state and return_lse": {
            "state": minimal_attn.forward(*backend.qkv(), return_state=True),
            "return_lse": True,
        },
        "state": {"state": minimal_attn.forward(*backend.qkv(), return_state=True)},
        "all": {
            "causal": True,
            "window_size": (20, 3),
            "softmax_scale": -0.1,
            "seqlens_k": backend.ints(33, 90),
            "leftpad_k": backend.ints(0, 12),
            "offset": backend.ints(5, 50),
            "prefix_k": backend.ints(4, 0),
            "softcap": 3.0,
            "alibi_slopes": backend.randn(4),
            "attn_mask": backend.randn(4, 1, 90) < 0.9,
            "bias": backend.randn(1, 1, 70, 90),
            "dropout_p": 0.1,
            "dropout_seed": backend.seed(),
            "state": minimal_attn.forward(*backend.qkv(), return_state=True),
            "return_state": True,
            "backend": backend.name,
        },
    }


KEYWORDS = [
    "nothing",
    "causal",
    "window_size",
    "softmax_scale",
    "softmax_scale as int",
    "softcap",
    "alibi_slopes",
    "alibi_slopes of a batch",
    "attn_mask",
    "attn_mask of batches",
    "additive attn_mask",
    "bias",
    "dropout",
    "seqlens_k",
    "leftpad_k",
    "offset",
    "negative offset",
    "offset tensor",
    "backend",
    "sinks",
    "sinks of a batch",
    "key_ranges",
    "key_ranges of all batches",
    "prefix_k",
    "block_table",
    "return_lse",
    "return_state",
    "state and return_lse",
    "state",
    "all",
]


def for_operator(options):
    """The operator's overload and keywords: the function's offset and state are several there."""
    options = dict(options)
    if isinstance(options.get("offset"), torch.Tensor):
        options["offsets"] = options.pop("offset")
    state = options.pop("state", None)
    wants_state = options.pop("return_state", False) or state is not None
    if state is not None:
        options |= dict(zip("olm", state, strict=True))
    overload = "lse" if options.pop("return_lse", False) else "state" if wants_state else "default"
    return getattr(torch.ops.minimal_attn.forward, overload), options


def flat(results):
    return results if isinstance(results, tuple) else (results,)


def same_bits(actual, expected):
    return len(flat(actual)) == len(flat(expected)) and all(map(torch.equal, flat(actual), flat(expected)))


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("name", KEYWORDS)
def test_opcheck(backend, name):
    op, options = for_operator(keywords(backend)[name])
    tensors = backend.qkv()
    library.opcheck(op, tensors, options)
    library.opcheck(op, [t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors], options)


@pytest.mark.parametrize("name", KEYWORDS)
def test_operator_equals_function(backend, name):
    options, tensors = keywords(backend)[name], backend.qkv()
    op, op_options = for_operator(options)
    assert same_bits(op(*tensors, **op_options), minimal_attn.forward(*tensors, **options))


def test_opcheck_of_out(backend, dtype):
    tensors = backend.qkv(dtype=dtype)
    op = torch.ops.minimal_attn.forward.out
    library.opcheck(op, tensors, {"causal": True, "result": torch.empty_like(tensors[0])})
    tokens_first = torch.empty_like(tensors[0].transpose(1, 2)).transpose(1, 2)
    library.opcheck(op, tensors, {"sinks": backend.randn(4), "result": tokens_first})


def layout(t):
    return t.shape, t.stride(), t.dtype


@pytest.mark.parametrize("without_data", ["meta", "fake"])
@pytest.mark.parametrize("returns", [{}, {"return_lse": True}, {"return_state": True}], ids=str)
def test_results_without_data(backend, dtype, returns, without_data):
    """Same shapes, strides and dtypes, whatever q's strides."""
    q, k, v = backend.qkv(B=3, Nq=50, dtype=dtype)
    tokens_first = q.transpose(1, 2).contiguous().transpose(1, 2)
    queries = [
        q,
        tokens_first,
        q.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3),
        tokens_first[:, 1:3, ::2],
        tokens_first[:, :, :1],
        q[:1].expand_as(q),
        q.mT.contiguous().mT,
        q[:0],
    ]
    for q in queries:
        keys = k[: q.shape[0]], v[: q.shape[0]]
        expected = map(layout, flat(backend.forward(q, *keys, **returns)))
        if without_data == "meta":
            q_meta = torch.empty_strided(q.shape, q.stride(), dtype=dtype, device="meta")
            actual = minimal_attn.forward(q_meta, *(t.to("meta") for t in keys), **returns)
            assert all(t.is_meta for t in flat(actual))
        else:
            with FakeTensorMode() as mode:
                fakes = [mode.from_tensor(t) for t in (q, *keys)]
                actual = backend.forward(*fakes, **returns)
        assert list(map(layout, flat(actual))) == list(expected)


def test_bad_input_without_data():
    q, k = torch.empty(1, 2, 5, 8, device="meta"), torch.empty(1, 2, 5, 9, device="meta")
    with pytest.raises(ValueError, match="^k must"):
        minimal_attn.forward(q, k, k)
    with pytest.raises(ValueError, match="^backend must be"):
        minimal_attn.forward(q, q, q, backend="gpu")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16])
def test_autocast(backend, dtype, to, compiled):
    """q, k and v in autocast's dtype, as SDPA takes them; the state stays float32."""
    q, k, v = backend.qkv(dtype=dtype)
    state = backend.forward(*backend.qkv(), return_state=True)

    def forward(q, k, v, **options):
        with torch.autocast(backend.device.type, dtype=to):
            return backend.forward(q, k, v, **options)

    if compiled:
        forward = torch.compile(forward, fullgraph=True)
    for options in {"causal": True}, {"state": state}, {"return_lse": True, "sinks": backend.randn(4)}:
        assert same_bits(
            forward(q, k, v, **options), backend.forward(*(t.to(to) for t in (q, k, v)), **options)
        )
    sdpa = torch.nn.functional.scaled_dot_product_attention
    with torch.autocast(backend.device.type, dtype=to):
        mixed = backend.forward(q, k.to(to), v.float())
        assert mixed.dtype == sdpa(q, q.to(to), q.float()).dtype == to
        with torch.autocast(backend.device.type, enabled=False):
            assert backend.forward(q, k, v).dtype == dtype
        out = torch.empty_like(q, dtype=to)
        assert torch.equal(backend.forward(q, k, v, out=out), backend.forward(q, k, v))


@pytest.mark.parametrize("returns", [{}, {"return_lse": True}, {"return_state": True}], ids=str)
def test_vmap(backend, returns):
    """The same as one call for each element, whatever is mapped over, in one call of the operator."""
    q, k, v = (t.unflatten(0, (2, 3)) for t in backend.qkv(B=6))
    lengths = torch.tensor([[90, 3, 50], [0, 89, 17]], device=backend.device)
    sinks = backend.randn(2, 4)
    state = backend.forward(*backend.qkv(B=3), return_state=True)
    cases = [  # q, k, v and what of them is mapped over; keywords that are mapped over, and others
        ((q, k, v), (0, 0, 0), {}, {}),
        ((q[0], k, v), (None, 0, 0), {}, {}),
        ((q, k[0], v.movedim(0, 2)), (0, None, 2), {"seqlens_k": lengths}, {}),
        ((q, k, v), (0, 0, 0), {}, {"leftpad_k": lengths[0]}),
        ((q[0], k[0], v[0]), (None, None, None), {"offset": lengths}, {"causal": True}),
        ((q, k, v), (0, 0, 0), {"sinks": sinks}, {}),
        ((q, k, v), (0, 0, 0), {}, {"sinks": sinks[0], "softmax_scale": 0.2}),
        ((q[1], k[1], v), (None, None, 0), {}, {"window_size": (9, 0)}),
    ]
    if "return_state" in returns:
        cases.append(((q, k, v), (0, 0, 0), {}, {"state": state}))
    for tensors, in_dims, mapped, options in cases:

        def forward(q, k, v, mapped, options=options):
            return flat(backend.forward(q, k, v, **mapped, **options, **returns))

        calls = []
        for i in range(2):
            element = (t if d is None else t.select(d, i) for t, d in zip(tensors, in_dims, strict=True))
            calls.append(forward(*element, {name: t[i] for name, t in mapped.items()}))
        with torch.profiler.profile(acc_events=True) as profile:
            actual = torch.vmap(forward, (*in_dims, 0 if mapped else None))(*tensors, mapped)
        counts = {event.key: event.count for event in profile.key_averages()}
        assert counts["minimal_attn::forward"] <= 2  # the call that is mapped, and that with the larger batch
        for x, *elements in zip(actual, *calls, strict=True):
            torch.testing.assert_close(x, torch.stack(elements), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["nothing", "seqlens_k", "offset tensor", "sinks", "block_table", "return_lse", "return_state"]
)
def test_vmap_of_no_elements(backend, name):
    """Empty results of the right shapes, whatever is mapped over; likewise gradients."""
    options = keywords(backend)[name]
    mapped = {name: x for name, x in options.items() if isinstance(x, torch.Tensor)}
    tensors = backend.qkv()
    expected = [(0, *x.shape) for x in flat(backend.forward(*tensors, **options))]

    def forward(q, k, v, mapped):
        return backend.forward(q, k, v, **options | mapped)

    for dims in (0, 0, 0, 0), (0, None, None, None), (None, 1, None, 0), (None, None, 4, None), (-1, 2, 0, 0):
        dims = dims if mapped else (*dims[:3], None)
        inputs = [
            x if d is None else x.unsqueeze(d).narrow(d, 0, 0) for x, d in zip(tensors, dims, strict=False)
        ]
        emptied = {name: x if dims[3] is None else x[None][:0] for name, x in mapped.items()}
        results = torch.vmap(forward, dims)(*inputs, emptied)
        assert [x.shape for x in flat(results)] == expected
    inputs = [x[None, None].expand(3, 2, *x.shape) for x in tensors]
    for one in (slice(0), slice(3)), (slice(3), slice(0)):
        results = torch.vmap(torch.vmap(forward, (0, 0, 0, None)), (0, 0, 0, None))(
            *(x[one] for x in inputs), mapped
        )
        sizes = inputs[0][one].shape[:2]
        assert [x.shape for x in flat(results)] == [(*sizes, *shape[1:]) for shape in expected]
    if "block_table" not in options:

        def loss(q, k, v):
            return flat(forward(q, k, v, mapped))[0].sum()

        gradients = torch.vmap(torch.func.grad(loss, (0, 1, 2)))(*(x[None][:0] for x in tensors))
        assert [x.shape for x in gradients] == [(0, *x.shape) for x in tensors]


def test_vmap_of_bad_input(backend):
    q, k, v = backend.qkv()
    with pytest.raises(
        ValueError, match=r"^q must have 4 dimensions, \(B, H, N, d\), but has shape \[4, 70, 64\]$"
    ):
        torch.vmap(backend.forward)(q, k, v)


def test_vmap_of_packed_sequences(backend):
    """Also over other lengths in each element."""
    q, k, v = (backend.randn(3, 20, H, 16) for H in (4, 2, 2))
    ends = torch.stack([backend.ints(0, 7, 20), backend.ints(0, 0, 9), backend.ints(2, 3, 20)])

    def packed(q, k, v, ends):
        return varlen(q, k, v, ends, ends, 18, 18, causal=True)

    expected = torch.stack([packed(*element) for element in zip(q, k, v, ends, strict=True)])
    torch.testing.assert_close(torch.vmap(packed)(q, k, v, ends), expected)
    assert torch.vmap(packed)(q[:0], k[:0], v[:0], ends[:0]).shape == (0, 20, 4, 16)


def test_vmap_of_out(backend):
    q, k, v = (t.unflatten(0, (2, 3)) for t in backend.qkv(B=6))
    for out in torch.zeros_like(q), torch.zeros_like(q[0]):
        with pytest.raises(ValueError, match="^out must be None under torch.vmap"):
            in_dims = (0, 0, 0, 0 if out.dim() == 5 else None)
            torch.vmap(lambda q, k, v, out: backend.forward(q, k, v, out=out), in_dims)(q, k, v, out)


def test_torch_function_mode(backend):
    """A TorchFunctionMode sees the call with the keywords that were given, and may compute it."""
    q, k, v = backend.qkv()
    seen = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is minimal_attn.forward:
                seen.append((args, kwargs))
            return function(*args, **(kwargs or {}))

    offset = backend.ints(3, 7)
    with Mode():
        actual = minimal_attn.forward(q, k, v, causal=True, offset=offset)
    [(args, kwargs)] = seen
    assert all(x is y for x, y in zip(args, (q, k, v), strict=True))
    assert kwargs == {"causal": True, "offset": offset}
    assert torch.equal(actual, minimal_attn.forward(q, k, v, causal=True, offset=offset))


def test_torch_function_of_a_subclass(backend):
    class Plain(torch.Tensor):
        pass

    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            return "own", function, kwargs

    q, k, v = backend.qkv()
    plain = backend.forward(q.as_subclass(Plain), k, v, return_lse=True)
    assert [type(t) for t in plain] == [Plain, Plain]
    assert same_bits(
        tuple(t.as_subclass(torch.Tensor) for t in plain), backend.forward(q, k, v, return_lse=True)
    )
    name, function, kwargs = minimal_attn.forward(q, k, v.as_subclass(Own), causal=True)
    assert (name, function, kwargs) == ("own", minimal_attn.forward, {"causal": True})
    parameters = (torch.nn.Parameter(t, requires_grad=False) for t in (q, k, v))
    assert torch.equal(backend.forward(*parameters), backend.forward(q, k, v))


@pytest.mark.parametrize(
    "returns", [{}, {"return_lse": True}, {"return_state": True}, {"out": True}], ids=str
)
def test_flop_counter(backend, returns):
    """Counted as PyTorch counts SDPA: 2 products, each 2 Nq Nk d FLOPs for each query head."""
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = backend.qkv()
    if "out" in returns:
        returns = {"out": torch.empty_like(q)}
    with FlopCounterMode(display=False) as counter:
        backend.forward(q, k, v, causal=True, **returns)
    assert counter.get_total_flops() == 4 * 2 * 4 * 70 * 90 * 64
    table = torch.zeros(2, 3, dtype=torch.int32, device=q.device)
    with FlopCounterMode(display=False) as counter:
        backend.forward(q, k, v, block_table=table, **returns)
    assert counter.get_total_flops() == 4 * 2 * 4 * 70 * 270 * 64


@pytest.mark.parametrize("first", ["minimal_attn", "torch.utils.flop_counter"])
def test_flop_counter_imported_before_and_after(first):
    code = f"""
import torch, {first}
import minimal_attn, torch.utils.flop_counter as f
q = torch.zeros(1, 1, 2, 4)
with f.FlopCounterMode(display=False) as counter:
    minimal_attn.forward(q, q, q)
assert counter.get_total_flops() == 64
import importlib
importlib.reload(f)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_profiler_sees_it(backend):
    q, k, v = backend.qkv()
    with torch.profiler.profile(acc_events=True) as profile:
        backend.forward(q, k, v)
    assert "minimal_attn::forward" in {event.key for event in profile.key_averages()}


def test_threads_run_meanwhile(backend):
    """The GIL is released: another thread of Python runs while a long call computes."""
    if backend.device.type == "cuda":
        pytest.skip("a GPU's call returns before it is computed")
    q, k, v = backend.qkv(B=1, Hq=8, Hkv=8, Nq=2048, Nk=4096)
    started, finished = threading.Event(), threading.Event()

    def compute():
        started.set()
        backend.forward(q, k, v)
        finished.set()

    thread = threading.Thread(target=compute)
    thread.start()
    started.wait()
    turns = 0
    while not finished.wait(1e-4):
        turns += 1
    thread.join()
    assert turns >= 5
