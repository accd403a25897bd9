"""`make bench`: every comparison, one after the other.

python -m benchmarks              # about 15 minutes on two quiet cores, and some more to make the peers' environments
python -m benchmarks --quick      # routers alone and fewer of them: about 2 minutes
python -m benchmarks --docs       # and put tables and plot into docs/benchmarks
"""

import argparse
import sys
import time
from pathlib import Path

from rich.console import Console

from benchmarks import accounting, bare, plot, ray_llm, relay, routers
from benchmarks.pages import put

PAGES = Path(__file__).parent.parent / "docs" / "benchmarks"
SVG = PAGES / "routers.svg"
# Which page a report stands on.
PAGE_OF = {"routers": "routers.md", "relay": "engines.md", "ray-llm": "engines.md"}


def main() -> None:
    accounting.unwind_on_sigterm()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="routers alone, and fewer of them")
    parser.add_argument("--docs", action="store_true", help="put tables and plot into docs/benchmarks")
    parser.add_argument("--svg", type=Path, default=None, help="where to draw the plot")
    options = parser.parse_args()
    if options.quick and options.docs:
        parser.error("--docs takes the figures of a whole run, not of a quick one")
    console = Console(stderr=True)
    began = time.monotonic()
    reports = {}
    size = routers.QUICK if options.quick else routers.FULL
    measured = routers.measure(size, console)
    reports["routers"] = routers.report(*measured, size)
    svg = plot.svg(routers.panels(measured[0], measured[1], size))
    if not options.quick:
        reports["relay"] = bare.report(*relay.measure(bare.FULL, console), bare.FULL)
        reports["ray-llm"] = bare.report(*ray_llm.measure(bare.FULL, console), bare.FULL)
    for name, report in reports.items():
        print(f"\n## {name}\n\n{report}")
    if path := options.svg or (SVG if options.docs else None):
        path.write_text(svg)
    if options.docs:
        for name, report in reports.items():
            page = PAGES / PAGE_OF[name]
            page.write_text(put(page.read_text(), name, report))
    console.print(f"{(time.monotonic() - began) / 60:.1f} minutes", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
