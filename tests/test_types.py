"""The annotations: what mypy says of a user's file, and whether flash_attn.pyi fits flash_attn.py."""

import ast
import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import minimal_attn
from minimal_attn import flash_attn

PACKAGE = Path(minimal_attn.__file__).parent
# A line with a mistake says in a comment what the checker must name there.
USER = """
import torch
from typing_extensions import assert_type

import minimal_attn
from minimal_attn import flash_attn, ring
from minimal_attn.flash_attn import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func
from minimal_attn.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

Pair = tuple[torch.Tensor, torch.Tensor]
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
q = torch.randn(1, 2, 3, 64)
n = torch.tensor([3])
flag = len(q) == 1

assert_type(minimal_attn.__version__, str)
assert_type(minimal_attn.forward(q, q, q, causal=True, window_size=(3, 0), softmax_scale=0.5), torch.Tensor)
assert_type(minimal_attn.forward(q, q, q, seqlens_k=n, leftpad_k=n, offset=n, sinks=n, out=q), torch.Tensor)
assert_type(minimal_attn.forward(q, q, q, seqlens_k=n, block_table=n), torch.Tensor)
assert_type(minimal_attn.forward(q, q, q, return_lse=True), Pair)
state = minimal_attn.forward(q, q, q, return_state=True, backend="cpu")
assert_type(state, Three)
assert_type(minimal_attn.forward(q, q, q, state=state), Three)
assert_type(minimal_attn.forward(q, q, q, state=state, return_lse=True), Pair)
assert_type(minimal_attn.forward(q, q, q, return_state=flag), torch.Tensor | Pair | Three)
assert_type(minimal_attn.explain(q, q, q, causal=True).others, dict[str, str])
with minimal_attn.activate() as activation:
    assert_type(activation.calls, dict[str, int])
assert_type(minimal_attn.scaled_dot_product_attention(q, q, q, is_causal=True, enable_gqa=True), torch.Tensor)
assert_type(minimal_attn.explain_scaled_dot_product_attention(q, q, q), minimal_attn.Explanation | str)
assert_type(flash_attn_func(q, q, q, 0.0, causal=True), torch.Tensor)
assert_type(flash_attn_func(q, q, q, return_attn_probs=True), Three)
assert_type(flash_attn_func(q, q, q, return_attn_probs=flag), torch.Tensor | Three)
assert_type(flash_attn_kvpacked_func(q, q, causal=True), torch.Tensor)
assert_type(flash_attn_qkvpacked_func(q, return_attn_probs=True), Three)
assert_type(flash_attn_varlen_func(q, q, q, n, n, 3, 3, block_table=n), torch.Tensor)
assert_type(flash_attn_with_kvcache(q, q, q, cache_seqlens=3), torch.Tensor)
assert_type(flash_attn_with_kvcache(q, q, q, return_softmax_lse=True), Pair)
assert_type(ring.forward(q, q, q, causal=True), torch.Tensor)
assert_type(ring.forward(q, q, q, return_lse=True), Pair)
assert_type(ring.unshard([ring.shard(q, 0, 2), ring.shard(q, 1, 2)]), torch.Tensor)

minimal_attn.forward(q, q, q, casual=True)  # casual
minimal_attn.forward(q, q, q, seqlens_k=[3])  # list[int]
minimal_attn.forward(q, q, q, window_size=3)  # int
minimal_attn.forward(q, q)  # forward
minimal_attn.explain(q, q, q, casual=True)  # casual
minimal_attn.scaled_dot_product_attention(q, q, q, causal=True)  # causal
minimal_attn.activate().call  # call
flash_attn_func(q, q, q, casual=True)  # casual
flash_attn_func(q, q, q, softmax_scale="1")  # str
flash_attn_kvpacked_func(q, q, casual=True)  # casual
flash_attn_with_kvcache(q, q, q, cache_seqlens=2.5)  # float
flash_attn.flash_attn_fun(q, q, q)  # flash_attn_fun
ring.forward(q, q, q, casual=True)  # casual
ring.shard(q, "0", 2)  # str
"""


def test_mypy_on_a_users_file(tmp_path):
    """Accepted is what is right, strictly; each mistake is found, and named in its own line."""
    if not importlib.util.find_spec("mypy"):
        pytest.skip("no mypy: pip install mypy")
    (tmp_path / "user.py").write_text(USER)
    (tmp_path / "minimal_attn").symlink_to(PACKAGE)
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--follow-imports=silent"]
    done = subprocess.run([*command, "user.py"], cwd=tmp_path, capture_output=True, text=True)
    lines = re.findall(r"^user\.py:(\d+): error: (.*)$", done.stdout, re.MULTILINE)
    said = {}
    for line, error in lines:
        said[int(line)] = said.get(int(line), "") + error
    mistakes = {
        i: match[1] for i, x in enumerate(USER.splitlines(), 1) if (match := re.search("  # (.*)", x))
    }
    assert len(mistakes) == 14 and said.keys() == mistakes.keys(), done.stdout + done.stderr
    assert all(mistakes[line] in said[line] for line in mistakes), said


def stub():
    """{function: its parameters in each overload, those without a default first}, of flash_attn.pyi."""
    functions = {}
    for node in ast.parse((PACKAGE / "flash_attn.pyi").read_text()).body:
        if isinstance(node, ast.FunctionDef):
            names = [argument.arg for argument in node.args.args + node.args.kwonlyargs]
            types = [ast.unparse(argument.annotation) for argument in node.args.args + node.args.kwonlyargs]
            functions.setdefault(node.name, []).append(dict(zip(names, types, strict=True)))
    return functions


def test_stub_of_flash_attn_has_its_signatures():
    public = {name for name in vars(flash_attn) if name.startswith("flash_attn_")}
    functions = {name: overloads for name, overloads in stub().items() if name in public}
    assert functions.keys() == public
    for name, overloads in functions.items():
        parameters = inspect.signature(getattr(flash_attn, name)).parameters
        if "options" in parameters:  # a packed function passes the rest to the one of separate tensors
            own = [x for x in parameters if x not in ("args", "options")]
            base = flash_attn.flash_attn_varlen_func if "varlen" in name else flash_attn.flash_attn_func
            rest = inspect.signature(base).parameters
            lengths = [x for x in rest if "seqlen" in x] * ("cu_seqlens" not in own)
            options = [x for x, p in rest.items() if p.default is not inspect.Parameter.empty]
            parameters, names = rest, own + lengths + options
        else:
            names = list(parameters)
        assert len(overloads) == 3
        for overload in overloads:
            assert list(overload) == names
            for x, annotation in overload.items():
                if x in parameters and not x.startswith("return_"):
                    assert parameters[x].annotation in (annotation, inspect.Parameter.empty), (name, x)
