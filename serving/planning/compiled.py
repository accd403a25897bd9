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
    """Bytes are of one device. `needs_bytes` has weights, cache and the largest program with its code; None where it was refused.

    Of a `quick` answer a step is a lower bound. `program_bytes` is an upper bound, of code that need not lie in HBM at once. Figures are
    None where no program of the kind was compiled. `unbuildable` has the reason where the engine can't be built without a TPU.
    """

    compiles: bool
    quick: bool
    needs_bytes: int | None
    weight_bytes: int | None
    program_bytes: int | None
    step_bytes: int | None
    grammar_bytes: int | None
    sampling_bytes: int | None
    prompt_logprobs_bytes: int | None
    unbuildable: list[str]
    date: str
    command: str
    versions: dict[str, str]

    def workspace(self, estimate: Workspace) -> Workspace:
        """An estimate with the compiler's figures in its place, where everything compiled with the versions that the image runs.

        Of a lower bound and the estimate the larger one stays. So does the estimate of what programs leave in HBM once they have run.
        """
        if not self.compiles or self.versions != ENGINE or self.step_bytes is None:
            return estimate
        step = max(estimate.step_bytes, self.step_bytes) if self.quick else self.step_bytes
        return Workspace(
            program_bytes=estimate.program_bytes,
            step_bytes=step,
            expert_bytes=estimate.expert_bytes if step == estimate.step_bytes else 0,
            grammar_bytes=estimate.grammar_bytes if self.grammar_bytes is None else self.grammar_bytes,
            sampling_bytes=estimate.sampling_bytes if self.sampling_bytes is None else self.sampling_bytes,
            prompt_logprobs_bytes=(
                estimate.prompt_logprobs_bytes
                if self.prompt_logprobs_bytes is None
                else self.prompt_logprobs_bytes
            ),
        )


def result_of(version: str, kept: Path = KEPT) -> CompileResult | None:
    """The result that is kept for a plan's version."""
    entry = entries(kept).get(version)
    return entry and CompileResult(**{name: entry[name] for name in CompileResult.__dataclass_fields__})


@cache
def entries(kept: Path = KEPT) -> dict[str, Any]:
    """Everything that is kept, by the plans' versions."""
    kept_entries: dict[str, Any] = json.loads(kept.read_text())
    return kept_entries
