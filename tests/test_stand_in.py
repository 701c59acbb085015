"""minimal_attn.flash_attn.install(): `import flash_attn` finds minimal_attn."""

import copy
import importlib
import importlib.metadata
import importlib.util
import inspect
import sys

import pytest
import torch
from conftest import ERROR_BOUND
from reference import attention, gradients
from test_backward import ERROR_BOUND as OF_GRADIENTS

import minimal_attn
from minimal_attn._dropout import draw_seed
from minimal_attn.flash_attn import install, uninstall

HALF_TYPES = [torch.float16, torch.bfloat16]


@pytest.fixture
def installed():
    install()
    yield importlib.import_module("flash_attn")
    uninstall()


@pytest.fixture
def interface(installed, forced_backend):
    return importlib.import_module("flash_attn.flash_attn_interface")


def find():
    return importlib.util.find_spec("flash_attn")


def test_names(installed):
    from flash_attn import flash_attn_func
    from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input  # noqa: F401
    from flash_attn.flash_attn_interface import _get_block_size_n, _wrapped_flash_attn_forward  # noqa: F401

    install()  # again
    importlib.invalidate_caches()
    assert flash_attn_func is minimal_attn.flash_attn.flash_attn_func
    assert importlib.util.find_spec("flash_attn.bert_padding").name == "flash_attn.bert_padding"
    assert installed.__version__ == importlib.metadata.version("flash_attn") == "2.8.3"
    assert importlib.metadata.version("flash-attn") == "2.8.3"
    assert importlib.metadata.packages_distributions()["flash_attn"] == ["flash-attn"]
    assert importlib.metadata.metadata("flash_attn")["Name"] == "flash-attn"
    assert importlib.metadata.version("Flash.Attn") == "2.8.3"
    assert not list(importlib.metadata.distributions(path=["/nowhere"]))
    assert importlib.metadata.version("pytest") == pytest.__version__


def test_nothing_is_left():
    if find() is not None:
        pytest.skip("flash_attn is installed")
    install()
    del sys.modules["flash_attn.bert_padding"]
    uninstall()
    uninstall()
    assert find() is None and "flash_attn.bert_padding" not in sys.modules
    assert "flash_attn" not in importlib.metadata.packages_distributions()
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash_attn")


def test_an_installed_package_keeps_its_name(tmp_path, monkeypatch):
    package = tmp_path / "flash_attn"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = 'another'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ImportError, match="^replace must be True where .*__init__.py, but was False$"):
        install()
    before = importlib.import_module("flash_attn")
    assert before.__version__ == "another"
    install(replace=True)
    assert importlib.import_module("flash_attn").__version__ == "2.8.3"
    uninstall()
    assert importlib.import_module("flash_attn") is before
    del sys.modules["flash_attn"]


