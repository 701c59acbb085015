"""What minimal_attn.flash_attn calls: attention of (B, N, H, d) tensors, and of packed sequences.

Packed sequences lie one behind the other in q (total_q, Hq, d) and k, v (total_k, Hkv, d). They are forward's
documents (attend_sequences), but over pages or long caches blocks of queries in batches (attend_packed).
"""

from __future__ import annotations

import torch

from minimal_attn._backward import backward
from minimal_attn._forward import cast_by_autocast, forward
from minimal_attn._sizes import divide_up, known, larger, smaller

_MAX_KEYS = 1 << 28  # of a batch, and more: binding/checks.h


def attend(q, k, v, s_aux, wants_lse, deterministic=False, **options):
    """forward on (B, N, H, d) tensors, and the log-sum-exp (B, Hq, Nq) if it is wanted."""
    if deterministic and wants_grad(q, k, v, s_aux):
        q, k, v = cast_by_autocast(q, k, v)  # forward's results and the backward pass need the same numbers
        with torch.set_grad_enabled(False):
            results = attend(q, k, v, s_aux, True, **options)
        cu_seqlens = options.pop("cu_seqlens_q", None), options.pop("cu_seqlens_k", None)
        tensors = _distinct(q, k, v, s_aux, *cu_seqlens)
        return _Deterministic.apply(*tensors, *results, options)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    results = forward(q, k, v, sinks=s_aux, return_lse=wants_lse, **options)
    out, lse = results if wants_lse else (results, None)
    return out.transpose(1, 2), lse


