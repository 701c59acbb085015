"""minimal_attn.flash_attn against float64, over cases as flash-attention's tests/test_flash_attn.py has them.

PYTHONPATH=. build/python tests/test_flash_attn.py 1000 [seed [backend]]    so many cases, larger ones
"""

import inspect
import math
import sys
import traceback

import pytest
import torch
from conftest import DTYPES, ERROR_BOUND, Backend, check_o, forced
from reference import Attention, attention

from minimal_attn import _varlen, flash_attn
from minimal_attn.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

# flash-attention's own sizes: dropout, ALiBi, softcap, rotary embedding and the backward pass aside.
HEAD_DIMS = [32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256]
LENGTHS = [(113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256), (1024, 1024), (1023, 1024)]
LENGTHS += [(1, 147), (1, 239), (3, 799), (799, 3), (127, 512)]
LENGTHS += [(127, 513), (239, 1), (512, 127), (1024, 1023)]
LENGTHS_OF_CACHE = [(1, 128), (1, 339), (3, 1024), (64, 800), (64, 256), (3, 799), (64, 2048), (16, 20000)]
LENGTHS_OF_CACHE += [(128, 128)]
SELF_LENGTHS = [97, 128, 200, 257, 384, 512, 768, 1024, 1025, 2048]


def expected_of(q, k, v, s_aux=None, **options):
    """Attention of (B, N, H, d) tensors. A sink is one more score in a row, with a value of 0."""
    o, l, m, size = attention(*(t.transpose(1, 2) for t in (q, k, v)), **options)
    if s_aux is None:
        return Attention(o, l, m, size)
    sink = s_aux.double()[:, None]
    of_keys = l * torch.exp(m - torch.maximum(m, sink))
    m = torch.maximum(m, sink)
    l = of_keys + torch.exp(sink - m)
    share = (of_keys / l)[..., None]
    return Attention(o * share, l, m, size * share)


def check(out, lse, dtype, expected):
    """out (B, Nq, Hq, d), and lse (B, Hq, Nq) if it isn't None."""
    assert out.dtype == dtype
    check_o(out.transpose(1, 2), expected, dtype)
    if lse is not None:
        assert lse.dtype == torch.float32
        torch.testing.assert_close(lse.double(), expected.m + expected.l.log(), rtol=2e-6, atol=1e-5)


