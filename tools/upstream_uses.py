"""Which of our modules use a name of vLLM, tpu-inference or Ray's private parts, read off their source by AST."""

import ast
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.python_source import Library, chain
from tools.upstream_names import Name

# vLLM loads our plugins by entry points, which stand there and in no module.
_ENTRY_POINTS = "pyproject.toml"
_OUR_MARK = "serving_"  # begins the attributes that we add to objects of others
_VARIABLE = re.compile(r"VLLM_[A-Z0-9_]+")
_VARIABLES_OF = ("tpu_inference.envs", "vllm.envs")


@dataclass(frozen=True)
class Module:
    """What a module of ours refers to by import or as a variable of the environment, and every word and string in it."""

    references: frozenset[str]
    words: frozenset[str]


def read(root: Path, package: str, library: Library) -> dict[str, Module]:
    """The modules of our package, by name."""
    modules = {}
    for file in sorted((root / package).rglob("*.py")):
        name = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        modules[name] = parse(file.read_text(), library)
    entry_points = root / _ENTRY_POINTS
    if entry_points.exists():
        words = frozenset(re.findall(r"[\w.:-]+", entry_points.read_text()))
        modules[_ENTRY_POINTS] = Module(frozenset(), words)
    return modules


def parse(text: str, library: Library) -> Module:
    nodes = list(ast.walk(ast.parse(text)))
    words = frozenset(_words(nodes))
    imported = {_path(name, library) for name in set(_dotted(nodes)) if _is_watched(name)}
    return Module(
        frozenset(imported | {_variable(word, library) for word in words if _VARIABLE.fullmatch(word)}), words
    )


def users(name: Name, modules: Mapping[str, Module]) -> list[str]:
    """Modules that use a name; where many things bear it, only those that import what stands nearest to it."""
    mentions = [ours for ours, module in modules.items() if _mentions(module, name)]
    near = {ours: _nearness(modules[ours], name.module) for ours in mentions}
    nearest = max(near.values(), default=0)
    is_member = "." in name.path.partition(":")[2]
    if nearest > name.module.count(".") or (is_member and nearest > 1):
        return [ours for ours in mentions if near[ours] == nearest]
    importing = [ours for ours in mentions if modules[ours].references]
    return importing if is_member and importing else mentions


def _mentions(module: Module, name: Name) -> bool:
    if name.line is None:
        return (
            name.path in module.references or name.path.replace(":", ".").rpartition(".")[2] in module.words
        )
    if " " in name.line:
        return any(name.line in word for word in module.words)
    return bool(
        {name.line, f"{name.line}_total"} & module.words
    )  # Prometheus' client adds _total to a counter


def _nearness(module: Module, upstream: str) -> int:
    """How many parts of an upstream module's name the nearest reference has in common with it."""
    wanted = upstream.split(".")
    return max((_common(_module(path).split("."), wanted) for path in module.references), default=0)


def _common(left: Sequence[str], right: Sequence[str]) -> int:
    pairs = zip(left, right, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def uncovered(modules: Mapping[str, Module], names: Iterable[Name]) -> list[tuple[str, str]]:
    """References of ours that no row of the table covers, each with the module that makes it."""
    rows = {name.path if name.line is None else f"{name.path}:{name.line}" for name in names}
    rows |= {name.module for name in names}
    members = {row for row in rows if ":" in row}
    return [
        (ours, path)
        for ours, module in modules.items()
        for path in sorted(module.references)
        if path not in rows and not any(_covers(row, path) for row in members)
    ]


def _covers(row: str, path: str) -> bool:
    """A row covers what is read of its name, and the class that has it."""
    return path.startswith(f"{row}.") or row.startswith(f"{path}.")


def _module(path: str) -> str:
    return path.partition(":")[0]


def _is_watched(dotted: str) -> bool:
    """vLLM and tpu-inference whole; of Ray what is private or an experiment."""
    package, *rest = dotted.split(".")
    if rest and rest[-1].startswith(_OUR_MARK):
        return False
    if package == "ray":
        return rest[:1] == ["experimental"] or any(
            name.startswith("_") and name != "__version__" for name in rest
        )
    return package in ("vllm", "tpu_inference")


def _dotted(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """What imports bind, and what is reached from there by attributes."""
    aliases: dict[str, str] = {}
    for node in nodes:
        match node:
            case ast.Import():
                for alias in node.names:
                    package = alias.name.partition(".")[0]
                    aliases[alias.asname or package] = alias.name if alias.asname else package
                    yield alias.name
            case ast.ImportFrom(module=str(origin), level=0):
                for alias in node.names:
                    aliases[alias.asname or alias.name] = f"{origin}.{alias.name}"
                    yield f"{origin}.{alias.name}"
    inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            names = chain(node)
            if names and names[0] in aliases:
                yield ".".join([aliases[names[0]], *names[1:]])


def _path(dotted: str, library: Library) -> str:
    """`package.module:name.attribute`, the module as long as there is one."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        if library.holds(".".join(parts[:end])):
            rest = ".".join(parts[end:])
            return ".".join(parts[:end]) + (f":{rest}" if rest else "")
    return dotted


def _variable(name: str, library: Library) -> str:
    """Where a variable is read; of one that nobody reads, where it should be."""
    reader = next((module for module in _VARIABLES_OF if library.says(module, name)), _VARIABLES_OF[-1])
    return f"{reader}:{name}"


def _words(nodes: Sequence[ast.AST]) -> Iterator[str]:
    for node in nodes:
        match node:
            case ast.Attribute(attr=word) | ast.Name(id=word) | ast.keyword(arg=str(word)):
                yield word
            case ast.FunctionDef(name=word) | ast.AsyncFunctionDef(name=word) | ast.ClassDef(name=word):
                yield word
            case ast.alias(name=word):
                yield word.rpartition(".")[2]
            case ast.Constant(value=str(word)):
                yield word
