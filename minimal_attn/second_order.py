"""forward with second derivatives: for gradient penalties, forces in a loss, Hessians.

The kernels compute o and its gradients. PyTorch computes gradients of gradients, and forward mode
(torch.func.jvp), from manual attention, whose scores take O(B Hq Nq Nk) of memory. PyTorch computes all of it
in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

import minimal_attn
from minimal_attn._dropout import check_p, check_seed, draw_seed, dropout_mask, dropped_of
from minimal_attn._errors import refuse_grad, wrong_call
from minimal_attn._varlen import gradient_of_sinks, keys_of_documents

_OPTIONS = "causal window_size softmax_scale seqlens_k leftpad_k offset backend".split()
_OPTIONS += "key_ranges cu_seqlens_q cu_seqlens_k prefix_k softcap alibi_slopes attn_mask bias".split()
_OPTIONS += ["dropout_p", "dropout_seed"]


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *surplus,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    **options,
):
    """minimal_attn.forward, differentiable twice and in forward mode.

    Args:
        q, k, v, sinks, return_lse, options: those of minimal_attn.forward, float64 besides, but for state,
            return_state, out and block_table. `backend` decides for o and first derivatives.

    Returns:
        o (B, Hq, Nq, d_v) of q's dtype; with return_lse (o, lse): lse (B, Hq, Nq) is float32, or q's float64.

    Raises:
        As minimal_attn.forward; TypeError for other arguments.
    """
    unknown = {name: None for name in options if name not in _OPTIONS}
    if unknown or surplus:
        raise wrong_call("second_order.forward", "q, k, v", surplus, unknown)
    if options.get("dropout_seed") is None:
        options["dropout_seed"] = draw_seed(q, options.get("dropout_p"))
    if q.dtype == torch.float64:
        options.pop("backend", None)
        if options.get("dropout_p") is not None:
            check_p(options["dropout_p"])
        if options.get("dropout_seed") is not None:
            check_seed(options["dropout_seed"])
        _check_terms(q, k, options.get("attn_mask"), options.get("bias"))
        o, lse = manual(q, k, v, sinks, **options)
    else:
        terms = {name: options.get(name) for name in ("alibi_slopes", "attn_mask", "bias")}
        refuse_grad("second_order.forward in q's dtype", **terms)
        of_ints = {name: x for name, x in options.items() if isinstance(x, Tensor)}
        numbers = {name: x for name, x in options.items() if name not in of_ints}
        o, lse = _Attention.apply(q, k, v, sinks, numbers, list(of_ints), *of_ints.values())
    return (o, lse) if return_lse else o


def _check_terms(q, k, attn_mask, bias):
    """forward's checks, for float64."""
    if attn_mask is not None and bias is not None and attn_mask.dtype != torch.bool:
        raise ValueError(f"attn_mask must be bool with a bias, but is {attn_mask.dtype}")
    pairs = (*q.shape[:3], k.shape[2])
    for name, t in ("attn_mask", attn_mask), ("bias", bias):
        if t is None:
            continue
        if not (t.dtype in (torch.float32, torch.float64) or (name == "attn_mask" and t.dtype == torch.bool)):
            allowed = "float32, float64" + (" or bool" if name == "attn_mask" else "")
            raise ValueError(f"{name} must be {allowed}, but is {t.dtype}")
        own = pairs[max(4 - t.ndim, 0) :]
        if t.ndim > 4 or any(n not in (1, of) for n, of in zip(t.shape, own, strict=True)):
            shape = tuple(t.shape)
            raise ValueError(f"{name} must broadcast to (B, Hq, Nq, Nk) = {pairs}, but has shape {shape}")


