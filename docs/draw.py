"""Draws the pictures of docs/ as SVG, with Python alone: python docs/draw.py"""

from pathlib import Path

GREY, BLUE, GREEN, ORANGE, RED = "#e8e8e8", "#cfe2ff", "#d3f0d3", "#ffe3bd", "#f8cfcf"


class Picture:
    def __init__(self, width, height):
        self.size = width, height
        self.parts = [f'<rect width="{width}" height="{height}" fill="white"/>']

    def text(self, x, y, words, anchor="middle", size=13, bold=False):
        weight = ' font-weight="bold"' if bold else ""
        words = words.replace("&", "&amp;").replace("<", "&lt;")
        self.parts.append(
            f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}"{weight}>{words}</text>'
        )

    def box(self, x, y, width, height, words="", fill=GREY, size=13):
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="3" fill="{fill}" stroke="#555"/>'
        )
        lines = words.split("\n")
        first = y + height / 2 + size * 0.35 - (len(lines) - 1) / 2 * size * 1.25
        for n, line in enumerate(lines):
            self.text(x + width / 2, first + n * size * 1.25, line, size=size)

    def arrow(self, x0, y0, x1, y1, words="", both=False):
        start = ' marker-start="url(#head)"' if both else ""
        self.parts.append(f'<path d="M{x0} {y0}L{x1} {y1}" stroke="#222" marker-end="url(#head)"{start}/>')
        if words:
            self.text((x0 + x1) / 2, (y0 + y1) / 2 - 5, words, size=11)

    def save(self, name):
        width, height = self.size
        head = (
            '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto-start-reverse"><path d="M0 0L8 4L0 8z"/></marker>'
        )
        Path(__file__).with_name(name).write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'font-family="sans-serif"><defs>{head}</defs>\n' + "".join(self.parts) + "</svg>\n"
        )


def draw_ways():
    """What moves between the memories on each rung."""
    p = Picture(940, 560)
    for x, words in ((215, "HBM"), (430, "L2 cache"), (600, "shared memory"), (840, "registers")):
        p.text(x, 24, words, bold=True)

    def rung(y, name, what):
        p.text(12, y + 16, name, "start", 14, bold=True)
        for n, line in enumerate(what.split("\n")):
            p.text(12, y + 36 + 16 * n, line, "start", 11)
        if y > 40:
            p.parts.append(f'<path d="M10 {y - 10}H930" stroke="#bbb"/>')

    rung(40, "flash.cu", "for j: for i:\none block a head")
    p.box(160, 45, 110, 28, "K, V", BLUE)
    p.box(160, 81, 110, 28, "Q; l, m", ORANGE)
    p.box(160, 124, 110, 28, "O", ORANGE)
    p.box(520, 45, 160, 28, "Kj, Vj", BLUE)
    p.box(520, 80, 160, 40, "Qi, li, mi\nSij, then Pij", ORANGE, 12)
    p.box(770, 45, 150, 107, "4 x 4 patches of\nSij and Oi", GREEN)
    p.arrow(270, 59, 520, 59, "once for each j")
    p.arrow(270, 95, 520, 95, "for each (i, j): in; l, m out, too", both=True)
    p.arrow(680, 82, 770, 82, "each step", both=True)
    p.arrow(270, 138, 770, 138, "for each (i, j): in and out", both=True)

    rung(180, "portable/", "grid over i, for j:\nBr queries a block")
    p.box(160, 185, 110, 36, "Q, K, V", BLUE)
    p.box(160, 238, 110, 36, "O, l, m", ORANGE)
    p.box(520, 185, 160, 52, "Qi;  Kj, Vj\nPij (FMA units)", BLUE)
    p.box(770, 185, 150, 90, "Sij; Pij (mma.sync)\nOi, li, mi\nstay while j runs", GREEN)
    p.arrow(270, 203, 520, 203, "Qi once; Kj, Vj for each j (cp.async)")
    p.arrow(680, 211, 770, 211, "", both=True)
    p.arrow(770, 256, 270, 256, "once, at the end")

    rung(310, "hopper/half.cu", "persistent blocks;\na producer warpgroup,\n1 to 3 consumers")
    p.box(160, 315, 110, 36, "Q, K, V", BLUE)
    p.box(160, 368, 110, 36, "O", ORANGE)
    p.box(520, 315, 160, 40, "stages of Qi, Kj, Vj", BLUE)
    p.box(520, 368, 160, 36, "O in a free stage", ORANGE)
    p.box(770, 315, 150, 90, "Sij, Pij, Oi, li, mi\nof 64 rows\na consumer", GREEN)
    p.arrow(270, 333, 520, 333, "TMA, by producer threads")
    p.arrow(680, 333, 770, 333, "wgmma")
    p.arrow(770, 386, 680, 386)
    p.arrow(520, 386, 270, 386, "TMA")

    rung(440, "hopper/float32/", "the same, and\nsplitter warps")
    p.box(160, 445, 110, 36, "K, V float32", BLUE)
    p.box(160, 500, 110, 36, "Q, O float32", ORANGE)
    p.box(370, 445, 120, 36, "workspace: hi, lo", RED)
    p.box(520, 445, 160, 36, "stages of Kj, Vj: hi, lo", RED, 12)
    p.box(520, 500, 160, 36, "Qi: split in place", RED)
    p.box(770, 445, 150, 90, "Sij; Pij as hi, lo\nTij = Pij Vj\nOi = alpha Oi + Tij", GREEN)
    p.arrow(270, 463, 370, 463, "split once")
    p.arrow(490, 463, 520, 463)
    p.text(505, 492, "TMA", size=11)
    p.arrow(680, 463, 770, 463, "3 wgmmas")
    p.arrow(270, 511, 520, 511, "Qi, TMA")
    p.arrow(770, 528, 270, 528)
    p.save("ways.svg")


