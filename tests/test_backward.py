"""dq, dk and dv of minimal_attn.backward and of autograd, against float64 autograd and PyTorch's own."""

import functools
import itertools
import time

import pytest
import torch
from conftest import cuda_backends
from reference import gradient_sizes, gradients, relative_error, visible_keys
from torch.nn import functional as F

import minimal_attn

# Of dq, dk and dv on ordinary inputs, relative Frobenius error.
ERROR_BOUND = {torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}


def grads(backend, do, q, k, v, dlse=None, **options):
    """By autograd, and by hand from the log-sum-exp: the same bits, if they are promised."""
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    o, lse = backend.forward(*inputs, return_lse=True, **options)
    outputs, wanted = ([o], [do]) if dlse is None else ([o, lse], [do, dlse])
    results = torch.autograd.grad(outputs, inputs, wanted)
    complete = options.pop("sinks", None) is None
    with torch.no_grad():
        by_hand = minimal_attn.backward(
            do,
            q,
            k,
            v,
            o.detach(),
            lse.detach(),
            None,
            dlse=dlse,
            backend=backend.name,
            complete=complete,
            **options,
        )
    if torch.are_deterministic_algorithms_enabled():
        assert all(map(torch.equal, results, by_hand))
    return results


def forms(backend, dtype):
    """The one that is on meanwhile: hopper's faster form for half types adds to dq in any order."""
    yield "deterministic"
    if backend.name == "hopper" and dtype != torch.float32:
        torch.use_deterministic_algorithms(False)
        yield "in any order"
        torch.use_deterministic_algorithms(True)


def check(backend, do, q, k, v, **options):
    """Errors are relative to the gradient's norm or, where it cancels, to gradient_sizes."""
    expected = gradients(do, q, k, v, **options)
    others = "softmax_scale", "softcap", "alibi_slopes", "attn_mask", "bias", "sinks", "dlse"
    others += "dropout_p", "dropout_seed"
    band = {x: y for x, y in options.items() if x not in others}
    seen = visible_keys(q.shape[0], q.shape[2], k.shape[2], **band).to(q.device)
    for x in options.get("attn_mask"), options.get("bias"):
        if x is not None:
            seen = seen & (x if x.dtype == torch.bool else x != -torch.inf)
    of_keys = ~seen.any(-2)
    if of_keys.shape[1] > 1:  # of all query heads that share the key head
        of_keys = of_keys.unflatten(1, (k.shape[1], -1)).all(2)
    blind = {"q": ~seen.any(-1), "k": of_keys, "v": of_keys}
    for name, actual, exact in zip("qkv", grads(backend, do, q, k, v, **options), expected, strict=True):
        assert actual.dtype == q.dtype and actual.shape == exact.shape
        assert not actual[blind[name].expand(actual.shape[:-1])].any(), f"d{name} of what is hidden isn't 0"
        error, norm = torch.linalg.vector_norm(actual.double() - exact), torch.linalg.vector_norm(exact)
        bound = ERROR_BOUND[q.dtype] * (1.5 if "bias" in options else 1)  # it rounds each score once more
        if not error <= bound * norm:  # NaN, too
            size = gradient_sizes(do, q, k, v, **options)["qkv".index(name)]
            assert error <= bound * size, f"d{name} is wrong by {error / size:.1e}"


