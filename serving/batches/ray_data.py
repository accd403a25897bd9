"""The one door to Ray Data: a corpus as a dataset, asked by actors.

File and actors are on the host where the run was started: the service's address is good there, and may not be on a slice's host,
whose processor is the engine's. Ray Data holds few blocks at once, whatever the corpus's size, and asks the lines of an actor that was lost once more.
"""

import logging
import math
import warnings
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from serving.batches import corpus
from serving.batches.asker import Asked, Asker
from serving.batches.corpus import Corpus, Piece
from serving.errors import ConfigError, ServingError

try:
    import pyarrow as pa
    import ray
    from ray.data import ActorPoolStrategy, DataContext, Datasource, ReadTask, read_datasource
    from ray.data.block import BlockMetadata
    from ray.exceptions import RayError
    from ray.util.annotations import RayDeprecationWarning
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError as error:
    raise ConfigError(
        f"Ray Data is not installed ({error}); pip install 'tpu-serving[data]', or ray[data]"
    ) from None

_MOST_OF_ACTOR = 256  # lines at once
_BLOCKS_OF_ACTOR = 16  # of _PIECE_LINES each: none of them holds the next up
_BLOCK_BYTES = 32 << 10  # of a block of results, which is what a kill may cost


def asked(corpus_: Corpus, url: str, key: str | None, most: int) -> Iterator[list[Asked]]:
    """Lines of a corpus with their results, as they come; after `connect`. Raises ServingError where Ray Data gives up."""
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.target_max_block_size = _BLOCK_BYTES
    context.target_min_block_size = 1
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    actors = math.ceil(most / _MOST_OF_ACTOR)
    parts = corpus_.parts()
    lines = read_datasource(
        _Lines(corpus_.path, parts),
        override_num_blocks=max(1, len(parts)),
        num_cpus=0,
    )
    with warnings.catch_warnings():
        # Where actors run and how many batches they take at once has no named parameter yet.
        warnings.simplefilter("ignore", RayDeprecationWarning)
        results = lines.map_batches(
            _Asks,
            batch_size=None,
            batch_format="pyarrow",
            compute=ActorPoolStrategy(size=actors, max_tasks_in_flight_per_actor=_BLOCKS_OF_ACTOR),
            fn_constructor_kwargs={
                "url": url,
                "model": corpus_.model,
                "most": math.ceil(most / actors),
                # Ray Data tells its dashboard what operators are made of.
                "key": SecretStr(key) if key else None,
            },
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(
                ray.get_runtime_context().get_node_id(), soft=False
            ),
            max_concurrency=_BLOCKS_OF_ACTOR,
        )
    try:
        for batch in results.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
            yield [Asked(**row) for row in batch.to_pylist()]
    except RayError as error:
        why = str(error).strip().rpartition("\n")[2][:300]
        raise ServingError(f"Ray Data has given up: {why}. The same command goes on.") from None


class _Asks:
    """An Asker as Ray Data calls it, in an actor's own event loop."""

    def __init__(self, url: str, model: str, most: int, key: SecretStr | None) -> None:
        self._asker = Asker(url, model, most, key.get_secret_value() if key else None)

    async def __call__(self, batch: Any) -> AsyncIterator[dict[str, Any]]:
        rows = await self._asker.ask(batch["number"].to_pylist(), batch["text"].to_pylist())
        yield _table(rows)


def _table(rows: Sequence[Asked]) -> Any:
    return pa.table(
        {name: [getattr(row, name) for row in rows] for name in ("number", "result", "stop")}, _ASKED
    )


_LINE = pa.schema([("number", pa.int64()), ("text", pa.large_binary())])
_ASKED = pa.schema([("number", pa.int64()), ("result", pa.large_string()), ("stop", pa.string())])


class _Lines(Datasource):  # type: ignore[misc]  # Ray has no types for it
    """A corpus on the disk of the host from which it is asked."""

    def __init__(self, path: Path, parts: Sequence[Sequence[Piece]]) -> None:
        super().__init__()
        self._path = path.resolve()
        self._parts = parts

    @property
    def supports_distributed_reads(self) -> bool:
        return False

    def estimate_inmemory_data_size(self) -> int:
        return sum(piece.bytes for part in self._parts for piece in part)

    def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[Any]:  # noqa: ARG002  a part is a task
        return [
            ReadTask(partial(_read, self._path, part), _metadata(part), schema=_LINE) for part in self._parts
        ]


def _metadata(part: Sequence[Piece]) -> Any:
    return BlockMetadata(
        num_rows=sum(piece.lines for piece in part),
        size_bytes=sum(piece.bytes for piece in part),
        input_files=None,
        exec_stats=None,
    )


def _read(path: Path, part: Sequence[Piece]) -> Iterator[Any]:
    for piece in part:
        lines = list(corpus.lines_of(path, piece))
        columns = {"number": [number for number, _ in lines], "text": [text for _, text in lines]}
        yield pa.table(columns, _LINE)


def connect(address: str) -> None:
    """Raises ConfigError."""
    try:
        ray.init(address, log_to_driver=False, logging_level="ERROR", configure_logging=True)
    except Exception as error:  # noqa: BLE001  whatever Ray raises of a cluster that it can't use
        raise ConfigError(f"the Ray cluster at {address} can't be used: {error}") from None


def disconnect() -> None:
    ray.shutdown()
