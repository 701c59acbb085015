"""float32 inputs of mixed sizes: two float16s, as hopper multiplies them, can't carry all of their numbers.

Also the ordinary inputs that they must carry, so that no row takes the slow fallback.
"""

import math

import pytest
import torch
from conftest import check_l_m, check_o
from reference import attention


def some_larger(inputs):
    """Two keys, or queries, have a number far larger than all others, but ordinary scores."""

    def larger(q, k, v):
        if inputs == "v":
            v[0, 1, [70, 400]] *= 1e12
        else:
            large, small = (q, k) if inputs == "q" else (k, q)
            large[:, :, [70, 270], 3] *= 1e9
            small[..., 3] *= 1e-9
        return q, k, v

    larger.__name__ = f"larger_{inputs}"
    return larger


def tiles_of_other_sizes(inputs, exponent):
    def scaled(q, k, v):
        t = {"q": q, "k": k, "v": v}[inputs]
        tiles = torch.arange(t.size(2), device=t.device) // 64
        t *= (10.0 ** (exponent * (tiles % 3)))[:, None]
        return q, k, v

    scaled.__name__ = f"{inputs}_by_1e{exponent}"
    return scaled


def values_that_shrink(q, k, v):
    """The first values are huge beside the next ones, and the last ones are ordinary."""
    v[:, :, :64] *= 1e20
    v[:, :, 64:128] *= 1e-20
    return q, k, v


def tiles_of_zeros(q, k, v):
    for t in q, k, v:
        t[:, :, 64:128] = t[:, 1] = 0
        t[..., t.size(-1) // 2] = 0
    return q, k, 1e-3 * v


def tiny_among_ordinary(q, k, v):
    """A channel and a few neighbours of each far below the others."""
    for t in q, k, v:
        t[..., 3] *= 1e-9
        t[:, :, 5, 4:12] *= 1e-30
    v[:, :, ::2] *= 1e-7
    return q, k, v


def larger_after_four(q, k, v):
    """The first four rows of a tile don't tell how large its numbers are, or they are zeros."""
    for t, by in (k, 1 / 6), (v, 2.0**-20):
        rows = torch.arange(t.size(2), device=t.device)
        t[:, :, rows % 32 < 4] *= by
        t[:, 1:, (rows // 64 % 2 == 1) & (rows % 64 < 4)] = 0
    return q, k, v


def values_far_apart(q, k, v):
    """Keys of a tiny weight with values so large that they count, in tiles of their own."""
    q, k = 0.01 * q, 0.01 * k
    q[..., 0], k[..., 0] = q.size(-1) ** 0.5, 0
    k[:, :, 320:384, 0], v[:, :, 320:384] = -34 * math.log(2), 2.0**36 * v[:, :, 320:384]
    return q, k, v


def weight_on_zeros(q, k, v):
    """Nearly all the weight is on a key whose value is 0; the result is e^-25 of the other values."""
    q[..., 0], k[..., 0], k[:, :, 0], v[:, :, 0] = q.size(-1) ** 0.5, 0, 0, 0
    k[:, :, 0, 0] = 25
    return q, k, v


def subnormal(q, k, v):
    return 1e19 * q, 1e-19 * k, 1e-39 * v


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (150, 20)}], ids=str)
@pytest.mark.parametrize("d", [40, 64, 128, 256])
@pytest.mark.parametrize(
    "inputs",
    [
        some_larger("q"),
        some_larger("k"),
        some_larger("v"),
        tiles_of_other_sizes("q", -4),
        tiles_of_other_sizes("k", -4),
        tiles_of_other_sizes("v", -1),
        tiles_of_other_sizes("v", 5),
        tiles_of_other_sizes("v", 15),
        values_that_shrink,
        tiles_of_zeros,
        tiny_among_ordinary,
        larger_after_four,
        values_far_apart,
        weight_on_zeros,
        subnormal,
    ],
    ids=lambda inputs: inputs.__name__,
)
def test_float32_of_mixed_sizes(backend, inputs, d, options):
    """Two float16s can't carry the numbers of some tiles, but those of the tiles next to them."""
    Hq = 2 if backend.name == "cpu" else 4
    q, k, v = inputs(*backend.qkv(B=2, Hq=Hq, Hkv=2, Nq=300, Nk=700, d=d))
    if inputs is subnormal:  # a subnormal has fewer bits, and may count as 0
        o, expected = backend.forward(q, k, v, **options), attention(q, k, v, **options)
        assert (o - expected.o).abs().max() <= 1e-5 * expected.size.max() + 2e-38
    else:
        backend.check(q, k, v, **options)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (150, 20)}], ids=str)
