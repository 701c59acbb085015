"""The backends that tests run on, and what a test does with one: draw inputs, call it, compare.

pytest --seed 123                     the inputs of an earlier failure (each test prints its seed)
pytest --cpu-instructions AVX2        the CPU backend with no better instruction set than this one
pytest --shared-memory-limit 65536    as on a GPU with 64 KB of shared memory a block
pytest -m sanitizer                   few and tiny cases, for compute-sanitizer
"""

import contextlib
import os
import random

# Threads that wait by spinning make small calls on a busy machine several times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic algorithms ask for it

import pytest
import torch
from reference import attention

import minimal_attn
from minimal_attn import _varlen

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# B, Hq, Hkv, Nq, Nk, d: tiles that are cut, one number, an odd d, several tiles, more queries than keys
SHAPES_OF_MASKS = [
    (2, 4, 2, 70, 90, 64),
    (1, 1, 1, 1, 1, 1),
    (3, 2, 1, 17, 200, 33),
    (1, 2, 2, 330, 330, 128),
    (2, 2, 1, 200, 65, 256),
]
# Of o on ordinary inputs, relative Frobenius error.
ERROR_BOUND = {torch.float32: 1.5e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}


NOT_ALL_TILES = "no tiles for smaller GPUs: build with MINIMAL_ATTN_TILES=all"


def pytest_addoption(parser):
    parser.addoption("--seed", type=int, help="seed of the random inputs; by default another for each test")
    parser.addoption("--cpu-instructions", help="the best instruction set that the CPU backend may use")
    parser.addoption("--shared-memory-limit", type=int, help="bytes of shared memory that a block may use")


def pytest_configure(config):
    config.addinivalue_line("markers", "sanitizer: tiny cases that reach every code path of the kernels")
    if name := config.getoption("--cpu-instructions"):
        minimal_attn._C.limit_cpu_instructions(name)
    if limit := config.getoption("--shared-memory-limit"):
        if not minimal_attn._C.has_all_tiles():
            raise pytest.UsageError(NOT_ALL_TILES)
        minimal_attn._C.shared_memory_limit(limit)


class Backend:
    """One of this build's backends, by name, with inputs drawn for it at random."""

    def __init__(self, name, seed):
        self.name = name
        self.device = torch.device("cpu" if name == "cpu" else "cuda")
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def randn(self, *shape, dtype=torch.float32):
        return torch.randn(shape, generator=self.generator).to(self.device, dtype)

    def integers(self, low, high, *shape, dtype=torch.float32):
        """From low to high, both included."""
        return torch.randint(low, high + 1, shape, generator=self.generator).to(self.device, dtype)

    def qkv(self, B=2, Hq=4, Hkv=2, Nq=70, Nk=90, d=64, dtype=torch.float32):
        return tuple(self.randn(B, H, N, d, dtype=dtype) for H, N in ((Hq, Nq), (Hkv, Nk), (Hkv, Nk)))

    def seed(self):
        """Of dropout."""
        return self.integers(-(2**63), 2**63 - 2, 1, dtype=torch.int64)

    def ints(self, *values):
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def forward(self, q, k, v, **options):
        return minimal_attn.forward(q, k, v, backend=self.name, **options)

    def explain(self, q, k, v, **options):
        return minimal_attn.explain(q, k, v, backend=self.name, **options)

    def check(self, q, k, v, **options):
        """The contract on these inputs: o, with and without the state, l and m against float64."""
        expected = attention(q, k, v, **options)
        alone = self.forward(q, k, v, **options)
        assert alone.dtype == q.dtype
        check_o(alone, expected, q.dtype)
        o, l, m = self.forward(q, k, v, return_state=True, **options)
        assert {t.dtype for t in (o, l, m)} == {torch.float32}
        assert l.is_contiguous() and m.is_contiguous()
        check_o(o, expected, q.dtype)
        check_l_m(
            l,
            m,
            expected,
            (options.get("softmax_scale") or 0) * q.shape[-1] ** 0.5,
            self.score_error(q, options),
            bool({"bias", "alibi_slopes", "attn_mask"} & options.keys()),
        )
        return alone

    def score_error(self, q, options):
        """Relative, beside rounding: GPUs approximate tanh in bfloat16 (scores.h)."""
        is_bounded = 0 < (options.get("softcap") or 0) <= 128
        is_approximated = is_bounded and self.name in ("hopper", "portable") and q.dtype == torch.bfloat16
        return 2**-11 if is_approximated else 0.0


def check_o(o, expected, dtype):
    """Every row within what rounding explains; what isn't finite must be the same."""
    assert o.shape == expected.o.shape and o.device == expected.o.device
    special = ~expected.o.isfinite()
    assert torch.equal(o.isnan(), expected.o.isnan())
    assert torch.equal(o[special].double().nan_to_num(), expected.o[special].nan_to_num())
    error, size = (t.masked_fill(special, 0).norm(dim=-1) for t in (o.double() - expected.o, expected.size))
    # A row may be a single element: all of o's rounding and all of P's at their worst. Beside a sink that
    # takes all weight o is near 0, where float16 has steps of 2^-24.
    step = 2**-24 if dtype == torch.float16 else 0
    wrong = ~(error <= 2 * ERROR_BOUND[dtype] * size + step / 2 * o.shape[-1] ** 0.5)
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()} rows are wrong, the first at {wrong.nonzero()[0].tolist()}, "
        f"the worst by {(error / size).nan_to_num(0).max():.1e}"
    )


