"""attn_mask and bias: what is visible, and what is added to scores. Values and gradients against float64."""

import pytest
import torch
from conftest import check_o
from reference import attention
from test_backward import check, forms
from test_cu_seqlens import DOCUMENTS, captured_without_synchronising, drawn, same_bits
from test_key_ranges import RANGES
from test_prefix_k import MASKS
from test_softcap import SHAPES, check_decode, check_general

import minimal_attn
from minimal_attn import second_order


def term(b, shape, dtype, *, hides=True):
    """Numbers to add; with `hides` some are -inf."""
    x = b.randn(*shape, dtype=dtype)
    return x.masked_fill(b.randn(*shape) > 1, -torch.inf) if hides else x


def options_of(b, shape, dtype):
    """Each form of a mask, broadcast along some dimensions."""
    B, Hq, Nq, Nk = shape
    some = [n if b.random.random() < 0.6 else 1 for n in shape]
    yield dict(attn_mask=b.randn(*some) < 0.5)
    yield dict(attn_mask=b.randn(Nq, Nk) < 0.5, causal=True)
    yield dict(attn_mask=term(b, some, dtype), softcap=2.0)
    yield dict(attn_mask=term(b, [Hq, Nq, 1], torch.float32), window_size=(40, 7))
    yield dict(bias=term(b, [B, 1, 1, Nk], dtype, hides=False), softmax_scale=-0.2)
    options = dict(attn_mask=b.randn(*some[1:]) < 1, alibi_slopes=b.randn(Hq) / 1000)
    yield dict(bias=term(b, some, torch.float32)) | options


@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients(backend, dtype, shape):
    B, Hq, Hkv, Nq, Nk, d = shape
    q, k, v = backend.qkv(B, Hq, Hkv, Nq, Nk, d, dtype=dtype)
    for options in options_of(backend, (B, Hq, Nq, Nk), dtype):
        check_general(backend, q, k, v, forms=forms(backend, dtype), **options)


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_masks(backend, dtype, mask, prefix):
    """Both masks hide."""
    q, k, v = backend.qkv(dtype=dtype)
    options = MASKS[mask](backend, 2, 90) | dict(attn_mask=backend.randn(2, 1, 70, 90) < 0.5)
    options |= dict(bias=term(backend, (4, 1, 90), dtype), softcap=3.0)
    options |= dict(prefix_k=backend.ints(4, 30)) if prefix else {}
    backend.check(q, k, v, **options)
    check(backend, torch.randn_like(q), q, k, v, **options)


@pytest.mark.parametrize("make", DOCUMENTS)
def test_documents(backend, dtype, make):
    """i and j count from the first token of all."""
    qkv, options = drawn(backend, make, dtype, front=3, behind=4)
    Nq, Nk = qkv[0].shape[2], qkv[1].shape[2]
    options |= dict(attn_mask=backend.randn(4, Nq, Nk) < 0.8, bias=term(backend, (Nq, Nk), torch.float32))
    check_general(backend, *qkv, **options)


@pytest.mark.parametrize("make", RANGES)
def test_key_ranges(backend, dtype, make):
    q, k, v = backend.qkv(dtype=dtype, Nq=200, Nk=180)
    ranges = make(backend, 2, 200, 180).to(backend.device)
    options = dict(key_ranges=ranges, attn_mask=backend.randn(200, 180) < 0)
    backend.check(q, k, v, **options)
    check(backend, torch.randn_like(q), q, k, v, **options)


@pytest.mark.parametrize("d", [64, 128, 192, 256])
def test_hopper_computes_terms_itself(cuda_backend, dtype, d):
    """Else by portable's kernels: in float32."""
    q, k, v = cuda_backend.qkv(Nq=200, Nk=300, d=d, dtype=dtype)
    options = list(term_options(cuda_backend, 200, 300))
    for backward in False, True:
        for option in options:
            own = cuda_backend.explain(q, k, v, backward=backward, **option)
            other = minimal_attn.explain(q, k, v, backward=backward, backend="portable", **option)
            assert "general" in own.kernel or cuda_backend.name == "paper"
            if cuda_backend.name == "hopper":
                assert (own.threads == other.threads) == (dtype == torch.float32)


