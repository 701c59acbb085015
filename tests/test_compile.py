"""torch.compile, torch.export, AOTInductor: the operator within graphs, values equal to eager's."""

import io
import zipfile

import pytest
import torch
from conftest import Backend
from test_operator import KEYWORDS, flat, fresh_compiler, keywords, same_bits  # noqa: F401

import minimal_attn

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.mark.parametrize("name", KEYWORDS)
def test_compile(backend, dtype, name):
    """The default backend, one graph, other operations before and after: eager's values."""
    options = keywords(backend)[name]

    def block(x, k, v):
        results = minimal_attn.forward(x.transpose(1, 2), k, v, **options)
        return results if isinstance(results, tuple) else results.transpose(1, 2).flatten(2)

    q, k, v = backend.qkv(dtype=dtype)
    x = q.transpose(1, 2).contiguous()
    assert same_bits(torch.compile(block, fullgraph=True)(x, k, v), block(x, k, v))


def test_compile_out(backend):
    """`out` changes in the graph, and in the caller's tensor."""

    def block(q, k, v, out):
        out = minimal_attn.forward(q, k, v, causal=True, out=out[:, :, 3:])
        return out + 1

    q, k, v = backend.qkv()
    out = backend.randn(2, 4, 73, 64)
    before = out.clone()
    result = torch.compile(block, fullgraph=True)(q, k, v, out)
    expected = minimal_attn.forward(q, k, v, causal=True)
    assert torch.equal(out[:, :, 3:], expected) and torch.equal(out[:, :, :3], before[:, :, :3])
    assert torch.equal(result, expected + 1)


def test_compile_bad_input(backend):
    forward = torch.compile(minimal_attn.forward, fullgraph=True)
    q, k, v = backend.qkv()
    with pytest.raises(Exception, match="window_size must be"):
        forward(q, k, v, window_size=(-2, 0))
    assert same_bits(forward(q, k, v), minimal_attn.forward(q, k, v))


@pytest.mark.parametrize("return_state", [False, True])
def test_compiled_once_for_all_lengths(backend, return_state):
    """Neither a new length nor a new offset recompiles, once sizes are dynamic."""

    @torch.compile(fullgraph=True, dynamic=True)
    def forward(q, k, v, offset):
        return minimal_attn.forward(q, k, v, causal=True, offset=offset, return_state=return_state)

    forward(*backend.qkv(Nq=70, Nk=90), 20)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for Nq, Nk, offset in (70, 91, 21), (65, 128, 3), (300, 33, -40), (2, 1000, 998), (512, 512, 5):
            q, k, v = backend.qkv(Nq=Nq, Nk=Nk)
            expected = minimal_attn.forward(q, k, v, causal=True, offset=offset, return_state=return_state)
            assert same_bits(forward(q, k, v, offset), expected)


