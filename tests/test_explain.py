"""explain names what forward does; and every tile of every kernel, reached by name, is right."""

import pytest
import torch
from conftest import DTYPES

import minimal_attn

BACKENDS = {"hopper", "portable", "paper", "cpu"}
HALVES = [torch.float16, torch.bfloat16]
# (dtypes, heads, Nq, Nk, d, KB of shared memory) -> (Br, Bc, d) of the tile
TILES = {
    "hopper": [
        (HALVES, 2, 64, 300, 64, None, (64, 64, 64)),
        (HALVES, 2, 65, 300, 40, None, (192, 128, 64)),
        (HALVES, 2, 200, 300, 96, None, (192, 96, 96)),
        (HALVES, 2, 200, 300, 100, None, (128, 128, 128)),
        (HALVES, 2, 200, 300, 192, None, (128, 112, 192)),
        (HALVES, 2, 200, 300, 256, None, (128, 80, 256)),
        ([torch.float32], 2, 64, 64, 64, None, (64, 64, 64)),
        ([torch.float32], 2, 64, 65, 33, None, (192, 64, 64)),
        ([torch.float32], 132, 200, 140, 64, None, (256, 64, 64)),
        ([torch.float32], 2, 150, 300, 128, None, (128, 64, 128)),
        ([torch.float32], 70, 150, 140, 100, None, (192, 64, 128)),
        ([torch.float32], 2, 200, 300, 256, None, (128, 32, 256)),
    ],
    "portable": [
        ([torch.float32], 2, 200, 300, 64, 163, (128, 32, 64)),  # from here on tensor cores
        ([torch.float32], 2, 60, 300, 64, 163, (64, 64, 64)),
        ([torch.float32], 2, 200, 300, 128, 163, (64, 32, 128)),
        ([torch.float32], 2, 200, 300, 256, 227, (128, 32, 256)),
        ([torch.float32], 2, 200, 300, 256, 163, (64, 32, 256)),
        ([torch.float32], 2, 200, 300, 64, 99, (64, 64, 64)),  # from here on FMA units
        ([torch.float32], 2, 200, 300, 64, 64, (32, 64, 64)),
        ([torch.float32], 2, 200, 300, 128, 99, (64, 48, 128)),
        ([torch.float32], 2, 200, 300, 128, 64, (32, 32, 128)),
        ([torch.float32], 2, 200, 300, 256, 99, (32, 16, 256)),
        ([torch.float32], 2, 200, 300, 256, 64, (16, 16, 256)),
        (HALVES, 2, 200, 300, 64, 99, (128, 64, 64)),
        (HALVES, 2, 200, 300, 64, 64, (64, 64, 64)),
        (HALVES, 2, 200, 300, 128, 227, (128, 64, 128)),
        (HALVES, 2, 200, 300, 128, 163, (128, 32, 128)),
        (HALVES, 2, 200, 300, 128, 99, (64, 32, 128)),
        (HALVES, 2, 200, 300, 128, 64, (64, 32, 128)),
        (HALVES, 2, 200, 300, 256, 227, (64, 64, 256)),
        (HALVES, 2, 200, 300, 256, 163, (128, 32, 256)),
        (HALVES, 2, 200, 300, 256, 99, (64, 32, 256)),
        (HALVES, 2, 200, 300, 256, 64, (64, 16, 256)),
    ],
    "paper": [  # Algorithm 1's formula, in multiples of 4
        (DTYPES, 2, 200, 300, 64, 227, (64, 112, 64)),  # two blocks on a multiprocessor
        (DTYPES, 2, 200, 300, 64, 99, (48, 48, 64)),
        (DTYPES, 2, 200, 300, 64, 64, (60, 60, 64)),  # one
        (DTYPES, 2, 200, 300, 128, 227, (56, 56, 128)),
        (DTYPES, 2, 200, 300, 256, 227, (56, 56, 256)),
        (DTYPES, 2, 200, 300, 256, 64, (16, 16, 256)),
        (DTYPES, 2, 200, 300, 6, 227, (8, 300, 8)),
        (DTYPES, 2, 9, 7, 61, 227, (12, 8, 64)),
    ],
}


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (50, 20)}], ids=str)
@pytest.mark.parametrize(
    "name, dtype, shape, kilobytes, tile",
    [
        (name, dtype, shape, kilobytes, tile)
        for name, tiles in TILES.items()
        for dtypes, *shape, kilobytes, tile in tiles
        for dtype in dtypes
    ],
)
def test_every_tile(cuda_backend, shared_memory_limit, name, dtype, shape, kilobytes, tile, options):
    if cuda_backend.name != name:
        pytest.skip(f"a tile of {name}")
    if name == "portable" and minimal_attn._C.cuda_architectures() == "compute_75":
        pytest.skip("code for Turing has tiles of its own")
    heads, Nq, Nk, d = shape
    tensors = cuda_backend.qkv(B=1, Hq=heads, Hkv=2, Nq=Nq, Nk=Nk, d=d, dtype=dtype)
    if kilobytes:
        shared_memory_limit(1024 * kilobytes)
    found = cuda_backend.explain(*tensors, **options)
    assert (found.Br, found.Bc, found.d) == tile
    if name == "portable" and dtype == torch.float32:
        on_tensor_cores = kilobytes >= 163 and torch.cuda.get_device_capability() >= (8, 0)
        assert found.kernel == f"float32 on {'tensor cores' if on_tensor_cores else 'FMA units'}"
    assert not kilobytes or found.shared_memory <= 1024 * kilobytes
    cuda_backend.check(*tensors, **options)


