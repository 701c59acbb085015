"""The README's table of Algorithm 1's steps points at the lines that it means."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_lines_of_the_steps():
    found = set()
    for row in re.findall(r"^\| \d+ .*$", (ROOT / "README.md").read_text(), re.MULTILINE):
        step = row.split()[1]
        for number, file in re.findall(r"\[(\d+)\]\((\w+\.\w+)#L\1\)", row):
            line = (ROOT / file).read_text().splitlines()[int(number) - 1]
            assert re.search(rf"// .*\b{step}\.", line), f"{file}:{number} isn't step {step}: {line}"
            found.add((file, step))
    assert found == {
        (file, step)
        for file in ("flash.cu", "flash_sm90.cu", "flash_cpu.cpp")
        for step in map(str, (5, 6, *range(8, 14)))
    }
