"""Training through activate(): the losses of PyTorch's own attention, to 5 decimals in float32."""

import copy

import pytest
import torch
from test_ring import raise_first, run
from torch import nn
from torch.nn import functional as F

import minimal_attn

STEPS = 12


def key_heads(device):
    """Of 4 heads. PyTorch has a fused operator for grouped keys on a CPU since 2.9, on CUDA not in float32:
    without one there is none that activate() replaces."""
    return 2 if device == "cpu" and torch.__version__ >= (2, 9) else 4


class Layer(nn.Module):
    """Attention and MLP; fewer key heads than query heads are grouped as in Llama."""

    def __init__(self, width, heads, key_heads, is_causal):
        super().__init__()
        self.d, self.is_causal = width // heads, is_causal
        self.split = width, key_heads * self.d, key_heads * self.d
        self.qkv = nn.Linear(width, sum(self.split), bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 128), nn.SiLU(), nn.Linear(128, width))

    def forward(self, x):
        parts = self.qkv(F.layer_norm(x, x.shape[-1:])).split(self.split, -1)
        q, k, v = (t.unflatten(-1, (-1, self.d)).transpose(1, 2) for t in parts)
        gqa = k.shape[1] != q.shape[1]
        a = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal, enable_gqa=gqa)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Llama(nn.Module):
    """A language model of a few thousand weights. Its loss is the next token's cross entropy."""

    def __init__(self, key_heads):
        super().__init__()
        self.embed = nn.Embedding(50, 64)
        self.layers = nn.Sequential(*(Layer(64, 4, key_heads, is_causal=True) for _ in range(2)))
        self.head = nn.Linear(64, 50)

    def forward(self, tokens, labels):
        logits = self.head(self.layers(self.embed(tokens)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class ViT(nn.Module):
    """An image classifier: patches of 8 x 8, a class token, no mask."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 48, 8, stride=8)
        self.token = nn.Parameter(torch.randn(1, 1, 48))
        self.positions = nn.Parameter(torch.randn(1, 17, 48))
        self.layers = nn.Sequential(*(Layer(48, 3, 3, is_causal=False) for _ in range(2)))
        self.head = nn.Linear(48, 10)

    def forward(self, pixel_values, labels):
        x = self.patches(pixel_values).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return F.cross_entropy(self.head(self.layers(x)[:, 0]), labels)


def tokens():
    batches = torch.randint(50, (STEPS, 4, 41))
    return [{"tokens": batch, "labels": batch} for batch in batches]


def images():
    pixels, labels = torch.randn(STEPS, 4, 3, 32, 32), torch.randint(10, (STEPS, 4))
    return [{"pixel_values": x, "labels": y} for x, y in zip(pixels, labels, strict=True)]


def losses(model, batches):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for batch in batches:
        result = model(**batch)
        loss = result if isinstance(result, torch.Tensor) else result.loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def check(model, batches, device):
    """Both runs begin with the same weights. Each step calls attention once a layer, of which there are 2."""
    model = model.train().to(device)
    batches = [{name: t.to(device) for name, t in batch.items()} for batch in batches]
    expected = losses(copy.deepcopy(model), batches)
    with minimal_attn.activate() as activation:
        actual = losses(model, batches)
    assert activation.calls == {"minimal_attn": 2 * STEPS}
    assert len(set(expected)) >= STEPS - 1  # two losses may be equal by chance
    assert max(abs(x - y) for x, y in zip(actual, expected, strict=True)) < 5e-6, (actual, expected)


def test_llama(device, seed):
    torch.manual_seed(seed)
    check(Llama(key_heads(device)), tokens(), device)


def test_vit(device, seed):
    torch.manual_seed(seed)
    check(ViT(), images(), device)


def train_in_parallel(rank, ranks, device, seed):
    """DDP's gradients of half the batch each, and those of one process with the whole."""
    torch.manual_seed(seed)
    model = Llama(key_heads(device.type)).to(device)
    batch = {name: t.to(device) for name, t in tokens()[0].items()}
    model(**batch).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    parallel = nn.parallel.DistributedDataParallel(model)
    with minimal_attn.activate() as activation:
        parallel(**{name: t[rank::ranks] for name, t in batch.items()}).backward()
    assert activation.calls == {"minimal_attn": 2}
    for p, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, grad)


def test_data_parallel(seed):
    raise_first(run(train_in_parallel, 2, seed))


def test_llama_of_transformers(device, seed):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=key_heads(device),
        max_position_embeddings=64,
        attn_implementation="sdpa",
    )
    batches = [{"input_ids": batch["tokens"], "labels": batch["labels"]} for batch in tokens()]
    check(transformers.LlamaForCausalLM(config), batches, device)


def test_vit_of_transformers(device, seed):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    config = transformers.ViTConfig(
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=3,
        image_size=32,
        patch_size=8,
        num_labels=10,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="sdpa",
    )
    check(transformers.ViTForImageClassification(config), images(), device)