def test_compiled_lengths_become_dynamic(backend):
    """Without being told: a second length makes the length dynamic, a third compiles nothing."""

    @torch.compile(fullgraph=True)
    def decode(q, k, v, seqlens_k, state):
        return minimal_attn.forward(q, k, v, seqlens_k=seqlens_k, causal=True, state=state)

    def run(Nk):
        q, k, v = backend.qkv(Nq=1, Nk=Nk)
        state = minimal_attn.forward(*backend.qkv(Nq=1), return_state=True)
        seqlens_k = backend.ints(Nk // 2, Nk)
        expected = minimal_attn.forward(q, k, v, seqlens_k=seqlens_k, causal=True, state=state)
        assert same_bits(decode(q, k, v, seqlens_k, state), expected)

    run(90)
    run(91)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for Nk in 92, 128, 500, 33:
            run(Nk)


def test_reduce_overhead(cuda_backend, dtype):
    """Recorded as a CUDA graph, replayed on other values and lengths; results are overwritten by the next."""
    backend = cuda_backend

    @torch.compile(fullgraph=True, mode="reduce-overhead")
    def block(q, k, v, seqlens_k):
        o, lse = backend.forward(q * 2, k, v, causal=True, seqlens_k=seqlens_k, return_lse=True)
        return backend.forward(o, k, v, seqlens_k=seqlens_k), lse + 1

    torch._dynamo.utils.counters.clear()
    for lengths in (90, 33), (90, 33), (1, 90), (0, 2), (77, 64):
        inputs = *backend.qkv(dtype=dtype), backend.ints(*lengths)
        torch.compiler.cudagraph_mark_step_begin()
        result = tuple(t.clone() for t in block(*inputs))
        q, k, v, seqlens_k = inputs
        o, lse = backend.forward(q * 2, k, v, causal=True, seqlens_k=seqlens_k, return_lse=True)
        assert same_bits(result, (backend.forward(o, k, v, seqlens_k=seqlens_k), lse + 1))
    counters = torch._dynamo.utils.counters["inductor"]
    assert counters["cudagraph_skips"] == 0, dict(counters)


class Block(torch.nn.Module):
    """A prefill and a step with the state: o, the log-sum-exp and (o, l, m) all occur."""

    def forward(self, q, k, v, seqlens_k, sinks):
        o, lse = minimal_attn.forward(q, k, v, causal=True, sinks=sinks, return_lse=True)
        state = minimal_attn.forward(o, k, v, window_size=(20, 3), offset=-2, return_state=True)
        return minimal_attn.forward(q, k, v, seqlens_k=seqlens_k, state=state, softmax_scale=0.2), lse


def block_inputs(backend, dtype, B=2, Nq=70, Nk=90):
    lengths = backend.ints(*(backend.random.randint(0, Nk) for _ in range(B)))
    return *backend.qkv(B=B, Nq=Nq, Nk=Nk, dtype=dtype), lengths, backend.randn(4)


def exported(backend, dtype):
    """For any batch size and lengths."""
    B, Nq, Nk = (torch.export.Dim(name, min=1, max=10000) for name in ("B", "Nq", "Nk"))
    dims = {"q": {0: B, 2: Nq}, "k": {0: B, 2: Nk}, "v": {0: B, 2: Nk}, "seqlens_k": {0: B}, "sinks": None}
    return torch.export.export(Block(), block_inputs(backend, dtype), dynamic_shapes=dims)


SIZES = [dict(), dict(B=3, Nq=1, Nk=33), dict(B=1, Nq=130, Nk=5)]


def nested_bits(actual, expected):
    (state, lse), (expected_state, expected_lse) = actual, expected
    return same_bits(tuple(state), expected_state) and torch.equal(lse, expected_lse)


def test_export(backend, dtype):
    """Saved, loaded, run."""
    file = io.BytesIO()
    torch.export.save(exported(backend, dtype), file)
    file.seek(0)
    program = torch.export.load(file).module()
    for sizes in SIZES:
        inputs = block_inputs(backend, dtype, **sizes)
        assert nested_bits(program(*inputs), Block()(*inputs))


def has_compiler():
    from torch._inductor import cpp_builder, exc

    try:
        return bool(cpp_builder.get_cpp_compiler())
    except exc.InvalidCxxCompiler:
        return False


def test_aot_inductor(seed, tmp_path):
    """Compiled to a shared library, which calls the operator without Python's part of this package."""
    if not has_compiler():
        pytest.skip("AOTInductor needs a C++ compiler")
    backend = Backend("cpu", seed)
    path = str(tmp_path / "block.pt2")
    torch._inductor.aoti_compile_and_package(exported(backend, torch.float32), package_path=path)
    with zipfile.ZipFile(path) as package:
        libraries = [package.read(name) for name in package.namelist() if name.endswith(".so")]
    if not all(b"c++.so" in library for library in libraries):
        pytest.skip("this compiler links libstdc++ statically: PyTorch's std::regex crashes with two of them")
    program = torch._inductor.aoti_load_package(path)
    for sizes in SIZES:
        inputs = block_inputs(backend, torch.float32, **sizes)
        assert nested_bits(program(*inputs), Block()(*inputs))
