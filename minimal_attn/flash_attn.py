"""flash_attn's functions on minimal_attn.forward: `from minimal_attn.flash_attn import flash_attn_func`.

Signatures, defaults and meaning are those of flash_attn 2 (github.com/Dao-AILab/flash-attention,
flash_attn/flash_attn_interface.py). What differs:

    dtypes, devices         float32 as well; CPUs as well; any page size, and lengths of int32 or int64
    s_aux                   an argument of its own at the end: attention sinks, as in FlashAttention-3's forks
    softmax_lse             -inf in a row that sees no key, as in FlashAttention-3 (flash_attn 2 has +inf)
    seqused_k               an argument of flash_attn_varlen_func, as in FlashAttention-3, at the end
    gradients               of all but flash_attn_with_kvcache, as there; in s_aux and with a block_table, too
    num_splits              accepted and not used
    rotary_cos, rotary_sin  of any rotary dimension, in any dtype
    dropout_p               any from 0 to 1; which weights are dropped is minimal_attn.forward's choice
    NotImplementedError     alibi_slopes of each sequence beside a block_table

What is copied. Nothing synchronises with a GPU, and memory is O(N d) but for S_dmask, which is for tests:

    flash_attn_func         nothing
    ..._varlen_func         nothing
    ..._with_kvcache        k and v into the cache; with rotary_cos q and k besides, rotated by PyTorch
    seqused_k               nothing; for gradients k and v
    alibi_slopes (B, Hq)    of packed sequences: q, k and v, each sequence padded to max_seqlen
    block_table             the sequences' keys, up to the length of the table, where the backend doesn't read
    and cache_batch_idx     pages (minimal_attn.explain says so), and for gradients: up to max_seqlen_k each

With s_aux, half dtypes cost a float32 result in memory besides. Under torch.autocast, q, k and v are cast to
its dtype first, as SDPA casts them. A cache stays as it is: new keys and values take its dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minimal_attn._dropout import draw_seed
from minimal_attn._errors import as_int, check_range, in_words, is_known, known_max, known_min, refuse_grad
from minimal_attn._forward import autocast_dtype, forward
from minimal_attn._sizes import known
from minimal_attn._varlen import S_dmask, attend, attend_pages, attend_sequences, pad, rotate, unpad

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_INTS = (torch.int32, torch.int64)


def install(replace: bool = False) -> None:
    """Lets `import flash_attn` find these functions: libraries that call flash_attn run on minimal_attn.

    Call it in each process, before they are imported. There are flash_attn, flash_attn.flash_attn_interface
    (private functions included, which take half types alone), flash_attn.bert_padding, and the metadata of
    version 2.8.3. flash_attn.layers, .ops, .losses and others are not there. transformers'
    attn_implementation="flash_attention_2", diffusers' attention backend "flash" and ring-flash-attn's
    functions ran on it, on a CPU (5.24, 0.42.1, 0.1.8). What minimal_attn lacks (in the private functions
    alibi_slopes of each packed sequence) is a NotImplementedError: no other kernel takes the call.

    Without a GPU this imports transformers, if it is there, and adds CPUs to the devices that it lets use it.

    Args:
        replace: take the name also where flash_attn is installed, and hide all of that package.

    Raises:
        ImportError: flash_attn is installed, and replace is False.
    """
    from minimal_attn import _stand_in

    _stand_in.install(replace)


def uninstall() -> None:
    """Ends install(). Libraries that have imported names keep them."""
    from minimal_attn import _stand_in

    _stand_in.uninstall()


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    s_aux: Tensor | None = None,
):
    """softmax(softmax_scale * q k^T + mask) v, as flash_attn.flash_attn_func computes it. Copies nothing.

    Args:
        q: queries (B, Nq, Hq, d), float32, float16 or bfloat16, d from 1 to 576.
        k, v: keys (B, Nk, Hkv, d) and values (B, Nk, Hkv, d_v), of q's dtype and device. Hkv divides Hq:
            query head h reads key head h // (Hq // Hkv).
        dropout_p: each weight of the softmax becomes 0 with this probability, and the others are divided by
            1 - dropout_p. The seed comes from PyTorch's generator. Give 0 outside of training.
        softcap: scaled scores s become softcap * tanh(s / softcap). None, or 0 and less: none.
        softmax_scale: any finite float32. None: 1 / sqrt(d).
        causal: query i sees the keys j <= i + Nk - Nq: the last query sees the last key.
        window_size: (left, right): query i sees i + Nk - Nq - left <= j <= i + Nk - Nq + right. A negative
            number is no bound.
        alibi_slopes: (Hq,) or (B, Hq), float32: the score of query i and key j is less by
            slope * |i + Nk - Nq - j|. They have no gradient.
        deterministic: gradients with the same bits on every run, as under torch.use_deterministic_algorithms.
        return_attn_probs: return softmax_lse and S_dmask, too.
        s_aux: attention sinks (Hq,), float32, float16 or bfloat16: one more score for each row of a head,
            whose value is 0. softmax_lse counts it.

    Returns:
        out (B, Nq, Hq, d_v) of q's dtype. With return_attn_probs (out, softmax_lse, S_dmask):
        softmax_lse (B, Hq, Nq), float32, is the logarithm of the sum of exp(score). A row that sees no key
        has out = 0, softmax_lse = -inf. S_dmask is empty without dropout. With dropout, for tests, it is
        (B, Hq, Nq, Nk), both rounded up to 128: exp(score - the row's largest score), negative where the
        weight is dropped. That takes O(Nq Nk) of memory and several calls.

    Raises:
        TypeError, ValueError: an argument of another type, shape, dtype, device or value.
    """
    options = _options(softmax_scale, causal, window_size, softcap) | {"deterministic": bool(deterministic)}
    _check_qkv(q, k, v, ("B", "Nq", "Hq", "d"), ("B", "Nk", "Hkv", "d"), s_aux)
    options |= _slopes(alibi_slopes, q, q.shape[0]) | _dropout(dropout_p, q)
    out, lse = attend(q, k, v, s_aux, bool(return_attn_probs), **options)
    return _results(return_attn_probs, out, lse, q, k, s_aux, (q.shape[1], k.shape[1]), options)


def flash_attn_kvpacked_func(q, kv, *args, **options):
    """flash_attn_func(q, k, v, ...) of k, v = kv.unbind(2), where kv is (B, Nk, 2, Hkv, d)."""
    _check("kv", kv, kv, ("B", "Nk", 2, "Hkv", "d"), _FLOATS)
    return flash_attn_func(q, *kv.unbind(2), *args, **options)


def flash_attn_qkvpacked_func(qkv, *args, **options):
    """flash_attn_func(q, k, v, ...) of q, k, v = qkv.unbind(2), where qkv is (B, N, 3, H, d)."""
    _check("qkv", qkv, qkv, ("B", "N", 3, "H", "d"), _FLOATS)
    return flash_attn_func(*qkv.unbind(2), *args, **options)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    s_aux: Tensor | None = None,
    seqused_k: Tensor | None = None,
):
    """flash_attn_func of B sequences of different lengths that lie packed, one behind the other.

    It is forward with cu_seqlens.

    Args:
        q: queries (total_q, Hq, d). Sequence b has the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1].
        k, v: keys and values (total_k, Hkv, d), likewise by cu_seqlens_k. With a block_table: pages
            (pages, page size, Hkv, d).
        cu_seqlens_q, cu_seqlens_k: (B + 1,) int32 or int64 on q's device, B >= 1, never decreasing. On a
            GPU values are not checked, which would cost a synchronisation, but clamped.
        max_seqlen_q, max_seqlen_k: ints, at least the longest sequence's number of queries and of keys that
            count. Below 2^28 with a block_table.
        block_table: (B, n) int32 or int64 on q's device: keys j * page size and up of sequence b lie in page
            block_table[b, j]. Pages behind the last key may have any number.
        seqused_k: (B,) int32 or int64 on q's device: only the first seqused_k[b] keys of sequence b count, at
            most as many as cu_seqlens_k gives it. causal and window_size align the last query with the last
            of them. None: all. With it and a block_table cu_seqlens_k isn't read and may be None.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
            return_attn_probs, s_aux: as in flash_attn_func, sequence by sequence. With alibi_slopes (B, Hq),
            each sequence's own, all are padded to max_seqlen first. Not with a block_table.

    Returns:
        out (total_q, Hq, d); with return_attn_probs (out, softmax_lse (Hq, total_q), S_dmask). A row of no
        sequence is 0. S_dmask is (B, Hq, max_seqlen_q, max_seqlen_k), rounded as there, but empty with
        seqused_k or a block_table.

    Raises: as flash_attn_func.
    """
    options = _options(softmax_scale, causal, window_size, softcap) | {"deterministic": bool(deterministic)}
    rows = ("total_k",) if block_table is None else ("pages", "page size")
    _check_qkv(q, k, v, ("total_q", "Hq", "d"), (*rows, "Hkv", "d"), s_aux)
    _check("cu_seqlens_q", cu_seqlens_q, q, ("B + 1",), _INTS)
    B = cu_seqlens_q.shape[0] - 1
    if known(B < 1):
        raise ValueError(f"cu_seqlens_q must have shape (B + 1,), B at least 1, but has shape ({B + 1},)")
    options |= _slopes(alibi_slopes, q, B if block_table is None else None) | _dropout(dropout_p, q)
    max_q = _checked_longest("q", max_seqlen_q, cu_seqlens_q, q.shape[0])
    if seqused_k is not None:
        _check("seqused_k", seqused_k, q, (B,), _INTS)
        check_range("seqused_k", seqused_k, 2**31)
    if block_table is None or seqused_k is None or cu_seqlens_k is not None:
        _check("cu_seqlens_k", cu_seqlens_k, q, (B + 1,), _INTS)
    total_k = k.shape[0] if block_table is None else None
    max_k = _checked_longest("k", max_seqlen_k, cu_seqlens_k, total_k, seqused_k)
    if block_table is not None:
        _check("block_table", block_table, q, (B, "n"), _INTS)
        lengths = cu_seqlens_k.diff() if seqused_k is None else seqused_k
        room = block_table.shape[1] * k.shape[1]
        if known((longest := known_max(lengths)) > room):
            raise ValueError(f"block_table must have pages for {longest} keys, but has them for {room}")
        _check_pages(block_table, lengths, "k", k)
        arguments = block_table, cu_seqlens_q, lengths, max_k, s_aux, bool(return_attn_probs)
        out, lse = attend_pages(q, k, v, *arguments, **options)
    elif alibi_slopes is not None and alibi_slopes.dim() == 2:
        lengths = cu_seqlens_k.diff().clamp(min=0)
        lengths = lengths if seqused_k is None else lengths.minimum(seqused_k.clamp(min=0))
        options |= dict(seqlens_k=lengths, offset=lengths - cu_seqlens_q.diff())
        total_q, q = q.shape[0], pad(q, cu_seqlens_q, max_q)
        k, v = (pad(x, cu_seqlens_k, max_k) for x in (k, v))
        out, lse = attend(q, k, v, s_aux, bool(return_attn_probs), **options)
        out = unpad(out, cu_seqlens_q, total_q)
        lse = None if lse is None else unpad(lse.mT, cu_seqlens_q, total_q, -torch.inf).mT
        return _results(return_attn_probs, out, lse, q, k, s_aux, (max_q, max_k), options)
    else:
        arguments = cu_seqlens_q, cu_seqlens_k, bool(return_attn_probs), seqused_k
        out, lse = attend_sequences(q, k, v, s_aux, *arguments, **options)
    longest = (max_q, max_k) if block_table is None and seqused_k is None else None
    options |= dict(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    return _results(return_attn_probs, out, lse, q[None], k[None], s_aux, longest, options)


def flash_attn_varlen_kvpacked_func(q, kv, *args, **options):
    """flash_attn_varlen_func(q, k, v, ...) of k, v = kv.unbind(1), where kv is (total_k, 2, Hkv, d)."""
    _check("kv", kv, kv, ("total_k", 2, "Hkv", "d"), _FLOATS)
    return flash_attn_varlen_func(q, *kv.unbind(1), *args, **options)


def flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, *args, **options):
    """flash_attn_varlen_func of q, k, v = qkv.unbind(1), where qkv is (total, 3, H, d)."""
    _check("qkv", qkv, qkv, ("total", 3, "H", "d"), _FLOATS)
    lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return flash_attn_varlen_func(*qkv.unbind(1), *lengths, *args, **options)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float | None = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    s_aux: Tensor | None = None,
):
    """Writes k and v into the cache, in place, and attends to the cache. For decoding.

    Args:
        q: queries (B, Nq, Hq, d).
        k_cache, v_cache: (C, N, Hkv, d) of q's dtype and device, C >= B. With a block_table: pages
            (pages, page size, Hkv, d); a sequence then has N = n * page size.
        k, v: new keys and values (B, N_new, Hkv, d), or None. Key j of sequence b is written to position
            cache_seqlens[b] + j, where the cache must have room. They may be views of the cache.
        rotary_cos, rotary_sin: (at least N, r) cosines and sines of each position, r at most d / 2, or None.
            The first 2 r channels of q and k are rotated by them: key j at its position in the cache, query i
            at cache_seqlens[b] + i, or, without causal and window_size, at cache_seqlens[b].
        cache_seqlens: an int or (B,) int32 or int64 on q's device: how many keys each sequence has, left
            padding included, before k is appended. None: N; with k it must be given.
        cache_batch_idx: (B,) int32 or int64: sequence b is row cache_batch_idx[b] of the cache. None: row b.
            Indices that occur twice must not be written to.
        cache_leftpad: (B,) int32 or int64: the sequence's keys begin at this position.
        block_table: (B, n) int32 or int64, as in flash_attn_varlen_func; not with cache_batch_idx.
        causal, window_size: as in flash_attn_func, where Nk is cache_seqlens[b] + N_new.
        softmax_scale, softcap, alibi_slopes, s_aux: as in flash_attn_func.
        rotary_interleaved: channels 2 c and 2 c + 1 are a pair. If not, c and c + r.
        num_splits: not used.
        return_softmax_lse: return softmax_lse, too.

    Returns:
        out (B, Nq, Hq, d_v); with return_softmax_lse (out, softmax_lse (B, Hq, Nq)).

    Raises:
        As flash_attn_varlen_func, and ValueError for lengths that exceed the cache (an int, or a tensor on a
        CPU; on a GPU they are not checked, and PyTorch's assertion ends a write behind the cache). The cache
        is then as before.
    """
    options = _options(softmax_scale, causal, window_size, softcap)
    _check_qkv(q, k_cache, v_cache, ("B", "Nq", "Hq", "d"), ("C", "N", "Hkv", "d"), s_aux, "_cache")
    slopes = _slopes(alibi_slopes, q, q.shape[0])
    refuse_grad("flash_attn_with_kvcache", q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v, s_aux=s_aux)
    B, (C, N, Hkv, d) = q.shape[0], k_cache.shape
    if block_table is not None:
        _check("block_table", block_table, q, (B, "n"), _INTS)
        if cache_batch_idx is not None:
            raise ValueError("cache_batch_idx must be None with a block_table, but was a tensor")
    elif cache_batch_idx is not None:
        _check("cache_batch_idx", cache_batch_idx, q, (B,), _INTS)
        check_range("cache_batch_idx", cache_batch_idx, C)
        block_table = cache_batch_idx[:, None]  # a sequence is a page of N keys
    elif known(C < B):
        raise ValueError(f"k_cache must have at least q's {B} sequences, but has {C}")
    if cache_leftpad is not None:
        _check("cache_leftpad", cache_leftpad, q, (B,), _INTS)
    N_new = 0
    if k is not None or v is not None:
        if cache_seqlens is None:
            raise ValueError("cache_seqlens must be given with k and v, but was None")
        _check("k", k, q, (B, "N_new", Hkv, d))
        _check("v", v, q, (*k.shape[:-1], v_cache.shape[-1]))
        N_new = k.shape[1]
    room = N if block_table is None else N * block_table.shape[1]
    lengths = _lengths(cache_seqlens, N_new, room, q)
    rotary = _checked_rotary(rotary_cos, rotary_sin, q, k, room)
    if block_table is not None:
        _check_pages(block_table, lengths, "k_cache", k_cache)
    if not known(N_new == 0):
        _check_is_writable("k_cache", k_cache)
        _check_is_writable("v_cache", v_cache)
        for keys in (k, v), (k_cache, v_cache):  # forward's checks, before the cache changes
            forward(*(x[:0].transpose(1, 2) for x in (q, *keys)), sinks=s_aux, **options)
        position = lengths[:, None] + torch.arange(-N_new, 0, device=q.device)
        if rotary is not None:
            at = (lengths - N_new)[:, None].expand(-1, q.shape[1])
            if options["causal"] or max(options["window_size"]) >= 0:
                at = at + torch.arange(q.shape[1], device=q.device)
            q, k = (
                rotate(q, *rotary, at, rotary_interleaved),
                rotate(k, *rotary, position, rotary_interleaved),
            )
        if block_table is not None:
            row, position = block_table.long().gather(1, position // N), position % N
        else:
            row = torch.arange(B, device=q.device)[:, None]
        q, k, v = (x.clone() if _may_be_written(x, k_cache, v_cache) else x for x in (q, k, v))
        k_cache[row, position] = k.to(k_cache.dtype)
        v_cache[row, position] = v.to(v_cache.dtype)
    k, v = (k_cache, v_cache) if block_table is not None else (k_cache[:B], v_cache[:B])
    options |= dict(seqlens_k=lengths, leftpad_k=cache_leftpad, block_table=block_table) | slopes
    out, lse = attend(q, k, v, s_aux, return_softmax_lse, **options)
    return (out, lse) if return_softmax_lse else out


# ---------------------------------------------------------------------------------------------- arguments


def _check_pages(block_table, lengths, name, cache):
    """Checks the numbers of the pages, but not of those behind a sequence's last key."""
    if known(*(n == 0 for n in cache.shape[:2])):
        raise ValueError(f"{name} must have pages, of at least 1 key, but has shape {tuple(cache.shape)}")
    if lengths is not None and is_known(block_table):
        first_key = torch.arange(block_table.shape[1], device=block_table.device) * cache.shape[1]
        block_table = torch.where(first_key < lengths[:, None], block_table, 0)
    check_range("block_table", block_table, cache.shape[0])


def _options(softmax_scale, causal, window_size, softcap):
    try:
        window_size = tuple(max(as_int(bound), -1) for bound in window_size)
    except TypeError:
        raise TypeError(f"window_size must be two ints (left, right), but was {window_size!r}") from None
    options = dict(softmax_scale=softmax_scale, causal=causal, window_size=window_size)
    if softcap is None or (isinstance(softcap, (int, float)) and softcap <= 0):
        return options
    return options | {"softcap": softcap}


def _slopes(alibi_slopes, q, B):
    """forward's options of alibi_slopes: (Hq,), or (B, Hq) unless B is None."""
    if alibi_slopes is None:
        return {}
    Hq = q.shape[-2]
    is_one = not isinstance(alibi_slopes, Tensor) or alibi_slopes.dim() != 2
    if not is_one and B is None:
        must = "must be (Hq,) for packed sequences here"
        raise NotImplementedError(f"alibi_slopes {must}, but has shape {tuple(alibi_slopes.shape)}")
    _check("alibi_slopes", alibi_slopes, q, (Hq,) if is_one else (B, Hq), (torch.float32,))
    return {"alibi_slopes": alibi_slopes}


def _dropout(dropout_p, q, *rng_state):
    """forward's options of dropout. The seed is drawn, or that of the rng_state which follows."""
    p = 0.0 if dropout_p is None else dropout_p
    if not isinstance(p, (int, float)) or not 0 <= p <= 1:
        raise ValueError(f"dropout_p must be None or a number from 0 to 1, but was {in_words(p)}")
    if not p:
        return {}
    if rng_state:
        _check("rng_state", *rng_state, q, (2,), (torch.int64,))
    return {"dropout_p": p, "dropout_seed": rng_state[0][:1] if rng_state else draw_seed(q, p)}


def _results(wanted, out, lse, q, k, s_aux, longest, options):
    """What return_attn_probs asks for: `wanted`. S_dmask is empty without dropout, or if longest is None."""
    if not wanted:
        return out
    seed, empty = options.get("dropout_seed"), q.new_empty(0)
    if wanted == "rng_state":  # the private functions: flash_attn's is (seed, offset)
        seed = q.new_zeros(1, dtype=torch.int64) if seed is None else seed
        return out, lse, empty, torch.nn.functional.pad(seed, (0, 1))
    return out, lse, empty if seed is None or longest is None else S_dmask(q, k, s_aux, *longest, **options)


def _check(name, x, q, shape, dtypes=None):
    """x must be on q's device, of this shape, where a word is any number, and of one of the dtypes.

    Without dtypes x must have q's, but for autocast, which casts it. The result is x's shape.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, but was {in_words(x)}")
    if x.layout != torch.strided or x.is_nested:
        raise TypeError(f"{name} must be a dense tensor, but was {in_words(x)}")
    was = x.shape
    differ = [n != must for n, must in zip(was, shape, strict=False) if type(must) is not str]
    if len(was) != len(shape) or known(*differ):
        must = ", ".join(map(str, shape)) + "," * (len(shape) == 1)
        raise ValueError(f"{name} must have shape ({must}), but has shape {tuple(was)}")
    if dtypes is None:
        dtypes = (q.dtype,) if x.dtype == q.dtype or autocast_dtype(q) is None else _FLOATS
    if x.dtype not in dtypes:
        hint = ": x.dequantize() makes it dense" if x.is_quantized else ""
        raise ValueError(f"{name} must be {' or '.join(map(str, dtypes))}, but is {x.dtype}{hint}")
    if x.device != q.device:
        raise ValueError(f"{name} must be on q's device {q.device}, but is on {x.device}")
    return was


def _check_qkv(q, k, v, q_shape, k_shape, s_aux, suffix=""):
    """Words that are in both shapes are the same number."""
    sizes = _check("q", q, q, q_shape, _FLOATS)
    of_q = dict(zip(q_shape, sizes, strict=True))
    of_k = _check("k" + suffix, k, q, [of_q.get(word, word) for word in k_shape])
    d_v = _check("v" + suffix, v, q, [*of_k[:-1], "d_v"])[-1]
    most = 576
    for name, d, x in ("q", of_q["d"], q), ("v" + suffix, d_v, v):
        if known(d < 1, d > most):
            was = tuple(x.shape)
            raise ValueError(f"{name} must have a head dimension d from 1 to {most}, but has shape {was}")
    Hq, Hkv = of_q["Hq"], of_k[-2]
    if known(Hq != Hkv) and known((Hq % Hkv if Hkv else Hq) != 0):
        hint = "; with heads in front of tokens, as in SDPA, pass x.transpose(-3, -2)"
        is_swapped = of_k[-3] and (Hq % of_k[-3] == 0 or sizes[-3] % of_k[-3] == 0)
        text = f"q must have a multiple of k{suffix}'s heads, but q has {Hq} and k{suffix} has {Hkv}"
        raise ValueError(text + hint * bool(is_swapped))
    if s_aux is not None:
        _check("s_aux", s_aux, q, (Hq,), _FLOATS)


def _check_is_writable(name, cache):
    """A cache whose elements share memory with each other can't be written."""
    if torch.compiler.is_compiling():  # PyTorch refuses it
        return
    least = 1
    for stride, size in sorted(zip(cache.stride(), cache.shape, strict=True)):
        if size > 1 and stride < least:
            raise ValueError(f"{name} must not overlap itself, but has strides {cache.stride()}")
        least = stride * size if size > 1 else least


def _may_be_written(x, *caches):
    """Whether x may share memory with one of the caches."""
    return torch.compiler.is_compiling() or any(torch._C._is_alias_of(x, cache) for cache in caches)


def _checked_longest(name, max_seqlen, cu_seqlens, total, used=None):
    """max_seqlen as an int. The numbers that the host knows must fit: `used` of seqused_k in cu_seqlens, and
    cu_seqlens in `total` rows. Pages have no total.
    """
    try:
        max_seqlen = as_int(max_seqlen)
    except TypeError:
        raise TypeError(f"max_seqlen_{name} must be an int, but was {max_seqlen!r}") from None
    lengths = cu_seqlens.diff() if is_known(cu_seqlens) else None  # on a GPU it would be a kernel for nothing
    counted = lengths if used is None else used
    if counted is not None and known((longest := known_max(counted)) > max_seqlen):
        raise ValueError(f"max_seqlen_{name} must be at least {longest}, the longest, but was {max_seqlen}")
    if lengths is None or total is None:
        return max_seqlen
    if known_min(cu_seqlens[:1]) < 0 or known_min(lengths) < 0:
        must = "begin at 0 or later, and never decrease"
        raise ValueError(f"cu_seqlens_{name} must {must}, but is {cu_seqlens.tolist()}")
    if (end := known_max(cu_seqlens)) > total:
        raise ValueError(f"cu_seqlens_{name} must end at most at {total}, {name}'s length, but ends at {end}")
    if used is not None and (excess := known_max(used - lengths)) > 0:
        raise ValueError(f"seqused_k must fit in cu_seqlens_k, but a sequence has {excess} keys more")
    return max_seqlen


def _checked_rotary(cos, sin, q, k, room):
    """(cos, sin), or None."""
    if cos is None and sin is None:
        return None
    if k is None:
        raise ValueError("rotary_cos must be None without k and v, but was a tensor")
    n, r = _check("rotary_cos", cos, q, ("positions", "r"), _FLOATS)
    _check("rotary_sin", sin, q, (n, r), _FLOATS)
    if known(n < room, 2 * r > q.shape[-1]):
        text = f"rotary_cos must have shape (at least {room}, at most {q.shape[-1] // 2})"
        raise ValueError(f"{text}, but has shape {tuple(cos.shape)}")
    return cos, sin


def _lengths(cache_seqlens, N_new, N, q):
    """How many keys each sequence has, with the new ones: (B,) on q's device, or None: all."""
    if cache_seqlens is None:
        return None
    if not isinstance(cache_seqlens, Tensor):
        try:
            n = as_int(cache_seqlens)
        except TypeError:
            raise TypeError(f"cache_seqlens must be an int or a tensor, but was {cache_seqlens!r}") from None
        check_range("cache_seqlens", n, N - N_new + 1)
        return torch.full((q.shape[0],), n + N_new, dtype=torch.int32, device=q.device)
    _check("cache_seqlens", cache_seqlens, q, (q.shape[0],), _INTS)
    check_range("cache_seqlens", cache_seqlens, N - N_new + 1)
    return cache_seqlens + N_new
