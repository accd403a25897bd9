"""What the TPU's compiler said of plans, as `serving compile` found it: kept as data, looked up by the plan's version.

`python -m tools.compiled FILE...` adds results of `serving compile --json`. A YAML that changes what the engine is started with has
another version, and no result until it is compiled again.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from serving.planning.fit import Workspace

KEPT = Path(__file__).with_name("compiled.json")
# What the image runs, as far as it decides what an engine's programs take; a test holds them to the lock.
ENGINE = {"tpu-inference": "0.26.0", "jax": "0.10.2", "libtpu": "0.0.43.2"}


@dataclass(frozen=True)
class CompileResult:
    """Bytes are of one device. `needs_bytes` has weights, cache, programs and the largest step; None where it was refused.

    `program_bytes` is an upper bound: a program that was not compiled counts as the largest of its name. Figures are None where
    no program of the kind was compiled. `unbuildable` has the reason where the engine can't be built without a TPU.
    """

    compiles: bool
    needs_bytes: int | None
    weight_bytes: int | None
    program_bytes: int | None
    step_bytes: int | None
    sampling_bytes: int | None
    prompt_logprobs_bytes: int | None
    unbuildable: list[str]
    date: str
    command: str
    versions: dict[str, str]

    @property
    def workspace(self) -> Workspace | None:
        """The figures in place of a plan's estimates, where everything compiled with the versions that the image runs."""
        if (
            not self.compiles
            or self.versions != ENGINE
            or self.program_bytes is None
            or self.step_bytes is None
        ):
            return None
        return Workspace(
            program_bytes=self.program_bytes,
            step_bytes=self.step_bytes,
            expert_bytes=0,
            sampling_bytes=self.sampling_bytes or 0,
            prompt_logprobs_bytes=self.prompt_logprobs_bytes or 0,
        )


def result_of(version: str, kept: Path = KEPT) -> CompileResult | None:
    """The result that is kept for a plan's version."""
    entry = entries(kept).get(version)
    return entry and CompileResult(**{name: entry[name] for name in CompileResult.__dataclass_fields__})


@cache
def entries(kept: Path = KEPT) -> dict[str, Any]:
    """Everything that is kept, by the plans' versions."""
    found: dict[str, Any] = json.loads(kept.read_text())
    return found