@pytest.mark.parametrize("d, Nq", [(40, 200), (63, 200), (64, 200), (100, 180), (128, 180)])
def test_float32_of_many_heads(backend, d, Nq, options):
    """With more heads a GPU may take more rows at a time: each batch is another of the inputs above."""
    N, Hkv = 330, 2 if backend.name == "cpu" else 8
    q, k, v = backend.qkv(B=6, Hq=3 * Hkv, Hkv=Hkv, Nq=Nq, Nk=N, d=d)
    if backend.name == "hopper" and torch.cuda.get_device_properties(0).multi_processor_count == 132:
        assert backend.explain(q, k, v).Br == (256 if d <= 64 else 192)
    k[0, ..., 3] += torch.linspace(0, 20, N, device=backend.device)
    others = some_larger("k"), tiles_of_zeros, tiny_among_ordinary, larger_after_four, values_far_apart
    for b, inputs in enumerate(others, 1):
        q[b : b + 1], k[b : b + 1], v[b : b + 1] = inputs(q[b : b + 1], k[b : b + 1], v[b : b + 1])
    backend.check(q, k, v, **options)
    backend.check(
        q,
        k,
        v,
        **options,
        seqlens_k=backend.ints(N, 290, 0, 65, N, 200),
        leftpad_k=backend.ints(0, 70, 0, 64, 10, 0),
    )
    offset = N - Nq
    first = backend.forward(q, k[:, :, :130], v[:, :, :130], **options, offset=offset, return_state=True)
    o, l, m = backend.forward(q, k[:, :, 130:], v[:, :, 130:], **options, offset=offset - 130, state=first)
    expected = attention(q, k, v, **options)
    check_o(o, expected, q.dtype)
    check_l_m(l, m, expected)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_float32_that_are_not_finite(backend, d, value):
    """Queries that see them get what manual attention gives: visible k give scores of +-inf or NaN."""
    # 257 is one of the first rows of a tile, by which hopper guesses a scale.
    for name, at in ("q", 150), ("k", 250), ("k", 257), ("v", 250), ("v", 257):
        tensors = dict(zip("qkv", backend.qkv(B=1, Hq=2, Hkv=1, Nq=200, Nk=300, d=d), strict=True))
        tensors[name][:, :, at, 1] = value
        expected = attention(**tensors).o
        o = backend.forward(**tensors)
        assert torch.equal(o.isfinite(), expected.isfinite())
        finite = expected.isfinite()
        torch.testing.assert_close(o[finite].double(), expected[finite], rtol=1e-4, atol=1e-5)
        if name != "q":  # hidden by seqlens_k they influence nothing
            backend.check(**tensors, seqlens_k=backend.ints(250))


@pytest.mark.parametrize("d", [64, 128, 256])
def test_an_infinite_key_among_many(backend, d):
    """So many that portable, which computes such rows again, has sums of them in its workspace."""
    q, k, v = backend.qkv(B=1, Hq=2, Hkv=1, Nq=150, Nk=9000, d=d)
    k[:, :, 6000, 1] = torch.inf
    o, expected = backend.forward(q, k, v), attention(q, k, v).o
    finite = expected.isfinite()
    assert torch.equal(o.isfinite(), finite) and finite.any() and not finite.all()
    torch.testing.assert_close(o[finite].double(), expected[finite], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{"softmax_scale": -0.05}, {"window_size": (90, 40)}], ids=str)
