"""The parts of examples/ that need no model and no GPU."""

import sys
from pathlib import Path

import torch
from conftest import ERROR_BOUND
from reference import attention

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def test_stream(backend, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    sys.modules.pop("stream", None)
    import stream

    q = backend.randn(1, stream.Hq, 20, stream.d)
    sizes = (50, 50, 17)
    chunks = [tuple(backend.randn(2, 1, stream.Hkv, n, stream.d).cpu()) for n in sizes]
    if backend.name != "cpu":
        chunks = [(k.pin_memory(), v.pin_memory()) for k, v in chunks]
    o = stream.attend(q, chunks).cpu()
    k, v = (torch.cat(parts, dim=2) for parts in zip(*chunks, strict=True))
    expected = attention(q.cpu(), k, v).o
    assert (o - expected).norm() <= ERROR_BOUND[torch.float32] * expected.norm()
    row = stream.exact(q, chunks, 7)
    torch.testing.assert_close(row, expected[:, :, 7])
