"""The comparison as a picture."""

import statistics
from collections.abc import Sequence

from benchmarks.routing.load import Seen
from benchmarks.routing.policies import OURS


def svg(rows: Sequence[Seen]) -> str:
    """Median and 99th percentile of TTFT, a bar a policy, a group a load."""
    loads = list(dict.fromkeys(row.load for row in rows))
    width, left, line, head = 760, 170, 18, 26
    worst = max(statistics.quantiles(row.first_s, n=100)[98] for row in rows)
    scale, shapes, top = (width - left - 130) / worst, [], 14
    for load in loads:
        shapes.append(f'<text x="{left}" y="{top + 12}" font-weight="bold">{load}</text>')
        top += head
        for row in (row for row in rows if row.load == load):
            first = statistics.quantiles(row.first_s, n=100)
            fill = "#2a6f4e" if row.policy.startswith(OURS) else "#7a8ca8"
            hits = row.cached_tokens / max(1.0, row.prompt_tokens)
            said = f"{first[49] * 1000:.0f} / {first[98] * 1000:.0f} ms, {hits:.0%}"
            shapes += [
                f'<text x="{left - 8}" y="{top + 11}" text-anchor="end">{row.policy}</text>',
                f'<rect x="{left}" y="{top}" width="{first[98] * scale:.1f}" height="13" fill="{fill}" opacity="0.35"/>',
                f'<rect x="{left}" y="{top}" width="{first[49] * scale:.1f}" height="13" fill="{fill}"/>',
                f'<text x="{left + first[98] * scale + 6:.1f}" y="{top + 11}">{said}</text>',
            ]
            top += line
        top += 10
    shapes.append(
        f'<text x="{left}" y="{top + 8}">TTFT p50 (dark) and p99 (light), share of prompt tokens from the cache</text>'
    )
    height = top + 20
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        f'font-size="12">\n<rect width="{width}" height="{height}" fill="white"/>\n'
        + "\n".join(shapes)
        + "\n</svg>\n"
    )
