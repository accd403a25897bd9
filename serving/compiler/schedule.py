"""The cycles that the compiler estimates for a program, read from the text of the compiled module. Nothing has run.

The compiler writes an estimate (`estimated_cycles` of an instruction's `backend_config`) at what it schedules itself: fusions, copies,
what is computed element by element. Kernels, collectives, loops and copies that run beside other work have none; they are counted by name.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

_HEAD = re.compile(r"(ENTRY )?%(\S+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%(\S+) = .*?[\]})] ([a-z][a-z0-9-]*)\(")
_ESTIMATE = re.compile(r'"estimated_cycles":"(\d+)"')
_CALLED = re.compile(r"calls=%([^\s,]+)")
_KERNEL = 'custom_call_target="tpu_custom_call"'
_NUMBER = re.compile(r"\.\d+$")  # of an instruction, behind the name of its kernel
_PRODUCTS = frozenset({"convolution", "dot"})
_MOVES = frozenset(
    {
        "bitcast",
        "concatenate",
        "constant",
        "copy",
        "dynamic-slice",
        "dynamic-update-slice",
        "fusion",
        "get-tuple-element",
        "pad",
        "parameter",
        "reshape",
        "slice",
        "transpose",
        "tuple",
    }
)
# With or without `-start` behind it. A copy that is not started beside other work has an estimate.
_WITHOUT_ESTIMATE = frozenset(
    {
        "all-gather",
        "all-reduce",
        "all-to-all",
        "async",
        "call",
        "collective-permute",
        "conditional",
        "copy-start",
        "reduce-scatter",
        "sort",
        "while",
    }
)


@dataclass(frozen=True)
class Schedule:
    """Estimated cycles of one device, and how often what has no estimate is started.

    `product_cycles` are of fusions with a matrix product, which wait for their weights too unless those were copied ahead to the chip's own
    memory; `move_cycles` of what computes nothing: copies to other layouts, slices. `unestimated` has Pallas kernels, collectives, copies
    ahead, sorts and loops, whose inside is not counted either.
    """

    product_cycles: int = 0
    move_cycles: int = 0
    other_cycles: int = 0
    unestimated: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Instruction:
    name: str
    opcode: str
    line: str


def schedule(text: str) -> Schedule:
    """What an HLO module's text says of its entry computation."""
    entry, computations = _computations(text)
    cycles: Counter[str] = Counter()
    unestimated: Counter[str] = Counter()
    for instruction in computations[entry]:
        if estimate := _ESTIMATE.search(instruction.line):
            cycles[_kind(_opcodes(instruction, computations))] += int(estimate[1])
        elif name := _without_estimate(instruction):
            unestimated[name] += 1
    return Schedule(cycles["product"], cycles["move"], cycles["other"], dict(sorted(unestimated.items())))


def _computations(text: str) -> tuple[str, dict[str, list[_Instruction]]]:
    """The name of the entry computation, and every computation's instructions."""
    found: dict[str, list[_Instruction]] = defaultdict(list)
    entry = name = ""
    for line in text.splitlines():
        if head := _HEAD.match(line):
            name = head[2]
            entry = name if head[1] else entry
        elif stated := _INSTRUCTION.match(line):
            found[name].append(_Instruction(stated[1], stated[2], line))
    return entry, found


def _opcodes(instruction: _Instruction, computations: Mapping[str, list[_Instruction]]) -> Iterator[str]:
    """Those of an instruction and of all that is fused into it."""
    yield instruction.opcode
    if instruction.opcode == "fusion" and (called := _CALLED.search(instruction.line)):
        for inner in computations[called[1]]:
            yield from _opcodes(inner, computations)


def _kind(opcodes: Iterator[str]) -> str:
    found = set(opcodes)
    if found & _PRODUCTS:
        return "product"
    return "move" if found <= _MOVES else "other"


def _without_estimate(instruction: _Instruction) -> str | None:
    """The name of what takes time and has no estimate. The end of what runs beside others (`-done`) is no other start."""
    for opcode in (instruction.opcode, instruction.opcode.removesuffix("-start")):
        if opcode in _WITHOUT_ESTIMATE:
            return opcode
    return _NUMBER.sub("", instruction.name) if _KERNEL in instruction.line else None