class Case:
    """One call, drawn at random: `kind` names the method that makes it and compares its results."""

    kinds = ["func", "kvpacked", "qkvpacked", "varlen", "varlen_kvpacked", "varlen_qkvpacked", "varlen_paged"]
    kinds += ["varlen_seqused"]
    kinds += ["kvcache", "kvcache", "kvcache_paged"]

    def __init__(self, backend, kind, work):
        """`work` bounds B * Hq * Nq * Nk * d."""
        self.backend, self.kind, self.random = backend, kind, backend.random
        choice = self.random.choice
        self.dtype, self.d = choice(DTYPES), choice(HEAD_DIMS)
        if "qkvpacked" in kind:
            lengths = [(n, n) for n in SELF_LENGTHS]
        else:
            lengths = LENGTHS_OF_CACHE if "kvcache" in kind else LENGTHS
        self.Nq, self.Nk = choice([(q, k) for q, k in lengths if q * k * self.d * 3 <= work])
        self.Hq = choice([h for h in (3, 4, 6, 9) if h * self.Nq * self.Nk * self.d <= work])
        of_keys = [h for h in (1, 2, 3, self.Hq) if self.Hq % h == 0]
        self.Hkv = self.Hq if "qkvpacked" in kind else choice(of_keys)
        self.B = min(choice([1, 2, 4, 8]), max(1, work // (self.Hq * self.Nq * self.Nk * self.d)))
        self.options = {}
        if choice([True, False]):
            self.options["causal"] = True
        if choice([True, False]):  # flash-attention's tests give a tensor, too
            self.options["window_size"] = choice([tuple, torch.tensor])(
                (self.random.randrange(self.Nk), self.random.randrange(self.Nk))
            )
        if choice([True, False, False]):
            self.options["softmax_scale"] = self.random.uniform(0.05, 0.3)
        self.s_aux = None
        if "packed" not in kind and choice([True, False]):
            self.s_aux = backend.randn(self.Hq, dtype=choice(DTYPES))
        self.with_lse = choice([True, False])

    def __str__(self):
        names = "dtype", "B", "Hq", "Hkv", "Nq", "Nk", "d", "options", "with_lse"
        parts = [f"{name} {getattr(self, name)}" for name in names]
        return f"{self.kind}: {', '.join(parts)}, s_aux {self.s_aux is not None}"

    def randn(self, *shape):
        return self.backend.randn(*shape, dtype=self.dtype)

    def ints(self, values):
        return torch.tensor(
            values, dtype=self.random.choice([torch.int32, torch.int64]), device=self.backend.device
        )

    def expected(self, q, k, v, **options):
        options |= self.options
        options["window_size"] = tuple(int(x) for x in options.get("window_size", (-1, -1)))
        return expected_of(q, k, v, self.s_aux, **options)

    def call(self, function, *args, **options):
        """out, and the log-sum-exp or None."""
        options |= self.options
        if self.s_aux is not None:
            options["s_aux"] = self.s_aux
        if function is flash_attn_with_kvcache:
            results = function(*args, **options, return_softmax_lse=self.with_lse)
        else:
            results = function(*args, **options, return_attn_probs=self.with_lse)
        if not self.with_lse:
            return results, None
        assert function is flash_attn_with_kvcache or results[2].numel() == 0
        return results[:2]

    def check(self):
        getattr(self, self.kind)()

    # ------------------------------------------------------------------------------------- one length

    def check_func(self, function, *args):
        q, k, v = args if len(args) == 3 else (*args[:-1], *args[-1].unbind(2))
        check(*self.call(function, *args), self.dtype, self.expected(q, k, v))

    def func(self):
        kv = [self.randn(self.B, self.Nk, self.Hkv, self.d) for _ in "kv"]
        self.check_func(flash_attn_func, self.randn(self.B, self.Nq, self.Hq, self.d), *kv)

    def kvpacked(self):
        kv = self.randn(self.B, self.Nk, 2, self.Hkv, self.d)
        self.check_func(flash_attn.flash_attn_kvpacked_func, self.randn(self.B, self.Nq, self.Hq, self.d), kv)

    def qkvpacked(self):
        qkv = self.randn(self.B, self.Nq, 3, self.Hq, self.d)
        self.check_func(flash_attn.flash_attn_qkvpacked_func, qkv)

    # ------------------------------------------------------------------------------------- packed sequences

    def lengths(self, most):
        """Padded as there, and sequences without a token."""
        low = self.random.choice([most, max(1, most - 20), most // 3, 0])
        lengths = [self.random.randint(low, most) for _ in range(self.B)]
        return [0 if self.random.random() < 0.1 else n for n in lengths]

    def pack(self, lengths):
        """The sequences' begins and ends, and their rows in a packed tensor, which goes on behind them."""
        cu_seqlens = [sum(lengths[:b]) for b in range(self.B + 1)]
        rows = [slice(*cu_seqlens[b : b + 2]) for b in range(self.B)]
        return self.ints(cu_seqlens), rows, cu_seqlens[-1] + self.random.choice([0, 0, 7])

    def bound(self, lengths):
        return max(lengths) + self.random.choice([0, 0, 0, 50])

    def check_varlen(self, results, q, rows_q, sequences, total):
        """`sequences` has k and v of each."""
        out, lse = results
        assert out.shape == q.shape and (lse is None or lse.shape == (self.Hq, total))
        for rows, (k, v) in zip(rows_q, sequences, strict=True):
            expected = self.expected(q[rows][None], k[None], v[None])
            check(out[rows][None], None if lse is None else lse[:, rows][None], self.dtype, expected)
        assert not out[rows_q[-1].stop :].any()

    def varlen(self, packs=0):
        lengths_q = self.lengths(self.Nq)
        lengths_k = lengths_q if packs == 3 else self.lengths(self.Nk)
        (cu_q, rows_q, total_q), (cu_k, rows_k, total_k) = map(self.pack, (lengths_q, lengths_k))
        max_q, max_k = self.bound(lengths_q), self.bound(lengths_k)
        if packs == 3:
            qkv = self.randn(total_q, 3, self.Hq, self.d)
            (q, k, v), rows_k = qkv.unbind(1), rows_q
            results = self.call(flash_attn.flash_attn_varlen_qkvpacked_func, qkv, cu_q, max_q)
        else:
            q, kv = self.randn(total_q, self.Hq, self.d), self.randn(total_k, 2, self.Hkv, self.d)
            kv[rows_k[-1].stop :] = math.nan  # of no sequence
            k, v = kv.unbind(1)
            if packs:
                function, keys = flash_attn.flash_attn_varlen_kvpacked_func, [kv]
            else:
                function, keys = flash_attn_varlen_func, [k, v]
            results = self.call(function, q, *keys, cu_q, cu_k, max_q, max_k)
        self.check_varlen(results, q, rows_q, [(k[rows], v[rows]) for rows in rows_k], total_q)

    def varlen_kvpacked(self):
        self.varlen(packs=2)

    def varlen_qkvpacked(self):
        self.varlen(packs=3)

    def varlen_seqused(self):
        lengths_q, lengths_k = self.lengths(self.Nq), self.lengths(self.Nk)
        rooms = [n + self.random.choice([0, 0, 1, 40]) for n in lengths_k]
        (cu_q, rows_q, total_q), (cu_k, rows_k, total_k) = self.pack(lengths_q), self.pack(rooms)
        rows_k = [slice(at.start, at.start + n) for at, n in zip(rows_k, lengths_k, strict=True)]
        q = self.randn(total_q, self.Hq, self.d)
        k, v = (self.randn(total_k, self.Hkv, self.d) for _ in "kv")
        bounds = cu_q, cu_k, self.bound(lengths_q), self.bound(lengths_k)
        results = self.call(flash_attn_varlen_func, q, k, v, *bounds, seqused_k=self.ints(lengths_k))
        self.check_varlen(results, q, rows_q, [(k[at], v[at]) for at in rows_k], total_q)

    def varlen_paged(self):
        lengths_q, lengths_k = self.lengths(self.Nq), self.lengths(self.Nk)
        cu_q, rows_q, total_q = self.pack(lengths_q)
        cu_k, used = self.random.choice(
            [(self.pack(lengths_k)[0], None), (None, lengths_k), (self.pack(lengths_q)[0], lengths_k)]
        )
        q = self.randn(total_q, self.Hq, self.d)
        k, v, table, sequences = self.pages(lengths_k)
        max_q, max_k = self.bound(lengths_q), self.bound(lengths_k)
        bounds = cu_q, cu_k, max_q, max_k
        used = {} if used is None else dict(seqused_k=self.ints(used))
        results = self.call(flash_attn_varlen_func, q, k, v, *bounds, block_table=table, **used)
        self.check_varlen(results, q, rows_q, [(k[at], v[at]) for at in sequences], total_q)

    # ------------------------------------------------------------------------------------- caches

    def pages(self, lengths, spare=0):
        """A paged cache, NaN where no key is, its table, and the index of each sequence's keys."""
        size = self.random.choice([256, 256, 16, 7, 1])
        n = max(1, -(-(max(lengths) + spare) // size))
        table = self.random.sample(range(3 * n * self.B), n * self.B)
        table = [table[b * n : b * n + n] for b in range(self.B)]
        k, v = (self.randn(3 * n * self.B, size, self.Hkv, self.d).fill_(math.nan) for _ in "kv")
        sequences = [self.places(row, size, length) for row, length in zip(table, lengths, strict=True)]
        for at in sequences:
            for x in k, v:
                x[at] = self.randn(len(at[0]), self.Hkv, self.d)
        for row, length in zip(table, lengths, strict=True):  # no key and no new key is there
            for j in range(-(-(length + spare) // size), n):
                row[j] = self.random.choice([-1, 10**6])
        return k, v, self.ints(table), sequences

    def places(self, table, size, length, first=0):
        """Of keys first <= j < length: their pages and their rows there."""
        j = torch.arange(first, length)
        return torch.tensor(table)[j // size].to(self.backend.device), (j % size).to(self.backend.device)

    def kvcache(self):
        N, N_new = self.Nk, self.random.choice([0, self.Nq, self.random.randint(1, self.Nq)])
        C = self.B * self.random.choice([1, 2])
        rows, options = list(range(self.B)), {}
        if self.random.random() < 0.5:
            rows = self.random.sample(range(C), self.B)
            options["cache_batch_idx"] = self.ints(rows)
        lengths = [self.random.randint(0 if N_new else 1, N - N_new) for _ in rows]
        way = self.random.choice(["tensor", "tensor", "int", "none" if N_new == 0 else "tensor"])
        if way == "tensor":
            options["cache_seqlens"] = self.ints(lengths)
        elif way == "int":
            lengths = [lengths[0]] * self.B
            options["cache_seqlens"] = lengths[0]
        else:
            lengths = [N] * self.B
        pads = [0] * self.B
        if self.random.random() < 0.5:
            pads = [self.random.randrange(max(1, n)) for n in lengths]
            options["cache_leftpad"] = self.ints(pads)
        caches = [self.randn(C, N, self.Hkv, self.d) for _ in "kv"]
        for cache in caches:
            for row, n, pad in zip(rows, lengths, pads, strict=True):
                cache[row, n:], cache[row, :pad] = math.nan, math.nan
        after, new = [cache.clone() for cache in caches], self.new_keys(N_new)
        for cache, x in zip(after, new, strict=True):
            for b, row in enumerate(rows):
                cache[row, lengths[b] : lengths[b] + N_new] = x[b]
        q = self.randn(self.B, self.Nq, self.Hq, self.d)
        results = self.call(flash_attn_with_kvcache, q, *caches, *(new if N_new else []), **options)
        for cache, x in zip(caches, after, strict=True):
            assert torch.equal(cache.nan_to_num(99), x.nan_to_num(99))
        counts = dict(seqlens_k=[n + N_new for n in lengths], leftpad_k=pads)
        check(*results, self.dtype, self.expected(q, *(x[rows] for x in after), **counts))

    def kvcache_paged(self):
        N_new = self.random.choice([0, self.Nq, self.random.randint(1, self.Nq)])
        lengths = [self.random.randint(0, self.Nk - N_new) for _ in range(self.B)]
        k, v, table, sequences = self.pages(lengths, spare=N_new)
        after, new = (k.clone(), v.clone()), self.new_keys(N_new)
        every = [
            self.places(row, k.shape[1], n + N_new) for row, n in zip(table.tolist(), lengths, strict=True)
        ]
        for b, (pages, rows) in enumerate(every):
            for cache, x in zip(after, new, strict=True):
                cache[pages[lengths[b] :], rows[lengths[b] :]] = x[b]
        q = self.randn(self.B, self.Nq, self.Hq, self.d)
        results = self.call(
            flash_attn_with_kvcache,
            q,
            k,
            v,
            *(new if N_new else []),
            cache_seqlens=self.ints(lengths),
            block_table=table,
        )
        for cache, x in zip((k, v), after, strict=True):
            assert torch.equal(cache.nan_to_num(99), x.nan_to_num(99))
        for b, at in enumerate(every):
            expected = self.expected(q[b : b + 1], *(x[at][None] for x in after))
            check(*(None if x is None else x[b : b + 1] for x in results), self.dtype, expected)

    def new_keys(self, N_new):
        return [self.randn(self.B, N_new, self.Hkv, self.d) for _ in "kv"]


@pytest.mark.parametrize("repeat", range(6))
@pytest.mark.parametrize("kind", Case.kinds, ids=[f"{kind}-{n}" for n, kind in enumerate(Case.kinds)])
def test_drawn_cases(forced_backend, kind, repeat):
    case = Case(forced_backend, kind, work=1 << 25)
    print(case)
    case.check()


# ---------------------------------------------------------------------------------------- what isn't drawn

SIGNATURES = {  # flash_attn 2.8.3
    "flash_attn_func": "q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), "
    "softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False",
    "flash_attn_varlen_func": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, "
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False, block_table=None",
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, "
    "causal=False, window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, "
    "num_splits=0, return_softmax_lse=False",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    parameters = inspect.signature(getattr(flash_attn, name)).parameters.values()
    ours = ", ".join(str(p.replace(annotation=p.empty)) for p in parameters)
    of_varlen = ", seqused_k=None" * (name == "flash_attn_varlen_func")  # as in FlashAttention-3
    assert ours == SIGNATURES[name] + ", s_aux=None" + of_varlen


def packed(backend, lengths, H=2, d=32, dtype=torch.float32):
    """q, k, v and cu_seqlens of packed sequences."""
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(backend.device, torch.int32)
    return *(backend.randn(sum(lengths), H, d, dtype=dtype) for _ in "qkv"), cu_seqlens


def test_a_sequence_of_nan_stays_alone(forced_backend, dtype):
    lengths = [60, 33, 150]
    q, k, v, cu_seqlens = packed(forced_backend, lengths, dtype=dtype)
    for x in q, k, v:
        x[60:93] = math.nan
    out = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 150, 150, causal=True)
    assert out[60:93].isnan().all()
    for rows in slice(0, 60), slice(93, 243):
        check(out[rows][None], None, dtype, expected_of(*(x[rows][None] for x in (q, k, v)), causal=True))


def test_rows_of_no_sequence_are_zero(forced_backend):
    """Before the first sequence and behind the last one."""
    q, k, v, _ = packed(forced_backend, [40])
    cu_seqlens = forced_backend.ints(3, 20, 35)
    out, lse, _ = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 17, 17, return_attn_probs=True)
    assert not out[:3].any() and not out[35:].any()
    assert (lse[:, :3] == -math.inf).all() and (lse[:, 35:] == -math.inf).all()
    for rows in slice(3, 20), slice(20, 35):
        check(out[rows][None], lse[:, rows][None], q.dtype, expected_of(*(x[rows][None] for x in (q, k, v))))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("with_gradients", [False, True])
def test_lengths_beyond_their_room_reach_no_other_sequence(backend, with_gradients):
    """Where the host doesn't know them: on a GPU, and while Dynamo traces."""
    q, pages = (
        backend.randn(2, 1, 8).requires_grad_(with_gradients),
        torch.zeros(4, 4, 1, 8, device=backend.device),
    )
    values = pages.clone()
    values[2:] = 1000
    options = dict(block_table=backend.ints(0, 1, 2, 3).view(2, 2))

    def attend(used, longest):
        bounds = backend.ints(0, 1, 2), None, 1, longest
        return flash_attn_varlen_func(q, pages, values, *bounds, seqused_k=used, **options)

    compiled = torch.compile(attend, backend="aot_eager")
    for used, longest in ((9, 8), 8), ((8, 8), 4), ((2**31 - 1, 2**31 - 1), 8):
        o = compiled(backend.ints(*used), longest)
        assert not o[0].any() and (o[1] - 1000).abs().max() < 1e-2
    flat, used = values.flatten(0, 1), backend.ints(2**31 - 1, 2**31 - 1)

    def packed(used):
        return flash_attn_varlen_func(q, flat, flat, backend.ints(0, 1, 2), bounds, 1, 8, seqused_k=used)

    bounds = backend.ints(0, 8, 16)
    o = torch.compile(packed, backend="aot_eager")(used)
    assert not o[0].any() and (o[1] - 1000).abs().max() < 1e-2


def test_nothing_packed(forced_backend):
    q, k, v, cu_seqlens = packed(forced_backend, [0, 0])
    some, _, _, cu_seqlens_of_some = packed(forced_backend, [3, 2])
    for max_seqlen in 0, 5:
        out = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
        assert out.shape == q.shape
        out = flash_attn_varlen_func(some, k, v, cu_seqlens_of_some, cu_seqlens, 3, max_seqlen)
        assert out.shape == some.shape and not out.any()
        out = flash_attn_varlen_func(q, some, some, cu_seqlens, cu_seqlens_of_some, max_seqlen, 3)
        assert out.shape == q.shape
    assert flash_attn_varlen_func(some, k, v, cu_seqlens, cu_seqlens, 0, 0).eq(0).all()


def test_one_long_sequence_among_short_ones_takes_little_memory(backend, monkeypatch):
    """Nothing is copied or padded."""
    seen = []

    def spy(*tensors, **options):
        seen.append(tensors)
        return forward(*tensors, **options)

    forward = _varlen.forward
    monkeypatch.setattr(_varlen, "forward", spy)
    q, k, v, cu_seqlens = packed(backend, [1] * 30 + [1000] + [5] * 30)
    few = torch.arange(62, device=q.device, dtype=torch.int32)
    for queries, cu_seqlens_q, longest in (q, cu_seqlens, 1000), (q[:61], few, 1):
        flash_attn_varlen_func(queries, k, v, cu_seqlens_q, cu_seqlens, longest, 1000, causal=True)
        assert all(x.data_ptr() == y.data_ptr() for x, y in zip(seen.pop(), (q, k, v), strict=True))


@pytest.mark.parametrize("room", [64, 2**27])
def test_tables_for_more_keys_than_a_call_may_have(forced_backend, monkeypatch, room):
    """max_seqlen_k bounds each sequence, as where one graph serves any length: several calls of forward."""
    backend, B = forced_backend, 5
    if room == 64:
        monkeypatch.setattr(_varlen, "_MAX_KEYS", 150)
    elif backend.name != "cpu":
        pytest.skip("some backends copy the pages of the whole table")
    pages, q = backend.randn(20, 32, 2, 8), backend.randn(16, 4, 8)
    table = backend.integers(0, 19, B, 1, dtype=torch.int32)
    cu_q, cu_k = backend.ints(1, 4, 4, 9, 10, 13), backend.ints(0, 20, 23, 28, 60, 60)
    options = dict(causal=True, return_attn_probs=True, s_aux=backend.randn(4))
    results = []
    for longest, n in (32, 1), (room, room // 32):
        keys = pages, pages, cu_q, cu_k, 5, longest
        results.append(flash_attn_varlen_func(q, *keys, block_table=table.expand(B, n), **options))
    torch.testing.assert_close(*results, rtol=2e-6, atol=2e-6)


def test_negative_windows_are_unbounded(forced_backend):
    q, k, v = (x.transpose(1, 2) for x in forced_backend.qkv())
    for window_size in (-7, 3), (3, -2), [-1, -9]:
        out = flash_attn_func(q, k, v, window_size=window_size)
        check(out, None, q.dtype, expected_of(q, k, v, window_size=[max(x, -1) for x in window_size]))


def test_accepted_and_not_used(forced_backend):
    q, k, v = (x.transpose(1, 2) for x in forced_backend.qkv())
    expected = flash_attn_func(q, k, v)
    assert torch.equal(flash_attn_func(q, k, v, 0.0, None, False, (-1, -1), -1.0, None, True), expected)
    assert torch.equal(flash_attn_func(q, k, v, softcap=None), expected)
    assert torch.equal(flash_attn_with_kvcache(q, k, v, rotary_interleaved=False, num_splits=7), expected)


def test_layout_of_results(forced_backend):
    q, k, v = (x.transpose(1, 2).contiguous() for x in forced_backend.qkv())
    for out in (
        flash_attn_func(q, k, v),
        flash_attn_with_kvcache(q, k, v),
        flash_attn_func(q, k, v, s_aux=q[0, 0, :, 0]),
    ):
        assert out.is_contiguous()
    q, k, v, cu_seqlens = packed(forced_backend, [30, 20])
    out, lse, _ = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 30, 30, return_attn_probs=True)
    assert out.is_contiguous() and lse.is_contiguous()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("cache", [0, 1])
def test_new_keys_that_are_views_of_the_cache(backend, name, cache, compiled):
    """As if they had been copied first."""
    q, *keys = (x.transpose(1, 2) for x in backend.qkv(Hq=2, Nq=90))
    lengths = backend.ints(3, 2)

    def call(q, k, v, view):
        caches = k.clone(), v.clone()
        tensors = dict(q=q, k=q[:, 10:15], v=q[:, 20:25])
        tensors[name] = view(caches[cache][:, 1:6])
        queries, *new = tensors.values()
        return flash_attn_with_kvcache(queries, *caches, *new, cache_seqlens=lengths), *caches

    expected = call(q, *keys, torch.clone)
    if compiled:
        torch._dynamo.reset()
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, call(q, *keys, lambda x: x), expected))


def turned(x, angle, position, interleaved):
    """x (N, H, d) in float64 as complex numbers, times exp(1j * angle) at position (N,)."""
    r = angle.shape[1]
    pairs = x[..., : 2 * r].double()
    pairs = pairs.unflatten(-1, (r, 2)) if interleaved else pairs.unflatten(-1, (2, r)).mT
    both = torch.view_as_complex(pairs.contiguous()) * torch.exp(1j * angle[position].double())[:, None]
    both = torch.view_as_real(both)
    return torch.cat(((both if interleaved else both.mT).flatten(-2), x[..., 2 * r :].double()), -1)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("options", [{}, dict(causal=True), dict(window_size=(20, -1))], ids=str)
@pytest.mark.parametrize("paged", [False, True])
def test_rotary_embedding(forced_backend, dtype, interleaved, options, paged):
    """Of new keys at their positions in the cache, and of queries; cached keys are as they were."""
    backend, lengths, r = forced_backend, [13, 40], forced_backend.random.choice([1, 8, 20])
    q, k, v = (backend.randn(2, 9, H, 40, dtype=dtype) for H in (4, 2, 2))
    caches = [backend.randn(2, 64, 2, 40, dtype=dtype) for _ in "kv"]
    angle = backend.randn(70, r) * 3
    before = [x.clone() for x in caches]
    tables = dict(block_table=torch.arange(8, device=q.device).view(2, 4)) if paged else {}
    given = [x.unflatten(1, (4, 16)).flatten(0, 1) if paged else x for x in caches]
    given, pads = [x.clone() for x in given], {} if paged else dict(cache_leftpad=backend.ints(5, 0))
    tables |= dict(rotary_cos=angle.cos(), rotary_sin=angle.sin(), rotary_interleaved=interleaved) | pads
    o = flash_attn_with_kvcache(q, *given, k, v, cache_seqlens=backend.ints(*lengths), **tables, **options)
    found = [x.unflatten(0, (2, 4)).flatten(1, 2) if paged else x for x in given]
    for b, n in enumerate(lengths):
        at = torch.arange(n, n + 9, device=q.device)
        keys, values = (x[b, : n + 9].double() for x in before)
        keys[n:], values[n:] = turned(k[b], angle, at, interleaved), v[b].double()
        torch.testing.assert_close(found[0][b, : n + 9].double(), keys, rtol=0, atol=8 * ERROR_BOUND[dtype])
        assert torch.equal(found[0][b, :n], before[0][b, :n]) and torch.equal(found[1][b, n : n + 9], v[b])
        assert torch.equal(found[0][b, n + 9 :], before[0][b, n + 9 :])
        queries = turned(q[b], angle, at if options else at[:1].expand(9), interleaved)
        first = 0 if paged else (5, 0)[b]
        expected = expected_of(queries[None], keys[None, first:], values[None, first:], **options)
        error = (o[b : b + 1].transpose(1, 2).double() - expected.o).norm() / expected.o.norm()
        assert error < 4 * ERROR_BOUND[dtype]


def one_call_of_each(backend):
    """A call of each function, without arguments: its results, and the caches that it has written."""
    q, k, v = (x.transpose(1, 2) for x in backend.qkv(Nk=90))
    packs = packed(backend, [30, 0, 77])
    pages = [backend.randn(8, 16, 2, 64) for _ in "kv"]
    table = backend.ints(5, 1, 2, 0, 3, 7).view(2, 3)
    lengths, rows, pads = backend.ints(11, 3), backend.ints(1, 0), backend.ints(2, 0)

    def cached(**options):
        caches = [x.clone() for x in (pages if "block_table" in options else (k, v))]
        new = dict(k=k[:, :5], v=v[:, :5], cache_seqlens=lengths, return_softmax_lse=True)
        return *flash_attn_with_kvcache(q, *caches, **new, **options), *caches

    inputs = [x.clone().requires_grad_() for x in (q[0, :30], *pages)]
    queries, keys, used = backend.ints(0, 20, 30), backend.ints(40, 33), backend.ints(20, 0, 60)

    def pages_with_gradients():
        options = dict(seqused_k=keys, block_table=table, causal=True)
        return flash_attn_varlen_func(*inputs, queries, None, 20, 48, return_attn_probs=True, **options)

    return {
        "func": lambda: flash_attn_func(q, k, v, causal=True, return_attn_probs=True),
        "varlen": lambda: flash_attn_varlen_func(*packs, packs[-1], 77, 77, return_attn_probs=True),
        "seqused": lambda: flash_attn_varlen_func(
            *packs, packs[-1], 77, 77, seqused_k=used, return_attn_probs=True
        ),
        "paged, with gradients": pages_with_gradients,
        "kvcache": lambda: cached(cache_batch_idx=rows, cache_leftpad=pads),
        "paged": lambda: cached(block_table=table),
    }


CALLS = ["func", "varlen", "seqused", "paged, with gradients", "kvcache", "paged"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", CALLS)
def test_compile_without_a_break(backend, name):
    """Reading a length on the host would break the graph."""
    call = one_call_of_each(backend)[name]
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")()
    for actual, expected in zip(compiled, call(), strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("name", CALLS)
def test_nothing_synchronises(cuda_backend, name):
    call = one_call_of_each(cuda_backend)[name]
    expected = call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(map(torch.equal, results, expected))


@pytest.mark.parametrize("name", CALLS)
def test_autocast(backend, name):
    """q, k and v of any two dtypes are cast to autocast's. Caches are written in their own dtype."""

    def calls(float32, other):
        (q, k), v = (x.transpose(1, 2).to(float32) for x in qkv[:2]), qkv[2].transpose(1, 2).to(other)
        new, lengths = (q[:, :5, :2], v[:, :5]), backend.ints(11, 3)
        if name == "func":
            return flash_attn_func(q, k, v, causal=True), flash_attn_func(v.repeat(1, 1, 2, 1), k, v)
        flat = [x.flatten(0, 1) for x in (q, k, v)]
        bounds = backend.ints(0, 70, 140), backend.ints(0, 90, 180), 70, 90
        if name == "varlen":
            packs = flash_attn.flash_attn_varlen_kvpacked_func(
                flat[0], torch.stack([flat[2]] * 2, 1), *bounds
            )
            return flash_attn_varlen_func(*flat, *bounds, causal=True), packs
        caches, options = [k.clone(), v.clone()], {}
        if name == "paged":
            caches = [x.unflatten(1, (9, 10)).flatten(0, 1) for x in caches]
            options["block_table"] = torch.arange(18, device=q.device).flip(0).view(2, 9)
            out = [flash_attn_varlen_func(flat[0], *caches, *bounds, **options)]
        else:
            out = [flash_attn_with_kvcache(q, *caches, cache_seqlens=7)]
        out += [flash_attn_with_kvcache(q, *caches, *new, cache_seqlens=lengths, **options)]
        assert caches[0].dtype == float32 and caches[1].dtype == other
        return *out, *caches

    qkv = backend.qkv(dtype=torch.bfloat16)  # so that no cast rounds
    with torch.autocast(backend.device.type, dtype=torch.bfloat16):
        results = calls(torch.float32, torch.bfloat16)
    for x, expected in zip(results, calls(torch.bfloat16, torch.bfloat16), strict=True):
        assert torch.equal(x, expected.to(x.dtype))
        assert x.dtype == torch.bfloat16 or x is results[-2]  # k_cache
    with pytest.raises(ValueError, match=" must be torch.float32, but is torch.bfloat16"):
        calls(torch.float32, torch.bfloat16)


def main(count, seed=0, name="cpu"):
    failed = 0
    for n in range(int(count)):
        backend = Backend(name, int(seed) + n)
        case = Case(backend, backend.random.choice(Case.kinds), work=1 << 30)
        try:
            with forced(backend):
                case.check()
        except Exception:
            failed += 1
            print(f"seed {int(seed) + n}: {case}\n{traceback.format_exc(limit=-2)}")
    print(f"{count} cases from seed {seed} on, backend {name}: failed {failed}")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
