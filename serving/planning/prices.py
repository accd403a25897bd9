"""What a chip costs an hour, as read from copies of Google's price pages; `prices:` in the YAML replaces any of them."""

import difflib
from collections.abc import Mapping

from serving.config import SliceSpec
from serving.errors import ConfigError
from serving.tpu import Slice

# By generation and way to buy, USD a chip-hour.
Prices = Mapping[str, Mapping[str, float]]

AS_OF = "2026-09-18"
CURRENCY = "USD"

# Cheapest US region with a list price. Flex-start and spot of v5e (us-west4) and v6e (us-east1, us-east5) are from the
# Billing Catalog of 2026-08; spot prices move. No flex-start or spot price was found for v5p, no spot price for v7x.
PER_CHIP_HOUR: dict[str, dict[str, float]] = {
    "v4": {"on-demand": 3.22},
    "v5e": {"on-demand": 1.20, "flex-start": 0.60, "spot": 0.578, "reserved-1y": 0.84, "reserved-3y": 0.54},
    "v5p": {"on-demand": 4.20, "reserved-1y": 2.94, "reserved-3y": 1.89},
    "v6e": {"on-demand": 2.70, "flex-start": 1.35, "spot": 1.40, "reserved-1y": 1.89, "reserved-3y": 1.22},
    "v7x": {"on-demand": 12.00, "flex-start": 6.00, "reserved-1y": 8.40, "reserved-3y": 5.40},
}


# What a price may be for; a reservation may have one without a term.
OPTIONS = ("on-demand", "flex-start", "spot", "reserved", "reserved-1y", "reserved-3y")


def check(replaced: Prices) -> None:
    """Refuse prices of unknown generations and ways to buy, which would replace nothing."""
    for generation, prices in replaced.items():
        if generation not in PER_CHIP_HOUR:
            raise ConfigError(
                f"prices.{generation}: no such TPU generation; there are {', '.join(PER_CHIP_HOUR)}"
            )
        if unknown := sorted(prices.keys() - set(OPTIONS)):
            near = difflib.get_close_matches(unknown[0], OPTIONS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(OPTIONS)}"
            raise ConfigError(f"prices.{generation}.{unknown[0]}: no way to buy a slice; {hint}")


def chip_hour(generation: str, replaced: Prices | None = None) -> dict[str, float]:
    """Price of a chip-hour by purchase option; the YAML's prices replace the table's."""
    return {**PER_CHIP_HOUR[generation], **(replaced or {}).get(generation, {})}


def slice_hour(spec: SliceSpec, slice_: Slice, replaced: Prices) -> float:
    """Price of a slice-hour by the first way to buy it; a reservation without a price costs as on demand."""
    prices = chip_hour(slice_.generation, replaced)
    way = spec.capacity[0].value
    price = prices.get(way) or prices.get(f"{way}-1y") or prices["on-demand"]
    return price * slice_.chips