def term_options(b, Nq, Nk):
    yield dict(alibi_slopes=b.randn(4))
    yield dict(attn_mask=b.randn(Nq, Nk) < 1)
    yield dict(bias=b.randn(Nq, Nk))


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("Nq, Nk", [(256, 384), (250, 380), (197, 197)])
def test_neighbours_and_others(backend, dtype, d, Nq, Nk):
    """Tiles within all keys and beyond, rows that begin at even places and odd ones, grouped heads."""
    q, k, v = backend.qkv(B=2, Hq=6, Hkv=2, Nq=Nq, Nk=Nk, d=d, dtype=dtype)
    wide = backend.randn(2, 6, Nq, Nk + 2, dtype=dtype)
    for x in wide[..., 1:-1], wide[..., :Nk], wide[:, :1, :, :Nk], wide[:1, :, :1, :Nk], wide[..., :1]:
        for options in (
            dict(bias=x),
            dict(bias=x.float()),
            dict(attn_mask=x < 1),
            dict(bias=x, attn_mask=x < 1),
        ):
            backend.check(q, k, v, **options)
        options |= dict(alibi_slopes=backend.randn(6) / 100, softcap=3.0, causal=True)
        backend.check(q, k, v, **options)
        check(backend, torch.randn_like(q), q, k, v, **options)


