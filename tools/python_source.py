"""Names of Python packages, read off their source by AST. Nothing is imported, so a wheel need not be installed.

A path says where a name stands: `package.module:Class.method`. `find` goes where Python would go: through re-exports,
base classes, attributes that methods set on `self`, and objects that a module makes of a class.
"""

import ast
import difflib
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_COMPILED = (".so", ".pyd")


@dataclass(frozen=True)
class Definition:
    """Where a name is defined, and a function's parameters; None for anything that is no function."""

    path: str
    signature: str | None = None


@dataclass(frozen=True)
class Source:
    """The files of one distribution, by their path below site-packages."""

    distribution: str
    version: str
    files: frozenset[str]
    read: Callable[[str], bytes]


def wheel(path: Path) -> Source:
    archive = zipfile.ZipFile(path)
    name, version = path.name.split("-")[:2]
    return Source(name.replace("_", "-"), version, frozenset(archive.namelist()), archive.read)


def installed(names: Iterable[str], package: str) -> Source | None:
    """The first distribution of `names` that is installed and holds the package."""
    for name in names:
        try:
            dist = distribution(name)
        except PackageNotFoundError:
            continue
        files = frozenset(str(file) for file in dist.files or ())
        if f"{package}/__init__.py" in files:
            root = Path(str(dist.locate_file("")))
            return Source(name, dist.version, files, lambda file, root=root: (root / file).read_bytes())  # type: ignore[misc]
    return None