def check_l_m(l, m, expected, score_std=1, score_error=0.0, has_terms=False):
    """score_std: of all scores, since one near 0 may be a sum of large products; score_error: relative, of
    scores before terms are added, which may cancel.
    """
    before_terms = 2 * score_error if has_terms else 0
    atol = 3e-6 * min(max(1, abs(score_std)), 10) + before_terms
    known = ~expected.m.isnan() & (expected.m != torch.inf)  # softmax has no use for other rows
    l, m, expected_l, expected_m = (t[known].double() for t in (l, m, expected.l, expected.m))
    torch.testing.assert_close(m, expected_m, rtol=2e-6 + score_error, atol=atol)
    # m is a score, which tensor cores truncate; seen were 2.7 times 2^-23. What m is short by for it
    # l has as a factor, but not for a rounding at the end. And, by weight, l has the other scores' errors.
    bound = 1e-5 + (2**-21 + score_error) * expected_m.abs() + before_terms
    assert ((m - expected_m).abs() <= bound)[expected_m.isfinite()].all()
    by_m = expected_l * (expected_m - m).nan_to_num().exp()
    of_scores = score_error * (2 * expected_m.abs() + 2)  # P has its weight near the maximum
    bound = 1e-5 + 2e-7 * expected_m.abs() + of_scores
    assert (l >= (1 - bound) * torch.minimum(expected_l, by_m))[expected_l > 0].all()
    assert (l <= (1 + bound) * torch.maximum(expected_l, by_m))[expected_l > 0].all()
    assert not l[expected_l == 0].any()
    lse, expected_lse = m + l.log(), expected_m + expected_l.log()
    atol += score_error * (expected_m.abs().nan_to_num(0, 0, 0).max().item() + 2 if len(m) else 0)
    torch.testing.assert_close(lse, expected_lse, rtol=2e-6, atol=atol)


def check_lse(lse, expected):
    assert lse.dtype == torch.float32 and lse.is_contiguous()
    torch.testing.assert_close(lse.double(), expected.m + expected.l.log(), rtol=2e-6, atol=1e-5)


def cuda_backends():
    """Those that the GPU here can run on."""
    if not torch.cuda.is_available():
        return []
    is_hopper = (
        torch.cuda.get_device_capability() == (9, 0) and "9.0a" in minimal_attn._C.cuda_architectures()
    )
    return [name for name in minimal_attn._C.backends() if name != "cpu" and (name != "hopper" or is_hopper)]


def why_no_cuda():
    return "this build has no CUDA code" if torch.cuda.is_available() else "there is no GPU"


@pytest.fixture(params=["cpu", *cuda_backends()])
def backend(request, seed):
    return Backend(request.param, seed)


@contextlib.contextmanager
def forced(backend):
    """For minimal_attn.flash_attn's functions, which have no argument for a backend."""
    before = _varlen.forward, _varlen.backward

    def force(function):
        return lambda *tensors, **options: function(*tensors, **options | {"backend": backend.name})

    _varlen.forward, _varlen.backward = map(force, before)
    yield
    _varlen.forward, _varlen.backward = before


@pytest.fixture
def forced_backend(backend):
    with forced(backend):
        yield backend


@pytest.fixture(params=cuda_backends() or [pytest.param(None, marks=pytest.mark.skip(reason=why_no_cuda()))])
def cuda_backend(request, seed):
    return Backend(request.param, seed)


@pytest.fixture(autouse=True)
def little_memory_is_kept():
    """What PyTorch's allocator keeps of a large test would be missing in other processes of the suite."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 4 << 30:
        torch.cuda.empty_cache()


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request):
    return request.param


@pytest.fixture
def seed(request):
    fixed = request.config.getoption("--seed")
    seed = random.SystemRandom().getrandbits(32) if fixed is None else fixed
    print(f"inputs drawn by --seed {seed}")  # pytest shows it where a test fails
    return seed


@pytest.fixture(params=["cpu", *["cuda"] * bool(cuda_backends())])
def device(request):
    return request.param


@pytest.fixture
def generator(seed):
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def randn(device, generator):
    def randn(*shape, dtype=torch.float32):
        return torch.randn(shape, generator=generator).to(device, dtype)

    return randn


@pytest.fixture
def shared_memory_limit(cuda_backend):
    """Sets the bytes of shared memory that a block may use, until the test ends."""
    set_limit = minimal_attn._C.shared_memory_limit
    before = set_limit(0)
    set_limit(before)

    def limit(bytes):
        if cuda_backend.name == "hopper":
            pytest.skip("hopper runs on Hopper alone")
        if cuda_backend.name == "portable" and bytes < 227 << 10 and not minimal_attn._C.has_all_tiles():
            pytest.skip(NOT_ALL_TILES)
        set_limit(bytes)

    yield limit
    set_limit(before)


@pytest.fixture(autouse=True)
def unwritten_is_nan(request):
    """New tensors start as NaN, so that an element that was not written shows."""
    torch.use_deterministic_algorithms(True)
    # Not under compute-sanitizer, whose initcheck finds more: a filled tensor counts as written.
    torch.utils.deterministic.fill_uninitialized_memory = request.node.get_closest_marker("sanitizer") is None
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.fixture(params=["gloo", "nccl"])
def transport(request):
    """Of the ranks of a process group."""
    if request.param == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs two GPUs")
    return request.param
