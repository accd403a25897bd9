"""Plots as SVG, written by hand: lines of figures over clients, and bars."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

COLOURS = ("#7a8ca8", "#d1495b", "#edae49", "#00798c", "#30638e", "#6a994e", "#8d6a9f")
_WIDTH, _HEIGHT = 330, 300
_LEFT, _TOP, _BOTTOM = 48, 34, 40
_BAR, _NAME = 22, 16


@dataclass(frozen=True)
class Lines:
    """Figures by clients (on a logarithmic axis), one line a name."""

    title: str
    lines: Mapping[str, Sequence[tuple[int, float]]]


@dataclass(frozen=True)
class Bars:
    """One figure a name."""

    title: str
    bars: Mapping[str, float]


def svg(panels: Sequence[Lines | Bars]) -> str:
    """The panels side by side, each name in the same colour everywhere."""
    names = list(dict.fromkeys(name for panel in panels for name in _names(panel)))
    colours = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}
    width, height = _WIDTH * len(panels), _HEIGHT + 20 * math.ceil(len(names) / len(panels))
    shapes = [f'<rect width="{width}" height="{height}" fill="white"/>']
    for number, panel in enumerate(panels):
        drawn = _lines(panel, colours) if isinstance(panel, Lines) else _bars(panel, colours)
        shapes.append(f'<g transform="translate({number * _WIDTH} 0)">')
        shapes.append(f'<text x="{_LEFT}" y="18" font-weight="bold">{panel.title}</text>')
        shapes += [*drawn, "</g>"]
    for number, name in enumerate(names):
        x, y = 12 + _WIDTH * (number % len(panels)), _HEIGHT + 12 + 20 * (number // len(panels))
        shapes.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{colours[name]}"/>')
        shapes.append(f'<text x="{x + 18}" y="{y}">{_plain(name)}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">\n' + "\n".join(shapes) + "\n</svg>\n"
    )


def _lines(panel: Lines, colours: Mapping[str, str]) -> list[str]:
    clients = sorted({at for line in panel.lines.values() for at, _ in line})
    top = _round_up(max(figure for line in panel.lines.values() for _, figure in line))
    right, bottom = _WIDTH - 16, _HEIGHT - _BOTTOM

    def x(at: int) -> float:
        if len(clients) == 1:
            return (_LEFT + right) / 2
        share = math.log(at / clients[0]) / math.log(clients[-1] / clients[0])
        return _LEFT + 10 + (right - _LEFT - 20) * share

    def y(figure: float) -> float:
        return bottom - (bottom - _TOP) * figure / top

    shapes = []
    for tick in (0, top / 2, top):
        shapes.append(
            f'<line x1="{_LEFT}" x2="{right}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="#dde3ec"/>'
        )
        shapes.append(f'<text x="{_LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    shapes += [f'<text x="{x(at):.1f}" y="{bottom + 18}" text-anchor="middle">{at}</text>' for at in clients]
    shapes.append(f'<text x="{(_LEFT + right) / 2}" y="{bottom + 34}" text-anchor="middle">clients</text>')
    for name, line in panel.lines.items():
        points = " ".join(f"{x(at):.1f},{y(figure):.1f}" for at, figure in line)
        shapes.append(f'<polyline points="{points}" stroke="{colours[name]}" stroke-width="2" fill="none"/>')
        for at, figure in line:
            shapes.append(
                f'<circle cx="{x(at):.1f}" cy="{y(figure):.1f}" r="3.5" fill="{colours[name]}">'
                f"<title>{_plain(name)}, {at} clients: {figure:.1f}</title></circle>"
            )
    return shapes


def _bars(panel: Bars, colours: Mapping[str, str]) -> list[str]:
    longest = max(panel.bars.values(), default=0) or 1
    shapes = []
    for number, (name, figure) in enumerate(panel.bars.items()):
        y = _TOP + number * (_BAR + _NAME)
        length = max(1.0, (_WIDTH - 2 * _LEFT - 40) * figure / longest)
        shapes.append(
            f'<rect x="{_LEFT}" y="{y}" width="{length:.1f}" height="{_BAR}" fill="{colours[name]}">'
            f"<title>{_plain(name)}: {figure:,.0f}</title></rect>"
        )
        shapes.append(f'<text x="{_LEFT + length + 6:.1f}" y="{y + _BAR - 6}">{figure:,.0f}</text>')
    return shapes


def _names(panel: Lines | Bars) -> list[str]:
    return list(panel.lines if isinstance(panel, Lines) else panel.bars)


def _plain(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _round_up(value: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    power = 10 ** math.floor(math.log10(value)) if value > 0 else 1
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value)
