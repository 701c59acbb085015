"""minimal_attn.huggingface: masks of transformers as bounds of forward."""

import copy
import random

import pytest
import torch
from reference import visible_keys

transformers = pytest.importorskip("transformers", minversion="5.4")

from test_huggingface import DEVICES, masks  # noqa: E402

import minimal_attn.huggingface as huggingface  # noqa: E402
from minimal_attn.huggingface import Mask, make_mask, register  # noqa: E402


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_masks_that_are_passed_on(device, dtype, seed):
    """A query that sees no key gets 0, and a float32 mask may stand beside half types, on every GPU."""
    q, k, v = (torch.randn(2, 4, 40, 64).to(device, dtype) for _ in range(3))
    seen = torch.rand(2, 1, 40, 40, device=device) < 0.5
    seen[:, :, 7] = False
    bias = torch.randn(2, 1, 40, 40, device=device)
    for mask, added in ((seen, torch.zeros_like(bias).masked_fill(~seen, -torch.inf)), (bias, bias)):
        if mask is bias and device == "cpu":
            mask = bias.to(dtype)  # there PyTorch wants one dtype
            added = mask
        o, _ = huggingface.attention(torch.nn.Module(), q, k, v, mask, is_causal=False)
        S = q.double() @ k.double().mT / 8 + added.double()
        expected = (S.softmax(-1).nan_to_num(0) @ v.double()).transpose(1, 2)
        assert (o.double() - expected).norm() < 0.02 * expected.norm()
    o, _ = huggingface.attention(torch.nn.Module(), q, k, v, seen, is_causal=False)
    assert not o[:, 7].any()


def test_kernels_of_pytorch():
    """All but cuDNN's, as far as sdpa_kernel allows them."""
    kernels = torch.nn.attention.SDPBackend
    for allowed in ([kernels.MATH, kernels.CUDNN_ATTENTION], [kernels.CUDNN_ATTENTION]):
        with torch.nn.attention.sdpa_kernel(allowed):
            assert huggingface._allowed_kernels() == allowed[:1]


def mask_arguments(**changed):
    arguments = dict(batch_size=3, q_length=7, kv_length=7, q_offset=0, kv_offset=0, attention_mask=None)
    arguments |= dict(mask_function=masks.causal_mask_function, device="cpu", dtype=torch.float32)
    return arguments | changed


def seen_by(mask):
    """What the Mask's bounds say, by the contract's words."""
    assert mask.why is None
    return visible_keys(mask.shape[0], *mask.shape[2:], window_size=mask.window, **mask.bounds)


def functions_of_blocks(window):
    """Of (3, 30) images of neighbours with numbers that count up, and -1 for text; one with a window."""
    if not hasattr(masks, "blockwise_overlay"):
        return []
    kinds = torch.rand(3, 30) < 0.5
    starts = kinds & ~torch.nn.functional.pad(kinds, (1, 0))[:, :-1]
    blocks = masks.blockwise_overlay(torch.where(kinds, starts.cumsum(1), -1))
    function = masks.or_masks(masks.causal_mask_function, blocks)
    return [function, masks.and_masks(function, masks.sliding_window_overlay(window))]


def test_bounds_are_transformers_mask(seed):
    """On random lengths, offsets, windows, chunks, blocks and paddings with holes."""
    register()
    draw = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(200):
        Nq, kv_offset, n = draw.randint(1, 9), draw.choice([0, 0, 3]), draw.randint(1, 6)
        q_offset = kv_offset + draw.choice([0, draw.randint(0, 9)])
        Nk = q_offset - kv_offset + Nq + draw.choice([0, 0, 5])
        function = draw.choice(
            [
                masks.causal_mask_function,
                masks.bidirectional_mask_function,
                masks.sliding_window_causal_mask_function(n),
                masks.sliding_window_bidirectional_mask_function(n),
                masks.chunked_causal_mask_function(n, torch.randint(0, 4, (3,))),
                *functions_of_blocks(n),
            ]
        )
        padding = None
        if draw.random() < 0.7:
            length = draw.choice([kv_offset + Nk, q_offset + Nq])
            first, last = torch.randint(0, length + 1, (2, 3, 1)).sort(0).values
            padding = (torch.arange(length) >= first) & (torch.arange(length) < last)
            if draw.random() < 0.3:
                padding &= torch.rand(3, length) < 0.7
        offset = draw.choice([int, torch.tensor])(q_offset)
        arguments = mask_arguments(q_length=Nq, kv_length=Nk, q_offset=offset, kv_offset=kv_offset)
        arguments |= dict(mask_function=function, attention_mask=padding)
        expected = masks.sdpa_mask(**{**arguments, "allow_is_causal_skip": False})
        mask = make_mask(**arguments)
        if mask.order is not None:  # its keys have another order
            expected = expected.take_along_dim(mask.order[:, None, None], -1)
        assert torch.equal(seen_by(mask), expected)


