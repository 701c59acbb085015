"""The README's table of Algorithm 1's steps points at the lines that it means."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_lines_of_the_steps():
    rows = re.findall(r"^\| (\d+)[^|]* \|.*\|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert rows == [str(int(row)) for row in rows] and len(rows) >= 6
    links = re.findall(r"^\| (\d+).*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert links == rows
    for line in (ROOT / "README.md").read_text().splitlines():
        step = re.match(r"\| (\d+)", line)
        for file, number in re.findall(r"\]\((\w+\.\w+)#L(\d+)\)", line):
            source = (ROOT / file).read_text().splitlines()[int(number) - 1]
            assert step and re.search(rf"// .*\b{step[1]}\.", source), (
                f"{file}:{number} isn't step {step[1]}: {source}"
            )
