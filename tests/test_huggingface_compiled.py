"""minimal_attn.huggingface under torch.compile and torch.export."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.4")

from test_huggingface import (  # noqa: E402
    NEW,
    SERVED,
    SIZES,
    Logits,
    build,
    by_each,
    decoder,
    ragged,
    sizes_of_any_kind,
    small,
)

import minimal_attn  # noqa: E402
import minimal_attn.huggingface as huggingface  # noqa: E402
from minimal_attn.huggingface import register  # noqa: E402


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_compiled_generate(name, seed):
    """With a StaticCache, whose masks generate makes outside of the compiled code."""
    torch._dynamo.reset()
    options = transformers.CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    options._compile_all_devices = True
    model = decoder(name, seed)
    ids, mask = ragged(3, 11)
    call = dict(attention_mask=mask, max_new_tokens=NEW, do_sample=False, cache_implementation="static")
    expected, _ = by_each(model, lambda: model.generate(ids, **call, disable_compile=True))
    assert torch.equal(model.generate(ids, **call, compile_config=options), expected)
    assert set(huggingface.calls) == SERVED


@pytest.mark.parametrize(
    "name, padded, use_cache",
    [("llama", False, True), ("llama", True, True), ("mistral", True, False), ("llama4_text", False, False)],
)
def test_compiled_call(name, padded, use_cache, seed):
    torch._dynamo.reset()
    model = decoder(name, seed)
    ids, mask = ragged(3, 11)
    mask[0, 3] = not padded  # a hole
    padding = mask if padded else None
    options = dict(attention_mask=padding, use_cache=use_cache)
    expected, _ = by_each(model, lambda: model(ids, **options)[0])
    huggingface.calls.clear()
    try:
        with torch.no_grad():
            o = torch.compile(model, fullgraph=True, backend="aot_eager")(ids, **options)[0]
    except torch._dynamo.exc.Unsupported as error:
        if "_PerLayerConfigView" not in str(error):
            raise
        pytest.skip("torch 2.8 can't compile this transformers, whatever the attention")
    rows = mask.bool() if padded else slice(None)
    torch.testing.assert_close(o[rows], expected[rows], rtol=1e-4, atol=1e-4)
    assert set(huggingface.calls) == SERVED


def test_compiled_masks_that_are_not_known(seed):
    """Qwen2-MoE makes a mask of an empty window, and doesn't use it."""
    torch._dynamo.reset()
    config = transformers.AutoConfig.for_model("qwen2_moe", **SIZES, num_experts=2, num_experts_per_tok=1)
    model = build(transformers.AutoModelForCausalLM.from_config, config, seed)
    ids, _ = ragged(2, 11)
    expected, _ = by_each(model, lambda: model(ids)[0])
    with torch.no_grad():
        o = torch.compile(model, fullgraph=True, backend="aot_eager")(ids)[0]
    torch.testing.assert_close(o, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("way", ["eval", "train", "compile"])
def test_sdpa_of_an_encoder(way, seed):
    """BERT with padding, by attn_implementation="sdpa": on a CPU its masks are served under activate()."""
    torch.manual_seed(seed)
    no_dropout = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    sizes = dict(SIZES, num_hidden_layers=3)
    config = transformers.BertConfig(**sizes, **no_dropout, attn_implementation="sdpa")
    model, tokens = transformers.BertModel(config).train(way == "train"), torch.randint(99, (3, 50))
    seen = torch.ones(3, 50, dtype=torch.long)
    seen[0, 30:], seen[1, :9] = 0, 0
    expected = copy.deepcopy(model).double()(tokens, attention_mask=seen).last_hidden_state.detach()
    torch.compiler.reset()
    function = torch.compile(model, fullgraph=True) if way == "compile" else model
    with minimal_attn.activate(strict=True) as activation, torch.set_grad_enabled(way == "train"):
        o = function(tokens, attention_mask=seen).last_hidden_state
        if way == "train":
            o[seen.bool()].square().sum().backward()
    assert activation.calls == {"minimal_attn": 3}
    torch.testing.assert_close(o[seen.bool()].double(), expected[seen.bool()], rtol=1e-4, atol=1e-5)
    assert way != "train" or model.embeddings.word_embeddings.weight.grad.isfinite().all()


@pytest.mark.parametrize("name", ["mistral", "bert"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_exported_with_sizes_of_any_kind(name, seed):
    """The graph has the operator, in each layer, for any batch, length and padding."""
    register()
    if name == "bert":
        model = build(transformers.BertModel, small(transformers.BertConfig), seed)
    else:
        model = decoder(name, seed, use_cache=False)
    model.set_attn_implementation("minimal_attn")
    ids, mask = ragged(2, 20)
    sizes = dict.fromkeys(("input_ids", "attention_mask"), sizes_of_any_kind())
    with torch.no_grad():
        graph = torch.export.export(
            model, (), dict(input_ids=ids, attention_mask=mask), dynamic_shapes=sizes, strict=False
        )
        operators = [str(node.target) for node in graph.graph.nodes]
        assert operators.count("minimal_attn.forward.default") == model.config.num_hidden_layers
        ids, mask = ragged(3, 33)
        found = graph.module()(input_ids=ids, attention_mask=mask)[0]
        expected = model(input_ids=ids, attention_mask=mask)[0]
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_compiled_ahead_of_time(seed, tmp_path):
    """AOTInductor's package calls the operator, for any batch, length and padding."""
    register()
    model = decoder("mistral", seed, use_cache=False)
    model.set_attn_implementation("minimal_attn")
    logits, sizes = Logits(model, "attention_mask"), sizes_of_any_kind()
    with torch.no_grad():
        graph = torch.export.export(logits, ragged(2, 20), dynamic_shapes=dict(ids=sizes, other=sizes))
        package = torch._inductor.aoti_compile_and_package(graph, package_path=str(tmp_path / "model.pt2"))
        compiled = torch._inductor.aoti_load_package(package)
        for given in ragged(2, 20), ragged(3, 33):
            seen = given[1].bool()
            torch.testing.assert_close(compiled(*given)[seen], logits(*given)[seen], rtol=1e-4, atol=1e-5)
