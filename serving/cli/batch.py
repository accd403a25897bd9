"""`serving batch run`: a file of lines is answered offline, by a running service, into a file of results."""

import argparse
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serving.cli.arguments import at_least
from serving.cli.status import add_address, address_of

KEY = "SERVING_API_KEY"
_TOLD_S = 2.0  # on a terminal, where the line is drawn anew
_LOGGED_S = 15.0
_STILL_S = 10.0  # without a result: then the service is asked why
_ASK_S = 5.0


def add_commands(commands: Any) -> None:
    batch = commands.add_parser("batch", help="work that can wait, without the Batch API")
    actions = batch.add_subparsers(required=True, metavar="COMMAND")
    run = actions.add_parser(
        "run",
        help="answer a file of lines, in the Batch API's format, with the free seats of a running service; through Ray Data",
    )
    run.add_argument("input", type=Path, metavar="FILE", help="JSON lines, as the Batch API takes them")
    run.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help="where the results go, a line each; lines that have one there are not asked again",
    )
    run.add_argument("--model", required=True, help="answers every line, whatever model the line names")
    run.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        help="the service (default: http://127.0.0.1:8000)",
    )
    run.add_argument(
        "--concurrency",
        type=at_least(1),
        default=256,
        metavar="N",
        help="most lines at once (default: 256); fewer where fewer seats are free",
    )
    add_address(run)
    run.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from serving.batches.corpus import Corpus, Results

    key = os.environ.get(KEY)
    url = options.url.rstrip("/")
    results = Results(options.output)
    try:
        corpus = Corpus(options.input, options.model, results)
        _tell_models(results.models, options)
        results.add(corpus.refused)
        if corpus.pieces:
            _check(url, key, options.model)
            _answer(options, corpus, results, url, key)
        print(f"all {corpus.total} lines have a result in {options.output}, {results.failed} of them failed")
    finally:
        results.close()
    if results.failed < corpus.total:
        return 0
    print("serving: no line was answered; take the results out once their cause is mended", file=sys.stderr)
    return 1


def _tell_models(models: Mapping[str, int], options: argparse.Namespace) -> None:
    """Two models in one file may be meant: what one could not answer is asked of a larger one."""
    if others := [f"{count} of {model!r}" for model, count in models.items() if model != options.model]:
        print(
            f"serving: {options.output} has answers of another model, {', '.join(others)}; lines without one are asked of "
            f"{options.model!r}. Name another file with -o to have all of them asked",
            file=sys.stderr,
        )


def _answer(options: argparse.Namespace, corpus: Any, results: Any, url: str, key: str | None) -> None:
    """Raises ServingError where the run has to stop; what there is stays."""
    from serving.batches import ray_data
    from serving.errors import ServingError

    ray_data.connect(address_of(options))
    progress = _Progress(corpus.total, results, url, key)
    try:
        for asked in ray_data.asked(corpus, url, key, options.concurrency):
            results.add([line.result for line in asked if line.result])
            if stop := next((line.stop for line in asked if line.stop), ""):
                raise ServingError(f"{stop} {len(results)} of {corpus.total} lines have a result; {_AGAIN}")
    except KeyboardInterrupt:
        print(f"\n{len(results)} of {corpus.total} lines have a result; {_AGAIN}", file=sys.stderr)
        raise
    finally:
        progress.end()
        ray_data.disconnect()
    if len(results) < corpus.total:
        raise ServingError(f"{len(results)} of {corpus.total} lines have a result; {_AGAIN}")


_AGAIN = "the same command goes on from there."


def _check(url: str, key: str | None, model: str) -> None:
    """Whether the service is there, takes the key and has the model; raises ServingError."""
    import httpx

    from serving.errors import ConfigError

    try:
        answer = httpx.get(f"{url}/v1/models", headers=_headers(key), timeout=_ASK_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(f"no service answers at {url} ({error}); --url says where it is") from None
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        raise ConfigError(f"{url} does not take the key: put one of its own into {KEY}")
    try:
        models = [str(entry["id"]) for entry in answer.json()["data"]]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            f"{url}/v1/models answers {answer.status_code}, and lists no models; --url says where the service is"
        ) from None
    if model not in models:
        raise ConfigError(f"{url} has no model {model!r}; there are {', '.join(models)}")


class _Progress:
    """Says on stderr how far a run is and, where it stands still, what the service says."""

    def __init__(self, total: int, results: Any, url: str, key: str | None) -> None:
        self._total = total
        self._results = results
        self._url = url
        self._key = key
        self._began = len(results), time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tell, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._over.set()
        self._thread.join()

    def _tell(self) -> None:
        drawn = sys.stderr.isatty()
        last, changed_s, width = len(self._results), time.monotonic(), 0
        while not self._over.wait(_TOLD_S if drawn else _LOGGED_S):
            has, now_s = len(self._results), time.monotonic()
            if has != last:
                last, changed_s = has, now_s
            rate = (has - self._began[0]) / (now_s - self._began[1])
            progress = f"{has} of {self._total} lines have a result, {self._results.failed} failed; {rate:.1f} a second"
            if now_s - changed_s >= _STILL_S:
                progress += f"; {self._why()}"
            width = max(width, len(progress))
            print(
                f"\r{progress.ljust(width)}" if drawn else progress,
                end="" if drawn else "\n",
                file=sys.stderr,
                flush=True,
            )
        if drawn and width:
            print(file=sys.stderr)

    def _why(self) -> str:
        import httpx

        try:
            answer = httpx.get(f"{self._url}/health", headers=_headers(self._key), timeout=_ASK_S)
        except httpx.HTTPError as error:
            return f"the service does not answer ({error})"
        if answer.is_success:
            return "no seat is free, or answers take long"
        return f"the service says: {answer.text.strip()[:300]}"


def _headers(key: str | None) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}