def no_neighbour(b, h, q, k):
    return (k <= q) & (k != 2)


@pytest.mark.parametrize(
    "function, is_range",
    [
        (lambda b, h, q, k: (k <= q) | (k < 3), True),
        (lambda b, h, q, k: (k > q - 2) & (k <= q + 3), True),
        (masks.sliding_window_causal_mask_function(torch.tensor(3)), True),
        (lambda b, h, q, k: k > 7, True),  # none
        (no_neighbour, False),
        (masks.and_masks(no_neighbour, masks.bidirectional_mask_function), False),
    ],
)
def test_other_mask_functions_are_looked_at(function, is_range):
    for Nq, offset in ((7, 0), (3, 4), (1, 6)):
        arguments = mask_arguments(mask_function=function, q_length=Nq, q_offset=offset)
        mask = make_mask(**arguments)
        if is_range:
            assert torch.equal(seen_by(mask), masks.sdpa_mask(**arguments, allow_is_causal_skip=False))
        else:
            assert mask.why.startswith("mask function")


@pytest.mark.parametrize("biased", [False, True])
def test_masks_without_ranges_are_tensors(biased, seed):
    """No bounds say what such a mask does, but attn_mask does, beside padding and a bias."""
    padding = torch.arange(7) < torch.tensor([[7], [5], [6]])
    arguments = mask_arguments(mask_function=no_neighbour, attention_mask=padding)
    seen = masks.sdpa_mask(**arguments, allow_is_causal_skip=False)
    q, k, v = torch.randn(3, 3, 4, 7, 8)
    bias = torch.randn(1, 4, 7, 7) if biased else torch.zeros(1, 4, 7, 7)
    options = dict(position_bias=bias) if biased else {}
    huggingface.calls.clear()
    o, _ = huggingface.attention(torch.nn.Module(), q, k, v, make_mask(**arguments), **options)
    assert set(huggingface.calls) == {"served"}
    S = (q.double() @ k.double().mT / 8**0.5 + bias).masked_fill(~seen, -torch.inf)
    torch.testing.assert_close(o.transpose(1, 2).double(), S.softmax(-1) @ v.double(), rtol=1e-5, atol=1e-5)


def test_some_rows_of_a_mask():
    padding = torch.arange(7) >= torch.tensor([[0], [2], [6]])
    mask = make_mask(**mask_arguments(attention_mask=padding))
    assert mask.contiguous() is mask
    assert torch.equal(seen_by(mask[:, :, -2:, :]), seen_by(mask)[:, :, -2:])
    assert torch.equal(seen_by(mask.to("cpu")), seen_by(mask))


def test_a_mask_becomes_a_tensor(seed):
    """Bool as transformers' sdpa_mask, but to add where it is added."""
    padding = torch.arange(7) < torch.tensor([[7], [2], [6]])
    mask = make_mask(**mask_arguments(attention_mask=padding))
    seen = masks.sdpa_mask(**mask_arguments(attention_mask=padding, allow_is_causal_skip=False))
    scores = torch.randn(3, 1, 7, 7)
    hidden = torch.zeros(3, 1, 7, 7).masked_fill(~seen, torch.finfo(torch.float32).min)
    for sum in (scores + mask, mask + scores, torch.add(scores, mask), scores.clone().add_(mask)):
        assert torch.equal(sum, scores + hidden)
    assert (scores.bfloat16() + mask).isfinite().all()
    assert mask.dtype == torch.bool and mask.size() == seen.size() and mask.dim() == 4
    assert torch.equal(mask[:, 0], seen[:, 0]) and torch.equal(mask[..., :3], seen[..., :3])
    pairs = [(~mask, ~seen), (mask & seen, seen), (seen & mask, seen), (mask == 0, seen == 0), (mask, seen)]
    pairs += [
        (mask.logical_not(), ~seen),
        (torch.logical_not(mask), ~seen),
        (mask.to(torch.int64), seen.long()),
    ]
    pairs += [(torch.where(mask, scores, 0), scores * seen), (scores.masked_fill(mask, 0), scores * ~seen)]
    pairs += [(mask * scores, seen * scores), (scores * mask, seen * scores), (mask.float(), seen.float())]
    for o, expected in pairs:
        assert torch.equal(o, expected)
    with pytest.raises(AttributeError, match="no colour"):
        mask.colour  # noqa: B018
    assert copy.deepcopy(mask).window == mask.window


def test_a_changed_transformers_is_refused(monkeypatch):
    monkeypatch.setattr(huggingface, "keys_of", lambda *_: ((3, 0), None))
    with pytest.raises(ImportError, match="causal_mask_function"):
        register()


def test_a_mask_says_what_it_is():
    assert "window=(-1, 0)" in repr(make_mask(**mask_arguments()))
    assert isinstance(make_mask(**mask_arguments(attention_mask=make_mask(**mask_arguments()))), Mask)
