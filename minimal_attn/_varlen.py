"""What minimal_attn.flash_attn calls: attention of (B, N, H, d) tensors, and of packed sequences.

Packed sequences lie one behind the other in q (total_q, Hq, d) and k, v (total_k, Hkv, d). They are forward's
documents.
"""

from __future__ import annotations

import torch

from minimal_attn._backward import backward
from minimal_attn._errors import refuse_grad
from minimal_attn._forward import cast_by_autocast, forward
from minimal_attn._sizes import divide_up, known

_MAX_KEYS = 1 << 28  # of a batch, and more: binding/checks.h
# Among the options of `attend`.
_TENSORS = "cu_seqlens_q", "cu_seqlens_k", "seqlens_k", "offset", "alibi_slopes", "dropout_seed"


def attend(q, k, v, s_aux, wants_lse, deterministic=False, **options):
    """forward on (B, N, H, d) tensors, and the log-sum-exp (B, Hq, Nq) if it is wanted."""
    if deterministic and wants_grad(q, k, v, s_aux):
        refuse_grad("flash_attn with deterministic=True", alibi_slopes=options.get("alibi_slopes"))
        q, k, v = cast_by_autocast(q, k, v)  # forward's results and the backward pass need the same numbers
        with torch.set_grad_enabled(False):
            results = attend(q, k, v, s_aux, True, **options)
        tensors = _distinct(q, k, v, s_aux, *(options.pop(name, None) for name in _TENSORS))
        return _Deterministic.apply(*tensors, *results, options)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    results = forward(q, k, v, sinks=s_aux, return_lse=wants_lse, **options)
    out, lse = results if wants_lse else (results, None)
    return out.transpose(1, 2), lse


def attend_pages(q, k, v, block_table, cu_seqlens_q, lengths, max_seqlen_k, s_aux, wants_lse, **options):
    """Packed sequences. The keys of sequence b are the first lengths[b] of its pages in block_table (B, n).

    For gradients these keys are copied into packed ones.
    """
    (B, n), page_size = block_table.shape, k.shape[1]
    is_long = known(B * n * page_size >= _MAX_KEYS)
    block_table = block_table[:, : divide_up(max_seqlen_k, page_size)]
    n = block_table.shape[1]
    room = n * page_size
    lengths = lengths.clamp(0, room)
    if wants_grad(q, k, v, s_aux):
        b, j, cu_seqlens_k = _gather_index(lengths, B * room)
        page = block_table[b, (j // page_size).clamp(0, n - 1)].clamp(0, k.shape[0] - 1)
        k, v = (x[page, j % page_size] for x in (k, v))
        return attend_sequences(q, k, v, s_aux, cu_seqlens_q, cu_seqlens_k, wants_lse, **options)

    if is_long and known(room >= _MAX_KEYS):
        raise ValueError(f"max_seqlen_k must be less than {_MAX_KEYS} with pages, but was {max_seqlen_k}")

    def attend_tables(table, cu_seqlens_q, lengths):
        B = table.shape[0]
        if is_long and known(B * room >= _MAX_KEYS):
            half = B // 2
            first = attend_tables(table[:half], cu_seqlens_q[: half + 1], lengths[:half])
            second = attend_tables(table[half:], cu_seqlens_q[half:], lengths[half:])
            is_second = torch.arange(q.shape[0], device=q.device) >= cu_seqlens_q[half]
            out = torch.where(is_second[:, None, None], second[0], first[0])
            return out, torch.where(is_second, second[1], first[1]) if wants_lse else None
        # One row has the pages of all sequences: their keys are one batch.
        cu_seqlens_k = torch.arange(B + 1, device=q.device, dtype=torch.int32) * room
        documents = dict(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_k=lengths)
        documents["block_table"] = table.reshape(1, -1)
        out, lse = attend(q[None], k, v, s_aux, wants_lse, **documents, **options)
        return out[0], lse[0] if wants_lse else None

    return attend_tables(block_table, cu_seqlens_q, lengths)


def attend_sequences(q, k, v, s_aux, cu_seqlens_q, cu_seqlens_k, wants_lse, seqused_k=None, **options):
    """Packed sequences by forward's cu_seqlens.

    seqused_k: of each sequence only the first keys count. For gradients these are copied.
    """
    begin, end = cu_seqlens_k[:-1], cu_seqlens_k[1:]
    if seqused_k is not None and wants_grad(q, k, v, s_aux):
        used = torch.minimum(seqused_k.clamp(min=0), end - begin)
        b, j, cu_seqlens_k = _gather_index(used, k.shape[0])
        row = (begin[b] + j).clamp(0, k.shape[0] - 1)
        k, v, seqused_k = k.index_select(0, row), v.index_select(0, row), None
    if seqused_k is not None:
        options["seqused_k"] = seqused_k
    options |= dict(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    out, lse = attend(q[None], k[None], v[None], s_aux, wants_lse, **options)
    return out[0], lse[0] if wants_lse else None


def pad(x, cu_seqlens, longest):
    """Packed sequences as (B, longest, H, d), 0 behind each one."""
    row = cu_seqlens[:-1, None] + torch.arange(longest, device=x.device)
    is_inside = (row < cu_seqlens[1:, None]) & (row >= 0) & (row < len(x))
    return torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 1))[row.where(is_inside, len(x))]


def unpad(x, cu_seqlens, total, empty=0.0):
    """The rows of (B, N, H, ...), packed: `total` in all. Those of no sequence are `empty`."""
    B, N = x.shape[:2]
    row = torch.arange(total, device=x.device)
    b = torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True)
    i = row - cu_seqlens[:-1][b.clamp(max=B - 1)]
    index = (b * N + i).where((b < B) & (i >= 0) & (i < N), B * N)
    rows = x.flatten(0, 1)
    return torch.nn.functional.pad(rows, (0, 0) * (rows.dim() - 1) + (0, 1), value=empty)[index]


