"""Lines over time as SVG, for a report that needs no network and no script."""

import math
from collections.abc import Mapping, Sequence
from html import escape

_COLORS = ("#2563eb", "#d97706", "#16a34a", "#dc2626", "#7c3aed")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 560, 240, 64, 28, 44
_LEAST = 1e-9  # no figure worth a line is smaller
Line = Sequence[tuple[float, float | None]]


def plot(title: str, lines: Mapping[str, Line]) -> str:
    """Lines by name; where nothing was measured there is a gap."""
    points = [point for line in lines.values() for point in line if point[1] is not None]
    last = max((second for second, _ in points), default=0) or 1
    step = _step(max((value for _, value in points if value is not None), default=0) or 1)
    top = step * max(1, math.ceil(max((value or 0 for _, value in points), default=0) / step))

    def x(second: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - 16) * second / last

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * value / top

    shapes = [f'<text x="{_LEFT}" y="16" font-weight="bold">{escape(title)}</text>']
    for number in range(round(top / step) + 1):
        value = number * step
        shapes.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - 16}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#8884"/>'
        )
        shapes.append(f'<text x="{_LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>')
    shapes += [
        f'<text x="{x(share * last):.1f}" y="{_HEIGHT - 8}" text-anchor="middle">{share * last:.0f} s</text>'
        for share in (0, 0.5, 1)
    ]
    for number, (name, line) in enumerate(lines.items()):
        color = _COLORS[number % len(_COLORS)]
        shapes.append(f'<text x="{_LEFT + 120 * number}" y="34" fill="{color}">{escape(name)}</text>')
        for stretch in _stretches(line):
            path = " ".join(f"{x(second):.1f},{y(value):.1f}" for second, value in stretch)
            shapes.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
            if len(stretch) == 1:
                shapes.append(
                    f'<circle cx="{x(stretch[0][0]):.1f}" cy="{y(stretch[0][1]):.1f}" r="3" fill="{color}"/>'
                )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif" '
        f'font-size="12" fill="currentColor">{"".join(shapes)}</svg>'
    )


def _stretches(line: Line) -> list[list[tuple[float, float]]]:
    """The parts of a line without a gap."""
    found: list[list[tuple[float, float]]] = [[]]
    for second, value in line:
        if value is None:
            found.append([])
        else:
            found[-1].append((second, value))
    return [stretch for stretch in found if stretch]


def _step(most: float) -> float:
    """A round number that goes into the highest value two to five times."""
    unit = 10 ** math.floor(math.log10(max(most, _LEAST)))
    return next((unit * part for part in (0.2, 0.5, 1) if most / (unit * part) <= 5), 2 * unit)