def attend_packed(q, k, v, cu_seqlens_q, begin, end, max_seqlen_q, s_aux, wants_lse, **options):
    """Packed sequences block by block, without gradients: queries as cu_seqlens_q says, keys begin[b] <= j <
    end[b] of k, v (1, total_k, Hkv, d), or of the pages in options' block_table (1, n).

    forward gets a batch of blocks of queries, each of one sequence, which share all keys by a stride of 0.
    The sum of the lengths bounds the number of blocks. The last block has no query and no key.
    """
    q, k, v = cast_by_autocast(q, k, v)
    total, B, device = q.shape[0], begin.shape[0], q.device
    if known(total == 0):  # forward's checks, and its empty results
        out, lse = attend(q[None], k, v, s_aux, wants_lse, **options)
        return out[0], lse[0] if wants_lse else None
    if not known(total > 0):
        q = torch.nn.functional.pad(q, (0, 0, 0, 0, 0, 1))  # a row that blocks without queries can read
    blocks_of_longest = larger(1, divide_up(max_seqlen_q, 192 if q.shape[2] <= 96 else 128))  # hopper's Br
    rows = larger(1, divide_up(max_seqlen_q, blocks_of_longest))
    n_blocks = smaller(B * blocks_of_longest, (total + B * (rows - 1)) // rows) + 1
    q_begin, q_end = cu_seqlens_q[:-1].long(), cu_seqlens_q[1:].long()
    blocks = divide_up(q_end - q_begin, rows)
    next_block = blocks.cumsum(0)
    first_block = next_block - blocks

    # A sequence's blocks go from its end to its begin: under a causal mask the longest is the first. The last
    # one may begin before the sequence, with rows that are computed for nothing.
    block = torch.arange(n_blocks, device=device)
    b = torch.searchsorted(next_block, block, right=True)
    is_used = b < B
    b = b.clamp(max=B - 1)
    to_end = (block - first_block[b] + 1) * rows  # from the block's first query to the sequence's end
    token = (q_end[b] - to_end)[:, None] + torch.arange(rows, device=device)
    queries = q.index_select(0, token.clamp(0, q.shape[0] - 1).flatten()).unflatten(0, (n_blocks, rows))
    options |= dict(seqlens_k=end[b] * is_used, leftpad_k=begin[b] * is_used, offset=end[b] - to_end)
    # hopper splits float32 keys once a batch, here for each block: O(N^2) of workspace.
    if q.is_cuda and q.dtype == torch.float32:
        options["backend"] = "portable"
    if "block_table" in options:
        options["block_table"] = options["block_table"].expand(n_blocks, -1)
    else:
        k, v = (x.expand(n_blocks, -1, -1, -1) for x in (k, v))
    out, lse = attend(queries, k, v, s_aux, wants_lse, **options)

    token = torch.arange(total, device=device)
    b = torch.searchsorted(q_end, token, right=True)
    is_inside = (b < B) & (token >= q_begin[0])
    b = b.clamp(max=B - 1)
    from_end = q_end[b] - 1 - token
    row = (first_block[b] + from_end // rows) * rows + rows - 1 - from_end % rows
    row = torch.where(is_inside, row, n_blocks * rows - 1).clamp(0, n_blocks * rows - 1)
    lse = lse.transpose(1, 2).flatten(0, 1).index_select(0, row).T.contiguous() if wants_lse else None
    return out.flatten(0, 1).index_select(0, row), lse


def attend_pages(
    q, k, v, block_table, cu_seqlens_q, lengths, max_seqlen_q, max_seqlen_k, s_aux, wants_lse, **options
):
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
        bounds = cu_seqlens_q, cu_seqlens_k, max_seqlen_q
        return attend_sequences(q, k, v, s_aux, *bounds, wants_lse, **options)

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
        # One row has the pages of all sequences, so that a backend that copies pages copies each once.
        begin = torch.arange(B, device=q.device) * room
        keys = begin, begin + lengths, max_seqlen_q, s_aux, wants_lse
        return attend_packed(q, k, v, cu_seqlens_q, *keys, **options, block_table=table.reshape(1, -1))

    return attend_tables(block_table, cu_seqlens_q, lengths)


def attend_sequences(
    q, k, v, s_aux, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, wants_lse, seqused_k=None, **options
):
    """Packed sequences by forward's cu_seqlens. Long caches of keys without gradients go to attend_packed.

    seqused_k: of each sequence only the first keys count. Without attend_packed, these are copied.
    """
    begin, end = cu_seqlens_k[:-1], cu_seqlens_k[1:]
    if seqused_k is not None:
        end = begin + torch.minimum(seqused_k, end - begin)
    if known(k.shape[0] > 2 * q.shape[0]) and not wants_grad(q, k, v, s_aux):
        keys = k[None], v[None], cu_seqlens_q, begin, end, max_seqlen_q
        return attend_packed(q, *keys, s_aux, wants_lse, **options)
    if seqused_k is not None:
        b, j, cu_seqlens_k = _gather_index(end - begin, k.shape[0])
        row = (begin[b] + j).clamp(0, k.shape[0] - 1)
        k, v = (x.index_select(0, row) for x in (k, v))
    options |= dict(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    out, lse = attend(q[None], k[None], v[None], s_aux, wants_lse, **options)
    return out[0], lse[0] if wants_lse else None


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
    def forward(q, k, v, s_aux, cu_seqlens_q, cu_seqlens_k, out, lse, options):
        return out.view_as(out), lse.view_as(lse)

    @staticmethod
    def setup_context(ctx, inputs, results):
        *tensors, _, _, ctx.options = inputs
        ctx.save_for_backward(*tensors, *results)

    @staticmethod
    def backward(ctx, do, dlse):
        q, k, v, s_aux, cu_seqlens_q, cu_seqlens_k, out, lse = ctx.saved_tensors
        heads_first = (x.transpose(1, 2) for x in (do, q, k, v, out))
        options = dict(deterministic=True, complete=s_aux is None, **ctx.options)
        options |= dict(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
        parts = backward(*heads_first, lse, None, dlse=dlse, **options)
        dsinks = None if s_aux is None else gradient_of_sinks(do, out, lse, dlse, s_aux)
        return *(x.transpose(1, 2) for x in parts), dsinks, *[None] * 5


def gradient_of_sinks(do, out, lse, dlse, sinks):
    """A sink is one more key of each row, whose value is 0."""
    D = (do.float() * out.float()).masked_fill(out == 0, 0).sum(-1).mT - dlse
    score = sinks.float()[:, None]
    dS = torch.where(score == -torch.inf, 0, -torch.exp(score - lse) * D)
    return dS.sum(-1).sum_to_size(sinks.shape).to(sinks.dtype)