def draw_timelines():
    """What is busy when: ping-pong at d 128, and the sequential steps of float32 at d 64."""
    p = Picture(940, 430)
    left, scale = 120, 0.13  # pixels a cycle

    def row(y, name):
        p.text(110, y + 19, name, "end")

    def span(y, begin, end, words, fill):
        if end * scale + left <= 930:
            p.box(left + begin * scale, y, (end - begin) * scale, 28, words, fill, 11)

    p.text(12, 24, "half.cu, d 128: two consumers take turns (ping-pong)", "start", 14, bold=True)
    for y, name in ((40, "tensor cores"), (76, "consumer 0"), (112, "consumer 1"), (148, "TMA")):
        row(y, name)
    for turn in range(6):
        at, c = 1024 * turn, turn % 2
        fill = BLUE if c == 0 else GREEN
        span(40, at, at + 512, f"S of {c}", fill)
        span(40, at + 512, at + 1024, f"P V of {c}", fill)
        span(76 + 36 * c, at, at + 512, "wait for S", GREY)
        span(76 + 36 * c, at + 512, at + 1900, "mask, exp, sum, pack", fill)
        if c == 0:
            span(148, at, at + 900, "Kj+1", ORANGE)
            span(148, at + 1000, at + 1900, "Vj+1", ORANGE)
    p.text(12, 226, "float32, d 64: one step after the other, four consumers overlap", "start", 14, bold=True)
    row(242, "tensor cores")
    for c in range(4):
        row(278 + 36 * c, f"consumer {c}")
    for c in range(4):
        for tile in range(-1, 2):
            at = 3072 * tile + 768 * c
            fill = (BLUE, GREEN, ORANGE, RED)[c]
            for begin, end, words, busy in (
                (0, 384, "S", True),
                (384, 1152, "exp, split of P", False),
                (1152, 1536, "T", True),
                (1536, 1900, "Oi", False),
            ):
                if at + begin < 0:
                    continue
                span(278 + 36 * c, at + begin, at + end, words, GREY if busy else fill)
                if busy:
                    span(242, at + begin, at + end, f"{words} of {c}", fill)
    p.save("timelines.svg")


def draw_split():
    """A float32 as hi + lo, and which products are taken."""
    p = Picture(940, 150)
    p.text(12, 24, "x times 2^s: 24 bits", "start", 14, bold=True)
    for bit in range(24):
        part, fill = ("hi", BLUE) if bit < 11 else ("lo", GREEN) if bit < 22 else ("", GREY)
        p.box(20 + 22 * bit, 40, 22, 26, "", fill)
    p.text(20 + 11 * 11, 84, "hi: float16, 11 bits")
    p.text(20 + 22 * 11 + 11 * 11, 84, "lo: float16, 11 bits")
    p.text(20 + 22 * 23, 84, "lost", size=11)
    p.text(12, 110, "One s for a whole tile: it brings the largest number", "start", 12)
    p.text(12, 128, "to 2^13 or above. Small numbers have fewer bits in lo.", "start", 12)
    for n, (words, fill) in enumerate(
        (("hi hi, last", BLUE), ("hi lo", GREEN), ("lo hi", GREEN), ("lo lo: left out", GREY))
    ):
        p.box(620 + 150 * (n % 2), 40 + 40 * (n // 2), 140, 32, words, fill)
    p.text(765, 24, "products, small ones first", size=12)
    p.save("split.svg")


def draw_mask():
    """Which tiles of scores are loaded and masked, with causal and a left window."""
    p = Picture(760, 270)
    size, left, top, window = 9, 80, 36, 11  # pixels of a score, its corner, keys that a query sees
    p.text(left + 12 * size, 24, "keys j")
    p.text(38, top + 12 * size, "queries i")
    for i0 in range(0, 24, 4):
        for j0 in range(0, 24, 4):
            seen = [max(i - window + 1, 0) <= j <= i for i in range(i0, i0 + 4) for j in range(j0, j0 + 4)]
            fill = GREEN if all(seen) else ORANGE if any(seen) else GREY
            p.box(left + j0 * size, top + i0 * size, 4 * size, 4 * size, "", fill)
    seen = [(i, j) for i in range(24) for j in range(max(i - window + 1, 0), i + 1)]
    dots = "".join(f"M{left + j * size + 3} {top + i * size + 4}h3" for i, j in seen)
    p.parts.append(f'<path d="{dots}" stroke="#333" stroke-width="3"/>')
    for n, (fill, words) in enumerate(
        (
            (GREEN, "inside keys_of_all: every row sees every key, no mask"),
            (ORANGE, "inside keys_of_any: masked, score by score (keys_of_row)"),
            (GREY, "outside keys_of_any: never loaded"),
        )
    ):
        p.box(320, 60 + 40 * n, 28, 28, "", fill)
        p.text(360, 79 + 40 * n, words, "start")
    p.text(320, 200, "dots: visible scores; causal, window_size=(10, 0)", "start", 12)
    p.save("mask.svg")


if __name__ == "__main__":
    draw_mask()
    draw_ways()
    draw_timelines()
    draw_split()