@pytest.mark.parametrize("d", [33, 64, 128, 256])
def test_float32_of_mixed_sizes_in_chunks(backend, d, options):
    """Inputs that two float16s can't carry, with a state, and keys that are expanded or not aligned."""
    q, k, v = some_larger("v")(*backend.qkv(B=2, Hq=4, Hkv=2, Nq=300, Nk=700, d=d + 1))
    q, k, v = q[..., 1:], k[..., 1:], v[..., 1:]
    k = k[:, :1].expand(-1, 2, -1, -1)
    backend.check(q, k, v, **options)
    expected = attention(q, k, v, causal=True)
    first = backend.forward(q, k[:, :, :333], v[:, :, :333], causal=True, offset=400, return_state=True)
    o, l, m = backend.forward(q, k[:, :, 333:], v[:, :, 333:], causal=True, offset=67, state=first)
    check_o(o, expected, q.dtype)
    check_l_m(l, m, expected)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_float32_of_one_prefix(backend, d):
    """Keys that all batches have in common, of which each has another part; and heads that are one."""
    q, k, v = backend.qkv(B=3, Hq=4, Hkv=4, Nq=200, Nk=300, d=d)
    for heads in k[:1], k[:1, :1]:
        both = heads.expand_as(k), v[: heads.size(0), : heads.size(1)].expand_as(v)
        backend.check(q, *both, causal=True)
        backend.check(q, *both, seqlens_k=backend.ints(300, 0, 70), leftpad_k=backend.ints(5, 0, 64))


@pytest.mark.parametrize(("d", "softmax_scale"), [(64, 1e38), (64, -1e38), (256, 1e37), (256, -1e37)])
def test_scores_of_a_huge_scale(backend, d, softmax_scale):
    """Tiny numbers, whose ordinary scores come from the scale. Some products are subnormal."""
    q, k, v = backend.qkv(B=1, Hq=2, Hkv=1, Nq=100, Nk=300, d=d)
    size = 3e19 if d == 64 else 1.5e19  # by 3e19 manual float32 attention on a GPU is wrong by 4e-6 at d 256
    backend.check(size / abs(softmax_scale) / d**0.5 * q, 1e-19 * k, v, softmax_scale=softmax_scale)


