"""minimal_attn.huggingface: tiny random models generate the tokens that eager attention generates.

pytest tests/test_huggingface.py -k table -s    prints which calls were served, which passed on, and why
"""

import copy
import inspect
import subprocess
import sys
import warnings

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.4")

import minimal_attn  # noqa: E402
import minimal_attn.huggingface as huggingface  # noqa: E402
from minimal_attn import _fallback, _transformers_mask  # noqa: E402
from minimal_attn.huggingface import register  # noqa: E402

masks = transformers.masking_utils
DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()
SERVED = {"served"}
SIZES = dict(
    vocab_size=99,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)
SLIDING = dict(sliding_window=5, layer_types=["sliding_attention", "full_attention"])
MLA = dict(kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16)
MOE = dict(n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=32)

# Decoders: what their config has besides SIZES, and what happens to the calls of their layers.
DECODERS = {
    "llama": ({}, SERVED),
    "mistral": (dict(sliding_window=5), SERVED),
    "mixtral": (dict(sliding_window=5, num_local_experts=4), SERVED),
    "qwen2": (dict(sliding_window=5, use_sliding_window=True, max_window_layers=1), SERVED),
    "qwen2_moe": (
        dict(sliding_window=5, use_sliding_window=True, max_window_layers=2, num_experts=4)
        | dict(num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32),
        SERVED,
    ),
    "qwen3": (dict(head_dim=32), SERVED),
    "gemma": (dict(head_dim=256), SERVED),
    "gemma2": (SLIDING, SERVED),
    "gemma3_text": (dict(SLIDING, head_dim=32), SERVED),
    "phi": ({}, SERVED),
    "phi3": (dict(sliding_window=7), SERVED),
    "phimoe": (dict(sliding_window=5, num_local_experts=4, num_experts_per_tok=2), SERVED),
    "gpt2": ({}, SERVED),
    "gpt_neox": ({}, SERVED),
    "gpt_bigcode": ({}, SERVED),  # one key head
    "gpt_oss": (dict(SLIDING, head_dim=16, num_local_experts=4, num_experts_per_tok=2), SERVED),  # sinks
    "opt": ({}, SERVED),
    "starcoder2": (dict(sliding_window=6), SERVED),
    "cohere2": (SLIDING, SERVED),
    "olmo2": ({}, SERVED),
    "stablelm": ({}, SERVED),
    "granite": ({}, SERVED),
    "smollm3": ({}, SERVED),
    "granitemoehybrid": (
        dict(layer_types=["attention"] * 2, num_local_experts=4, num_experts_per_tok=2, mamba_n_heads=8),
        SERVED,
    ),
    "exaone4": (SLIDING, SERVED),
    "nemotron": ({}, SERVED),
    "biogpt": ({}, SERVED),
    "deepseek_v3": (
        dict(MLA, **MOE, num_key_value_heads=4, first_k_dense_replace=1),
        SERVED,
    ),  # v is narrower
    "llama4_text": (
        dict(head_dim=16, attention_chunk_size=6, layer_types=["chunked_attention", "full_attention"]),
        SERVED,
    ),
}
NEW = 8
MODES = {
    "single": dict(rows=1),
    "left_padding": dict(),
    "static": dict(cache_implementation="static"),
    "beams": dict(num_beams=3),
    "chunked_prefill": dict(prefill_chunk_size=4),
}


@pytest.fixture
def told():
    """No reason has been told yet; and register() is not strict after the test."""
    _fallback._told.clear()
    yield
    register()


def build(make, config, seed, device="cpu"):
    """Scores differ enough for a wrong mask to show. Rounding chooses no experts: routers are zero."""
    torch.manual_seed(seed)
    model = make(config).eval().to(device)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            is_router = name.endswith((".gate.weight", ".router.weight"))
            torch.nn.init.normal_(parameter, std=0 if is_router else 0.15)
    return model


def decoder(name, seed, device="cpu", **options):
    config = transformers.AutoConfig.for_model(name, **{**SIZES, **DECODERS[name][0], **options})
    return build(transformers.AutoModelForCausalLM.from_config, config, seed, device)


class Logits(torch.nn.Module):
    """A model's logits, of token ids and one more argument, by name."""

    def __init__(self, model, name):
        super().__init__()
        self.model, self.name = model.eval(), name

    def forward(self, ids, other):
        return self.model(input_ids=ids, use_cache=False, **{self.name: other}).logits


