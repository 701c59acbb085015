"""What docs/conventions.md says of this project, and of the libraries whose functions it stands in for.

The values of many shapes are in test_mask.py, test_autograd.py, test_sdpa*.py, test_flash_attn.py and
test_huggingface.py. Here the other libraries are called, where they are installed.
"""

import importlib.util
import inspect
import math
import os
import re
import warnings
from pathlib import Path

import pytest
import torch
from conftest import check_lse, check_o
from reference import attention, relative_error
from test_backward import ERROR_BOUND
from test_flash_attn import expected_of, forced
from torch.nn import functional as F

import minimal_attn
from minimal_attn import flash_attn

DIFFERENT_LENGTHS = [(2, 5), (5, 2), (1, 7), (130, 70), (70, 130)]


def swap(x):
    """(B, H, N, d) from (B, N, H, d), and back."""
    return x.transpose(1, 2)


# --------------------------------------------------------------------------------- this project's own column


def drawings():
    """Name and rows of each one in docs/conventions.md."""
    page = (Path(__file__).parent.parent / "docs" / "conventions.md").read_text()
    names, *lines = re.search(r"```\n(.*?)\n```", page, re.DOTALL)[1].split("\n")
    columns = [(m.start(), m[0]) for m in re.finditer(r"\S+( \S+)*", names)]
    ends = [start for start, _ in columns[1:]] + [None]
    for (start, name), end in zip(columns, ends, strict=True):
        rows = [line[start:end].split() for line in lines]
        yield name, [[int(x) for x in row] for row in rows if row]


CALLS_OF = {  # forward's arguments; the drop-ins' that mean the same
    "top-left": (dict(causal=True, offset=0), {"sdpa": dict(is_causal=True)}),
    "bottom-right": (dict(causal=True), {"flash_attn": dict(causal=True)}),
    "window (2, 0)": (dict(window_size=(2, 0)), {"flash_attn": dict(window_size=(2, 0))}),
    "window (1, 1)": (dict(window_size=(1, 1)), {"flash_attn": dict(window_size=(1, 1))}),
}


@pytest.mark.parametrize("name, rows", list(drawings()))
def test_drawings(backend, dtype, name, rows):
    """What each row of them sees: all scores are equal, and v has a column for each key."""
    Nq, Nk = len(rows), len(rows[0])
    q, k = backend.randn(1, 1, Nq, Nk, dtype=dtype), backend.randn(1, 1, Nk, Nk, dtype=dtype) * 0
    v = torch.eye(Nk, dtype=dtype, device=k.device)[None, None]
    options, of_drop_ins = CALLS_OF[name]
    results = [backend.forward(q, k, v, **options)]
    with forced(backend):
        for function, arguments in of_drop_ins.items():
            if function == "sdpa":
                results.append(minimal_attn.scaled_dot_product_attention(q, k, v, **arguments))
            else:
                results.append(swap(flash_attn.flash_attn_func(*map(swap, (q, k, v)), **arguments)))
    seen = torch.tensor(rows, device=q.device, dtype=torch.float64)
    for o in results:
        expected = seen / seen.sum(1, keepdim=True).clamp(min=1)
        torch.testing.assert_close(o[0, 0].double(), expected, rtol=1e-2, atol=0)


