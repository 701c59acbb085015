"""Paged caches: block_table says which pages hold a batch's keys."""

import re

import pytest
import torch
from conftest import Backend

import minimal_attn

PAGE_SIZES = [16, 32, 64, 128, 256]
CASES = {  # of the drawing, and options of the call
    "decode": dict(Nq=1),
    "decode with GQA": dict(Nq=1, Hq=8),
    "decode of padded rows": dict(Nq=1, d=40),
    "few queries": dict(Nq=3, causal=True),
    "chunked prefill": dict(Nq=70, causal=True),
    "prefill of an odd d": dict(Nq=33, d=37, causal=True, window_size=(50, 0)),
    "full": dict(Nq=130, Hq=2),
}


class Paged:
    """A cache with NaN in all pages and rows without a key, garbage in the entries behind them."""

    def __init__(self, backend, page_size=16, lengths=(150, 0, 97), n=None, Hkv=2, d=64, dtype=torch.float32):
        most = n or -(-max(lengths) // page_size) + 1
        pages = backend.random.sample(range(most * len(lengths) + 2), most * len(lengths) + 2)
        garbage = [-1, -(2**31), 2**31 - 1, len(pages), 10**6]
        table = [[backend.random.choice(garbage) for _ in range(most)] for _ in lengths]
        layout = (len(pages), page_size, Hkv, d) if backend.random.random() < 0.7 else None
        self.k, self.v = (
            backend.randn(*layout, dtype=dtype).transpose(1, 2)
            if layout
            else backend.randn(len(pages), Hkv, page_size, d, dtype=dtype)
            for _ in "kv"
        )
        hidden = torch.ones(len(pages), page_size, dtype=torch.bool)
        first = pages[0]  # a prompt that all batches have in common
        for b, length in enumerate(lengths):
            for p in range(-(-length // page_size)):
                table[b][p] = first if p == 0 and min(filter(None, lengths)) >= page_size else pages.pop()
                hidden[table[b][p], : min(page_size, length - p * page_size)] = False
        for x in self.k, self.v:
            x.masked_fill_(hidden.to(backend.device)[:, None, :, None], torch.nan)
        self.table, self.lengths = backend.ints(*table), backend.ints(*lengths)

    def dense(self):
        """k and v as they are without pages, NaN where no key is."""
        table = self.table.long().clamp(0, len(self.k) - 1)
        return (x[table].transpose(1, 2).flatten(2, 3) for x in (self.k, self.v))

    def options(self):
        return dict(block_table=self.table, seqlens_k=self.lengths)


def reads_pages(backend, q, k, v, **options):
    return not {"k", "v"} & set(backend.explain(q, k, v, **options).copied)


@pytest.mark.parametrize("page_size", [*PAGE_SIZES, 1, 24])
@pytest.mark.parametrize("case", CASES)
def test_values(backend, dtype, case, page_size):
    options = dict(CASES[case])
    Nq, Hq, d = options.pop("Nq"), options.pop("Hq", 2), options.pop("d", 64)
    cache = Paged(backend, page_size, d=d, dtype=dtype)
    q = backend.randn(3, Hq, Nq, d, dtype=dtype)
    k, v = cache.dense()
    dense = backend.check(q, k, v, seqlens_k=cache.lengths, **options)
    paged = backend.forward(q, cache.k, cache.v, **cache.options(), **options)
    if backend.name in ("cpu", "paper"):
        assert reads_pages(backend, q, cache.k, cache.v, **cache.options(), **options)
    how = [backend.explain(q, k, v, seqlens_k=cache.lengths, **options)]
    how += [backend.explain(q, cache.k, cache.v, **cache.options(), **options)]
    assert how[0].kernel == how[1].kernel
    assert torch.equal(paged, dense)
