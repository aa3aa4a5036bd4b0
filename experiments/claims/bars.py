"""One figure of a claim as an SVG: a bar a case with its interval, and a band where the claim says it would end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Final

from .arithmetic import Number
from .claim import UNITS, Figure, shown

WIDTH, LEFT, RIGHT, ROW, TOP = 720, 300, 90, 30, 34
INK, BAR, BAND, RULE = "#333333", "#1f4e79", "#f0c36d", "#999999"
NAMESPACE: Final = 'xmlns="http://www.w3.org/2000/svg"'
FONT: Final = 'font-family="sans-serif" font-size="13"'


def picture(title: str, figures: Sequence[Figure], numbers: Sequence[Number]) -> str:
    """The picture's text. All figures have the first one's unit."""
    limits = [limit for figure in figures if figure.decides for limit in figure.limits if abs(limit) != float("inf")]
    top = max([number.high for number in numbers] + limits) or 1.0
    bottom = min(0.0, *(number.low for number in numbers), *limits)

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (value - bottom) / (top - bottom)

    height = TOP + ROW * len(figures) + 28
    lines = [
        f'<svg {NAMESPACE} width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title>",
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="20" {FONT} font-weight="bold" fill="{INK}">{escape(title)}</text>',
    ]
    for index, (figure, number) in enumerate(zip(figures, numbers, strict=True)):
        lines += _row(TOP + ROW * index, figure, number, x, (bottom, top))
    lines.append(f'<line x1="{x(0):.1f}" y1="{TOP}" x2="{x(0):.1f}" y2="{height - 28}" stroke="{INK}"/>')
    legend = "band: what is claimed; line: 90 % interval" if limits else "line: 90 % interval"
    unit = figures[0].unit if UNITS[figures[0].unit] != 1 or figures[0].unit else "count"
    lines.append(f'<text x="{LEFT}" y="{height - 8}" {FONT} fill="{RULE}">{escape(unit)}; {legend}</text>')
    return "\n".join([*lines, "</svg>\n"])


def _row(y: float, figure: Figure, number: Number, x: Callable[[float], float], ends: tuple[float, float]) -> list[str]:
    lines = []
    if figure.decides:
        low, high = (x(min(max(limit, ends[0]), ends[1])) for limit in figure.limits)
        lines.append(
            f'<rect x="{low:.1f}" y="{y}" width="{max(high - low, 2):.1f}" height="{ROW - 2}" fill="{BAND}" opacity="0.5"/>'
        )
    start, end = sorted((x(0), x(number.value)))
    lines += [
        f'<text x="{LEFT - 8}" y="{y + 18}" {FONT} text-anchor="end" fill="{INK}">{escape(_short(figure.says))}</text>',
        f'<rect x="{start:.1f}" y="{y + 7}" width="{end - start:.1f}" height="{ROW - 16}" fill="{BAR}"/>',
        f'<line x1="{x(number.low):.1f}" y1="{y + 14}" x2="{x(number.high):.1f}" y2="{y + 14}" stroke="{RULE}" stroke-width="2"/>',
        f'<text x="{max(end, x(number.high)) + 6:.1f}" y="{y + 18}" {FONT} fill="{INK}">{escape(shown(number.value, figure.unit))}</text>',
    ]
    return lines


def _short(text: str, most: int = 42) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