def masks_that_hide_tiles(b, N):
    """Causal, documents, a window, padding, rows without a key at both ends and between, ranges, holes."""
    i, j = torch.arange(N, device=b.device).unsqueeze(1), torch.arange(N, device=b.device)
    begin = i * 7919 % N
    yield j <= i
    yield i // 150 == j // 150
    yield (i - j).abs() < 40
    yield (j < N - 300).expand(N, N)
    yield (j <= i) & (i < N - 130) & (j % 3 > 0)
    yield (i // 100 % 2 == 1) & (j > 400)
    yield (begin <= j) & (j < begin + 60)
    holes = (b.randn(-(-N // 64), -(-N // 64)) < 0).repeat_interleave(64, 0).repeat_interleave(64, 1)[:N, :N]
    yield holes
    yield holes & (j != 200)


def test_masks_that_hide_tiles(backend, dtype):
    """On a GPU the tables of ranges leave out what no query of a tile sees, on a CPU tiles themselves."""
    q, k, v = backend.qkv(Nq=450, Nk=450, dtype=dtype)
    for mask in masks_that_hide_tiles(backend, 450):
        added = torch.where(mask, 0.0, -torch.inf).to(dtype)
        backend.check(q, k, v, attn_mask=mask)
        backend.check(q, k, v, attn_mask=mask, window_size=(300, 300))
        backend.check(q[:, :, 300:302], k, v, bias=added[300:302])
        check(backend, torch.randn_like(q), q, k, v, attn_mask=mask)
        check(backend, torch.randn_like(q), q, k, v, bias=added, attn_mask=mask.T)


def masks_of_tiles(b, B, N):
    """Of tiles of 128 x 128, as hopper's kernels skip: at random, diagonals, stripes, keys that none sees,
    rows without a key, half tiles.
    """
    n = -(-N // 128)
    i, j = torch.arange(n, device=b.device).unsqueeze(1), torch.arange(n, device=b.device)
    for tiles in (
        b.randn(n, n) < -0.7,
        b.randn(B, 1, n, n) < 0.3,
        i == j,
        (i + j) % 3 == 0,
        ((j == 0) | (j == n - 1)).expand(n, n),
        (i % 2 == 1) & (j % 2 == 0),
        (i != j) & (i > 0),
    ):
        mask = tiles.repeat_interleave(128, -2).repeat_interleave(128, -1)[..., :N, :N]
        yield mask
        yield mask & (b.randn(N, N) < 1)
        yield mask.roll((64, 30), (-2, -1))


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("N", [700, 1024])
def test_tiles_that_hopper_skips(cuda_backend, dtype, N, d):
    """Both passes; deterministic gradients, whose dQ counts the tiles that come; beside other options."""
    backend = cuda_backend
    q, k, v = backend.qkv(B=2, Hq=2, Hkv=1, Nq=N, Nk=N, d=d, dtype=dtype)
    do = torch.randn_like(q)
    for n, mask in enumerate(masks_of_tiles(backend, 2, N)):
        for backward in False, True:
            if backend.name == "hopper":
                kernel = backend.explain(q, k, v, backward=backward, attn_mask=mask).kernel
                assert ("skip" in kernel) == (d <= 128 and dtype != torch.float32)
        options = [
            {},
            dict(causal=True),
            dict(leftpad_k=backend.ints(3, 250)),
            dict(window_size=(300, 200)),
            dict(alibi_slopes=backend.randn(2) / 100),
            dict(softcap=3.0),
            dict(prefix_k=backend.ints(140, 3), causal=True, window_size=(100, 0)),
        ][n % 7]
        backend.check(q, k, v, attn_mask=mask, **options)
        torch.use_deterministic_algorithms(n % 2 == 1)
        try:
            check(backend, do, q, k, v, attn_mask=mask, **options)
            if n % 4 == 0:
                check_gradient_of_bias(
                    backend, do, q, k, v, "bias", backend.randn(2, N, N), attn_mask=mask, **options
                )
        finally:
            torch.use_deterministic_algorithms(False)


def test_a_graph_reads_the_mask_anew(cuda_backend, dtype):
    """Which tiles are skipped is found out on the device, at each replay."""
    b = cuda_backend
    q, k, v = (x.requires_grad_() for x in b.qkv(Nq=500, Nk=500, dtype=dtype))
    masks = [x for x in masks_of_tiles(b, 2, 500) if x.dim() == 2]
    mask, do = masks[0].clone(), torch.randn_like(q)

    def step():
        o = b.forward(q, k, v, attn_mask=mask)
        return o, *torch.autograd.grad(o, (q, k, v), do)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step()
    for x in masks[1::4]:
        mask.copy_(x)
        graph.replay()
        expected = step()
        assert torch.equal(replayed[0], expected[0])
        for actual, other in zip(replayed[1:], expected[1:], strict=True):
            torch.testing.assert_close(actual, other, rtol=2e-2, atol=1e-2)


def strided_masks(b, shape):
    """The same numbers in other memory: transposed, expanded, with gaps, backwards in the batch."""
    B, Hq, Nq, Nk = shape
    x = b.randn(*shape)
    yield x.mT.contiguous().mT
    yield x.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0)
    yield b.randn(B, Hq, Nq, 2 * Nk)[..., ::2]
    yield b.randn(B, 1, Nq, 1).expand(shape)
    yield b.randn(1, 1, 1, Nk).expand(shape)
    yield b.randn(Nq + Nk).as_strided((Nq, Nk), (1, 1))  # of overlapping rows: relative positions


@pytest.mark.parametrize("Nq", [70, 1])
def test_strides(backend, dtype, Nq):
    q, k, v = backend.qkv(Nq=Nq, Nk=300, dtype=dtype)
    for x in strided_masks(backend, (2, 4, Nq, 300)):
        for options in dict(bias=x), dict(attn_mask=x < 0.5):
            (name, t), *_ = options.items()
            dense = t.expand(2, 4, Nq, 300).contiguous()
            expected = backend.forward(q, k, v, **{name: dense})
            found = backend.forward(q, k, v, **options)
            if name == "bias":
                assert torch.equal(found, expected)
            else:  # a mask that heads share decides where tiles begin
                torch.testing.assert_close(
                    found, expected, rtol=2e-2, atol=2e-2 if dtype != torch.float32 else 1e-5
                )
        backend.check(q, k, v, bias=x)


def test_decode(backend, dtype):
    """Pages in any order, lengths that only the device knows, few queries a key head."""
    q, k, v = backend.qkv(B=3, Hq=8, Hkv=2, Nq=2, Nk=16 * 20, d=128, dtype=dtype)
    options = dict(attn_mask=backend.randn(3, 8, 2, 320) < 0.5, bias=term(backend, (8, 1, 320), dtype))
    options |= dict(seqlens_k=backend.ints(320, 130, 0), causal=True, softcap=3.0)
    options["attn_mask"][1, 3] = False
    check_decode(backend, q, k, v, **options)


@pytest.mark.parametrize("Nq", [130, 2])
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_rows_without_a_key(backend, dtype, kind, Nq):
    """Whole rows, whole heads: o = 0, lse = -inf, gradients 0; a state and sinks stay."""
    q, k, v = backend.qkv(Nq=Nq, Nk=300, dtype=dtype)
    seen = torch.ones(2, 4, Nq, 300, dtype=torch.bool, device=backend.device)
    seen[:, 1], seen[0, :, 1], seen[1, :, :, 100:] = False, False, False
    mask = seen if kind == "bool" else torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, -torch.inf)
    backend.check(q, k, v, attn_mask=mask)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    o, lse = backend.forward(*inputs, attn_mask=mask, return_lse=True)
    blind = ~seen.any(-1)
    assert not o[blind].any() and (lse[blind] == -torch.inf).all() and lse[~blind].isfinite().all()
    check(backend, torch.randn_like(q), q, k, v, attn_mask=mask)
    dq, dk, dv = torch.autograd.grad(o.sum(), inputs)
    assert not dq[blind].any() and not dk[1, :, 100:].any() and not dv[1, :, 100:].any()
    do = torch.randn_like(q)
    q[blind], do[blind] = torch.nan, torch.nan  # what sees nothing may be anything
    found = minimal_attn.backward(do, q, k, v, o, lse, None, attn_mask=mask, backend=backend.name)
    assert not found[0][blind].any() and all(x.isfinite().all() for x in found)
    q = inputs[0].detach()
    backend.check(q, k, v, attn_mask=mask, sinks=backend.randn(4))
    check(backend, torch.randn_like(q), q, k, v, attn_mask=mask, sinks=backend.randn(4))
    state = backend.forward(q, k, v, return_state=True)
    nothing = mask & False if kind == "bool" else mask - torch.inf
    after = backend.forward(q, k, v, attn_mask=nothing, state=state)
    for x, y in zip(after, state, strict=True):
        assert torch.equal(x, y)


def test_a_row_without_a_key_beside_a_nan(backend, dtype):
    """A NaN that another document sees reaches no row behind one that a mask hides everything from."""
    q, k, v = backend.qkv(1, 4, 2, 64, 64, dtype=dtype)
    seen = torch.ones(64, 1, dtype=torch.bool, device=backend.device)
    seen[0] = seen[16] = False
    cu = backend.ints(0, 30, 64)
    options = dict(cu_seqlens_q=cu, cu_seqlens_k=cu, attn_mask=seen)
    expected = backend.forward(q, k, v, **options)
    v[:, :, 40] = torch.nan
    o = backend.forward(q, k, v, **options)
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(o[:, :, :30], expected[:, :, :30], rtol=bound, atol=bound)
    assert o[:, :, 30:].isnan().all()


def test_scores_of_finfo_min(backend, dtype):
    """They are ordinary numbers: a row of them alone is the mean of V, as in softmax."""
    q, k, v = backend.qkv(dtype=dtype)
    bias = torch.zeros(70, 90, device=backend.device)
    bias[3], bias[5, 40:] = (torch.finfo(torch.float32).min,) * 2
    exact = attention(q, k, v, attn_mask=bias == 0)
    o = backend.forward(q, k, v, bias=bias)
    mean = v.double().mean(2, keepdim=True).repeat_interleave(2, 1)
    torch.testing.assert_close(o[:, :, 3:4].double(), mean, rtol=1e-2, atol=1e-2)
    others = torch.arange(70, device=backend.device) != 3
    torch.testing.assert_close(o[:, :, others].double(), exact.o[:, :, others], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("Nq", [130, 2])
@pytest.mark.parametrize("kind", ["bool", "additive"])
@pytest.mark.parametrize("scale", [1, 30])  # with 30 gradients normalise rows again
def test_hidden_keys_may_be_large(backend, dtype, kind, Nq, scale):
    """Their products and dP overflow, and nothing of it is seen. A hidden bias may be NaN."""
    q, k, v = backend.qkv(Nq=Nq, Nk=300, dtype=dtype)
    q *= scale
    seen = backend.randn(300) < 0.5
    seen[:5], seen[5:9] = True, False
    mask = seen if kind == "bool" else torch.zeros(300, device=backend.device).masked_fill(~seen, -torch.inf)
    options, do = dict(attn_mask=mask), torch.randn_like(q)
    state = backend.forward(q, k, v, **options, return_state=True)
    found = backend.forward(q, k, v, **options)
    grads = minimal_attn.backward(do, q, k, v, *state, **options, backend=backend.name)
    for x in k, v:
        x[:, :, ~seen] = 1e37 if dtype == torch.float32 else torch.finfo(dtype).max
    # Beside such numbers float32 leaves AMX, where a CPU has it, and is rounded otherwise.
    atol = 1e-4 if backend.name == "cpu" and dtype == torch.float32 else 0
    torch.testing.assert_close(backend.forward(q, k, v, **options), found, rtol=0, atol=atol)
    assert same_bits(minimal_attn.backward(do, q, k, v, *state, **options, backend=backend.name), grads)
    if kind == "bool":
        bias = torch.zeros(300, device=backend.device)
        expected = backend.forward(q, k, v, **options, bias=bias)
        hidden = bias.masked_fill(~seen, torch.nan)
        torch.testing.assert_close(backend.forward(q, k, v, **options, bias=hidden), expected)


@pytest.mark.parametrize("scale", [0.0, 30.0])
def test_large_and_small_scores(backend, dtype, scale):
    """Also where the bias makes scores large: lse is then normalised again."""
    q, k, v = backend.qkv(Nq=130, Nk=150, dtype=dtype)
    bias = 600 * backend.randn(4, 130, 1) + backend.randn(4, 1, 150)
    options = dict(softmax_scale=scale / 8, bias=bias, attn_mask=backend.randn(130, 150) < 1)
    exact = attention(q, k, v, **options).o
    error = (backend.forward(q, k, v, **options).double() - exact).norm() / exact.norm()
    assert error < {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}[dtype]
    if scale == 0:
        leaves = [x.double().requires_grad_() for x in (q, k, v)]
        do = torch.randn_like(q)
        expected = torch.autograd.grad(attention(*leaves, **options).o, leaves, do.double())
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        found = torch.autograd.grad(backend.forward(*inputs, **options), inputs, do)
        assert not found[0].any() and not found[1].any()
        assert (found[2].double() - expected[2]).norm() < 1e-2 * expected[2].norm()


def test_forms_of_results(backend, dtype):
    q, k, v = backend.qkv(dtype=dtype)
    bias = term(backend, (4, 70, 90), dtype)
    state = backend.forward(q, k, v, return_state=True, bias=bias)
    first = backend.forward(q, k[:, :, :50], v[:, :, :50], return_state=True, bias=bias[..., :50])
    joined = backend.forward(q, k[:, :, 50:], v[:, :, 50:], state=first, bias=bias[..., 50:])
    for x, y in zip(joined, state, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4 if dtype == torch.float32 else 2e-2)
    out = torch.empty_like(q)
    assert backend.forward(q, k, v, bias=bias, out=out) is out
    check_o(out, attention(q, k, v, bias=bias), dtype)
    check(backend, torch.randn_like(q), q, k, v, dlse=backend.randn(2, 4, 70), bias=bias)
    # An additive attn_mask is the same, and so is a bool one that hides by -inf.
    assert torch.equal(backend.forward(q, k, v, attn_mask=bias), backend.forward(q, k, v, bias=bias))
    seen = bias > 0
    hidden = torch.zeros_like(bias).masked_fill(~seen, -torch.inf)
    assert torch.equal(backend.forward(q, k, v, attn_mask=seen), backend.forward(q, k, v, bias=hidden))


def test_the_mask_is_that_of_causal(backend, dtype):
    q, k, v = backend.qkv(dtype=dtype)
    seen = torch.ones(70, 90, dtype=torch.bool, device=backend.device).tril(20)
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    expected = backend.forward(q, k, v, causal=True)
    torch.testing.assert_close(backend.forward(q, k, v, attn_mask=seen), expected, rtol=bound, atol=bound)


def test_wrong_masks(backend):
    q, k, v = backend.qkv(dtype=torch.bfloat16)

    def refuses(error, match, **options):
        for call in backend.forward, backend.explain:
            with pytest.raises(error, match=match) as found:
                call(q, k, v, **options)
            assert "\n" not in str(found.value)

    x = backend.randn(70, 90)
    for wrong in x.int(), x.double(), x.half(), x.to(torch.uint8):
        name = str(wrong.dtype).removeprefix("torch.")
        must = rf"float32 or q's bfloat16 \(added to scores\), but is {name}$"
        refuses(ValueError, r"^attn_mask must be bool \(True: visible\), " + must, attn_mask=wrong)
        refuses(ValueError, "^bias must be " + must, bias=wrong)
    refuses(ValueError, "^bias must be float32 or q's bfloat16 .* but is bool", bias=x > 0)
    for name in "attn_mask", "bias":
        for wrong in x[1:], x[:, 1:], x.expand(3, 70, 90), x.expand(3, 4, 70, 90), x[None, None, None], x.T:
            shape = rf"^{name} must broadcast to \(B, Hq, Nq, Nk\) = \[2, 4, 70, 90\], but has shape \["
            refuses(ValueError, shape, **{name: wrong})
        refuses(ValueError, f"^{name} must be on q's device", **{name: x.to("meta")})
        refuses(TypeError, f"^{name} must be a dense tensor or None, but was 'x' ", **{name: "x"})
        refuses(TypeError, f"^{name} must be a dense tensor or None, but was ", **{name: x.to_sparse()})
    refuses(ValueError, "^attn_mask must be bool with a bias, but is float32$", attn_mask=x, bias=x)
    with pytest.raises(ValueError, match="^attn_mask must broadcast"):
        minimal_attn.backward(q, q, k, v, q, x.new_zeros(2, 4, 70), None, attn_mask=x[1:] > 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_graph(cuda_backend, dtype):
    """Nothing synchronises; a replay reads masks anew."""
    inputs = [x.requires_grad_() for x in cuda_backend.qkv(dtype=dtype)]
    do = torch.randn_like(inputs[0])
    mask, bias = cuda_backend.randn(70, 90) < 0.5, cuda_backend.randn(4, 70, 90)

    def step():
        o = cuda_backend.forward(*inputs, attn_mask=mask, bias=bias)
        return o.detach(), *torch.autograd.grad(o, inputs, do)

    graph, captured = captured_without_synchronising(step)
    for _ in range(2):
        mask.copy_(cuda_backend.randn(70, 90) < 0.5), bias.mul_(0.5)
        graph.replay()
        assert same_bits(captured, step())


def test_second_derivatives(backend):
    q, k, v = (x.double().cpu().requires_grad_() for x in backend.qkv(B=1, Hq=2, Nq=3, Nk=4, d=2))
    options = dict(attn_mask=torch.ones(3, 4, dtype=torch.bool).tril(1), bias=torch.randn(2, 1, 4))
    torch.autograd.gradgradcheck(lambda *t: second_order.forward(*t, **options), (q, k, v))
    if backend.name == "cpu":
        x, y, z = (t.detach().float().requires_grad_() for t in (q, k, v))
        o = second_order.forward(x, y, z, **options)
        torch.testing.assert_close(o, minimal_attn.forward(x, y, z, **options))
        with pytest.raises(RuntimeError, match="^bias must not require grad, but does, and second_order"):
            second_order.forward(x, y, z, bias=options["bias"].requires_grad_())


def test_wrong_masks_of_second_order():
    q, k, x = (torch.randn(*shape, dtype=torch.float64) for shape in ((1, 2, 3, 2), (1, 2, 4, 2), (3, 4)))
    for error, options in (
        ("^attn_mask must be float32, float64 or bool, but is torch.int64$", dict(attn_mask=x.long())),
        ("^bias must be float32, float64, but is torch.bool$", dict(bias=x > 0)),
        ("^attn_mask must be bool with a bias, but is torch.float64$", dict(attn_mask=x, bias=x)),
        (r"^bias must broadcast to \(B, Hq, Nq, Nk\) = \(1, 2, 3, 4\), but", dict(bias=x.expand(3, 2, 3, 4))),
        (r"^attn_mask must broadcast .* has shape \(1, 1, 1, 3, 4\)$", dict(attn_mask=x[None, None, None])),
    ):
        with pytest.raises(ValueError, match=error):
            second_order.forward(q, k, k, **options)


def test_wrong_masks_of_vmap(backend):
    q, k, v = (torch.stack([x, x]) for x in backend.qkv(B=3))
    match = r"^bias must broadcast to \(B, Hq, Nq, Nk\), B 3, but has shape "
    for shape in (5, 3, 4, 70, 90), (2, 4, 70, 90), (1, 1, 1, 1, 90):
        bias = backend.randn(2, *shape)
        with pytest.raises(ValueError, match=match):
            torch.func.vmap(lambda q, k, v, bias: backend.forward(q, k, v, bias=bias))(q, k, v, bias)


@pytest.mark.sanitizer
@pytest.mark.parametrize("d", [64, 128, 256])
def test_sanitizer(backend, dtype, d):
    q, k, v = backend.qkv(B=1, Hq=2, Hkv=1, Nq=130, Nk=140, d=d, dtype=dtype)
    options = dict(attn_mask=backend.randn(130, 140) < 0.5, bias=backend.randn(2, 130, 1, dtype=dtype))
    check(backend, torch.randn_like(q), q, k, v, **options)
    backend.check(q[:, :, :1], k, v, attn_mask=backend.randn(140) < 0.5)


def gradient_of_bias(b, do, q, k, v, name, bias, dlse=None, **options):
    """Of ours, and of the reference in float64."""
    leaf = bias.clone().requires_grad_()
    o, lse = b.forward(q, k, v, return_lse=True, **{name: leaf}, **options)
    outputs, wanted = ([o], [do]) if dlse is None else ([o, lse], [do, dlse])
    [found] = torch.autograd.grad(outputs, leaf, wanted)
    exact = bias.detach().double().requires_grad_()
    expected = attention(*(x.double() for x in (q, k, v)), **{name: exact}, **options)
    loss = (expected.o * do.double()).sum()
    if dlse is not None:
        seen = expected.l > 0
        loss = loss + ((expected.m + expected.l.log())[seen] * dlse.double()[seen]).sum()
    [expected] = torch.autograd.grad(loss, exact)
    assert found.shape == bias.shape and found.dtype == bias.dtype
    return found, expected


def check_gradient_of_bias(b, do, q, k, v, name, bias, **options):
    """Where the bias is the same for all keys its gradient is 0, but for rounding."""
    found, expected = gradient_of_bias(b, do, q, k, v, name, bias, **options)
    bound = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[q.dtype]
    sizes = bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2]).numel() / max(bias.numel(), 1)
    size = expected.norm() + 0.1 * (sizes * bias.numel()) ** 0.5
    assert (found.double() - expected).norm() <= bound * size


SHARED = ["BHQK", "1HQK", "B1QK", "11QK", "QK", "B11K", "1", "HQ1", "B1Q1", "1H11"]  # by whom


def shape_of(letters, B, H, Q, K):
    return [dict(B=B, H=H, Q=Q, K=K).get(x, 1) for x in letters]


@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize(
    "shape", [(2, 4, 2, 70, 90, 64), (3, 6, 2, 33, 200, 48), (1, 71, 1, 20, 65, 8), (9, 2, 2, 140, 150, 32)]
)
def test_gradient_of_bias(backend, dtype, shape, shared):
    B, Hq, Hkv, Nq, Nk, d = shape
    q, k, v = backend.qkv(B, Hq, Hkv, Nq, Nk, d, dtype=dtype)
    for options in {}, dict(softcap=2.0, causal=True), dict(attn_mask=backend.randn(Nq, Nk) < 0.5):
        of = torch.float32 if backend.random.random() < 0.5 else dtype
        bias = term(backend, shape_of(shared, B, Hq, Nq, Nk), of, hides="attn_mask" not in options)
        do = torch.randn_like(q)
        name = "bias" if "attn_mask" in options or backend.random.random() < 0.5 else "attn_mask"
        check_gradient_of_bias(backend, do, q, k, v, name, bias, **options)


@pytest.mark.parametrize("shared", ["11K", "1", "QK"])
@pytest.mark.parametrize("masked", [False, True])
def test_gradient_of_bias_beside_memory_of_nan(backend, dtype, shared, masked):
    """Memory that an earlier tensor has left, of queries that are no multiple of 8, reaches no sum."""
    shape = {"11K": (1, 1, 90), "1": (1,), "QK": (70, 90)}[shared]
    q, k, v = backend.qkv(2, 4, 2, 70, 90, 64, dtype=dtype)
    options = dict(attn_mask=backend.randn(70, 90) < 1) if masked else {}
    for size in 1 << 18, 1 << 20, 1 << 22:
        left = torch.full((size,), torch.nan, device=backend.device)
        del left
        check_gradient_of_bias(
            backend, torch.randn_like(q), q, k, v, "bias", backend.randn(*shape), **options
        )


def test_a_bias_hides_beside_a_mask_that_shows(backend, dtype):
    """What -inf in the bias hides may be large, though the mask shows the whole tile."""
    q, k, v = backend.qkv(1, 2, 2, 256, 256, 64, dtype=dtype)
    bias, mask = backend.randn(256, 256), torch.ones(256, 256, dtype=torch.bool, device=backend.device)
    bias[:, 40:60] = -torch.inf
    v[:, :, 40:60] = torch.finfo(dtype).max / 2
    do, leaves = torch.randn_like(q), [x.requires_grad_() for x in (q, k, v, bias)]
    o = backend.forward(q, k, v, bias=bias, attn_mask=mask)
    found = torch.autograd.grad(o, leaves, do)
    assert all(x.isfinite().all() for x in (o, *found)) and not found[3][:, 40:60].any()


@pytest.mark.parametrize("d", [96, 128, 256])
def test_gradient_of_bias_of_large_heads(backend, dtype, d):
    q, k, v = backend.qkv(d=d, Nq=130, Nk=150, dtype=dtype)
    check_gradient_of_bias(backend, torch.randn_like(q), q, k, v, "bias", backend.randn(4, 130, 150))


@pytest.mark.parametrize("mask", MASKS)
def test_gradient_of_bias_with_masks(backend, dtype, mask):
    q, k, v = backend.qkv(dtype=dtype)
    options = MASKS[mask](backend, 2, 90) | dict(alibi_slopes=backend.randn(4) / 50)
    options |= dict(prefix_k=backend.ints(4, 30)) if backend.random.random() < 0.5 else {}
    for bias in backend.randn(4, 70, 90), backend.randn(2, 1, 1, 90, dtype=dtype):
        check_gradient_of_bias(backend, torch.randn_like(q), q, k, v, "bias", bias, **options)


@pytest.mark.parametrize("make", DOCUMENTS)
def test_gradient_of_bias_of_documents(backend, dtype, make):
    qkv, options = drawn(backend, make, dtype, front=3, behind=4)
    bias = backend.randn(4, qkv[0].shape[2], qkv[1].shape[2])
    do = torch.randn_like(qkv[0])
    check_gradient_of_bias(backend, do, *qkv, "bias", bias, causal=True, **options)


def test_gradient_of_bias_beside_others(backend, dtype):
    """Sinks, dlse, strides, NaN in what nothing sees; gradients of q, k and v don't change."""
    q, k, v = backend.qkv(dtype=dtype)
    bias, do = backend.randn(4, 90, 70).mT, torch.randn_like(q)
    others = dict(dlse=backend.randn(2, 4, 70), sinks=backend.randn(4))
    check_gradient_of_bias(backend, do, q, k, v, "bias", bias, **others)
    lengths = backend.ints(60, 33)
    expected, _ = gradient_of_bias(backend, do, q, k, v, "bias", bias, seqlens_k=lengths)
    k[0, :, 60:], v[0, :, 60:], k[1, :, 33:], v[1, :, 33:] = [torch.nan] * 4
    leaves = [x.clone().requires_grad_() for x in (q, k, v, bias)]
    o = backend.forward(*leaves[:3], bias=leaves[3], seqlens_k=lengths)
    *others, found = torch.autograd.grad(o, leaves, do)
    assert torch.equal(found, expected) and others[0].any()
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o = backend.forward(*leaves, bias=bias, seqlens_k=lengths)
    assert same_bits(torch.autograd.grad(o, leaves, do), others)
    o, lse = backend.forward(q, k, v, bias=bias, seqlens_k=lengths, return_lse=True)
    options = dict(bias=bias, seqlens_k=lengths, backend=backend.name, complete=True)
    again = torch.ops.minimal_attn.backward_and_bias(do, q, k, v, o, lse, None, **options)
    assert same_bits(again[:3], others) and torch.equal(again[3], expected)


def test_gradient_of_bias_at_large_scores(backend, dtype):
    """lse is normalised again there, too."""
    q, k, v = backend.qkv(Nq=130, Nk=150, dtype=dtype)
    q = 10 * q
    bias = 300 + backend.randn(4, 130, 150)
    found, expected = gradient_of_bias(backend, torch.randn_like(q), q, k, v, "bias", bias)
    bound = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}[dtype]
    assert (found.double() - expected).norm() < bound * expected.norm()


def test_gradient_of_bias_is_refused(backend):
    q, k, v = backend.qkv()
    bias = backend.randn(70, 90).requires_grad_()
    with pytest.raises(RuntimeError, match="^bias must not require grad where out is given, but does"):
        backend.forward(q, k, v, bias=bias, out=torch.empty_like(q))
    with pytest.raises(ValueError, match="^bias must be given for its gradient, but was None$"):
        torch.ops.minimal_attn.backward_and_bias(q, q, k, v, q, q[..., 0].contiguous(), None)
    o = backend.forward(q, k, v, bias=bias)
    [found] = torch.autograd.grad(o.sum(), bias, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        found.sum().backward()


def test_gradient_of_bias_is_computed_where_it_is_wanted(backend):
    """Not for a call of autograd.grad that doesn't name the bias."""
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = (x.requires_grad_() for x in backend.qkv())
    bias = backend.randn(70, 90).requires_grad_()
    for wanted, operator in (
        ([q, k, v], "backward"),
        ([q, bias], "backward_and_bias"),
        ([bias], "backward_and_bias"),
    ):
        o = backend.forward(q, k, v, bias=bias)
        with FlopCounterMode(display=False) as counter:
            torch.autograd.grad(o.sum(), wanted)
        assert [str(name) for name in counter.get_flop_counts()["Global"]] == [f"minimal_attn.{operator}"]


def test_gradient_of_bias_by_torchs_tools(backend):
    """torch.compile, torch.func, vmap, checkpointing, nothing to compute."""
    q, k, v = backend.qkv()
    bias = backend.randn(2, 1, 70, 90)

    def loss(bias, q=q):
        return backend.forward(q, k, v, bias=bias).square().sum()

    leaf = bias.clone().requires_grad_()
    [expected] = torch.autograd.grad(loss(leaf), leaf)
    assert torch.equal(torch.func.grad(loss)(bias), expected)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert torch.equal(torch.autograd.grad(compiled(leaf), leaf)[0], expected)
    both = torch.func.vmap(torch.func.grad(loss))(torch.stack([bias, bias + 1]))
    torch.testing.assert_close(both[0], expected)
    again = torch.utils.checkpoint.checkpoint(loss, leaf, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(again, leaf)[0], expected)
    none = torch.zeros(70, 0, device=backend.device, requires_grad=True)
    o = backend.forward(q, k[:, :, :0], v[:, :, :0], bias=none)
    assert torch.autograd.grad(o.sum(), none)[0].shape == (70, 0)


@pytest.mark.sanitizer
@pytest.mark.parametrize("shared", ["1HQK", "B11K", "HQ1"])
def test_sanitizer_of_the_gradient(backend, dtype, shared):
    q, k, v = backend.qkv(B=2, Hq=2, Hkv=1, Nq=70, Nk=80, d=96, dtype=dtype)
    bias = backend.randn(*shape_of(shared, 2, 2, 70, 80), dtype=dtype)
    check_gradient_of_bias(backend, torch.randn_like(q), q, k, v, "bias", bias)
