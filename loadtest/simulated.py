"""The load test against a YAML's service on simulated slices with the simulated engine, from nothing and back to nothing.

    python loadtest/simulated.py deployments/llama.yaml --arrivals ramp --rate 10 --step-rate 10 -t 3m

What it does not know it hands to locust, after options of its own that a later one overrides. Its exit status is locust's.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from serving.cli.interrupt import end_on_signals
from serving.cli.simulated_service import running
from serving.errors import ServingError
from serving.simulation.cluster import default_directory

HERE = Path(__file__).parent
DEFAULTS = (
    "--arrivals",
    "constant",
    "--rate",
    "8",
    "-t",
    "60s",
    "--thresholds",
    str(HERE / "thresholds.yaml"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("yaml", type=Path, nargs="?", default=Path("deployments/llama.yaml"))
    parser.add_argument("--html", type=Path, default=Path("loadtest.html"), help="where the report goes")
    parser.add_argument("--name", default="loadtest", help="name of the simulation (default: loadtest)")
    options, to_locust = parser.parse_known_args(arguments)
    end_on_signals()
    console = Console(stderr=True)
    try:
        with running(
            options.yaml, directory=default_directory(options.name), console=console, engine="simulated"
        ) as trial:
            command = [sys.executable, "-m", "locust", "-f", str(HERE / "locustfile.py"), "--headless"]
            command += [
                "--only-summary",
                "--host",
                trial.address,
                "--html",
                str(options.html),
                *DEFAULTS,
                *to_locust,
            ]
            status = subprocess.run(command, check=False).returncode
    except ServingError as error:
        print(f"loadtest: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(f"report: {options.html} (simulated engine: its times are the calibrated roofline's)")
    return status


if __name__ == "__main__":
    sys.exit(main())
