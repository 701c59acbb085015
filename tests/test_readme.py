"""The README: its recipes run, its pictures of masks are right, its links lead somewhere."""

import re
from pathlib import Path

import pytest
import torch

import minimal_attn

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_recipes(capsys):
    [code] = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    q, k, v, x, y = (names[name] for name in ("q", "k", "v", "x", "y"))
    heads = x.transpose(1, 2)
    expected = minimal_attn.forward(heads, heads, heads, window_size=(63, 0)).transpose(1, 2)
    assert torch.equal(y, expected)
    # The keys that came in two chunks are all of them.
    state = minimal_attn.forward(q, k[:, :, :50], v[:, :, :50], causal=True, offset=0, return_state=True)
    chunked = minimal_attn.forward(q, k[:, :, 50:], v[:, :, 50:], causal=True, offset=-50, state=state)[0]
    torch.testing.assert_close(chunked, minimal_attn.forward(q, k, v, causal=True))
    # The last step of the decode loop sees the 20 keys that it has filled in.
    pages = [names[name] for name in ("pages_k", "pages_v")]
    paged = minimal_attn.forward(
        q[:, :, 19:20], *pages, seqlens_k=names["filled"], block_table=names["table"]
    )
    causal = minimal_attn.forward(*(t[:, :, :20] for t in (q, k, v)), causal=True)
    torch.testing.assert_close(paged, causal[:, :, 19:])
    assert capsys.readouterr().out.startswith(("cpu", "hopper", "portable"))


PICTURES = {  # the column in which a picture begins: the call
    0: dict(Nq=2, Nk=5, causal=True),
    22: dict(Nq=4, Nk=2, causal=True),
    41: dict(Nq=2, Nk=5, causal=True, offset=0),
    66: dict(Nq=4, Nk=4, window_size=(1, 1)),
    88: dict(Nq=3, Nk=5, causal=True, seqlens_k=[4], leftpad_k=[1]),
}


@pytest.mark.parametrize("column", PICTURES)
def test_pictures_of_masks(backend, column):
    """v's rows are unit vectors, so that a row of o is not 0 where a key is seen."""
    lines = re.search(r"```\n(causal=True,  .*?)```", README, re.DOTALL)[1].splitlines()[2:]
    rows = [match[0].split() for line in lines if (match := re.match(r"[01]( [01])*", line[column:]))]
    options = dict(PICTURES[column])
    Nq, Nk = options.pop("Nq"), options.pop("Nk")
    for name in "seqlens_k", "leftpad_k":
        if name in options:
            options[name] = backend.ints(*options[name])
    q, k = torch.zeros(1, 1, Nq, Nk, device=backend.device), torch.zeros(1, 1, Nk, Nk, device=backend.device)
    v = torch.eye(Nk, device=backend.device)[None, None]
    seen = backend.forward(q, k, v, **options)[0, 0] != 0
    assert seen.int().tolist() == [[int(x) for x in row] for row in rows]


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))])
def test_links(page):
    for link in re.findall(r"\]\(([^)#:]+)(?:#L\d+)?\)", (ROOT / page).read_text()):
        assert (ROOT / page).parent.joinpath(link).exists(), f"{page} links to {link}"


def test_algorithm_1_beside_flash_cu():
    """Each line of code that the README's table quotes stands in flash.cu, in the paper's order."""
    code, at = (ROOT / "flash.cu").read_text(), 0
    rows = re.findall(r"^\| (\d+) \| .* \| `([^`]+)` \|$", README, re.MULTILINE)
    assert [int(step) for step, _ in rows] == [1, 2, *range(5, 14)]
    for _, quoted in rows[1:]:  # the tiles of step 1 are chosen at the launch, below
        at = code.find(quoted, at)
        assert at > 0, f"flash.cu has no {quoted!r}, or it is out of order"
    assert rows[0][1] in code
