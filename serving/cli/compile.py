"""`serving compile`: what the TPU's own compiler says of a YAML's plans, on a machine without a TPU.

Status 0: everything compiled. 1: a model was refused, by the plan or by the compiler. 2: the file can't be read as asked, or
there is no compiler.
"""

import argparse
import datetime as dt
import json
import tempfile
import zlib
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from serving import hub
from serving.cli.arguments import at_least, seconds
from serving.cli.compile_view import Watch, show
from serving.compiler import libtpu, processes
from serving.compiler.compile import Answer, Wish, compile_plan
from serving.compiler.report import Asked, document
from serving.config import load
from serving.errors import CompileError, ConfigError, PlanError, TopologyError
from serving.planning import Plan
from serving.planning.checkpoints import config_of
from serving.planning.plan import plan

OK, REFUSED, UNREADABLE = 0, 1, 2
_ENTRIES = "*-cache"  # of JAX's persistent compilation cache
_CHUNK_BYTES = 1 << 16
_ZSTANDARD = b"\x28\xb5\x2f\xfd"  # which a frame begins with (RFC 8878)
_LIMIT_S = 1800.0  # a step of 94 layers takes ten minutes on two slow cores


def add_commands(commands: Any) -> None:
    compiling = commands.add_parser(
        "compile",
        help="ask the TPU's compiler whether a YAML's engines compile, and what they take of HBM; needs no TPU",
    )
    compiling.add_argument("yaml", help="a file of deployments/")
    compiling.add_argument("--model", metavar="NAME", help="of this model alone")
    depth = compiling.add_mutually_exclusive_group()
    depth.add_argument(
        "--quick",
        action="store_true",
        help="steps of a few layers: whether they compile, and what they take at least",
    )
    depth.add_argument("--full", action="store_true", help="every program at every bucket; takes hours")
    compiling.add_argument(
        "--jobs", type=at_least(1), default=1, metavar="N", help="compiles at once (default: 1)"
    )
    compiling.add_argument(
        "--timeout",
        type=seconds,
        default=_LIMIT_S,
        metavar="S",
        help="seconds for one compile (default: 1800)",
    )
    compiling.add_argument(
        "--cache",
        type=Path,
        metavar="DIR",
        help="write what was compiled here, as JAX's persistent compilation cache; unproved on a TPU",
    )
    compiling.add_argument("--json", action="store_true", help="print every figure as JSON")
    compiling.set_defaults(run=_compile)


def _compile(options: argparse.Namespace) -> int:
    wish = Wish(
        quick=options.quick,
        full=options.full,
        jobs=max(1, options.jobs),
        limit_s=options.timeout,
        cache=options.cache and str(options.cache.expanduser().absolute()),
    )
    output = Console()
    progress = Console(stderr=True) if options.json else output
    try:
        plans = _plans(options)
        processes.check_installed()
        library = libtpu.library()
    except (PlanError, TopologyError) as error:
        progress.print(f"refused {error.message}", markup=False, highlight=False, soft_wrap=True)
        return REFUSED
    except (ConfigError, CompileError) as error:
        progress.print(error.message, markup=False, highlight=False, soft_wrap=True)
        return UNREADABLE
    asked = Asked(
        command=" ".join(["serving", "compile", *_shown(options)]),
        date=dt.datetime.now(dt.UTC).date().isoformat(),
        versions={name: version(name) for name in ("tpu-inference", "jax")} | {"libtpu": libtpu.VERSION},
        quick=options.quick,
        full=options.full,
    )
    documents: list[dict[str, Any]] = []
    try:
        for chosen in plans:
            answer = _ask(options.yaml, chosen, library, wish, progress)
            documents.append(document(chosen, asked, answer.stages, answer.unbuilt))
            if not options.json:
                show(output, documents[-1])
            if answer.logs:
                progress.print(f"logs: {answer.logs}", highlight=False)
    finally:  # also of those before an interrupt, for each took minutes
        if options.json:
            output.print_json(json.dumps(documents))
    if options.cache:
        progress.print(written(options.cache), highlight=False, soft_wrap=True)
    return OK if all(entry["compiles"] for entry in documents) else REFUSED


def written(cache: Path) -> str:
    """What a cache holds after a compile. JAX leaves an empty or a cut entry where the disk is full, and goes on."""
    entries = sorted(cache.expanduser().glob(_ENTRIES))
    if lost := [entry for entry in entries if not _is_whole(entry)]:
        return (
            f"cache: {len(lost)} of {len(entries)} programs are empty or cut files in {cache}, whose disk was full; make room, empty the "
            "folder and compile again"
        )
    size = sum(entry.stat().st_size for entry in entries)
    return f"cache: {len(entries)} programs, {size / 2**20:.1f} MiB, in {cache}; no TPU has read one yet"


def _is_whole(entry: Path) -> bool:
    """Whether an entry can be unpacked to its end. JAX packs by zlib, which checks a sum; what it packs by zstandard is not looked at."""
    stream = zlib.decompressobj()
    try:
        with entry.open("rb") as file:
            if file.read(len(_ZSTANDARD)) == _ZSTANDARD:
                return True
            file.seek(0)
            while not stream.eof and (chunk := file.read(_CHUNK_BYTES)):
                stream.decompress(chunk)
    except (OSError, zlib.error):
        return False
    return stream.eof


def _ask(file: str, chosen: Plan, library: Path, wish: Wish, console: Console) -> Answer:
    config = config_of(str(chosen.engine.get("hf_config_path") or chosen.model.model), hub.config_of)
    with Watch(console, f"{chosen.model.name} on {chosen.slice}") as watch:
        try:
            return compile_plan(file, chosen, config, library, wish, watch.tell)
        except CompileError as error:
            return Answer((), (error.message,), None)


def _plans(options: argparse.Namespace) -> list[Plan]:
    """The plans of a file's models, of one pool after the other; raises what `plan` raises."""
    file, model = options.yaml, options.model
    if options.cache and options.quick:
        raise ConfigError(
            "--cache keeps whole steps, and --quick compiles some of their layers: leave one out"
        )
    if options.cache:
        _check_cache(options.cache.expanduser())
    services = load(Path(file)).services.values()
    specs = [spec for service in services for entry in service.models for spec in entry.per_pool()]
    if model is not None and not any(spec.name == model for spec in specs):
        names = ", ".join(dict.fromkeys(spec.name for spec in specs))
        raise ConfigError(f"--model {model}: {file} has {names}")
    return [plan(spec, hub.config_of, estimated=True) for spec in specs if model in (None, spec.name)]


def _check_cache(folder: Path) -> None:
    """JAX compiles on where it can't write its cache, and says so in a log alone. It never writes an entry that is there anew."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        lost = [entry.name for entry in sorted(folder.glob(_ENTRIES)) if not _is_whole(entry)]
    except OSError as error:
        raise ConfigError(f"--cache {folder}: {error.strerror}; name a folder that can be written") from None
    if lost:
        raise ConfigError(
            f"--cache {folder}: {len(lost)} of its programs are empty, cut or damaged, and would be kept as they are, {lost[0]} first; "
            "delete them, or name another folder"
        )


def _shown(options: argparse.Namespace) -> list[str]:
    """The command as it would be typed again, where it decides what is compiled."""
    flags = [f"--{name}" for name in ("quick", "full") if getattr(options, name)]
    return [options.yaml, *(["--model", options.model] if options.model else []), *flags]