def sizes_of_any_kind():
    """Of two arguments (B, N), for torch.export."""
    return {0: torch.export.Dim("B", min=2, max=64), 1: torch.export.Dim("N", min=3, max=512)}


def ragged(rows, length, device="cpu", right=False):
    """Token ids and a padding mask, the first row without padding."""
    ids = torch.randint(3, SIZES["vocab_size"], (rows, length), device=device)
    padding = torch.zeros(rows, dtype=torch.int64, device=device)
    padding[1:] = torch.randint(1, length - 1, (rows - 1,), device=device)
    mask = torch.arange(length, device=device) >= padding[:, None]
    mask = mask.flip(1) if right else mask
    return ids * mask, mask.long()


def by_each(model, call):
    """(call's result with eager attention, and with minimal_attn; counts are those of the second)."""
    register()
    model.set_attn_implementation("eager")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = call()
        model.set_attn_implementation("minimal_attn")
        if model.config._attn_implementation != "minimal_attn":
            pytest.skip("this transformers can't change the attention of a model of this kind")
        huggingface.calls.clear()
        return expected, call()


def check(model, why=SERVED, **call):
    expected, o = by_each(model, lambda: model(**call)[0])
    padding = call.get("attention_mask")
    rows = slice(None) if padding is None or padding.shape[1] != o.shape[1] else padding.bool()
    torch.testing.assert_close(o[rows], expected[rows], rtol=1e-4, atol=1e-4)
    assert set(huggingface.calls) == why


def check_tokens(o, expected, n_prompt):
    """The same logits and tokens, until two tokens tie, which rounding decides."""
    logits, expected_logits = torch.stack(o.logits, 1), torch.stack(expected.logits, 1)
    bound = 1e-4 * expected_logits.std()
    same = o.sequences[:, n_prompt:] == expected.sequences[:, n_prompt:]
    is_comparable = torch.ones_like(logits[..., 0], dtype=torch.bool)
    if len(same) < len(logits):  # beams
        assert same.all()
    else:
        first, second = expected_logits.topk(2).values.unbind(-1)
        is_comparable[:, 1:] = same.cummin(1).values[:, :-1]
        assert (same | ~is_comparable | (first - second < bound)).all()
    assert (logits - expected_logits)[is_comparable].abs().max() < bound


