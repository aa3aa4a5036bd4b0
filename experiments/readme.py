"""The parts of README that are made: its picture, and how far off predictions are.

    python experiments/readme.py            writes docs/figures/step.svg, and README between its marks `made: ...`
    python experiments/readme.py --check    writes nothing; exit code 1 where something would change

The errors are those of the pages that `experiments/accuracy.py` and `accuracy_serving.py` write: run those first.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Final

from simulator import Cluster, Model, Plan, Prediction, predict
from simulator.base.units import format_bytes, format_seconds

ROOT: Final = Path(__file__).resolve().parents[1]
README, PICTURE = ROOT / "README.md", ROOT / "docs" / "figures" / "step.svg"
MARKED: Final = re.compile(r"(<!-- made: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

LEFT, WIDTH, TOP = 120, 740, 60  # of the panels
ROW, GAP, HEIGHT = 26, 8, 130  # of a stream, between streams, of the memory
COLOURS: Final = {  # Okabe and Ito's, told apart by most colour-blind readers (doi.org/10.1038/nmeth.1618)
    "gemm": "#0072b2", "all_gather": "#e69f00", "reduce_scatter": "#d55e00", "optimizer": "#009e73",
}  # fmt: skip
OTHER: Final = "#999999"


def asked() -> Prediction:
    """The embedded default: what README's first command predicts."""
    return predict(Model.load("llama3-8b"), Plan(dp_shard=8, zero=3, seq_len=8192), Cluster.load("hgx-h100-8"))


def picture(p: Prediction) -> str:
    """One step as SVG: what each stream does, and what the fullest rank holds."""
    m = p.memory
    interval = f"{format_seconds(p.low_s)} to {format_seconds(p.high_s)}"
    heads = (
        f"{p.model} on {p.cluster}: a step takes {format_seconds(p.step_s)} ({interval})",
        f"each GPU needs {format_bytes(m.used_bytes)} of {format_bytes(m.capacity_bytes)}: {p.verdict}",
    )
    below = TOP + 2 * (ROW + GAP) + 40
    size = f'width="{LEFT + WIDTH + 20}" height="{below + HEIGHT + 30}"'
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="13" role="img">',
        f"<title>{escape('; '.join(heads))}</title>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        *(_text(LEFT, 22 + 18 * line, head) for line, head in enumerate(heads)),
        *_streams(p),
        *_memory(p, below),
        "</svg>",
    ]
    return "\n".join(body) + "\n"


def _text(x: float, y: float, words: str, anchor: str = "start", colour: str = "#222222") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{colour}">{escape(words)}</text>'


def _streams(p: Prediction) -> Iterator[str]:
    """A row a stream: in each pixel the first operation that runs in it."""
    spans = [span for span in p.timeline.spans if span.program == p.timeline.spans[0].program]
    streams = sorted({span.stream for span in spans}, key=lambda name: (name != "compute", name))[:2]
    for row, stream in enumerate(streams):
        y = TOP + row * (ROW + GAP)
        yield _text(LEFT - 8, y + 18, "compute" if stream == "compute" else "communication", "end")
        pixels = [""] * WIDTH
        for span in (one for one in spans if one.stream == stream):
            first, last = (int(float(at) / float(p.timeline.step_s) * WIDTH) for at in (span.start_s, span.end_s))
            pixels[first : max(first + 1, last)] = [span.category] * (max(first + 1, last) - first)
        start = 0
        for x in range(1, WIDTH + 1):
            if x == WIDTH or pixels[x] != pixels[start]:
                if pixels[start]:
                    colour = COLOURS.get(pixels[start], OTHER)
                    yield f'<rect x="{LEFT + start}" y="{y}" width="{x - start}" height="{ROW}" fill="{colour}"/>'
                start = x
    y = TOP + 2 * (ROW + GAP) + 12
    for place, (name, colour) in enumerate([*COLOURS.items(), ("other", OTHER)]):
        yield f'<rect x="{LEFT + 150 * place}" y="{y - 9}" width="10" height="10" fill="{colour}"/>'
        yield _text(LEFT + 150 * place + 15, y, "layers (most gemm)" if name == "gemm" else name)