@pytest.mark.parametrize("softmax_scale", [0.0, 1e-44])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_no_scale_for_keys_of_mixed_sizes(backend, d, softmax_scale):
    """All seen keys count alike, also those of tiles with other magnitudes, some of zeros alone."""
    q, k, v = backend.qkv(B=1, Hq=2, Hkv=1, Nq=300, Nk=300, d=d)
    k[:, :, 64:128] *= 2.0**-20
    k[:, :, 128:192] = 0
    backend.check(q, k, v, causal=True, softmax_scale=softmax_scale)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_keys_of_zeros_among_huge_ones(backend, d):
    """The zeros have no magnitude, and their scores are as exact as the others."""
    q, k, v = backend.qkv(B=1, Hq=2, Hkv=1, Nq=300, Nk=300, d=d)
    k[:, :, 64:192] = 0
    backend.check(2.0**-46 * q, 2.0**112 * k, v, softmax_scale=2.0**-69)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_a_small_query(backend, d):
    """Its scores are ordinary, by channels that are large in k; those of the other queries are far apart."""
    q, k, v = backend.qkv(B=2, Hq=4, Hkv=2, Nq=300, Nk=700, d=d)
    q[:, :, 77] *= 2.0**-13
    k[..., d // 2 :] *= 2.0**10
    o, expected = backend.forward(q, k, v)[:, :, 77], attention(q, k, v).o[:, :, 77]
    assert (o - expected).norm() <= 1.5e-6 * expected.norm()


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("N", [64, 300])
def test_large_keys_that_count_for_nothing(backend, N, d):
    """A channel in which queries are 0, keys that the first 63 don't see: what they see is small."""
    q, k, v = backend.qkv(B=1, Hq=4, Hkv=2, Nq=N, Nk=N, d=d)
    large = [*range(63, N, 64), N - 1]  # one in each tile
    q, k = 2.0**12 * q, 2.0**-12 * k
    q[..., 0], k[..., 0] = 0, 2.0**14 * (1 + k[..., 0].abs().clamp(max=2.9))
    k[:, :, large, 1:] = 2 * k[:, :, large, 1:].sign()
    few_q, few_k = torch.zeros_like(q), torch.zeros_like(k)
    few_q[..., 1] = 2.0**20 * d**0.5
    few_k[..., 0], few_k[..., 1] = 2.0**14, 2.0**-8 * k[..., 1]
    few_k[:, :, large, 1] = 1
    for qk in (q, k), (few_q, few_k):
        expected = attention(*(x[:, :, :63] for x in (*qk, v)), causal=True)
        check_o(backend.forward(*qk, v, causal=True)[:, :, :63], expected, q.dtype)


def test_the_state_of_scores_that_overflow_without_their_scale(backend):
    """Where O is finite, and not what an overflow makes of it, m is right."""
    q, k, v = backend.qkv(B=1, Hq=2, Hkv=2, Nq=100, Nk=300, d=64)
    o, _, m = backend.forward(
        2.0**62 * q.sign(),
        2.0**62 * q[:, :, :1].sign().expand_as(k),
        v,
        softmax_scale=2.0**-124,
        return_state=True,
    )
    is_finite = o.isfinite().all(dim=-1)
    expected = (q.sign() @ q[:, :, :1].sign().mT)[..., 0]
    torch.testing.assert_close(m[is_finite], expected[is_finite])


def test_many_keys_of_mixed_sizes(backend):
    """Equal terms, of which a running sum would lose part."""
    q, k, v = (torch.zeros(1, 1, N, 16, device=backend.device) for N in (16, 16384, 16384))
    v[:] = 0.1
    v[..., 3] = 1e-9
    backend.check(q, k, v)


def as_drawn(t):
    return t


def after_relu(t):
    return t.relu()


def half_dropped(t):
    return t * (t.roll(1, dims=-1) > 0)


def rows_a_hundredfold(t):
    return t * torch.logspace(-1, 1, t.size(2), device=t.device)[:, None]


def rows_far_apart(t):
    """Each third of the values is tiny beside the others, and loses nothing by that."""
    return t * 2.0 ** (-18 * (torch.arange(t.size(2), device=t.device) % 3 == 1))[:, None]


@pytest.mark.parametrize("inputs", [as_drawn, after_relu, half_dropped, rows_a_hundredfold, rows_far_apart])
@pytest.mark.parametrize("d", [63, 64, 65, 128, 256])
def test_ordinary_float32_is_split(backend, d, inputs):
    """It does not take the fallback, which a huge hidden key forces on all rows: their bits differ."""
    if backend.name != "hopper":
        pytest.skip("only hopper has a fallback")
    q, k, v = map(inputs, backend.qkv(B=4, Hq=4, Hkv=4, Nq=600, Nk=700, d=d))
    if inputs is rows_a_hundredfold:
        k = k / 30  # scores of 10: those of 30 lose 3e-6 by their own rounding
    o = backend.check(q, k, v, causal=True)
    with_huge = (torch.cat([t, torch.full_like(t[:, :, :1], 1e30)], dim=2) for t in (k, v))
    slow = backend.check(q, *with_huge, causal=True, offset=100)
    assert ((o == slow).flatten(2).float().mean(-1) < 0.7).all()  # a tenth to a third is equal by chance


@pytest.mark.parametrize("Nq, Nk, leftpad_k", [(600, 700, 104), (600, 596, 0), (64, 60, 0)])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_float32_beside_rows_without_keys_is_split(backend, d, Nq, Nk, leftpad_k):
    """Likewise of rows 8 to 15, which a warp has together with four that see no key."""
    if backend.name != "hopper":
        pytest.skip("only hopper has a fallback")
    q, k, v = backend.qkv(B=4, Hq=4, Hkv=4, Nq=Nq, Nk=Nk, d=d)
    options = {"causal": True, "offset": Nk - Nq, "leftpad_k": backend.ints(*[leftpad_k] * 4)}
    o = backend.check(q, k, v, **options)
    with_huge = (torch.cat([t, torch.full_like(t[:, :, :1], 1e30)], dim=2) for t in (k, v))
    slow = backend.check(q, *with_huge, **options)
    assert not o[:, :, :4].any() and o[:, :, 4:].any(-1).all()
    assert (o == slow)[:, :, 8:16].float().mean() < 0.8


@pytest.mark.parametrize("Nq, Nk", [(129, 640), (193, 641), (193, 300)])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_few_rows_of_float32_are_split(backend, d, Nq, Nk):
    """Likewise where a tile has a single row, whose columns are single numbers, some tiny by chance."""
    if backend.name != "hopper":
        pytest.skip("only hopper has a fallback")
    q, k, v = backend.qkv(B=8, Hq=40, Hkv=40, Nq=Nq, Nk=Nk, d=d)
    o = backend.check(q, k, v)
    with_huge = (torch.cat([t, torch.full_like(t[:, :, :1], 1e30)], dim=2) for t in (k, v))
    slow = backend.forward(q, *with_huge, causal=True, offset=Nk - 1)[:, :, :1]
    assert ((o[:, :, :1] == slow).flatten(2).float().mean(-1) < 0.7).float().mean() > 0.99