def test_the_table_has_all_tiles_of_hopper():
    """Each dtype has six tiles there; test_every_tile reaches each of them."""
    for dtype in DTYPES:
        tiles = {tile for dtypes, *_, tile in TILES["hopper"] if dtype in dtypes}
        assert len(tiles) == 6


def test_names_what_is_taken(backend, dtype):
    q, k, v = backend.qkv(dtype=dtype)
    found = backend.explain(q, k, v, causal=True)
    assert found.backend == backend.name
    assert (
        found.kernel
        and found.Br > 0
        and found.Bc > 0
        and found.d >= 64
        and found.grid > 0
        and found.threads > 0
    )
    assert set(found.others) == BACKENDS - {backend.name}
    assert all(found.others.values())
    assert found.copied == []
    text = str(found)
    assert all(name in text for name in (found.backend, found.kernel, *found.others.values()))


def kernel_of(found):
    """Kernels of two backends may have one name."""
    return found.kernel, found.Br, found.Bc, found.d, found.grid, found.threads, found.shared_memory


def test_auto(backend, dtype):
    """The first of the list that serves the device. The others say in words what stops them."""
    q, k, v = backend.qkv(dtype=dtype)
    found = minimal_attn.explain(q, k, v)
    assert found.backend == minimal_attn.explain(q, k, v, backend=found.backend).backend
    names = minimal_attn._C.backends()
    assert set(found.others) == BACKENDS - {found.backend}
    for name, why in found.others.items():
        if name not in names:
            assert why == "this build has no CUDA code"
        elif (name == "cpu") != (found.backend == "cpu"):
            device = "CPU" if name == "cpu" else "CUDA GPU"
            assert why == f"serves tensors on a {device}, but q is on {q.device}"
        elif names.index(name) > names.index(found.backend):
            is_same = kernel_of(minimal_attn.explain(q, k, v, backend=name)) == kernel_of(found)
            assert why == ("runs the same kernel as " if is_same else "is slower than ") + found.backend
        else:
            major, minor = torch.cuda.get_device_capability()
            assert "serves compute capability 9.0, but " in why
            assert f"{major}.{minor}" in why or "this build has code for " in why


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("Nq", [1, 200])
def test_a_kernel_that_two_backends_run(cuda_backend, dtype, Nq, backward):
    """Such as portable's kernels for few queries and for some gradients, which hopper takes, too."""
    q, k, v = cuda_backend.qkv(Nq=Nq, Nk=2000, dtype=dtype)
    found = cuda_backend.explain(q, k, v, backward=backward)
    for name, why in found.others.items():
        if why.startswith(("is slower", "backend=", "runs the same")):
            other = minimal_attn.explain(q, k, v, backend=name, backward=backward)
            is_same = kernel_of(found) == kernel_of(other)
            assert (why == f"runs the same kernel as {found.backend}") == is_same
    if cuda_backend.name == "hopper" and Nq == 1:
        assert found.others["portable"] == "runs the same kernel as hopper"


def test_copies(backend):
    """What has no contiguous rows is copied; on hopper also what TMA can't read."""
    q, k, v = backend.qkv()
    assert backend.explain(q.mT.contiguous().mT, k, v).copied == ["q"]
    padded = torch.nn.functional.pad(v, (1, 0))[..., 1:]
    assert backend.explain(q, k, padded).copied == (["v"] if backend.name == "hopper" else [])


def test_refuses_what_forward_refuses(backend):
    q, k, v = backend.qkv()
    for error, options in [
        (ValueError, {"window_size": (-2, 0)}),
        (ValueError, {"backend": "gpu"}),
        (TypeError, {"causal": "yes"}),
        (TypeError, {"is_causal": True}),
    ]:
        with pytest.raises(error) as explained:
            minimal_attn.explain(q, k, v, **options)
        with pytest.raises(error) as raised:
            minimal_attn.forward(q, k, v, **options)
        assert str(explained.value) == str(raised.value).replace("forward()", "explain()")
    with pytest.raises(ValueError, match="^q must have data"):
        minimal_attn.explain(*(t.to("meta") for t in (q, k, v)))


def test_nothing_to_compute(backend):
    q, k, v = backend.qkv(Nq=0)
    found = backend.explain(q, k, v)
    assert found.kernel == "nothing to compute"
    assert all(why != "" and "slower" not in why for why in found.others.values())


def test_every_argument(backend):
    """forward's arguments, all of them, change neither the backend nor raise."""
    q, k, v = backend.qkv()
    state = backend.forward(q, k, v, return_state=True)
    limits = {name: backend.ints(5, 7) for name in ("seqlens_k", "leftpad_k", "offset")}
    found = backend.explain(
        q, k, v, causal=True, window_size=(3, 4), softmax_scale=0.1, state=state, return_state=True, **limits
    )
    assert found.backend == backend.name
    backend.explain(q, k, v, offset=3)


def test_state_changes_the_workspace_as_it_does_in_forward(cuda_backend):
    """paper keeps O in the workspace unless O is float32 and wanted."""
    q, k, v = cuda_backend.qkv(dtype=torch.float16)
    state = cuda_backend.forward(q, k, v, return_state=True)
    alone, wanted = cuda_backend.explain(q, k, v), cuda_backend.explain(q, k, v, return_state=True)
    assert wanted == cuda_backend.explain(q, k, v, state=state)
    if cuda_backend.name == "paper":
        assert wanted.workspace < alone.workspace
    with pytest.raises(ValueError, match="state's l must have shape"):
        cuda_backend.explain(q, k, v, state=(state[0], state[1][..., :5], state[2]))
