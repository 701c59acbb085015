"""Sizes that are symbols in a graph: dynamic ones, and unbacked ones, which depend on data (x[keep])."""

import pytest
import torch
from test_operator import flat, fresh_compiler, same_bits  # noqa: F401

import minimal_attn
from minimal_attn import flash_attn

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

KINDS = [
    "batch",
    "batch, (B, N, H, d)",
    "batch and per-batch tensors",
    "sinks and lse",
    "state",
    "out",
    "queries",
    "queries, (B, N, H, d)",
    "keys",
    "heads",
    "heads, (B, N, H, d)",
    "pages",
    "flash_attn_func",
    "deterministic",
    "varlen",
    "kvcache",
    "kvcache, new keys",
    "merge",
    "SDPA",
]


def unbacked(backend, kind):
    """A function of q, k, v and keep, a mask of what counts in one dimension; the shapes of q and of k."""
    q, k, rows = (5, 4, 7, 16), (5, 4, 9, 16), 5

    def attend(q, k, v, **options):
        return minimal_attn.forward(q, k, v, causal=True, backend=backend.name, **options)

    def heads_first(*tensors):
        return (x.transpose(1, 2) for x in tensors)

    if kind == "batch":
        return lambda q, k, v, keep: attend(q[keep], k[keep], v[keep]), q, k, rows
    if kind == "batch and per-batch tensors":
        ints = backend.ints(9, 3, 0, 5, 7)

        def function(q, k, v, keep):
            n = ints[keep]
            return attend(q[keep], k[keep], v[keep], seqlens_k=n, leftpad_k=n // 2, offset=n - 5)

        return function, q, k, rows
    if kind == "sinks and lse":
        sinks = backend.randn(5, 4)
        return (
            (lambda q, k, v, keep: attend(q[keep], k[keep], v[keep], sinks=sinks[keep], return_lse=True)),
            q,
            k,
            rows,
        )
    if kind == "state":

        def function(q, k, v, keep):
            state = attend(q[keep], k[keep], v[keep], return_state=True)
            return attend(q[keep], k[keep], v[keep], state=state)

        return function, q, k, rows
    if kind == "merge":

        def function(q, k, v, keep):
            state = attend(q[keep], k[keep], v[keep], return_state=True)
            return minimal_attn.merge(state, attend(q[keep], v[keep], k[keep], return_state=True))

        return function, q, k, rows
    if kind == "out":

        def function(q, k, v, keep):
            return attend(q[keep], k[keep], v[keep], out=torch.zeros_like(q[keep])).clone()

        return function, q, k, rows
    if kind == "queries":
        return lambda q, k, v, keep: attend(q[:, :, keep], k, v), q, k, 7
    if kind == "keys":
        return lambda q, k, v, keep: attend(q, k[:, :, keep], v[:, :, keep]), q, k, 9
    if kind == "heads":
        return lambda q, k, v, keep: attend(q[:, keep], k[:, keep], v[:, keep]), q, k, 4
    if kind == "pages":
        table = backend.integers(-1, 5, 5, 8, dtype=torch.int32)
        return lambda q, k, v, keep: attend(q, k, v, block_table=table[:, keep]), q, k, 8
    q, k = (5, 7, 4, 16), (5, 9, 4, 16)
    if kind == "batch, (B, N, H, d)":
        return lambda q, k, v, keep: attend(*heads_first(q[keep], k[keep], v[keep])), q, k, rows
    if kind == "queries, (B, N, H, d)":
        return lambda q, k, v, keep: attend(*heads_first(q[:, keep], k, v)), q, k, 7
    if kind == "heads, (B, N, H, d)":
        return lambda q, k, v, keep: attend(*heads_first(*(x[:, :, keep] for x in (q, k, v)))), q, k, 4
    if kind == "flash_attn_func":
        return (
            lambda q, k, v, keep: flash_attn.flash_attn_func(q[keep], k[keep], v[keep], causal=True),
            q,
            k,
            5,
        )
    if kind == "deterministic":
        return (
            (lambda q, k, v, keep: flash_attn.flash_attn_func(q[keep], k[keep], v[keep], deterministic=True)),
            q,
            k,
            rows,
        )
    if kind == "SDPA":
        return (
            (
                lambda q, k, v, keep: minimal_attn.scaled_dot_product_attention(
                    *heads_first(q[keep], k[keep], v[keep])
                )
            ),
            q,
            k,
            rows,
        )
    if kind == "kvcache":
        lengths = backend.ints(1, 2, 3, 0, 5)

        def function(q, k, v, keep):
            return flash_attn.flash_attn_with_kvcache(
                q[keep, -1:], k[keep], v[keep], q[keep, :1], q[keep, 1:2], cache_seqlens=lengths[keep]
            )

        return function, q, k, rows
    if kind == "kvcache, new keys":

        def function(q, k, v, keep):
            new = q[:, keep], q[:, keep] + 1
            return flash_attn.flash_attn_with_kvcache(q, k.clone(), v.clone(), *new, cache_seqlens=2)

        return function, q, k, 7

    def varlen(q, k, v, keep):  # the first half of the tokens that count is one sequence
        n = keep.sum()
        ends = torch.stack([n * 0, n // 2, n])
        q, k, v = q[keep], k[keep], v[keep]
        return flash_attn.flash_attn_varlen_func(q, k, v, ends, ends, 100, 100, causal=True)

    return varlen, (100, 4, 16), (100, 2, 16), 100


def masks(backend, n):
    """How many count: several, all, one, none."""
    for count in (n // 2 + 1, n, 1, 0):
        keep = torch.arange(n) < count
        yield keep[torch.randperm(n, generator=backend.generator)].to(backend.device)


class Module(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def close(actual, expected):
    assert len(flat(actual)) == len(flat(expected))
    for x, y in zip(flat(actual), flat(expected), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_export_of_unbacked_sizes(backend, kind):
    """One program for all sizes, 0 and 1 among them, and the strides that it predicts."""
    function, q_shape, k_shape, n = unbacked(backend, kind)
    program = None
    for keep in masks(backend, n):
        inputs = backend.randn(*q_shape), backend.randn(*k_shape), backend.randn(*k_shape), keep
        if program is None:
            program = torch.export.export(Module(function), inputs)
            [symbol] = program.range_constraints
            assert program.range_constraints[symbol].lower == 0
            [output] = [node for node in program.graph.nodes if node.op == "output"]
            predicted = [node.meta["val"] for node in output.args[0]]
        actual, expected = flat(program.module()(*inputs)), flat(function(*inputs))
        close(actual, expected)
        for fake, x, y in zip(predicted, actual, expected, strict=True):
            sizes = {symbol: int(keep.sum())}
            stride = [s if isinstance(s, int) else int(s.node.expr.subs(sizes)) for s in fake.stride()]
            for a, b, c, size in zip(stride, x.stride(), y.stride(), x.shape, strict=True):
                assert size == 1 or x.numel() == 0 or a == b == c


@pytest.mark.parametrize("kind", KINDS)
def test_compile_of_unbacked_sizes(backend, kind):
    """One graph, compiled once, with its gradients where the function has some."""
    with_gradients = kind not in ("out", "pages", "kvcache", "kvcache, new keys")
    function, q_shape, k_shape, n = unbacked(backend, kind)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    config = torch._dynamo.config.patch(
        capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True, error_on_recompile=True
    )
    for keep in masks(backend, n):
        tensors = backend.randn(*q_shape), backend.randn(*k_shape), backend.randn(*k_shape)
        if with_gradients:
            tensors = [x.requires_grad_() for x in tensors]
        with config:
            actual = flat(compiled(*tensors, keep))
        expected = flat(function(*tensors, keep))
        close(actual, expected)
        if with_gradients:
            parts = [
                torch.autograd.grad(sum(x.square().sum() for x in results), tensors)
                for results in (actual[:2], expected[:2])
            ]
            close(*map(tuple, parts))


@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_max_seqlen_that_depends_on_data(backend, as_tensor, with_gradients):
    """From .item(), and as a tensor: one graph, also for more tokens. Once by the default compiler."""

    def function(q, k, v, ends):
        longest = ends.diff().max() if as_tensor else ends.diff().max().item()
        return flash_attn.flash_attn_varlen_func(q, k, v, ends, ends, longest, longest, causal=True)

    options = {} if as_tensor and with_gradients else {"backend": "aot_eager"}
    compiled = torch.compile(function, fullgraph=True, dynamic=True, **options)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for ends in (0, 3, 40), (0, 0, 40), (0, 400, 500):
            shapes = (ends[-1], 4, 16), (ends[-1], 2, 16), (ends[-1], 2, 16)
            tensors = [backend.randn(*shape).requires_grad_(with_gradients) for shape in shapes]
            results = [f(*tensors, backend.ints(*ends)) for f in (compiled, function)]
            close(*results)
            if with_gradients:
                close(*(torch.autograd.grad(x.square().sum(), tensors) for x in results))


@pytest.mark.parametrize("dims", [(0,), (1,), (2,), (3,), (0, 1, 2, 3)], ids=str)
def test_mark_unbacked(backend, dims):
    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(q, k, v):
        return minimal_attn.forward(q, k, v, causal=True, backend=backend.name) * 2

    tensors = backend.qkv()
    for t in tensors:
        for dim in dims:
            torch._dynamo.decorators.mark_unbacked(t, dim)
    assert same_bits(compiled(*tensors), backend.forward(*tensors, causal=True) * 2)
    with torch._dynamo.config.patch(error_on_recompile=True):
        new = {0: dict(B=1), 1: dict(Hq=3, Hkv=3), 2: dict(Nq=1, Nk=300), 3: dict(d=8)}
        sizes = {name: size for dim in dims for name, size in new[dim].items()}
        if 1 not in dims or len(dims) > 1:
            tensors = backend.qkv(**sizes)
            assert same_bits(compiled(*tensors), backend.forward(*tensors, causal=True) * 2)
        with pytest.raises((ValueError, RuntimeError, AssertionError)):  # k has another d, or another batch
            q, k, v = backend.qkv(**sizes)
            compiled(q, torch.cat([k, k], 3)[:, :, :, : k.shape[3] + 1], v)


def exports(function, inputs, dims):
    """The program, whose sizes have no bounds."""
    program = torch.export.export(Module(function), inputs, dynamic_shapes=(dims,))
    for bounds in program.range_constraints.values():
        assert bounds.lower <= 2 and bounds.upper > 2**40
    return program


@pytest.mark.parametrize("name", ["AUTO", "DYNAMIC", "names"])
def test_export_of_dynamic_sizes(backend, name):
    """B, Nq and Nk, heads and d: none is frozen, and none has a bound."""
    kind, Dim = getattr(torch.export.Dim, name, None), torch.export.Dim
    B, Nq, Nk = (kind or Dim(word) for word in ("B", "Nq", "Nk"))

    def function(q, k, v):
        return minimal_attn.forward(q, k, v, causal=True, return_lse=True, backend=backend.name)

    keys = {0: B, 2: Nk}
    program = exports(function, backend.qkv(), ({0: B, 2: Nq}, keys, keys))
    assert len(program.range_constraints) == 3
    for sizes in dict(B=1, Nq=1, Nk=1), dict(B=3, Nq=90, Nk=700), dict(B=0), dict(Nq=0), dict(Nk=0):
        tensors = backend.qkv(**sizes)
        assert same_bits(program.module()(*tensors), function(*tensors))
    if kind:
        program = exports(function, backend.qkv(), ({0: kind, 1: kind, 2: kind, 3: kind},) * 3)
        assert len(program.range_constraints) == 7  # d_v is free
        for sizes in dict(Hq=6, Hkv=2, d=40), dict(Hq=9, Hkv=9, d=256):
            tensors = backend.qkv(**sizes)
            assert same_bits(program.module()(*tensors), function(*tensors))
        with pytest.raises(ValueError, match="^q must have a multiple of k's heads, but q has 5 and k has 2"):
            program.module()(*backend.qkv(Hq=5))
        most = 576
        with pytest.raises(ValueError, match=f"^q must have a head dimension d from 1 to {most}"):
            program.module()(*backend.qkv(d=most + 1))


@pytest.mark.parametrize("name", ["AUTO", "DYNAMIC"])
def test_export_of_dynamic_packed_sequences(backend, name):
    kind = getattr(torch.export.Dim, name)

    def inputs(*ends, longest=None):
        q, k, v = (backend.randn(ends[-1], H, 16) for H in (4, 2, 2))
        return q, k, v, backend.ints(*ends), longest or max(ends)

    def function(q, k, v, ends, longest):
        return flash_attn.flash_attn_varlen_func(q, k, v, ends, ends, longest, longest, causal=True)

    dims = {0: kind}, {0: kind}, {0: kind}, {0: kind}, kind
    program = torch.export.export(Module(function), inputs(0, 3, 5, 80), dynamic_shapes=(dims,))
    assert all(bounds.upper > 2**40 for bounds in program.range_constraints.values())
    for ends in (0, 7, 9), (0, 0, 300, 300, 401), (0, 1, 2, 3, 4):
        tensors = inputs(*ends)
        assert same_bits(program.module()(*tensors), function(*tensors))
