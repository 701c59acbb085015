"""Any shapes, bands, lengths, strides and states, as Hypothesis draws them."""

import pytest
import torch
from conftest import DTYPES, check_l_m, check_o
from reference import attention

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

INT32 = st.integers(-(2**31), 2**31 - 1)


@st.composite
def calls(draw):
    """(seed, shapes, layouts, padding, dtype, options): how to draw tensors, and what to call with them."""
    B, Hkv, ratio = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    Nq, Nk = (draw(st.one_of(st.integers(0, 40), st.integers(0, 300))) for _ in "qk")
    d = draw(st.one_of(st.integers(1, 256), st.sampled_from([32, 64, 128])))
    near = st.integers(-10, max(Nq, Nk) + 10)
    bound = st.one_of(st.just(-1), st.integers(0, Nk + 10), st.integers(0, 2**62))
    of_each_batch = st.lists(st.one_of(near, near, INT32), min_size=B, max_size=B)
    options = draw(
        st.fixed_dictionaries(
            {},
            optional={
                "causal": st.booleans(),
                "window_size": st.tuples(bound, bound),
                "softmax_scale": st.floats(-1, 1).map(lambda x: x / d**0.5),
                "seqlens_k": of_each_batch,
                "leftpad_k": of_each_batch,
                "offset": st.one_of(near, st.integers(-(2**62), 2**62), of_each_batch),
            },
        )
    )
    layouts = [draw(st.permutations(range(3))) for _ in "qkv"]
    padding = [draw(st.integers(0, 9)) for _ in "qkv"]
    shapes = [(B, Hkv * ratio, Nq, d), (B, Hkv, Nk, d), (B, Hkv, Nk, d)]
    seed = draw(st.integers(0, 2**32))
    return seed, shapes, layouts, padding, draw(st.sampled_from(DTYPES)), options


def tensors(backend, seed, shapes, layouts, padding, dtype):
    """Random values, the first three dimensions in any order in memory, rows a little apart."""
    backend.generator.manual_seed(seed)
    for shape, order, pad in zip(shapes, layouts, padding, strict=True):
        stored = [shape[dimension] for dimension in order]
        storage = backend.randn(*stored, shape[3] + pad, dtype=dtype)[..., : shape[3]]
        yield storage.permute(*(order.index(dimension) for dimension in range(3)), 3)


PROPERTY = settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
)


@PROPERTY
@given(call=calls())
def test_any_call(backend, call):
    *inputs, dtype, options = call
    options = {name: backend.ints(*x) if isinstance(x, list) else x for name, x in options.items()}
    backend.check(*tensors(backend, *inputs, dtype), **options)


@PROPERTY
@given(call=calls(), cut=st.floats(0, 1))
def test_any_cut_in_two(backend, call, cut):
    """The keys of one call, given in two: the second's positions and limits count from its own first key."""
    *inputs, dtype, options = call
    options = {name: backend.ints(*x) if isinstance(x, list) else x for name, x in options.items()}
    q, k, v = tensors(backend, *inputs, dtype)
    Nq, Nk = q.shape[2], k.shape[2]
    n = options.get("seqlens_k", backend.ints(*[Nk] * q.shape[0])).clamp(0, Nk)
    options.setdefault("offset", n - Nq)
    expected = attention(q, k, v, **options)
    middle = round(cut * Nk)
    state = backend.forward(q, k[:, :, :middle], v[:, :, :middle], **options, return_state=True)
    for limit in "seqlens_k", "leftpad_k":
        if limit in options:
            options[limit] = options[limit].clamp(0, Nk) - middle
    position = options["offset"]
    if isinstance(position, torch.Tensor):
        position = position.clamp(-(2**30), 2**30)
    options["offset"] = position - middle
    o, l, m = backend.forward(q, k[:, :, middle:], v[:, :, middle:], **options, state=state)
    check_o(o, expected, dtype)
    check_l_m(l, m, expected)
