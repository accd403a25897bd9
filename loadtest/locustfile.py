"""Load for any OpenAI-compatible service, with what matters of inference measured, judged and shown.

    locust -f loadtest/locustfile.py --headless -u 4 -r 4 -t 20s --host http://localhost:8000
    locust -f loadtest/locustfile.py --headless --arrivals constant --rate 20 -t 1m --thresholds loadtest/thresholds.yaml --host ...

Without `--arrivals` it is closed loop: so many users, each of whom asks when its last answer is read. With it, it is open
loop: requests arrive as the shape says, and the users named (all, if none) are only the mix. Without --headless, locust's
web UI has a tab for it. Rows beside locust's own: rows.py; what may be asked: prompts.py; shapes: arrivals.py.
"""

import logging
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import gevent
from locust import events
from locust.env import Environment
from locust.runners import WorkerRunner

import exchange
import keys
import open_loop
import thresholds
from arrivals import SHAPES
from bad_input import BadInputError
from report import Report
from users import AskingUser, Completion, ConversationUser, LongChat, Rag, ShortChat

__all__ = ["Completion", "ConversationUser", "LongChat", "Rag", "ShortChat"]  # whom locust finds here

for noisy in ("geventhttpclient",):
    logging.getLogger(noisy).setLevel(logging.ERROR)


@events.init_command_line_parser.add_listener
def add_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    # Read when locust starts, so that the web UI has no field for them.
    at_start: dict[str, Any] = {"include_in_web_ui": False}
    add(
        "--arrivals", choices=SHAPES, help="open loop with this shape; closed loop where left out", **at_start
    )
    add(
        "--thresholds",
        metavar="FILE",
        help="YAML of what the run has to hold; it decides the exit status",
        **at_start,
    )
    add(
        "--trace",
        metavar="FILE",
        help="JSON lines to replay: timestamp, prompt and output tokens",
        **at_start,
    )
    add("--api-keys", metavar="FILE", help="YAML of API keys and their shares of the requests", **at_start)
    add("--api-key", env_var="LOADTEST_API_KEY", help="one API key for every request", **at_start)
    add(
        "--rate",
        type=float,
        default=1,
        help="requests a second; of a ramp the first, of a day the quietest moment's",
    )
    add("--peak-rate", type=float, default=4, help="requests a second at noon or in a burst")
    add("--period-s", type=float, default=60, help="length of a day, or from burst to burst")
    add("--burst-s", type=float, default=5, help="length of a burst")
    add("--step-rate", type=float, default=1, help="requests a second that each step of a ramp adds")
    add("--step-s", type=float, default=10, help="length of a step")
    add("--speed", type=float, default=1, help="how much faster than recorded a trace is replayed")
    add(
        "--max-in-flight",
        type=int,
        default=1000,
        help="requests a worker has under way; further ones are dropped",
    )
    add("--drain-s", type=float, default=60, help="how long to wait for answers when arrivals are over")
    add("--seed", type=int, default=0, help="of arrivals and prompts")
    add("--model", default="", help="the service's first where left out")
    add("--max-tokens", type=int, default=64, help="longest answer")
    add(
        "--prompt-words",
        type=int,
        default=100,
        help="mean length of a short prompt; others are multiples of it",
    )
    add(
        "--think-s",
        type=float,
        default=0.5,
        help="mean pause of a closed-loop user between answer and question",
    )
    add("--streamed", type=float, default=0.75, help="share of requests that stream")


@events.init.add_listener
def set_up(environment: Environment, **_: Any) -> None:
    """Refuse what cannot work before anything runs, then arrange users, shape and report."""
    try:
        _set_up(environment)
    except BadInputError as error:
        sys.exit(f"loadtest: {error}")


def _set_up(environment: Environment) -> None:
    options = environment.parsed_options
    worker = isinstance(environment.runner, WorkerRunner)
    limits = thresholds.load(Path(options.thresholds)) if options.thresholds else thresholds.NONE
    AskingUser.slo = limits.slo
    if options.api_keys:
        AskingUser.api_keys = keys.load(Path(options.api_keys))
    elif options.api_key:
        AskingUser.api_keys = [keys.Key("", options.api_key)]
    shape = None
    if options.arrivals:
        if options.arrivals == "ramp" and not limits.limits:
            raise BadInputError("a ramp ends where a threshold breaks: give --thresholds FILE")
        shape = open_loop.OpenLoopShape(options, limits)
        # By name: locust hands those named on its command line over in any order, and a seed has to mean the same each time.
        open_loop.OpenLoop.mix = sorted(environment.user_classes, key=lambda user: user.__name__)
        open_loop.OpenLoop.concurrency = options.max_in_flight
        environment.user_classes = [open_loop.OpenLoop]
    if worker:
        return
    if shape is not None:
        environment.shape_class, shape.runner = shape, environment.runner
    if options.headless:
        exchange.check_target(environment.host, next(iter(AskingUser.api_keys), None))
    _report(environment, limits, shape)


def _report(
    environment: Environment, limits: thresholds.Thresholds, shape: open_loop.OpenLoopShape | None
) -> None:
    def judge(figures: dict[str, float | None]) -> list[thresholds.Judgement]:
        return shape.ramp.judge() if shape and shape.ramp else limits.judge(figures)

    def remark() -> str:
        return str(shape.ramp) if shape and shape.ramp else ""

    report = Report(environment, limits.slo, judge, remark)
    report.add_to_web_ui()
    gevent.spawn(report.follow)

    def begin(**_: Any) -> None:
        report.course = type(report.course)()

    def judge_run(**_: Any) -> None:
        """The thresholds alone decide, where there are any; else locust's own rule: no failure at all."""
        if limits.limits and environment.runner is not None:
            broken = any(one.broken for one in report.judgements())
            environment.process_exit_code = 1 if broken or environment.runner.exceptions else 0
        written = environment.parsed_options.html_file
        if written and Path(written).exists():
            report.add_to_file(Path(written))

    def say(**_: Any) -> None:
        print(report.say())

    environment.events.test_start.add_listener(begin)
    environment.events.quitting.add_listener(judge_run)
    environment.events.quit.add_listener(say)