class _Attention(torch.autograd.Function):
    """`names` are those of the options that are tensors, `ints`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q, k, v, sinks, options, names, *ints):
        options = options | dict(zip(names, ints, strict=True))
        return minimal_attn.forward(q, k, v, sinks=sinks, return_lse=True, **options)

    @staticmethod
    def setup_context(ctx, inputs, results):
        *tensors, ctx.options, ctx.names = inputs[:6]
        ctx.save_for_backward(*tensors, *results, *inputs[6:])
        ctx.save_for_forward(*tensors, *results, *inputs[6:])

    @staticmethod
    def backward(ctx, do, dlse):
        (q, k, v, sinks, o, lse), options = ctx.saved_tensors[:6], _options(ctx)
        rest = [None] * (2 + len(ctx.names))
        if torch.is_grad_enabled():  # create_graph=True
            _, pull_back = torch.func.vjp(*_function(q, k, v, sinks, options))
            parts = pull_back((do, dlse))
            return *parts, *[None] * (4 - len(parts)), *rest
        parts = minimal_attn.backward(do, q, k, v, o, lse, None, dlse=dlse, complete=sinks is None, **options)
        dsinks = None
        if sinks is not None:
            dsinks = gradient_of_sinks(do.transpose(1, 2), o.transpose(1, 2), lse, dlse, sinks)
        return *parts, dsinks, *rest

    @staticmethod
    def jvp(ctx, *tangents):
        function, *tensors = _function(*ctx.saved_tensors[:4], _options(ctx))
        tangents = [torch.zeros_like(x) if t is None else t for x, t in zip(tensors, tangents, strict=False)]
        return torch.func.jvp(function, tuple(tensors), tuple(tangents))[1]


def _options(ctx):
    return ctx.options | dict(zip(ctx.names, ctx.saved_tensors[6:], strict=True))


def _function(q, k, v, sinks, options):
    """manual as a function of tensors alone, and these."""
    options = {name: x for name, x in options.items() if name != "backend"}
    if sinks is None:
        return lambda q, k, v: manual(q, k, v, None, **options), q, k, v
    return lambda *tensors: manual(*tensors, **options), q, k, v, sinks


def manual(
    q,
    k,
    v,
    sinks,
    *,
    softmax_scale=None,
    softcap=None,
    alibi_slopes=None,
    attn_mask=None,
    bias=None,
    dropout_p=None,
    dropout_seed=None,
    **band,
):
    """(o, lse) by operators of PyTorch, in float32 or float64."""
    (B, Hq, Nq, d), (_, Hkv, Nk, _) = q.shape, k.shape
    dtype, of_sums = q.dtype, torch.promote_types(q.dtype, torch.float32)
    seen = visible(B, Nq, Nk, q.device, **band)
    is_key = seen.any(-2)[..., None]  # what no query sees may be NaN
    k, v = (x.to(of_sums).where(is_key, 0).repeat_interleave(Hq // max(Hkv, 1), dim=1) for x in (k, v))
    S = (d**-0.5 if softmax_scale is None else softmax_scale) * (q.to(of_sums) @ k.mT)
    if softcap:
        S = softcap * torch.tanh(S / softcap)
    if alibi_slopes is not None:
        if score := minimal_attn._C.score():
            raise NotImplementedError(f"alibi_slopes must be None: this build's are those of {score}")
        distance = (positions(Nq, Nk, q.device, **band)[0] - torch.arange(Nk, device=q.device)).abs()
        S = S - alibi_slopes.to(of_sums)[..., None, None] * distance.unsqueeze(-3)
    for term in attn_mask, bias:
        if term is not None and term.dtype != torch.bool:
            S, seen = S + term.to(of_sums), seen & (term != -torch.inf)
        elif term is not None:
            seen = seen & term
    S = S.masked_fill(~seen, -torch.inf)
    m = S.detach().amax(-1, keepdim=True) if Nk else S.new_full((B, Hq, Nq, 1), -torch.inf)
    if sinks is not None:
        sinks = sinks.to(of_sums)[..., None, None]
        m = torch.maximum(m, sinks.detach())
    m = m.masked_fill(m == -torch.inf, 0)
    P = torch.exp(S - m)
    l = P.sum(-1, keepdim=True)
    if sinks is not None:
        l = l + torch.exp(sinks - m)
    is_blind = l == 0
    l = l.masked_fill(is_blind, 1)
    if dropout_p:
        kept = 65536 / max(65536 - dropped_of(dropout_p), 1)
        P = P * dropout_mask(dropout_seed, dropout_p, (B, Hq, Nq, Nk)) * kept
    lse = (m + l.log()).masked_fill(is_blind, -torch.inf)
    return (P @ v / l).to(dtype), lse[..., 0]


def _of_batches(x):
    return x.long()[:, None, None] if isinstance(x, Tensor) else x


def positions(
    Nq, Nk, device, seqlens_k=None, leftpad_k=None, offset=None, cu_seqlens_q=None, cu_seqlens_k=None, **_
):
    """Of each query: the key that it is at, the first and the end of its keys, and its document."""
    if cu_seqlens_q is not None:
        document, own, begin, end = (x[:, None] for x in keys_of_documents(cu_seqlens_q, cu_seqlens_k, Nq))
        return own, begin, end, document
    end = Nk if seqlens_k is None else _of_batches(seqlens_k).clamp(0, Nk)
    begin = 0 if leftpad_k is None else _of_batches(leftpad_k).clamp(0, Nk)
    i = torch.arange(Nq, device=device)[:, None]
    return i + (end - Nq if offset is None else _of_batches(offset)), begin, end, None


def visible(
    B,
    Nq,
    Nk,
    device,
    *,
    causal=False,
    window_size=(-1, -1),
    seqlens_k=None,
    leftpad_k=None,
    offset=None,
    key_ranges=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    prefix_k=None,
):
    """The mask that forward's options mean: (B or 1, 1, Nq, Nk), True where a query sees a key."""

    j = torch.arange(Nk, device=device)
    own, begin, end, document = positions(
        Nq, Nk, device, seqlens_k, leftpad_k, offset, cu_seqlens_q, cu_seqlens_k
    )
    first_keys = _of_batches(prefix_k)
    if cu_seqlens_q is not None and prefix_k is not None:
        first_keys = prefix_k.long()[document]
    left, right = window_size
    right = 0 if causal else right
    seen = (j >= begin) & (j < end)
    if right >= 0:
        seen = seen & (j <= own + right)
    if left >= 0:
        is_near = j >= own - left
        seen = seen & (is_near if first_keys is None else is_near | (j < begin + first_keys))
    if key_ranges is not None:
        first, last = key_ranges.long()[..., :1], key_ranges.long()[..., 1:]
        seen = seen & (first <= j) & (j < last)
    return seen.expand(-1 if seen.dim() == 3 else 1, Nq, Nk)[:, None]