class Library:
    """Packages by name; those of another source are unknown."""

    def __init__(self, sources: dict[str, Source]) -> None:
        self.sources = sources
        self._trees: dict[str, ast.Module | None] = {}
        self._lines: dict[str, frozenset[str]] = {}

    def holds(self, module: str) -> bool:
        return self._file(module) is not None or self._is_compiled(module)

    def find(self, path: str) -> Definition | None:
        """The definition that `module` or `module:name.attribute` leads to; None where there is none."""
        module, _, attributes = path.partition(":")
        return self._find(module, attributes.split(".") if attributes else [], frozenset())

    def says(self, module: str, text: str) -> bool:
        """Whether a string of the module has a line that begins so."""
        if module not in self._lines:
            tree = self._tree(module)
            self._lines[module] = frozenset(
                line.strip()
                for node in (ast.walk(tree) if tree else ())
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
                for line in node.value.splitlines()
            )
        return any(line.startswith(text) for line in self._lines[module])

    def members(self, path: str) -> set[str]:
        """The annotated fields of a class and of its bases, or a module's public functions."""
        module, _, name = path.partition(":")
        if not name:
            tree = self._tree(module)
            functions = [node.name for node in tree.body if isinstance(node, _Function)] if tree else []
            return {function for function in functions if not function.startswith("_")}
        return self._fields(module, name)

    def _fields(self, module: str, name: str) -> set[str]:
        owner = self._class(module, name)
        if owner is None:
            return set()
        module, class_ = owner
        own = {
            node.target.id
            for node in class_.body
            if isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and "ClassVar" not in ast.unparse(node.annotation)
        }
        return own.union(*(self._fields(*base.split(":")) for base in self._bases(module, class_)))

    def elsewhere(self, path: str, most: int = 3) -> list[str]:
        """Other places of the same package that define the name, or its class where that moved; the likeliest first."""
        module, _, attributes = path.partition(":")
        owner, _, name = attributes.rpartition(".")
        if owner and self.find(f"{module}:{owner}") is None:
            return self.elsewhere(f"{module}:{owner}", most)
        if owner and self._class(module, owner) is None:
            return []
        word = re.compile(
            rb"\b(?:def|class)\s+%b\b|^\s*%b\s*[:=]" % (name.encode(), name.encode()), re.MULTILINE
        )
        places = [
            place
            for file in self._python_files(module)
            if word.search(self._read(file))
            for place in self._definitions(_module_of(file), name)
            if place != path
        ]
        places.sort(key=lambda place: (-difflib.SequenceMatcher(None, place, path).ratio(), place))
        return places[:most]

    def uses(self, path: str) -> bool:
        """Whether the package itself reads the last name of a path anywhere."""
        name = path.rpartition(":")[2].rpartition(".")[2]
        return any(
            name.encode() in self._read(file) and _reads(ast.parse(self._read(file)), name)
            for file in self._python_files(path.partition(":")[0])
        )

    def _python_files(self, module: str) -> list[str]:
        """Of the module's package, the files beside the module first."""
        source = self.sources.get(module.partition(".")[0])
        beside = module.rpartition(".")[0].replace(".", "/")
        files = [file for file in source.files if file.endswith(".py")] if source else []
        package = [file for file in files if file.startswith(f"{module.partition('.')[0]}/")]
        return sorted(package, key=lambda file: (not file.startswith(beside), file))

    def _read(self, file: str) -> bytes:
        return self.sources[file.partition("/")[0]].read(file)

    def _definitions(self, module: str, name: str) -> Iterator[str]:
        tree = self._tree(module)
        if tree is None:
            return
        if _binding(tree.body, name, imports=False) is not None:
            yield f"{module}:{name}"
        for node in _statements(tree.body):
            if isinstance(node, ast.ClassDef) and _binding(node.body, name, imports=False) is not None:
                yield f"{module}:{node.name}.{name}"

    def _file(self, module: str) -> str | None:
        source = self.sources.get(module.partition(".")[0])
        stem = module.replace(".", "/")
        return next(
            (file for file in (f"{stem}/__init__.py", f"{stem}.py") if source and file in source.files), None
        )

    def _is_compiled(self, module: str) -> bool:
        source = self.sources.get(module.partition(".")[0])
        stem = module.replace(".", "/") + "."
        return source is not None and any(
            file.startswith(stem) and file.endswith(_COMPILED) for file in source.files
        )

    def _tree(self, module: str) -> ast.Module | None:
        if module not in self._trees:
            file = self._file(module)
            source = self.sources.get(module.partition(".")[0])
            self._trees[module] = ast.parse(source.read(file)) if source and file else None
        return self._trees[module]

    def _find(self, module: str, names: Sequence[str], seen: frozenset[str]) -> Definition | None:
        step = f"{module}:{'.'.join(names)}"
        if step in seen:
            return None
        tree = self._tree(module)
        if tree is None:
            return self._find_compiled(module, names)
        return self._find_below(module, tree, names, seen | {step}) if names else Definition(module)

    def _find_below(
        self, module: str, tree: ast.Module, names: Sequence[str], seen: frozenset[str]
    ) -> Definition | None:
        definition = None
        match _binding(tree.body, names[0]):
            case ast.ImportFrom() | ast.Import() as node:
                definition = self._imported(module, node, names, seen)
            case ast.ClassDef() as node:
                definition = self._in_class(module, node, names[1:], seen)
            case ast.FunctionDef() | ast.AsyncFunctionDef() as node:
                definition = _in_function(module, node, names[1:])
            case ast.Assign(value=ast.Call(func=ast.Name(id=maker))) if names[1:]:
                definition = self._find(module, [maker, *names[1:]], seen)
            case None if self.holds(below := f"{module}.{names[0]}"):
                definition = self._find(below, names[1:], seen)
            case ast.stmt() if not names[1:]:
                definition = Definition(f"{module}:{names[0]}")
        return definition

    def _find_compiled(self, module: str, names: Sequence[str]) -> Definition | None:
        """A compiled module has the names that its own package imports from it."""
        if not self._is_compiled(module):
            return None
        if not names:
            return Definition(module)
        known = len(names) == 1 and self._is_imported_from(module, names[0])
        return Definition(f"{module}:{names[0]}") if known else None

    def _is_imported_from(self, module: str, name: str) -> bool:
        asking = f"from {module} import".encode()
        return any(
            isinstance(node, ast.ImportFrom) and node.module == module and name in _imported_names(node)
            for file in self._python_files(module)
            if asking in (text := self._read(file)) and name.encode() in text
            for node in ast.walk(ast.parse(text))
        )

    def _imported(
        self, module: str, node: ast.ImportFrom | ast.Import, names: Sequence[str], seen: frozenset[str]
    ) -> Definition | None:
        if isinstance(node, ast.Import):
            target = next(alias.name for alias in node.names if (alias.asname or alias.name) == names[0])
            return self._find(target, names[1:], seen)
        origin = self._origin(module, node)
        if origin.partition(".")[0] not in self.sources:
            return Definition(f"{origin}:{'.'.join(names)}")
        name = next(
            (alias.name for alias in node.names if (alias.asname or alias.name) == names[0]), names[0]
        )
        definition = self._find(origin, [name, *names[1:]], seen)
        below = f"{origin}.{name}"
        return self._find(below, names[1:], seen) if definition is None and self.holds(below) else definition

    def _origin(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        is_package = (self._file(module) or "").endswith("__init__.py")
        parts = module.split(".")
        kept = parts[: len(parts) - node.level + is_package]
        return ".".join([*kept, *([node.module] if node.module else [])])

    def _in_class(
        self, module: str, class_: ast.ClassDef, names: Sequence[str], seen: frozenset[str]
    ) -> Definition | None:
        path = f"{module}:{'.'.join([class_.name, *names])}"
        if not names:
            return Definition(path)
        node = _binding(class_.body, names[0])
        if isinstance(node, _Function):
            return Definition(
                path, None if _is_property(node) else signature(node, bound=not _is_static(node))
            )
        if node is not None or names[0] in _set_on_self(class_):
            return Definition(path)
        for base in self._bases(module, class_):
            origin, _, name = base.partition(":")
            if definition := self._find(origin, [name, *names], seen):
                return definition
        return None

    def _class(self, module: str, name: str) -> tuple[str, ast.ClassDef] | None:
        definition = self._find(module, [name], frozenset())
        if definition is None:
            return None
        origin, _, own = definition.path.partition(":")
        tree = self._tree(origin)
        node = _binding(tree.body, own) if tree else None
        return (origin, node) if isinstance(node, ast.ClassDef) else None

    def _bases(self, module: str, class_: ast.ClassDef) -> Iterator[str]:
        for base in class_.bases:
            node = base.value if isinstance(base, ast.Subscript) else base
            definition = self._find(module, ast.unparse(node).split("."), frozenset())
            if definition is not None and ":" in definition.path:
                yield definition.path


def signature(function: _Function, *, bound: bool = False) -> str:
    """Parameters by name, those with a default marked by `=`; of a bound method without self or cls."""
    asked = function.args
    plain = [*asked.posonlyargs, *asked.args]
    optional = {argument.arg for argument in plain[len(plain) - len(asked.defaults) :]}
    optional |= {
        argument.arg
        for argument, default in zip(asked.kwonlyargs, asked.kw_defaults, strict=True)
        if default is not None
    }

    def shown(argument: ast.arg) -> str:
        return f"{argument.arg}=" if argument.arg in optional else argument.arg

    parts = [shown(argument) for argument in asked.posonlyargs]
    parts += ["/"] if asked.posonlyargs else []
    parts += [shown(argument) for argument in asked.args]
    if bound:
        parts = parts[1:]
    if asked.vararg:
        parts.append(f"*{asked.vararg.arg}")
    elif asked.kwonlyargs:
        parts.append("*")
    parts += [shown(argument) for argument in asked.kwonlyargs]
    if asked.kwarg:
        parts.append(f"**{asked.kwarg.arg}")
    return ", ".join(parts)


def chain(node: ast.expr) -> list[str] | None:
    """The names of `a.b.c`; None where it begins with anything but a name."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return [node.id, *names] if isinstance(node, ast.Name) else None


def _imported_names(node: ast.ImportFrom) -> set[str]:
    return {alias.name for alias in node.names}


def _module_of(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that bind names here, those inside if, try and with included."""
    for node in body:
        yield node
        match node:
            case ast.If():
                yield from _statements([*node.body, *node.orelse])
            case ast.Try():
                handlers = [statement for handler in node.handlers for statement in handler.body]
                yield from _statements([*node.body, *handlers, *node.orelse, *node.finalbody])
            case ast.With():
                yield from _statements(node.body)


def _binding(body: Sequence[ast.stmt], name: str, *, imports: bool = True) -> ast.stmt | None:
    """What gives a name its meaning; a definition counts for more than an import, an import for more than a value."""
    bindings = [(_rank(node), node) for node in _statements(body) if name in _bound(node)]
    ranked = [pair for pair in bindings if imports or pair[0] != 1]
    return min(reversed(ranked), key=lambda pair: pair[0])[1] if ranked else None


def _rank(node: ast.stmt) -> int:
    if isinstance(node, _Function | ast.ClassDef):
        return 0
    return 1 if isinstance(node, ast.Import | ast.ImportFrom) else 2


def _bound(node: ast.stmt) -> set[str]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return {node.name}
        case ast.Import() | ast.ImportFrom():
            return {alias.asname or alias.name for alias in node.names}
        case ast.Assign():
            return {target.id for target in node.targets if isinstance(target, ast.Name)}
        case ast.AnnAssign(target=ast.Name(id=name)):
            return {name}
    return set()


def _in_function(module: str, node: _Function, names: Sequence[str]) -> Definition | None:
    """A function, or an attribute of an untyped object that it reads or sets: `function:state.server`."""
    if not names:
        return Definition(f"{module}:{node.name}", signature(node))
    used = any(chain(inner) == list(names) for inner in ast.walk(node) if isinstance(inner, ast.Attribute))
    return Definition(f"{module}:{'.'.join([node.name, *names])}") if used else None


def _reads(tree: ast.Module, name: str) -> bool:
    return any(
        isinstance(node, ast.Name | ast.Attribute)
        and isinstance(node.ctx, ast.Load)
        and name == (node.id if isinstance(node, ast.Name) else node.attr)
        for node in ast.walk(tree)
    )


def _set_on_self(class_: ast.ClassDef) -> set[str]:
    return {
        node.attr
        for node in ast.walk(class_)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def _decorators(node: _Function) -> set[str]:
    return {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}


def _is_static(node: _Function) -> bool:
    return "staticmethod" in _decorators(node)


def _is_property(node: _Function) -> bool:
    return bool(_decorators(node) & {"property", "cached_property", "setter"})
