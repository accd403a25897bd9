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


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping, where YAML's own loader takes the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Looked at before anchors are merged in: what `<<` brings may stand again, for that is how it is changed."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        first: dict[tuple[str, Any], int] = {}
        for key, _ in node.value:
            name = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else (key.tag, id(key))
            if name in first:
                problem = f"{key.value} stands twice in one mapping, first in line {first[name]}; take one of them out"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            first[name] = key.start_mark.line + 1
        return node


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
