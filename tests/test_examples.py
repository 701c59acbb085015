"""The parts of examples/ that need no model and no GPU."""

import sys
from pathlib import Path

import pytest
import torch
from conftest import ERROR_BOUND, cuda_backends
from reference import attention

import minimal_attn

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


@pytest.fixture
def train(monkeypatch):
    """A function: examples/train.py on the GPU or not, with a tiny model and 20 steps."""
    monkeypatch.syspath_prepend(EXAMPLES)
    sys.modules.pop("train", None)

    def main(on_gpu, *more):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
        import train

        train.main([*"--steps 20 --layers 1 --width 32 --head-dim 16 --batch 2 --context 40".split(), *more])

    return main


@pytest.mark.parametrize("on_gpu", [False, *[True] * bool(cuda_backends())])
def test_train(train, on_gpu, capsys):
    train(on_gpu)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["steps", "manual", "sdpa", "minimal_attn"]
    first, last = (float(lines[i].split()[1]) for i in (1, -4))
    assert last < first - 0.1


@pytest.mark.parametrize("on_gpu", [False, *[True] * bool(cuda_backends())])
def test_train_packed(train, on_gpu, capsys):
    """Documents in one row give the losses that they give with padding: train.main checks it."""
    train(on_gpu, "--packed")
    assert capsys.readouterr().out.splitlines()[0].split()[-1] == "packed"


def test_train_sees_a_wrong_gradient(train, monkeypatch):
    """Of v, by 10 %."""
    right = minimal_attn.forward
    wrong = lambda q, k, v, **options: right(q, k, 1.1 * v - 0.1 * v.detach(), **options)  # noqa: E731
    monkeypatch.setattr(minimal_attn, "forward", wrong)
    with pytest.raises(SystemExit, match="not equal within"):
        train(False)
