"""YAML as people write it: a key that stands twice is an error, and every error says where it is. Pure."""

from typing import Any

import yaml

from serving.errors import ConfigError

# What to look at, by what PyYAML says.
_HINTS = {
    "'\\t'": "YAML is indented with spaces, never with tabs",
    "block end": "look whether this line is indented as its neighbours are",
    "mapping values": "look whether this line is indented as its neighbours are, and put text with a colon into quotes",
    "undefined alias": "an anchor (&) has to stand before it; put text that begins with * into quotes",
    "another document": "write one file for each",
    "unacceptable character": "save the file as UTF-8 text",
}

_UNFIT = (AttributeError, KeyError, ValueError)  # by PyYAML, of a value that its tag does not fit
FAILURES = (yaml.YAMLError, RecursionError, *_UNFIT)  # by PyYAML, of any text
_MOST_SHOWN = 40  # characters of a value
_MOST_BITS = 63  # of a whole number; msgpack and databases take no more


class _Loader(yaml.SafeLoader):
    """Refuses what YAML's own loader takes, as a key that stands twice, and what it fails on without naming a line."""

    def __init__(self, text: bytes) -> None:
        super().__init__(text)
        self._begun: list[str | None] = []  # anchors of the mappings and lists that are being read

    def compose_node(self, parent: Any, index: Any) -> Any:
        """An alias inside of what it stands for has no end."""
        if self.check_event(yaml.AliasEvent):
            alias = self.peek_event()  # type: ignore[no-untyped-call]
            if alias.anchor in self._begun:
                problem = f"*{alias.anchor} stands inside of &{alias.anchor}; write out what is meant"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=alias.start_mark)
        return super().compose_node(parent, index)

    def compose_sequence_node(self, anchor: Any) -> yaml.SequenceNode:
        """The list, none of whose entries is the list itself."""
        self._begun.append(anchor)
        node: yaml.SequenceNode = super().compose_sequence_node(anchor)
        self._begun.pop()
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Looked at before anchors are merged in: what `<<` brings may stand again, for that is how it is changed."""
        self._begun.append(anchor)
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        self._begun.pop()
        first: dict[tuple[str, Any], int] = {}
        for key, _ in node.value:
            name = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else (key.tag, id(key))
            if name in first:
                problem = f"{key.value} stands twice in one mapping, first in line {first[name]}; take one of them out"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            first[name] = key.start_mark.line + 1
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """The value of a node; PyYAML fails on a date that no calendar has, and on numbers that are none."""
        try:
            value = super().construct_object(node, deep)
        except _UNFIT:
            raise _odd(node, "and is none") from None
        if isinstance(value, int) and value.bit_length() > _MOST_BITS:
            raise _odd(node, f"of more than {_MOST_BITS} bits")
        return value


def _odd(node: yaml.Node, how: str) -> yaml.MarkedYAMLError:
    kind = node.tag.rpartition(":")[2]
    problem = f"{str(node.value)[:_MOST_SHOWN]!r} reads as a YAML {kind} {how}; quote it if it is text"
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def load(text: bytes, where: str) -> Any:
    """The document in `text`; raises ConfigError with the line of what is wrong."""
    try:
        return yaml.load(text, _Loader)  # noqa: S506  it is a SafeLoader
    except RecursionError:
        raise ConfigError(f"{where} is not YAML: lists or mappings stand in each other too deeply") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = str(error.problem)
        if problem.startswith("but "):
            problem = f"{error.context}, {problem}"
        raise ConfigError(f"{where} is not YAML{place}: {_with_hint(problem)}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not YAML: {_with_hint(str(error).splitlines()[0])}") from None


def _with_hint(problem: str) -> str:
    hint = next((hint for words, hint in _HINTS.items() if words in problem), "")
    return f"{problem}; {hint}" if hint else problem