def check_generate(name, mode, seed, device="cpu"):
    options = dict(MODES[mode])
    model = decoder(name, seed, device)
    ids, mask = ragged(options.pop("rows", 3), 11, device)

    def generate():
        return model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=NEW,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            disable_compile=True,
            **options,
        )

    try:
        expected, o = by_each(model, generate)
    except TypeError as error:
        if "block_sequence_ids" not in str(error):
            raise
        pytest.skip("this transformers itself fails: no block_sequence_ids")
    check_tokens(o, expected, ids.shape[1])
    assert set(huggingface.calls) == DECODERS[name][1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", DECODERS)
def test_generate(name, mode, device, seed):
    check_generate(name, mode, seed, device)


def test_table(seed):
    for name in DECODERS:
        check_generate(name, "left_padding", seed)
        print(name, ", ".join(f"{what}: {count}" for what, count in huggingface.calls.items()), sep="\t")


def test_wrong_windows_would_show(seed, monkeypatch):
    right, wide = _transformers_mask.keys_of, ((-1, 0), None)
    monkeypatch.setattr(
        _transformers_mask, "keys_of", lambda *x: wide if right(*x) == ((4, 0), None) else right(*x)
    )
    monkeypatch.setattr(huggingface, "register", lambda: None)
    with pytest.raises(AssertionError):
        check_generate("mistral", "left_padding", seed)


def test_right_padding(seed):
    for name in ("llama", "mistral", "gpt_oss"):
        model = decoder(name, seed)
        ids, mask = ragged(3, 13, right=True)
        check(model, input_ids=ids, attention_mask=mask, use_cache=False)


def small(config, **options):
    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    return config(**{**sizes, "vocab_size": 99, **options})


@pytest.mark.parametrize("right", [True, False])
def test_bert(seed, right):
    model = build(transformers.BertModel, small(transformers.BertConfig), seed)
    ids, mask = ragged(3, 13, right=right)
    check(model, input_ids=ids, attention_mask=mask)
    check(model, input_ids=ids)


def test_modernbert(seed):
    """Windows to both sides."""
    config = small(
        transformers.ModernBertConfig, local_attention=6, global_attn_every_n_layers=2, pad_token_id=0
    )
    ids, mask = ragged(3, 13, right=True)
    check(build(transformers.ModernBertModel, config, seed), input_ids=ids, attention_mask=mask)


def test_vit(seed):
    model = build(transformers.ViTModel, small(transformers.ViTConfig, image_size=32, patch_size=8), seed)
    check(model, pixel_values=torch.randn(2, 3, 32, 32))


def test_clip(seed):
    text, vision = dict(eos_token_id=2, bos_token_id=1), dict(image_size=32, patch_size=8)
    sizes = dict(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=99
    )
    config = transformers.CLIPConfig(text_config={**sizes, **text}, vision_config={**sizes, **vision})
    model = build(transformers.CLIPModel, config, seed)
    ids, mask = ragged(3, 13, right=True)
    check(model, input_ids=ids, attention_mask=mask, pixel_values=torch.randn(3, 3, 32, 32))


def seq2seq(kind, seed):
    sizes = dict(d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2)
    sizes |= dict(decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=99)
    tokens = dict(pad_token_id=0, bos_token_id=1, eos_token_id=None, decoder_start_token_id=1)
    if kind == "whisper":
        tokens |= dict(
            num_mel_bins=8, max_source_positions=20, suppress_tokens=None, begin_suppress_tokens=None
        )
        make, config = transformers.WhisperForConditionalGeneration, transformers.WhisperConfig
        inputs = dict(input_features=torch.randn(2, 8, 40))
    else:
        make, config = transformers.BartForConditionalGeneration, transformers.BartConfig
        tokens["forced_eos_token_id"] = None
        ids, mask = ragged(3, 12, right=True)
        inputs = dict(input_ids=ids, attention_mask=mask)
    return build(make, config(**sizes, **tokens), seed), inputs


@pytest.mark.parametrize("options", [{}, dict(num_beams=2), dict(cache_implementation="static")])
@pytest.mark.parametrize("kind", ["whisper", "bart"])
def test_encoder_decoder(kind, options, seed):
    model, inputs = seq2seq(kind, seed)
    fixed = dict(max_new_tokens=NEW, do_sample=False, disable_compile=True)
    expected, o = by_each(model, lambda: model.generate(**inputs, **fixed, **options))
    assert torch.equal(o, expected)
    assert set(huggingface.calls) == SERVED


# ---------------------------------------------------------------------- what is passed on or refused


def test_holes_in_padding(seed):
    for name in ("mistral", "llama4_text"):
        ids, mask = ragged(3, 13)
        mask[:, -3] = 0
        check(decoder(name, seed), input_ids=ids, attention_mask=mask)


def test_masks_of_the_user_are_served(seed):
    model = decoder("llama", seed)
    ids, _ = ragged(2, 9)
    seen = torch.rand(2, 1, 9, 9) < 0.5
    seen |= torch.eye(9, dtype=torch.bool)
    mask = torch.zeros(2, 1, 9, 9).masked_fill(~seen, torch.finfo(torch.float32).min)
    check(model, input_ids=ids, attention_mask=mask)


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("name", ["t5", "umt5"])
def test_position_bias(seed, name, holes):
    """In the encoder, the causal decoder and between both, beside holes in the padding; with its gradient."""
    sizes = dict(d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4, vocab_size=99, dropout_rate=0.0)
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(name, **sizes, decoder_start_token_id=0)
    model = transformers.AutoModelForSeq2SeqLM.from_config(config).eval()
    ids, mask = ragged(3, 9, right=True)
    mask[0, 3:5] = not holes
    labels = torch.randint(3, 99, (3, 7))
    expected, o = by_each(model, lambda: model(ids, attention_mask=mask, labels=labels).logits)
    torch.testing.assert_close(o, expected, rtol=1e-4, atol=1e-4)
    if not huggingface.calls:
        pytest.skip("this version of transformers doesn't ask the interface in T5")
    assert set(huggingface.calls) == {"served"}
    gradients = []
    for implementation in "eager", "minimal_attn":
        model.set_attn_implementation(implementation)
        model.zero_grad()
        model(ids, attention_mask=mask, labels=labels).loss.backward()
        gradients.append([x.grad for n, x in model.named_parameters() if "relative_attention_bias" in n])
    assert gradients[0]
    for x, y in zip(*gradients, strict=True):
        torch.testing.assert_close(y, x, rtol=1e-3, atol=1e-6)


@pytest.mark.skipif(
    not (
        torch.cuda.is_available()
        and minimal_attn._C.has_fast_pairs(torch.empty(1, 1, 8, 64, device="cuda").half())
    ),
    reason="no GPU for which biases are served",
)
def test_position_bias_on_a_gpu(seed):
    """T5 in training: the bias's gradient comes from the kernel of the others."""
    sizes = dict(d_model=64, d_kv=32, d_ff=64, num_layers=2, num_heads=4, vocab_size=99, dropout_rate=0.0)
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model("t5", **sizes, decoder_start_token_id=0)
    model = transformers.AutoModelForSeq2SeqLM.from_config(config).cuda()
    ids, labels = torch.randint(3, 99, (2, 2, 130), device="cuda")
    gradients = []
    for implementation, dtype in ("eager", torch.float32), ("minimal_attn", torch.bfloat16):
        register()
        huggingface.calls.clear()
        model.to(dtype).set_attn_implementation(implementation)
        model.zero_grad()
        model(ids, labels=labels).loss.backward()
        found = [x.grad.double() for n, x in model.named_parameters() if "relative_attention_bias" in n]
        gradients.append(torch.cat(found))
    if not huggingface.calls:
        pytest.skip("this version of transformers doesn't ask the interface in T5")
    assert set(huggingface.calls) == {"served"}
    assert (gradients[1] - gradients[0]).norm() < 0.1 * gradients[0].norm()


def test_training(seed):
    """The gradients are those of the eager attention."""
    register()
    ids = torch.randint(3, 99, (2, 9))
    losses = {}
    for name in ("eager", "minimal_attn"):
        model = decoder("llama", seed)
        model.set_attn_implementation(name)
        huggingface.calls.clear()
        loss = model.train()(ids, labels=ids).loss
        loss.backward()
        losses[name] = loss.detach(), model.model.layers[0].self_attn.k_proj.weight.grad
    torch.testing.assert_close(losses["minimal_attn"], losses["eager"], rtol=1e-4, atol=1e-5)
    assert set(huggingface.calls) == {"served"}


def test_dropout(seed):
    """BERT and a decoder in training: seeded, the same again; another seed gives another loss."""
    bert = build(
        transformers.BertModel, small(transformers.BertConfig, attention_probs_dropout_prob=0.5), seed
    )
    for model in bert, decoder("llama", seed, attention_dropout=0.5):
        register()
        model.train().set_attn_implementation("minimal_attn")
        ids = torch.randint(3, 99, (2, 9))
        results = []
        for n in 1, 1, 2:
            torch.manual_seed(n)
            results.append(model(ids)[0])
        assert set(huggingface.calls) == {"served"}
        assert torch.equal(*results[:2]) and not torch.equal(*results[1:])
        results[0].sum().backward()


def test_weights_are_passed_on(seed):
    model = decoder("llama", seed)
    ids = torch.randint(3, 99, (2, 9))
    expected, o = by_each(model.eval(), lambda: model(ids, output_attentions=True).attentions)
    torch.testing.assert_close(o, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_and_autocast(seed, dtype):
    model = decoder("llama", seed)
    ids, mask = ragged(3, 13)
    call = dict(input_ids=ids, attention_mask=mask)
    expected, _ = by_each(model, lambda: model(**call)[0])
    with torch.autocast("cpu", dtype):
        _, o = by_each(model, lambda: model(**call)[0])
    _, of_half = by_each(model.to(dtype), lambda: model(**call)[0])
    assert set(huggingface.calls) == SERVED
    for x in (o, of_half):
        error = (x.float() - expected)[mask.bool()].norm() / expected[mask.bool()].norm()
        assert error < (0.02 if dtype == torch.float16 else 0.1)


def check_loaded(make, config, seed, call, expected_calls=None):
    """A model loaded with minimal_attn against itself loaded with eager, in float64 (XGLM can't do that)."""
    register()
    eager = build(lambda c: make(copy.deepcopy(c), attn_implementation="eager"), config, seed)
    model = make(copy.deepcopy(config), attn_implementation="minimal_attn").eval()
    model.load_state_dict(eager.state_dict())
    huggingface.calls.clear()
    with torch.no_grad():
        o = call(model)
        expected = call(eager if config.model_type == "xglm" else eager.double())
    assert (o.double() - expected).norm() < 1e-5 * expected.norm()
    if expected_calls is not None:
        assert set(huggingface.calls) == expected_calls
    return model


# Models that compute attention by themselves: further names in their config, and the layers that they take.
OWN_ATTENTION = {
    "bloom": ({}, "eager"),
    "mpt": (dict(d_model=64, n_heads=4, n_layers=2), "eager"),
    "xglm": (dict(d_model=64, ffn_dim=64, num_layers=2, attention_heads=4), "eager"),
    "gpt_neo": (dict(num_layers=2, attention_types=[[["global", "local"], 1]], window_size=4), "eager"),
    "falcon": (dict(alibi=False), "sdpa"),
}


@pytest.mark.parametrize("name", OWN_ATTENTION)
def test_models_without_transformers_interface(name, seed, told):
    """They would fail with "minimal_attn", or be silently wrong with a mask of another kind."""
    options, layers = OWN_ATTENTION[name]
    ids, mask = ragged(3, 9, right=True)
    make = transformers.AutoModelForCausalLM.from_config
    config = transformers.AutoConfig.for_model(name, **{**SIZES, **options})
    with pytest.warns(minimal_attn.FallbackWarning, match=f"{name} computes attention by itself.*{layers}"):
        model = check_loaded(make, config, seed, lambda m: m(ids, attention_mask=mask)[0][mask.bool()], set())
    assert model.config._attn_implementation == layers
    with pytest.raises(RuntimeError, match=f"strict=True. transformers: {name} computes attention by itself"):
        register(strict=True)
        make(model.config, attn_implementation="minimal_attn")


@pytest.mark.parametrize("name", ["Sam", "Data2VecVision", "Git", "Beit"])
def test_vision_models_with_tables_of_classes(name, seed, told):
    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    vision = dict(sizes, image_size=32, patch_size=8)
    config = getattr(transformers, f"{name}Config")
    if name == "Sam":
        vision |= dict(
            mlp_dim=32, output_channels=32, window_size=2, global_attn_indexes=[1], num_pos_feats=16
        )
        decoder_sizes = dict(hidden_size=32, mlp_dim=32, num_attention_heads=2, iou_head_hidden_dim=32)
        prompt = dict(hidden_size=32, image_size=32, patch_size=8, image_embedding_size=4)
        config = config(vision_config=vision, mask_decoder_config=decoder_sizes, prompt_encoder_config=prompt)
    elif name == "Git":
        config = config(**sizes, vocab_size=99, vision_config=vision)
    else:
        config = config(**vision, use_relative_position_bias=True, use_shared_relative_position_bias=False)
    pixels = torch.randn(2, 3, 32, 32)

    def call(model):
        dtype = next(model.parameters()).dtype
        inputs = dict(pixel_values=pixels.to(dtype))
        if name == "Sam":
            inputs["input_points"] = torch.tensor([[[[3.0, 5.0]]], [[[20.0, 9.0]]]], dtype=dtype)
            return model(**inputs).pred_masks
        if name == "Git":
            inputs["input_ids"] = torch.arange(3, 11).expand(2, -1)
        return model(**inputs)[0]

    check_loaded(getattr(transformers, f"{name}Model")._from_config, config, seed, call)


@pytest.mark.parametrize("name", ["doge", "deepseek_v32"])
@pytest.mark.parametrize("padded", [False, True])
def test_models_that_compute_with_their_mask(name, padded, seed, told):
    options = dict(MLA, **MOE, index_topk=4, index_n_heads=2, index_head_dim=16, first_k_dense_replace=1)
    options |= dict(num_key_value_heads=4, keep_window_size=4) if name != "doge" else dict(keep_window_size=4)
    if name not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {name}")
    ids, mask = ragged(3, 9, right=True)
    mask = mask if padded else None
    rows = slice(None) if mask is None else mask.bool()
    config = transformers.AutoConfig.for_model(name, **{**SIZES, **options})
    make = transformers.AutoModelForCausalLM.from_config
    check_loaded(make, config, seed, lambda m: eager_experts(m)(ids, attention_mask=mask)[0][rows])
    assert set(huggingface.calls) == {"served"}


def eager_experts(model):
    """The model with experts that compute in float64, too."""
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


def test_strict_and_warnings(seed, told):
    """One warning a reason, and with strict=True an error; none where the kernels serve."""
    register()
    model = decoder("llama", seed)
    model.set_attn_implementation("minimal_attn")
    ids, mask = ragged(3, 9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(ids, attention_mask=mask)
            model(ids, attention_mask=mask, output_attentions=True)
    caught = [str(w.message) for w in caught if w.category is minimal_attn.FallbackWarning]
    assert caught == ["minimal_attn does not serve this call. transformers: output_attentions"]
    register(strict=True)
    model(ids, attention_mask=mask)
    model.train()(ids, attention_mask=mask)[0].sum().backward()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="strict=True. transformers: output_attentions"):
            model.eval()(ids, attention_mask=mask, output_attentions=True)


def call_attention(mask=None, **options):
    layer = torch.nn.Module()
    layer.is_causal = options.pop("is_causal", False)
    q, k, v = torch.randn(3, 1, 2, 5, 8)
    return huggingface.attention(layer, q, k, v, mask, **options)[0]


def test_unknown_arguments_are_refused():
    """A sparse attention's indices, for example, that transformers' functions would ignore."""
    with pytest.raises(ValueError, match="indices"):
        call_attention(indices=torch.zeros(1))
    huggingface.calls.clear()
    call_attention(is_causal=True)  # no mask, so transformers decides
    assert set(huggingface.calls) == {"no mask in a layer that is causal or has a window"}


# ---------------------------------------------------------------------- images, generate_batch


def image_model(name, seed):
    vision = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    vision |= dict(image_size=32, patch_size=8, model_type="siglip_vision_model")
    if name == "gemma3":
        options = dict(text_config=SIZES | SLIDING | dict(head_dim=32), mm_tokens_per_image=4)
    else:
        options = dict(text_config=SIZES | dict(head_dim=32, model_type="gemma"), projection_dim=64)
        vision["projection_dim"] = 64
    config = transformers.AutoConfig.for_model(name, vision_config=vision, image_token_id=98, **options)
    return build(transformers.AutoModelForImageTextToText.from_config, config, seed)


@pytest.mark.parametrize("padded", [None, "left", "right"])
@pytest.mark.parametrize("name", ["gemma3", "paligemma"])
def test_image_blocks(name, padded, seed):
    """Images see all of themselves in gemma3, prompts in paligemma, also where padding is of their type."""
    ids, kinds = torch.randint(3, 98, (2, 14)), torch.zeros(2, 14, dtype=torch.int64)
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :3] = 0
        mask = mask.flip(1) if padded == "right" else mask
    if name == "gemma3":
        kinds[:, 3:7] = kinds[1, 8:11] = 1
    else:
        kinds[:, 9:] = 1
        kinds *= mask
    call = dict(input_ids=ids, attention_mask=mask if padded else None, token_type_ids=kinds)
    check(image_model(name, seed), **call, use_cache=False)
    text = torch.full_like(kinds, name == "paligemma")
    model = image_model(name, seed)
    with_causal, with_blocks = (model(**call | dict(token_type_ids=x)).logits for x in (text, kinds))
    assert not torch.allclose(with_causal, with_blocks, atol=1e-2)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss", "phimoe", "qwen2_moe"])
def test_generate_batch(name, seed):
    """Continuous batching: each prompt gets the tokens that it gets alone. The last two pass no window."""
    config = getattr(transformers, "ContinuousBatchingConfig", None)
    if config is None or "page_size" not in inspect.signature(config).parameters:
        pytest.skip("not on a CPU in this transformers")
    prompts = [torch.randint(3, 99, (n,)).tolist() for n in (7, 4, 11)]
    config = transformers.GenerationConfig(
        max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=-1
    )
    pages = transformers.ContinuousBatchingConfig(page_size=8, num_blocks=64, max_batch_tokens=64)
    model = decoder(name, seed)
    model.set_attn_implementation("eager")
    expected = [
        model.generate(torch.tensor([x]), generation_config=config)[0, len(x) :].tolist() for x in prompts
    ]
    register()
    model.set_attn_implementation("minimal_attn")
    huggingface.calls.clear()
    results = model.generate_batch(prompts, generation_config=config, continuous_batching_config=pages)
    assert sorted(x.generated_tokens for x in results.values()) == sorted(expected)
    assert set(huggingface.calls) == SERVED and model.config._attn_implementation == "minimal_attn"


def test_without_transformers(tmp_path):
    """One line that says so."""
    (tmp_path / "transformers.py").write_text("raise ModuleNotFoundError('none', name='transformers')")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import minimal_attn.huggingface"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stderr.splitlines()[-1] == (
        "ImportError: minimal_attn.huggingface needs transformers, which isn't installed"
    )