@pytest.mark.parametrize("Nq", [3, 40])
def test_query_head_h_reads_key_head_h_div_group(backend, dtype, Nq):
    """And its gradient goes there."""
    q, k, v = backend.qkv(B=1, Hq=6, Hkv=2, Nq=Nq, Nk=40, d=16, dtype=dtype)
    v[:] = torch.tensor([1.0, 2.0], device=v.device)[:, None, None]
    o = backend.forward(q, k, v)
    assert o.mean((0, 2, 3)).round().tolist() == [1, 1, 1, 2, 2, 2]
    v.requires_grad_()
    for h in range(6):
        dv = torch.autograd.grad(backend.forward(q, k, v)[:, h].sum(), v)[0]
        assert dv.abs().sum((0, 2, 3)).gt(0).tolist() == [h // 3 == 0, h // 3 == 1]


def test_lse_is_natural(backend, dtype):
    q, k, v = backend.qkv(dtype=dtype, Hkv=4)
    _, lse = backend.forward(q, k, v, softmax_scale=-0.7, return_lse=True)
    expected = torch.logsumexp(-0.7 * (q.double() @ k.double().mT), -1)
    torch.testing.assert_close(lse.double(), expected, rtol=2e-6, atol=1e-5)


@pytest.mark.parametrize("do_of_empty_rows", [1.0, math.nan])
@pytest.mark.parametrize("empty_by", ["causal", "seqlens_k", "window"])
def test_empty_rows(backend, dtype, empty_by, do_of_empty_rows):
    """o 0, lse -inf, gradients 0, whatever the gradient of o is there."""
    q, k, v = backend.qkv(B=2, Nq=70, Nk=30, d=32, dtype=dtype)
    options = {
        "causal": dict(causal=True),
        "seqlens_k": dict(seqlens_k=backend.ints(0, 30)),
        "window": dict(window_size=(3, 0), offset=0),
    }[empty_by]
    expected = attention(q, k, v, **options)
    empty = expected.l == 0
    assert empty.any() and not empty.all()
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    o, lse = backend.forward(q, k, v, return_lse=True, **options)
    assert not o[empty].any()
    assert torch.equal(lse == -torch.inf, empty)
    do = torch.randn_like(o)
    do[empty] = do_of_empty_rows
    found = torch.autograd.grad(o, (q, k, v), do)
    assert not found[0][empty].any()
    do[empty] = 0
    o = attention(q, k, v, **options).o
    exact = torch.autograd.grad(o, (q, k, v), do.double())
    for x, y in zip(found, exact, strict=True):
        assert relative_error(x.double(), y.double()) < ERROR_BOUND[dtype]


def test_a_sink_is_one_more_score_that_no_scale_multiplies(backend, dtype):
    q, k, v = backend.qkv(dtype=dtype, Hkv=4)
    sinks = backend.randn(4) + 2
    scores = 0.3 * (q.double() @ k.double().mT)
    column = sinks.double()[:, None, None].expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    o = backend.forward(q, k, v, softmax_scale=0.3, sinks=sinks)
    expected = attention(q, k, v, softmax_scale=0.3, sinks=sinks)
    check_o(o, expected._replace(o=weights @ v.double()), dtype)


# ------------------------------------------------------------------------------------- the drop-ins' peers


@pytest.mark.parametrize("Nq, Nk", DIFFERENT_LENGTHS)
@pytest.mark.parametrize("gqa", [False, True])
def test_scaled_dot_product_attention(backend, dtype, Nq, Nk, gqa):
    """PyTorch's function in float64 beside the drop-in, and under activate(): is_causal aligns the first."""
    q, k, v = backend.qkv(Hkv=2 if gqa else 4, Nq=Nq, Nk=Nk, dtype=dtype)
    expected = F.scaled_dot_product_attention(
        *(x.double() for x in (q, k, v)), is_causal=True, enable_gqa=gqa
    )
    rows = attention(q, k, v, causal=True, offset=0)
    check_o(
        minimal_attn.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa),
        rows._replace(o=expected),
        dtype,
    )
    with minimal_attn.activate():
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
    check_o(o, rows._replace(o=expected), dtype)


def flex(q, k, v, mask_mod, **options):
    """o and lse of FlexAttention in float64."""
    from torch.nn.attention import flex_attention as module

    block_mask = module.create_block_mask(mask_mod, None, None, q.shape[2], k.shape[2], device=q.device.type)
    if "return_aux" in inspect.signature(module.flex_attention).parameters:
        options["return_aux"] = module.AuxRequest(lse=True)
    else:
        options["return_lse"] = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it isn't compiled
        o, lse = module.flex_attention(
            *(x.double() for x in (q, k, v)), block_mask=block_mask, enable_gqa=True, **options
        )
    return o, getattr(lse, "lse", lse)


@pytest.mark.parametrize("Nq, Nk", DIFFERENT_LENGTHS)
@pytest.mark.parametrize("left, right", [(-1, 0), (3, 0), (2, 5)])
def test_flex_attention(backend, dtype, Nq, Nk, left, right):
    """Of the mask_mod that the table's words make; rows without keys are 0 and -inf there, too."""
    if backend.name != "cpu":
        pytest.skip("FlexAttention has no float64 on a GPU")

    def mask_mod(b, h, i, j):
        position = i + Nk - Nq
        return (j <= position + right) & ((j >= position - left) if left >= 0 else (j >= 0))

    q, k, v = backend.qkv(Nq=Nq, Nk=Nk, dtype=dtype)
    options = dict(window_size=(left, right), softmax_scale=0.4)
    o, lse = backend.forward(q, k, v, return_lse=True, **options)
    expected_o, expected_lse = flex(q, k, v, mask_mod, scale=0.4)
    check_o(o, attention(q, k, v, **options)._replace(o=expected_o), dtype)
    torch.testing.assert_close(lse.double(), expected_lse.double(), rtol=2e-6, atol=1e-5)


