"""A line chart as an SVG picture, without a plotting library."""

from collections.abc import Mapping, Sequence
from html import escape
from math import floor, log2, log10
from pathlib import Path

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 190, 50, 60
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")
"""Told apart also by readers who do not see all colours (Okabe and Ito's palette)."""

Points = Sequence[tuple[float, float]]


def line_chart(path: Path, title: str, x_label: str, y_label: str, series: Mapping[str, Points]) -> None:
    """Writes one line per series; x > 0 on a logarithmic axis, y ≥ 0 on a linear one that starts at 0. Raises OSError."""
    xs = sorted({x for points in series.values() for x, _ in points})
    top = _round_up(max((y for points in series.values() for _, y in points), default=0.0) or 1.0)
    span = log2(xs[-1] / xs[0]) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + log2(x / xs[0]) / span * (WIDTH - LEFT - RIGHT)
        return round(across, 1), round(HEIGHT - BOTTOM - y / top * (HEIGHT - TOP - BOTTOM), 1)

    parts = [_text(WIDTH / 2, 26, title, anchor="middle", size=15)]
    for step in range(6):
        y = top * step / 5
        left, level = place(xs[0], y)
        parts.append(f'<line x1="{left}" y1="{level}" x2="{WIDTH - RIGHT}" y2="{level}" stroke="#ddd"/>')
        parts.append(_text(left - 8, level + 4, f"{y:.3g}", anchor="end"))
    parts += [_text(place(x, 0)[0], HEIGHT - BOTTOM + 18, f"{x:g}", anchor="middle") for x in _thinned(xs)]
    parts.append(_text((WIDTH - RIGHT + LEFT) / 2, HEIGHT - 14, x_label, anchor="middle"))
    parts.append(_text(LEFT, TOP - 8, y_label))
    for number, (name, points) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        dash = "" if number < len(COLOURS) else ' stroke-dasharray="5 3"'
        places = [place(x, y) for x, y in points]
        line = " ".join(f"{across},{level}" for across, level in places)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        parts += [f'<circle cx="{across}" cy="{level}" r="2.5" fill="{colour}"/>' for across, level in places]
        parts.append(_text(WIDTH - RIGHT + 12, TOP + 16 * number + 8, name, fill=colour))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">'
    body = "\n".join([head, f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>', *parts, "</svg>"])
    path.write_text(body + "\n", encoding="utf-8")


def _round_up(y: float) -> float:
    """The next of 1, 2, 2.5, 5 and 10 times a power of ten: a fifth of it is a short number."""
    power: float = 10 ** floor(log10(y))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= y)


def _thinned(xs: Sequence[float]) -> Sequence[float]:
    """At most nine of the values, evenly chosen."""
    return xs[:: -(-len(xs) // 9)]


def _text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 12, fill: str = "#222") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}" fill="{fill}">{escape(words)}</text>'
