"""API keys that requests carry, each under a name that the statistics show.

interactive: {key: sk-1, share: 3}   # three of four requests
batch: {key: sk-2, share: 1}
"""

from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import yaml

from bad_input import BadInputError


@dataclass(frozen=True)
class Key:
    """A key, its name in the statistics (none where there is but one), and its share of the requests."""

    name: str
    value: str = field(repr=False)
    share: float = 1.0


def load(path: Path) -> list[Key]:
    """Keys of a YAML file; raises BadInputError."""
    wanted = "wanted is NAME: {key: KEY, share: NUMBER ABOVE 0}"
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BadInputError(f"API keys {path}: {error}") from None
    if not isinstance(content, dict) or not content:
        raise BadInputError(f"API keys {path}: {wanted}")
    found = []
    for name, entry in content.items():
        if (
            not isinstance(entry, dict)
            or not isinstance(entry.get("key"), str)
            or entry.keys() - {"key", "share"}
        ):
            raise BadInputError(f"API keys {path}, {name}: {wanted}")
        share = entry.get("share", 1)
        if isinstance(share, bool) or not isinstance(share, int | float) or not share > 0:
            raise BadInputError(f"API keys {path}, {name}: {wanted}")
        found.append(Key(str(name), entry["key"], share))
    return found


def pick(keys: list[Key], random: Random) -> Key | None:
    """By their shares."""
    return random.choices(keys, [key.share for key in keys])[0] if keys else None