@pytest.mark.parametrize("kind", ["causal", "sliding", "bidirectional", "bidirectional sliding"])
def test_transformers(backend, kind):
    """A sliding_window of W sees W keys with the own one; the bidirectional one W keys on both sides.

    test_huggingface.py has the models and test_bounds_are_transformers_mask."""
    masks = pytest.importorskip("transformers.masking_utils")
    W = 3
    function, options = {
        "causal": (masks.causal_mask_function, dict(causal=True)),
        "sliding": (masks.sliding_window_causal_mask_function(W), dict(window_size=(W - 1, 0))),
        "bidirectional": (masks.bidirectional_mask_function, {}),
        "bidirectional sliding": (
            masks.sliding_window_bidirectional_mask_function(W),
            dict(window_size=(W, W)),
        ),
    }[kind]
    mask = masks.sdpa_mask(
        batch_size=2,
        q_length=4,
        kv_length=10,
        q_offset=6,
        kv_offset=0,
        mask_function=function,
        attention_mask=torch.arange(10) >= torch.tensor([[0], [8]]),
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        device="cpu",
    ).to(backend.device)
    q, k, v = backend.qkv(Nq=4, Nk=10)
    expected = F.scaled_dot_product_attention(*(x.double() for x in (q, k, v)), mask, enable_gqa=True)
    options["leftpad_k"] = backend.ints(0, 8)
    check_o(backend.forward(q, k, v, **options), attention(q, k, v, **options)._replace(o=expected), q.dtype)


def numpy(x):
    return x.detach().cpu().numpy()


def test_jax(backend):
    """jax.nn.dot_product_attention aligns the first query and key; its window is (left, right)."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = (
        "false"  # else it takes 3/4 of the GPU's memory from other tests
    )
    jax = pytest.importorskip("jax")
    q, k, v = backend.qkv(Nq=60, Nk=90)
    theirs = [jax.numpy.asarray(numpy(swap(x))) for x in (q, k, v)]
    for of_jax, options in [
        (dict(is_causal=True), dict(causal=True)),
        (dict(local_window_size=(4, 2)), dict(window_size=(4, 2))),
        (dict(local_window_size=3), dict(window_size=(3, 3))),
        ({}, {}),
    ]:
        with jax.default_matmul_precision("highest"):
            o, lse = jax.nn.dot_product_attention(*theirs, return_residual=True, scale=0.3, **of_jax)
        options |= dict(offset=0, softmax_scale=0.3)
        exact = attention(q, k, v, **options)
        check_o(swap(torch.tensor(o.tolist(), device=q.device)), exact, torch.float32)
        check_lse(swap(torch.tensor(lse.tolist(), device=q.device)).contiguous(), exact)
        o, lse = backend.forward(q, k, v, return_lse=True, **options)
        check_o(o, exact, torch.float32)
        check_lse(lse, exact)


def test_mlx(backend):
    """Its causal mask aligns the last query with the last key. Rows before key 0 see all keys there."""
    mx = pytest.importorskip("mlx.core")
    q, k, v = backend.qkv(Nq=60, Nk=90)
    theirs = [mx.array(numpy(x)) for x in (q, k, v)]
    o = mx.fast.scaled_dot_product_attention(*theirs, scale=0.3, mask="causal")
    exact = attention(q, k, v, softmax_scale=0.3, causal=True)
    check_o(torch.tensor(o.tolist(), device=q.device), exact, torch.float32)
    check_o(backend.forward(q, k, v, softmax_scale=0.3, causal=True), exact, torch.float32)


CALLS = {
    "func": dict(causal=True),
    "window": dict(window_size=(5, 3)),
    "window and causal": dict(window_size=(5, 3), causal=True),
    "scale": dict(softmax_scale=0.3),
}


@pytest.mark.skipif(not importlib.util.find_spec("flash_attn"), reason="flash_attn isn't installed")
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("Nq, Nk", DIFFERENT_LENGTHS)
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
def test_the_functions_of_flash_attn(cuda_backend, name, Nq, Nk, half):
    """flash_attn's own and ours, each against float64: out, and the log-sum-exp at the same places."""
    theirs = pytest.importorskip("flash_attn")
    options = CALLS[name]
    q, k, v = (swap(x).contiguous() for x in cuda_backend.qkv(Nq=Nq, Nk=Nk, dtype=half))
    exact = expected_of(q, k, v, **options)
    cu_q, cu_k = (torch.arange(0, 3 * N, N, dtype=torch.int32, device=q.device) for N in (Nq, Nk))
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    with forced(cuda_backend):
        for module in theirs, flash_attn:
            out, lse, _ = module.flash_attn_func(q, k, v, return_attn_probs=True, **options)
            check_half(out, lse, exact)
            out, lse, _ = module.flash_attn_varlen_func(
                *packed, cu_q, cu_k, Nq, Nk, return_attn_probs=True, **options
            )
            check_half(out.unflatten(0, (2, Nq)), lse.unflatten(1, (2, Nq)).transpose(0, 1), exact)
            filled = torch.tensor([Nk, (Nk + 1) // 2], dtype=torch.int32, device=q.device)
            out, lse = module.flash_attn_with_kvcache(
                q, k, v, cache_seqlens=filled, return_softmax_lse=True, **options
            )
            check_half(out, lse, expected_of(q, k, v, seqlens_k=filled, **options))


def check_half(out, lse, exact):
    check_o(swap(out), exact, out.dtype)
    seen = exact.l > 0  # what flash_attn 2 gives other rows is a cell that was not run
    expected = exact.m + exact.l.log()
    torch.testing.assert_close(lse[seen].double(), expected[seen], rtol=2e-6, atol=1e-4)