def _memory(p: Prediction, top: int) -> Iterator[str]:
    """What is allocated and reserved, with what lies outside torch, in the order of operations; the capacity above."""
    m, samples = p.memory, p.memory_trace.samples
    y_of = HEIGHT / (1.08 * m.capacity_bytes)
    columns = [samples[x * len(samples) // WIDTH : (x + 1) * len(samples) // WIDTH] for x in range(WIDTH)]
    filled = [column or (samples[x * len(samples) // WIDTH],) for x, column in enumerate(columns)]
    bottom = top + HEIGHT

    def line(sizes: list[int]) -> str:
        points = [f"{LEFT + x},{bottom - (m.outside_torch_bytes + size) * y_of:.1f}" for x, size in enumerate(sizes)]
        return " ".join(points)

    allocated = line([max(one.allocated_bytes for one in column) for column in filled])
    reserved = line([max(one.reserved_bytes for one in column) for column in filled])
    capacity = bottom - m.capacity_bytes * y_of
    yield f'<polygon points="{LEFT},{bottom} {allocated} {LEFT + WIDTH - 1},{bottom}" fill="#56b4e9"/>'
    yield f'<polyline points="{reserved}" fill="none" stroke="#222222"/>'
    across = f'x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{capacity:.1f}" y2="{capacity:.1f}"'
    yield f'<line {across} stroke="#d55e00" stroke-dasharray="6 4"/>'
    yield _text(LEFT - 8, capacity + 4, f"capacity {format_bytes(m.capacity_bytes)}", "end", "#b34700")
    yield _text(LEFT - 8, bottom - 50, "memory of", "end")
    yield _text(LEFT - 8, bottom - 34, "the fullest rank", "end")
    yield _text(LEFT, bottom + 18, "black: reserved by the allocator; blue: live tensors, in the order of operations")


def errors() -> str:
    """How far off predictions are, from the pages that say so."""
    page = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
    rows = {
        "step time, software described by a stack": _cells(page, "Coverage and sharpness", "all", (1, 4, 5, 2)),
        "step time, as if nobody had described it": _cells(page, "My framework is not described", "all", (1, 2, 3, 4)),
        "live tensors at the peak": (*_cells(page, "Memory", "allocated by torch, peak", (1, 2, 3)), "–"),
        "reserved memory at the peak": (*_cells(page, "Memory", "reserved by torch, peak", (1, 2, 3)), "–"),
    }
    lines = ["| | measured runs | half are closer than | nine in ten are closer than | in the 90 % interval |"]
    lines += ["| --- | --: | --: | --: | --: |", *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items())]
    return "\n".join(lines) + "\n"


def _cells(page: str, section: str, row: str, columns: tuple[int, ...]) -> tuple[str, ...]:
    """Cells of the row of that name in the section's table."""
    _, _, text = page.partition(f"\n## {section}\n")
    found = re.search(rf"^\| {re.escape(row)} \|.*\|$", text.partition("\n## ")[0], re.MULTILINE)
    if found is None:
        raise SystemExit(f"docs/accuracy.md: no row {row} in {section}")
    cells = [cell.strip().strip("*") for cell in found[0].strip("|").split("|")]
    return tuple(f"{int(cells[each]):,}" if cells[each].isdigit() else cells[each] for each in columns)


def made() -> dict[Path, str]:
    """Every file that is written, and its text."""
    text = README.read_text(encoding="utf-8")
    return {README: MARKED.sub(lambda found: found[1] + errors() + found[3], text), PICTURE: picture(asked())}


def main() -> int:
    """Write what changed, or only name it."""
    changed = [
        (file, text) for file, text in made().items() if not file.exists() or file.read_text(encoding="utf-8") != text
    ]
    for file, text in changed:
        print(f"{file.relative_to(ROOT)} {'is stale' if '--check' in sys.argv else 'written'}")
        if "--check" not in sys.argv:
            file.write_text(text, encoding="utf-8")
    return 1 if changed and "--check" in sys.argv else 0


if __name__ == "__main__":
    raise SystemExit(main())
