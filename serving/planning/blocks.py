"""`block_configs` of Nemotron's searched architectures: each layer has its own KV heads and width, or no attention or MLP at all.

Source: vLLM 0.26's nemotron_nas.py.
"""

from collections import Counter
from dataclasses import dataclass

from serving.errors import PlanError
from serving.planning.checked_config import Keys

_MULTIPLE = 256  # that widths given as a multiple of the model's are rounded up to


@dataclass(frozen=True)
class Block:
    """A layer: its KV heads and its MLP's width, 0 where it has none."""

    kv_heads: int
    width: int


def blocks(text: Keys, layers: int, heads: int) -> list[Block]:
    """The layers of a config that lists them, else none; raises PlanError."""
    listed = text.entries("block_configs", layers)
    return [_block(text, Keys(block, f"{text.where} (block {n})"), heads) for n, block in enumerate(listed)]


def widths(listed: list[Block]) -> tuple[tuple[int, int], ...]:
    """(layers, width) of their MLPs."""
    found = Counter(block.width for block in listed if block.width)
    return tuple((count, width) for width, count in found.items())


def _block(text: Keys, block: Keys, heads: int) -> Block:
    attention, mlp = block.within("attention"), block.within("ffn")
    if attention is None or mlp is None:
        raise PlanError(
            f"config.json of {block.where}: a block has attention and ffn, this one lacks one of them"
        )
    for part in (attention, mlp):
        if part.get("replace_with_linear"):
            raise PlanError(
                f"config.json of {part.where}: replace_with_linear is set, which vLLM 0.26 does not read (nemotron_nas.py)"
            )
    return Block(
        kv_heads=0 if attention.get("no_op") else heads // attention.number("n_heads_in_group", most=heads),
        width=0 if mlp.get("no_op") else _width(mlp, text.number("hidden_size")),
    )


def _width(mlp: Keys, hidden: int) -> int:
    multiple = mlp.get("ffn_mult")
    if multiple is None:
        return mlp.number("intermediate_size")
    if not isinstance(multiple, int | float) or not 0 < multiple < hidden:
        raise PlanError(f"config.json of {mlp.where}: ffn_mult is {multiple!r}, not a number above 0")
    width = int(2 * multiple * hidden / 3)
    return width + -width % _MULTIPLE