OPTIONS = {
    "full": lambda b: {},
    "causal": lambda b: dict(causal=True),
    "causal, empty rows": lambda b: dict(causal=True, offset=-40),
    "window": lambda b: dict(window_size=(20, 3)),
    "window to the right": lambda b: dict(window_size=(0, 30), offset=-10),
    "prefix_k": lambda b: dict(window_size=(9, 3), prefix_k=b.ints(4, 40)),
    "scale": lambda b: dict(softmax_scale=-0.3),
    "scale 0": lambda b: dict(softmax_scale=0.0),
    "softcap": lambda b: dict(softcap=1.5, causal=True),
    "attn_mask": lambda b: dict(attn_mask=b.randn(4, 70, 90) < 0.5, causal=True),
    "bias": lambda b: dict(bias=b.randn(2, 1, 70, 90)),
    "alibi_slopes": lambda b: dict(alibi_slopes=b.randn(4).abs() / 4, causal=True),
    "lengths": lambda b: dict(seqlens_k=b.ints(33, 0), causal=True),
    "left padding": lambda b: dict(leftpad_k=b.ints(70, 12), seqlens_k=b.ints(80, 90)),
    "offsets": lambda b: dict(offset=b.ints(-60, 50), causal=True),
    "dropout": lambda b: dict(dropout_p=0.2, dropout_seed=b.seed(), causal=True),
    "sinks": lambda b: dict(sinks=b.randn(4), causal=True),
    "dlse": lambda b: dict(dlse=b.randn(2, 4, 70)),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(backend, dtype, name):
    q, k, v = backend.qkv(dtype=dtype)
    check(backend, torch.randn_like(q), q, k, v, **OPTIONS[name](backend))


def test_scale_0_with_few_keys(backend, dtype):
    q, k, v = backend.qkv(Nk=5, dtype=dtype)
    check(backend, torch.randn_like(q), q, k, v, softmax_scale=0.0, window_size=(-1, 1))


def test_nan_in_v_at_large_scores(backend):
    """Each query sees it, if only with a P that is 0 in float32."""
    q, k, v = backend.qkv(dtype=torch.float32)
    v[:, :, 3, 1] = torch.nan
    q = (100 * q.detach()).requires_grad_()
    [dq] = torch.autograd.grad(backend.forward(q, k, v).sum(), q)
    assert dq.isnan().all()


@pytest.mark.parametrize(
    "B, Hq, Hkv, Nq, Nk, d",
    [
        (1, 1, 1, 1, 1, 1),
        (2, 3, 3, 65, 1, 33),
        (1, 6, 1, 3, 130, 80),
        (1, 6, 2, 260, 300, 96),
        (1, 2, 2, 200, 129, 128),
        (1, 2, 1, 100, 90, 200),
        (1, 1, 1, 70, 70, 256),
        (1, 2, 1, 2500, 20, 16),  # dk and dv are set aside after 64 tiles of queries
        (1, 2, 1, 20, 700, 100),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_shapes(backend, dtype, B, Hq, Hkv, Nq, Nk, d, causal):
    q, k, v = backend.qkv(B, Hq, Hkv, Nq, Nk, d, dtype)
    check(backend, torch.randn_like(q), q, k, v, causal=causal)


@pytest.mark.parametrize("shape", [(0, 4, 2, 5, 7), (2, 0, 0, 5, 7), (2, 4, 2, 0, 7), (2, 4, 2, 5, 0)])
def test_nothing_to_differentiate(backend, shape):
    q, k, v = backend.qkv(*shape, 16)
    for actual, t in zip(grads(backend, torch.ones_like(q), q, k, v), (q, k, v), strict=True):
        assert actual.shape == t.shape and not actual.any()


def test_strides(backend, dtype):
    """Any strides, also of do, and the results in the order of their tensors."""
    B, H, N, d = 2, 4, 70, 40
    x = backend.randn(B, N, 3, H, d, dtype=dtype)
    q, k, v = x.unbind(2)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k = k[:, :1].expand(B, 2, N, d)
    v = v[:, :2].mT.contiguous().mT
    do = backend.randn(d, dtype=dtype).expand(B, H, N, d)
    actual = grads(backend, do, q, k, v)
    assert actual[0].transpose(1, 2).is_contiguous() and all(t.stride(-1) == 1 for t in actual)
    check(backend, do, q, k, v)
    check(backend, do.mT.contiguous().mT, q, k, v, causal=True)


@pytest.fixture
def in_any_order():
    """Without deterministic algorithms, which all other tests ask for: hopper may add to dq in any order."""
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(True)


def multiprocessors():
    return torch.cuda.get_device_properties(0).multi_processor_count


FUSED, IN_ORDER, TWO = "half backward, fused", "half backward, fused, in order", "half backward, two kernels"
ON_HOPPER = [x for x in OPTIONS if x not in ("alibi_slopes", "attn_mask", "bias")]  # by its own kernels
SPLIT = ", keys split"  # added to the name where tiles of keys are split


@pytest.mark.parametrize("name", ON_HOPPER)
@pytest.mark.parametrize("d", [50, 128])
@pytest.mark.parametrize("Nk", [90, 2100])
@pytest.mark.parametrize("kernel", [FUSED, IN_ORDER])
def test_options_of_the_fused_kernel(cuda_backend, in_any_order, name, d, Nk, kernel):
    """2100 keys: it computes lse and D itself, and many tiles add to a part of dq."""
    if cuda_backend.name != "hopper":
        pytest.skip("a kernel of hopper")
    torch.use_deterministic_algorithms(kernel == IN_ORDER)
    q, k, v = cuda_backend.qkv(Nk=Nk, d=d, dtype=cuda_backend.random.choice([torch.float16, torch.bfloat16]))
    is_split = kernel == FUSED and (d, Nk) == (128, 90)  # 4 tiles of 4 steps each
    assert cuda_backend.explain(q, k, v, backward=True).kernel == kernel + SPLIT * is_split
    check(cuda_backend, torch.randn_like(q), q, k, v, **OPTIONS[name](cuda_backend))


@pytest.mark.parametrize("name", ON_HOPPER)
@pytest.mark.parametrize("Hq, Hkv", [(4, 1), (4, 4), (7, 1)])
@pytest.mark.parametrize(
    "d, kernel", [(50, FUSED), (128, FUSED), (50, IN_ORDER), (128, IN_ORDER), (180, TWO), (250, TWO)]
)
def test_split_keys(cuda_backend, in_any_order, name, d, Hq, Hkv, kernel):
    """Few tiles of keys for the multiprocessors. Slices may begin within a head, have few steps, or none."""
    if cuda_backend.name != "hopper":
        pytest.skip("a kernel of hopper")
    torch.use_deterministic_algorithms(kernel == IN_ORDER)
    dtype = cuda_backend.random.choice([torch.float16, torch.bfloat16])
    q, k, v = cuda_backend.qkv(
        Hq=Hq, Hkv=Hkv, Nq=1300, Nk=cuda_backend.random.choice([90, 300]), d=d, dtype=dtype
    )
    options = OPTIONS[name](cuda_backend)
    if name in ("dlse", "sinks"):
        options[name] = cuda_backend.randn(*(q.shape[:3] if name == "dlse" else [Hq]))
    is_split = Hq > Hkv or kernel != IN_ORDER  # in order, a slice has whole query heads
    band = {x: y for x, y in options.items() if x in ("causal", "window_size", "offset")}
    found = cuda_backend.explain(q, k, v, backward=True, **band).kernel
    shortens = [Hq == Hkv, "window_size" in options, kernel == TWO]
    if sum(shortens) < 2:  # else a tile may have too few steps to be split
        assert found == kernel + SPLIT * is_split or multiprocessors() != 132
    check(cuda_backend, torch.randn_like(q), q, k, v, **options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "d, kernel", [(64, FUSED), (128, FUSED), (64, IN_ORDER), (128, IN_ORDER), (192, TWO), (256, TWO)]
)
def test_whole_and_split_keys(cuda_backend, in_any_order, d, kernel, causal):
    """Eight tiles of 128 keys more than multiprocessors: the last ones are split, the first ones aren't.
    Above d 128 no tile is split, since the next kernel begins beside the last tiles."""
    if cuda_backend.name != "hopper":
        pytest.skip("a kernel of hopper")
    torch.use_deterministic_algorithms(kernel == IN_ORDER)
    Nk = 64 * (multiprocessors() + 8) - 30
    q, k, v = cuda_backend.qkv(B=1, Hq=10, Hkv=2, Nq=1300, Nk=Nk, d=d, dtype=torch.bfloat16)
    expected = kernel + SPLIT * (kernel != TWO)
    assert cuda_backend.explain(q, k, v, backward=True, causal=causal).kernel == expected
    check(cuda_backend, torch.randn_like(q), q, k, v, causal=causal)


# d, whether deterministic algorithms are asked for -> kernel, (Br, Bc, d) of the tile that gives dK and dV
HOPPER_TILES = [
    (40, False, FUSED + SPLIT, (128, 128, 64)),
    (100, False, FUSED + SPLIT, (64, 128, 128)),
    (64, True, IN_ORDER + SPLIT, (128, 128, 64)),
    (96, True, IN_ORDER + SPLIT, (64, 128, 128)),
    (130, False, TWO, (64, 64, 192)),
    (200, False, TWO, (64, 64, 256)),
    (256, True, TWO, (64, 64, 256)),
]


@pytest.mark.parametrize(
    "band",
    [{}, dict(causal=True), dict(causal=True, offset=-200), dict(window_size=(150, 60))],
    ids=str,
)
@pytest.mark.parametrize("d, deterministic, kernel, tile", HOPPER_TILES)
def test_every_tile_of_hopper(cuda_backend, in_any_order, band, d, deterministic, kernel, tile):
    """Several tiles of queries and of keys, none of them whole; a tile of queries that sees no key."""
    if cuda_backend.name != "hopper":
        pytest.skip("a tile of hopper")
    torch.use_deterministic_algorithms(deterministic)
    for dtype in torch.float16, torch.bfloat16:
        q, k, v = cuda_backend.qkv(B=1, Nq=410, Nk=450, d=d, dtype=dtype)
        found = cuda_backend.explain(q, k, v, backward=True, **band)
        assert (found.kernel, (found.Br, found.Bc, found.d)) == (kernel, tile)
        check(cuda_backend, torch.randn_like(q), q, k, v, **band)


def test_short_heads_of_hopper(cuda_backend):
    """By portable's kernel. A float32 dQ would need far more memory than many short heads have."""
    if cuda_backend.name != "hopper":
        pytest.skip("a choice of hopper")
    q, k, v = cuda_backend.qkv(B=3, Hq=6, Hkv=3, Nq=64, Nk=100, d=32, dtype=torch.bfloat16)
    found = cuda_backend.explain(q, k, v, backward=True)
    assert found.kernel == "half backward, two passes" and found.workspace < 8 * q.nbytes
    check(cuda_backend, torch.randn_like(q), q, k, v)


@pytest.mark.parametrize(
    "d, limit, tile",
    [
        (40, 227, (64, 64, 64)),
        (100, 227, (32, 64, 128)),
        (128, 163, (16, 128, 128)),
        (256, 227, (32, 64, 256)),
        (200, 163, (32, 32, 256)),
        (50, 99, (32, 128, 64)),
        (128, 99, (16, 64, 128)),
        (256, 99, (16, 32, 256)),
    ],
)
def test_every_tile_of_tf32(cuda_backend, shared_memory_limit, d, limit, tile):
    """Shared memory in KB: an A100 has 163, an L4 99."""
    if cuda_backend.name != "portable" or minimal_attn._C.cuda_architectures() == "compute_75":
        pytest.skip("a tile of portable, since Ampere")
    if torch.cuda.get_device_properties(0).shared_memory_per_block_optin < limit << 10:
        pytest.skip("too little shared memory")
    shared_memory_limit(limit << 10)
    assert minimal_attn._C.has_fast_backward(torch.empty(1, 1, 8, d, device="cuda")) == (limit >= 163)
    for band in {}, dict(causal=True), dict(window_size=(150, 60)):
        q, k, v = cuda_backend.qkv(B=1, Nq=310, Nk=350, d=d)
        found = cuda_backend.explain(q, k, v, backward=True, **band)
        assert (found.kernel, (found.Br, found.Bc, found.d)) == ("float32 backward on tensor cores", tile)
        check(cuda_backend, torch.randn_like(q), q, k, v, **band)


def test_explain(backend, dtype):
    """What backward does; the arguments are forward's."""
    q, k, v = backend.qkv(dtype=dtype)
    found = backend.explain(q, k, v, backward=True, causal=True)
    assert found.kernel and found.Br > 0 and found.Bc > 0 and found.d >= 64 and found.grid > 0
    assert found != backend.explain(q, k, v, causal=True)
    with pytest.raises(TypeError, match="^backward must be True or False, but was 1"):
        backend.explain(q, k, v, backward=1)
    with pytest.raises(ValueError, match="^block_table must be None with backward=True, but was given"):
        backend.explain(q, k, v, backward=True, block_table=backend.ints(0, 0)[:, None])


def sdpa_gradients(do, q, k, v, **options):
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    o = F.scaled_dot_product_attention(*inputs, is_causal=options.get("causal", False))
    return torch.autograd.grad(o, inputs, do)


def hard_inputs(backend, name, dtype, d):
    q, k, v = backend.qkv(B=1, Hq=2, Hkv=2, Nq=300, Nk=300, d=d)
    do = backend.randn(*q.shape)
    rows = 10 ** torch.linspace(-8, 2, 300, device=q.device)[:, None]
    one_hot = torch.zeros_like(do)
    one_hot[:, :, ::10, 5] = 1
    q, k, v, do = {
        "ordinary": (q, k, v, do),
        "V with a mean": (q, k, v + 5, do),
        "tiny dO": (q, k, v, 1e-6 * do),
        "rows of dO": (q, k, v, rows * do),
        "dO of zeros": (q, k, v, 0 * do),
        "few numbers of dO": (q, k, v, one_hot),
        "scores of 30": (30 * q, k, v, do),
        "larger channels": (q, k * torch.where(torch.arange(d, device=q.device) % 7 == 0, 50, 1), v, do),
        "equal keys": (q, k[:, :, :1].expand_as(k), v, do),
    }[name]
    return [t.to(dtype) for t in (do, q, k, v)]


def worst_error(x, expected, dim):
    """The relative error, or the largest one of a row or channel."""
    error, size = (torch.linalg.vector_norm(t, dim=dim) for t in (x.double() - expected, expected))
    return (error / size.clamp(min=1e-300)).max().item()


HARD = ["dO of zeros", "few numbers of dO", "scores of 30", "larger channels", "equal keys"]
MILD = ["ordinary", "V with a mean", "tiny dO", "rows of dO"]


@pytest.mark.parametrize("name", [*MILD, *HARD])
@pytest.mark.parametrize("d", [64, 256])
def test_as_exact_as_sdpa(backend, dtype, name, d):
    """The whole; of mild inputs without a mask the worst row and the worst channel, too."""
    do, q, k, v = hard_inputs(backend, name, dtype, d)
    largest_score = (q.double() @ k.double().mT).abs().max().item() / d**0.5
    for options in {}, {"causal": True, "offset": 0}:
        exact = gradients(do, q, k, v, **options)
        peers = sdpa_gradients(do, q, k, v, **options)
        ours = {form: grads(backend, do, q, k, v, **options) for form in forms(backend, dtype)}
        results = [(form, *x) for form in ours for x in zip("qkv", ours[form], peers, exact, strict=True)]
        for form, which, x, peer, expected in results:
            for dim in (None, -1, -2) if name in MILD and not options else (None,):
                error, bound = (worst_error(t, expected, dim) for t in (x, peer))
                bound = max(bound, torch.finfo(dtype).eps / 4)  # what rounding the result alone costs
                # Small samples vary: the worst row most, and the few large rows of dO.
                factor = 2.5 if dim else 1.2 if name in MILD and name != "rows of dO" else 1.6
                bound *= factor
                if name in HARD:  # P has the rounding of a score, which PyTorch may sum in more chains
                    bound = max(bound, torch.finfo(torch.float32).eps * largest_score)
                assert error <= bound, f"{form} d{which}, dim {dim}: {error:.1e}, SDPA {bound / factor:.1e}"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d, Hq, Hkv", [(64, 4, 2), (128, 7, 1), (256, 4, 2), (256, 7, 1)])
def test_padding_may_be_nan(backend, dtype, causal, d, Hq, Hkv):
    """Keys outside leftpad_k..seqlens_k, and queries that see no key, reach nothing."""
    q, k, v = backend.qkv(Hq=Hq, Hkv=Hkv, d=d, dtype=dtype)
    do = torch.randn_like(q)
    options = dict(leftpad_k=backend.ints(5, 0), seqlens_k=backend.ints(60, 33), causal=causal)
    expected = {form: grads(backend, do, q, k, v, **options) for form in forms(backend, dtype)}
    for t in k, v:
        t[0, :, :5] = t[0, :, 60:] = t[1, :, 33:] = torch.nan
    if causal:
        for t in q, do:
            t[0, :, :15] = t[1, :, :37] = torch.nan  # positions -10 + i and -37 + i
    for form in forms(backend, dtype):
        found = grads(backend, do, q, k, v, **options)
        if form == "in any order" or (backend.name == "hopper" and dtype == torch.float32):  # fallback
            torch.testing.assert_close(found, expected[form])
        else:
            assert all(map(torch.equal, found, expected[form]))


@pytest.mark.parametrize("lengths", [dict(seqlens_k=(80, 0)), dict(leftpad_k=(0, 90))], ids=str)
@pytest.mark.parametrize("d, Hq, Hkv", [(64, 4, 2), (128, 7, 1), (256, 4, 2), (256, 7, 1)])
def test_a_batch_without_keys_may_be_nan(backend, dtype, lengths, d, Hq, Hkv):
    q, k, v = backend.qkv(Hq=Hq, Hkv=Hkv, d=d, dtype=dtype)
    do = torch.randn_like(q)
    for t in q, k, v, do:
        t[1] = torch.nan
    options = {name: backend.ints(*values) for name, values in lengths.items()}
    for form in forms(backend, dtype):
        for actual in grads(backend, do, q, k, v, **options):
            assert not actual[1].any() and actual[0].any() and actual.isfinite().all(), form


@pytest.mark.parametrize("band", [{}, dict(causal=True), dict(window_size=(40, 30))], ids=str)
def test_chunks(backend, dtype, band):
    """(o, l, m) of all keys with a part of them: dk and dv of the part, and dq as a sum."""
    q, k, v = backend.qkv(Nq=100, Nk=200, dtype=dtype)
    do = torch.randn_like(q)
    state = backend.forward(q, k, v, return_state=True, **band)
    exact = gradients(do, q, k, v, **band)
    dq, keys = torch.zeros_like(q, dtype=torch.float32), []
    for begin, end in itertools.pairwise([0, 1, 64, 130, 137, 200]):
        part = (t[:, :, begin:end] for t in (k, v))
        options = dict(band, offset=100 - begin, backend=backend.name, out_dtype=torch.float32)
        more, *dk_dv = minimal_attn.backward(do, q, *part, *state, **options)
        assert {t.dtype for t in (more, *dk_dv)} == {torch.float32}
        dq += more
        keys.append(dk_dv)
    dk, dv = (torch.cat(parts, dim=2) for parts in zip(*keys, strict=True))
    for actual, expected in zip((dq, dk, dv), exact, strict=True):
        assert relative_error(actual.double(), expected) < ERROR_BOUND[dtype]


def test_the_same_bits(backend, dtype):
    q, k, v = backend.qkv(Hq=6, Hkv=3, Nq=150, Nk=333, d=72, dtype=dtype)
    do = torch.randn_like(q)
    options = [{}, dict(causal=True), dict(window_size=(50, 7))]
    threads = torch.get_num_threads()
    expected = [grads(backend, do, q, k, v, **x) for x in options]
    try:
        for n in 1, 2, 3, 8:
            if backend.name == "cpu":
                torch.set_num_threads(n)
            for x, y in zip(options, expected, strict=True):
                assert all(map(torch.equal, grads(backend, do, q, k, v, **x), y))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("options", [{}, dict(causal=True), dict(window_size=(300, 100))], ids=str)
@pytest.mark.parametrize(
    "d, Hq, Hkv",
    [(64, 12, 12), (64, 12, 3), (128, 12, 12), (128, 12, 3), (128, 10, 2), (256, 12, 12), (256, 12, 1)],
)
def test_the_same_bits_of_many_tiles(cuda_backend, d, Hq, Hkv, options):
    """More tiles or slices than multiprocessors, some of which another stream takes: blocks must wait."""
    if cuda_backend.name == "paper":
        pytest.skip("a block of paper adds all of a dq")
    q, k, v = cuda_backend.qkv(B=2, Hq=Hq, Hkv=Hkv, Nq=1100, Nk=1500, d=d, dtype=torch.bfloat16)
    found = cuda_backend.explain(q, k, v, backward=True, **options)
    if cuda_backend.name == "hopper" and "window_size" not in options and multiprocessors() == 132:
        assert found.kernel == (TWO if d > 128 else IN_ORDER) + SPLIT * (Hkv < Hq)
    do, noise, other = torch.randn_like(q), torch.randn(2048, 2048, device=q.device), torch.cuda.Stream()
    for form in forms(cuda_backend, q.dtype):
        workspace = cuda_backend.explain(q, k, v, backward=True, **options).workspace  # of this form
        promised = slice(1 if form == "in any order" else 0, 3)  # dq may have other bits then
        expected = grads(cuda_backend, do, q, k, v, **options)[promised]
        for _ in range(20):
            with torch.cuda.stream(other):
                noise @ noise
            # NaN in the memory of the next workspace, so that nothing is read before it is stored
            torch.full(((workspace + 3) // 4,), torch.nan, device=q.device)
            assert all(map(torch.equal, grads(cuda_backend, do, q, k, v, **options)[promised], expected))


HOLD = """extern "C" __global__ void hold(volatile int *released, int seconds) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do asm volatile("mov.u64 %0, %globaltimer; nanosleep.u32 1000;" : "=l"(now));
    while (!*released && now - begin < seconds * 1000000000ull);
}"""


@pytest.mark.parametrize("options", [{}, dict(causal=True), dict(window_size=(0, 400))], ids=str)
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("Hq, Hkv", [(4, 2), (7, 1)])
def test_one_multiprocessor(cuda_backend, d, Hq, Hkv, options):
    """Another kernel holds the rest: a block must not wait for one that can't begin."""
    if not hasattr(torch.cuda, "_compile_kernel"):
        pytest.skip("torch has no NVRTC")
    gpu, hold = torch.cuda.get_device_properties(0), torch.cuda._compile_kernel(HOLD, "hold")
    most = gpu.shared_memory_per_block_optin
    hold.set_shared_memory_config(most)
    q, k, v = cuda_backend.qkv(B=1, Hq=Hq, Hkv=Hkv, Nq=500, Nk=700, d=d, dtype=torch.bfloat16)
    do, other, releasing = torch.randn_like(q), torch.cuda.Stream(), torch.cuda.Stream()
    # On the GPU, since a flag in the host's memory slows everything down while so many blocks read it.
    released, one = (
        torch.zeros(1, dtype=torch.int32, device="cuda"),
        torch.ones(1, dtype=torch.int32).pin_memory(),
    )
    expected = grads(cuda_backend, do, q, k, v, **options)
    torch.cuda.synchronize()
    # 30 s: a build of PTX for 7.5 needed more than 5 at d 256
    hold((gpu.multi_processor_count - 1, 1, 1), (32, 1, 1), [released, 30], most, other)
    time.sleep(0.01)
    found = grads(cuda_backend, do, q, k, v, **options)
    torch.cuda.current_stream().synchronize()
    is_held = not other.query()
    with torch.cuda.stream(releasing):
        released.copy_(one, non_blocking=True)
    other.synchronize()
    assert is_held and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("d, Hq", [(64, 7), (128, 7), (256, 7), (256, 2)])
def test_graph(cuda_backend, dtype, d, Hq):
    """Captured once, replayed on new contents: counters are 0 when a replay begins."""
    draw = functools.partial(cuda_backend.qkv, B=1, Hq=Hq, Hkv=1, Nq=300, Nk=300, d=d, dtype=dtype)
    inputs = [torch.empty_like(t) for t in (*draw(), draw()[0])]

    def new_inputs():
        for t, new in zip(inputs, (*draw(), draw()[0]), strict=True):
            t.copy_(new)
        return cuda_backend.forward(*inputs[:3], causal=True, return_lse=True)

    def backward():
        q, k, v, do = inputs
        return minimal_attn.backward(do, q, k, v, o, lse, None, causal=True, backend=cuda_backend.name)

    o, lse = new_inputs()
    for form in forms(cuda_backend, dtype):
        if cuda_backend.name == "hopper" and dtype != torch.float32 and multiprocessors() == 132:
            found = cuda_backend.explain(*inputs[:3], backward=True, causal=True)
            assert found.kernel.endswith(SPLIT) == (Hq == 7)
        backward()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = backward()
        for _ in range(3):
            for t, new in zip((o, lse), new_inputs(), strict=True):
                t.copy_(new)
            graph.replay()
            same = slice(1 if form == "in any order" else 0, 3)
            expected = backward()
            torch.testing.assert_close(found, expected)
            assert all(map(torch.equal, found[same], expected[same]))


@pytest.mark.parametrize("d", [64, 128, 256])
def test_many_streams(cuda_backend, d):
    """More than have an array of zeros, so that a memset clears the counters."""
    q, k, v = cuda_backend.qkv(B=1, Hq=7, Hkv=1, Nq=300, Nk=300, d=d, dtype=torch.bfloat16)
    do, streams = torch.randn_like(q), [torch.cuda.Stream() for _ in range(12)]
    expected = grads(cuda_backend, do, q, k, v, causal=True)
    torch.cuda.synchronize()
    for stream in 2 * streams:
        with torch.cuda.stream(stream):
            found = grads(cuda_backend, do, q, k, v, causal=True)
        stream.synchronize()
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("name", minimal_attn._C.cpu_instructions())
def test_every_instruction_set(seed, name):
    from conftest import Backend

    backend = Backend("cpu", seed)
    before = minimal_attn._C.limit_cpu_instructions(name)
    try:
        q, k, v = backend.qkv(d=100)
        check(backend, torch.randn_like(q), q, k, v, causal=True)
    finally:
        minimal_attn._C.limit_cpu_instructions(before)


@pytest.mark.skipif(not cuda_backends(), reason="there is no GPU")
def test_small_shared_memory(shared_memory_limit, cuda_backend):
    for limit in 48 << 10, 64 << 10, 99 << 10, 163 << 10:
        shared_memory_limit(limit)
        for d in 64, 128, 256:
            q, k, v = cuda_backend.qkv(d=d)
            check(cuda_backend, torch.randn_like(q), q, k, v, causal=True)


@pytest.mark.parametrize(
    "change, error, text",
    [
        (dict(do=1), TypeError, "^do must be a dense tensor, but was 1"),
        (dict(l=None), TypeError, "^l must be a dense tensor"),
        (dict(out_dtype="float"), TypeError, "^out_dtype must be a dtype or None"),
        (dict(do=torch.zeros(1, 2, 5, 9)), ValueError, r"^do must have shape .* = \[1, 2, 5, 8\]"),
        (dict(o=torch.zeros(1, 2, 5, 8).double()), ValueError, "^o must be float32, but is float64"),
        (dict(m=None, l=torch.zeros(1, 2, 5, 1)), ValueError, r"^lse must have shape \(B, Hq, Nq\)"),
        (dict(m=torch.zeros(1, 2, 1)), ValueError, "^m must have l's shape .1, 2, 5., but has shape"),
        (dict(m=None, l=torch.zeros(1, 2, 5).half()), ValueError, "^lse must be float32, but is float16"),
        (dict(dlse=torch.zeros(2, 5, 1)), ValueError, "^dlse must have shape"),
        (dict(out_dtype=torch.float16), ValueError, "^out_dtype must be float32 or q's float32"),
        (dict(k=torch.zeros(1, 3, 5, 8)), ValueError, "^v must have k's shape|^q must have a multiple"),
        (dict(causal=1), TypeError, "^causal must be True or False"),
        (dict(backend="gpu"), ValueError, "^backend must be"),
        (dict(dropout_p=0.1), ValueError, "^dropout_seed must be given with dropout_p 0.1"),
        (dict(dropout=0.1), TypeError, "unexpected keyword argument .dropout.; use dropout_p"),
    ],
    ids=str,
)
def test_errors(change, error, text):
    q = torch.zeros(1, 2, 5, 8)
    rows = torch.ones(1, 2, 5)
    arguments = dict(do=q, q=q, k=q, v=q, o=q, l=rows, m=rows) | change
    with pytest.raises(error, match=text) as found:
        minimal_attn.backward(**arguments)
    assert "\n" not in str(found.value)