def test_beside_flash_attention_4(tmp_path, monkeypatch):
    """Which has the folder flash_attn/cute and no flash_attn/__init__.py."""
    package = tmp_path / "flash_attn" / "cute"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("name = 'cute'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    install()
    try:
        assert importlib.import_module("flash_attn.cute").name == "cute"
        assert importlib.import_module("flash_attn").__version__ == "2.8.3"
    finally:
        uninstall()
        sys.modules.pop("flash_attn.cute", None)


# ------------------------------------------------------------------------------------- private functions


def close(x, exact, bound):
    assert (x.double() - exact).norm() <= bound * exact.norm()


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_blocks_of_a_ring(interface, forced_backend, dtype, deterministic, softcap):
    """Two blocks of keys: out and softmax_lse of both lead to the gradients of each, in slices of buffers."""
    backend = forced_backend
    q, do = (backend.randn(2, 70, 4, 64, dtype=dtype) for _ in "qo")
    k, v = (backend.randn(2, 120, 2, 64, dtype=dtype) for _ in "kv")
    fixed = dict(dropout_p=0.0, softmax_scale=0.2, softcap=softcap, alibi_slopes=None)
    fixed |= dict(window_size_left=-1, window_size_right=-1)
    blocks = [(slice(0, 50), False), (slice(50, 120), True)]
    parts = []
    for at, causal in blocks:
        one = interface._flash_attn_forward(
            q, k[:, at], v[:, at], causal=causal, return_softmax=False, **fixed
        )
        assert len(one) == 4 and one[1].dtype == torch.float32
        parts.append(one[:2])
    lse = torch.stack([lse for _, lse in parts]).logsumexp(0)
    o = sum(o.float() * (part - lse).exp().mT[..., None] for o, part in parts).to(dtype)
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    exact = attention(*heads, softmax_scale=0.2, softcap=softcap, causal=True)
    close(o.transpose(1, 2), exact.o, 2 * ERROR_BOUND[dtype])
    dq, dk, dv = torch.zeros_like(q, dtype=torch.float32), torch.empty_like(k), torch.empty_like(v)
    for at, causal in blocks:
        part = torch.empty_like(q)
        into = dict(dq=part, dk=dk[:, at], dv=dv[:, at])
        known = dict(causal=causal, deterministic=deterministic, rng_state=None)
        D = interface._flash_attn_backward(do, q, k[:, at], v[:, at], o, lse, **into, **known, **fixed)
        assert D.shape[:2] == (2, 4)
        close(D[..., :70], (do.double() * o.double()).sum(-1).mT, 1e-5)
        dq += part
    expected = gradients(do.transpose(1, 2), *heads, softmax_scale=0.2, softcap=softcap, causal=True)
    for x, y in zip((dq, dk, dv), expected, strict=True):
        close(x.transpose(1, 2), y, 2 * OF_GRADIENTS[dtype])


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
def test_packed_sequences(interface, forced_backend, dtype):
    backend = forced_backend
    q, k, v, do = (backend.randn(100, 2, 40, dtype=dtype) for _ in "qkvo")
    cu, longest = backend.ints(0, 33, 33, 97), 64
    into = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    bounds = cu, cu, longest, longest
    o, lse, empty, _ = interface._flash_attn_varlen_forward(q, k, v, *bounds, 0.0, 0.3, True, 40, 0)
    assert lse.shape == (2, 100) and empty.numel() == 0 and not o[97:].any()
    rest = 0.0, 0.3, True, 40, 0, 0.0, None, False
    D = interface._flash_attn_varlen_backward(do, q, k, v, o, lse, *into, *bounds, *rest)
    assert D.shape == lse.shape
    some = into[0].clone().fill_(7)
    interface._flash_attn_varlen_backward(do, q, k, v, o, lse, some, None, None, *bounds, *rest)
    assert (some - into[0]).abs().max() <= 1e-2  # any order of sums
    for rows in slice(0, 33), slice(33, 97):
        one = [x[rows].transpose(0, 1)[None] for x in (do, q, k, v)]
        options = dict(softmax_scale=0.3, causal=True, window_size=(40, 0))
        close(o[rows].transpose(0, 1)[None], attention(*one[1:], **options).o, 2 * ERROR_BOUND[dtype])
        for x, y in zip(into, gradients(*one, **options), strict=True):
            close(x[rows].transpose(0, 1)[None], y, 2 * OF_GRADIENTS[dtype])


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_dropout(interface, forced_backend, dtype, packed):
    """rng_state holds the seed: the backward pass drops the same weights."""
    backend, p = forced_backend, 0.25
    q, k, v = (x.transpose(1, 2).contiguous() for x in backend.qkv(B=1, dtype=dtype))
    do, into = backend.randn(*q.shape, dtype=dtype), [torch.empty_like(x) for x in (q, k, v)]
    tensors, bounds, documents, name = (q, k, v), (), {}, ""
    if packed:
        cu_q, cu_k = (backend.ints(0, n // 3, n) for n in (70, 90))
        bounds, name = (cu_q, cu_k, 47, 60), "varlen_"
        documents = dict(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
        do, *into, q, k, v = (x[0] for x in (do, *into, q, k, v))
    rest = p, 0.2, True, -1, -1, 0.0, None
    forward, backward = (getattr(interface, f"_flash_attn_{name}{way}ward") for way in ("for", "back"))
    torch.manual_seed(5)
    o, lse, empty, rng_state = forward(q, k, v, *bounds, *rest, return_softmax=True)
    torch.manual_seed(5)
    assert empty.numel() == 0 and rng_state.tolist() == [int(draw_seed(q, 0.1)), 0]
    before = torch.get_rng_state()
    backward(do, q, k, v, o, lse, *into, *bounds, *rest, deterministic=False, rng_state=rng_state)
    assert torch.equal(torch.get_rng_state(), before)
    options = dict(softmax_scale=0.2, causal=True, dropout_p=p, dropout_seed=rng_state[:1]) | documents
    heads = [x.transpose(1, 2) for x in tensors]
    close(o.view_as(tensors[0]).transpose(1, 2), attention(*heads, **options).o, 2 * ERROR_BOUND[dtype])
    expected = gradients(do.view_as(tensors[0]).transpose(1, 2), *heads, **options)
    for x, like, y in zip(into, tensors, expected, strict=True):
        close(x.view_as(like).transpose(1, 2), y, 2 * OF_GRADIENTS[dtype])
    call = do, q, k, v, o, lse, *into, *bounds, *rest, False
    with pytest.raises(TypeError, match="^rng_state must be a tensor, but was None"):
        backward(*call)
    with pytest.raises(ValueError, match=r"^rng_state must have shape \(2,\), but has shape \(1,\)$"):
        backward(*call, rng_state=rng_state[:1])


def test_no_dropout(interface, forced_backend):
    """The generator stays, rng_state is 0, and the backward pass doesn't read it."""
    q = forced_backend.randn(1, 5, 2, 8, dtype=torch.bfloat16)
    before, rest = torch.get_rng_state(), (0.0, 1.0, True, -1, -1, 0.0, None)
    *results, rng_state = interface._flash_attn_forward(q, q, q, *rest, False)
    assert rng_state.tolist() == [0, 0] and rng_state.dtype == torch.int64
    interface._flash_attn_backward(q, q, q, q, *results[:2], None, None, None, *rest, False, None)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_private_functions_refuse(interface, forced_backend):
    q = forced_backend.randn(1, 5, 2, 8, dtype=torch.bfloat16)
    forward = interface._flash_attn_forward
    cu = forced_backend.ints(0, 5)
    with pytest.raises(NotImplementedError, match="^leftpad_k must be None, but was a tensor"):
        interface._flash_attn_varlen_forward(*[q[0]] * 3, cu, cu, 5, 5, 0.0, 1.0, True, leftpad_k=cu[:1])
    with pytest.raises(ValueError, match="^q must be torch.float16 or torch.bfloat16, but is torch.float32"):
        forward(*[q.float()] * 3, 0.0, 1.0, True, -1, -1, 0.0, None, False)
    with pytest.raises(TypeError, match="^dout must be a tensor, but was None"):
        interface._flash_attn_backward(
            None, q, q, q, q, q, q, None, None, 0.0, 1.0, True, -1, -1, 0.0, None, False
        )
    with pytest.raises(ValueError, match="^dk must have shape"):
        interface._flash_attn_backward(
            q, q, q, q, q, q, q, q[:, :4], None, 0.0, 1.0, True, -1, -1, 0.0, None, False
        )
    # Libraries call them by these names.
    names = list(inspect.signature(forward).parameters)[3:]
    assert names[:5] == "dropout_p softmax_scale causal window_size_left window_size_right".split()
    assert names[5:] == "softcap alibi_slopes return_softmax".split()


def test_bert_padding(installed, backend):
    from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input

    x = backend.randn(3, 7, 2, 5).requires_grad_()
    mask = torch.arange(7, device=x.device) < backend.ints(4, 0, 7)[:, None]
    unused = (torch.arange(7, device=x.device) == 5)[None] & ~mask
    tokens, indices, cu_seqlens, longest, used = unpad_input(x, mask, unused)
    assert torch.equal(tokens, x[mask | unused]) and longest == 7
    assert cu_seqlens.tolist() == [0, 5, 6, 13] and used.tolist() == [4, 0, 7]
    assert cu_seqlens.dtype == used.dtype == torch.int32
    assert torch.equal(index_first_axis(x.flatten(0, 1), indices), tokens)
    padded = pad_input(tokens, indices.int(), 3, 7)
    assert torch.equal(padded, x * (mask | unused)[..., None, None])
    [dx] = torch.autograd.grad((padded * 2).sum(), x)
    assert torch.equal(dx, 2.0 * (mask | unused)[..., None, None].expand_as(x))
    assert unpad_input(x, mask.long())[0].shape == (11, 2, 5)
    with pytest.raises(ValueError, match="^attention_mask must have hidden_states' shape"):
        unpad_input(x, mask[:, :6])


# ------------------------------------------------------------------------------------- transformers

MODES = {
    "left padding": lambda ids: dict(attention_mask=(torch.arange(20) >= torch.tensor([[7], [0]])).long()),
    "right padding": lambda ids: dict(attention_mask=(torch.arange(20) < torch.tensor([[13], [20]])).long()),
    "packed": lambda ids: dict(position_ids=torch.cat((torch.arange(8), torch.arange(12)))[None]),
    "no mask": lambda ids: {},
}


@pytest.fixture(scope="module")
def transformers():
    module = pytest.importorskip("transformers", minversion="5.4")
    if not hasattr(module.modeling_flash_attention_utils, "FLASH_ATTENTION_COMPATIBILITY_MATRIX"):
        pytest.skip("this transformers looks for flash_attn on GPUs alone")
    return module


def models(transformers, name, seed):
    """The same random model with flash_attn and with eager attention."""
    from test_huggingface import decoder

    eager = decoder(name, seed)
    config = copy.deepcopy(eager.config)
    config._attn_implementation = "flash_attention_2"
    model = type(eager)(config).eval()
    model.load_state_dict(eager.state_dict())
    config = copy.deepcopy(eager.config)
    config._attn_implementation = "eager"
    other = type(eager)(config).eval()
    other.load_state_dict(eager.state_dict())
    return model, other


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "deepseek_v3"])
def test_models_by_flash_attention_2(installed, transformers, name, mode, seed, monkeypatch):
    model, eager = models(transformers, name, seed)
    ids = torch.randint(1, 90, (1 if mode == "packed" else 2, 20))
    options = MODES[mode](ids)
    calls = []
    forward = minimal_attn._varlen.forward
    monkeypatch.setattr(minimal_attn._varlen, "forward", lambda *a, **b: calls.append(b) or forward(*a, **b))
    is_token = options.get("attention_mask", torch.ones_like(ids)).bool()
    found, expected = (m(ids, **options).logits[is_token] for m in (model, eager))
    if mode == "packed":  # eager sees no documents without transformers' mask of them
        expected = torch.cat([eager(part).logits[0] for part in ids.split([8, 12], 1)])
    assert len(calls) == model.config.num_hidden_layers
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    weight = torch.randn_like(found)
    one, other = (
        torch.autograd.grad((x * weight).sum(), m.get_input_embeddings().weight, retain_graph=True)[0]
        for x, m in ((found, model), (expected, eager))
    )
    assert (one - other).norm() <= 1e-4 * other.norm()


def test_generate_by_flash_attention_2(installed, transformers, seed):
    model, eager = models(transformers, "llama", seed)
    ids = torch.randint(1, 90, (2, 20))
    options = MODES["left padding"](ids) | dict(max_new_tokens=6, do_sample=False)
    assert torch.equal(model.generate(ids, **options), eager.generate(ids, **options))


def test_without_it_transformers_has_no_flash_attention_2(transformers, seed):
    if find() is not None:
        pytest.skip("flash_attn is installed")
    install()
    uninstall()
    with pytest.raises(ImportError, match="FlashAttention2"):
        models(transformers, "llama", seed)