def _gather_index(lengths, total):
    """(b, j, cu_seqlens) for a copy of the first lengths[b] keys of each sequence b: its row r is key j[r] of
    sequence b[r]. Rows behind the last sequence, of total in all, and of wrong lengths may be any number.
    """
    ends = lengths.clamp(min=0).cumsum(0)
    row = torch.arange(total, device=lengths.device)
    b = torch.searchsorted(ends, row, right=True).clamp(max=len(ends) - 1)
    cu_seqlens = torch.nn.functional.pad(ends, (1, 0))
    return b, row - cu_seqlens[b], cu_seqlens


def keys_of_documents(cu_seqlens_q, cu_seqlens_k, n):
    """Of n packed queries: document, index of the own key, begin and end of the document's keys, each (n,).

    A document's last query is at its last key. A query of no document has no keys: end is begin.
    """
    cu_q, cu_k = cu_seqlens_q.long(), cu_seqlens_k.long()
    query = torch.arange(n, device=cu_q.device)
    document = torch.searchsorted(cu_q[1:].contiguous(), query, right=True)
    is_inside = (document < len(cu_q) - 1) & (query >= cu_q[0])
    document = document.clamp(max=len(cu_q) - 2)
    begin, end = cu_k[:-1][document], cu_k[1:][document]
    return document, query - cu_q[1:][document] + end, begin, end.where(is_inside, begin)


@torch.no_grad()
def S_dmask(q, k, s_aux, max_seqlen_q, max_seqlen_k, **options):
    """exp(score - the row's largest score), negative where the weight is dropped.

    (B, Hq, Nq, Nk), both rounded up to 128. Columns of P are o, where v is columns of the identity.
    """
    key = torch.arange(k.shape[1], device=q.device)
    columns, rows = (128 * divide_up(max(n, 1), 128) for n in (max_seqlen_k, max_seqlen_q))
    first_q = torch.arange(len(q) + 1, device=q.device) * q.shape[1]
    if "cu_seqlens_q" in options:
        _, own, begin, _ = keys_of_documents(options["cu_seqlens_k"], options["cu_seqlens_k"], k.shape[1])
        key, first_q = own - begin, options["cu_seqlens_q"]

    def weights(**options):
        identity = key[:, None, None] == torch.arange(columns, device=q.device)
        parts = [x.to(q.dtype).expand(len(k), -1, k.shape[2], -1) for x in identity.split(256, -1)]
        return torch.cat([attend(q, k, x, s_aux, False, **options)[0] for x in parts], -1).flatten(0, 1)

    is_dropped = weights(**options) == 0
    P = weights(**options | dict(dropout_p=0.0, dropout_seed=None))
    largest = P.amax(-1, keepdim=True)
    S = torch.where(is_dropped, -P, P) / largest.where(largest != 0, 1)
    return pad(S, first_q, rows).transpose(1, 2)


def rotate(x, cos, sin, position, interleaved):
    """Rotary embedding of x (B, N, H, d) in float32: pairs of its first 2 r channels turn by the angles of
    cos and sin (positions, r) at position (B, N).
    """
    r = cos.shape[-1]
    cos, sin = (table[position][:, :, None].float() for table in (cos, sin))
    turned, rest = x[..., : 2 * r].float(), x[..., 2 * r :]
    even, odd = turned.unflatten(-1, (r, 2)).unbind(-1) if interleaved else turned.split(r, -1)
    pair = even * cos - odd * sin, even * sin + odd * cos
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((turned.to(x.dtype), rest), -1)


# ---------------------------------------------------------------------------------------------- gradients


def wants_grad(*tensors):
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _distinct(*tensors):
    """The same tensors, but none twice, which Dynamo refuses in the arguments of an autograd.Function."""

    def is_again(i):
        return tensors[i] is not None and any(tensors[i] is x for x in tensors[:i])

    return [x.view_as(x) if is_again(i) else x for i, x in enumerate(tensors)]


class _Deterministic(torch.autograd.Function):
    """attend's results, whose gradients have the same bits on every run."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q, k, v, s_aux, *others):  # _TENSORS, out, lse, options
        out, lse, _ = others[-3:]
        return out.view_as(out), lse.view_as(lse)

    @staticmethod
    def setup_context(ctx, inputs, results):
        *tensors, _, _, ctx.options = inputs
        ctx.save_for_backward(*tensors, *results)

    @staticmethod
    def backward(ctx, do, dlse):
        q, k, v, s_aux, *of_options, out, lse = ctx.saved_tensors
        heads_first = (x.transpose(1, 2) for x in (do, q, k, v, out))
        options = dict(deterministic=True, complete=s_aux is None, **ctx.options)
        options |= dict(zip(_TENSORS, of_options, strict=True))
        parts = backward(*heads_first, lse, None, dlse=dlse, **options)
        dsinks = None if s_aux is None else gradient_of_sinks(do, out, lse, dlse, s_aux)
        return *(x.transpose(1, 2) for x in parts), dsinks, *[None] * (len(_TENSORS) + 3)


def gradient_of_sinks(do, out, lse, dlse, sinks):
    """A sink is one more key of each row, whose value is 0."""
    D = (do.float() * out.float()).masked_fill(out == 0, 0).sum(-1).mT - dlse
    score = sinks.float()[:, None]
    dS = torch.where(score == -torch.inf, 0, -torch.exp(score - lse) * D)
    return dS.sum(-1).sum_to_size(sinks.shape).to(sinks.dtype)
