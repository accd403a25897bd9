"""Three simulated slices serve and one is spare; one of the three gives wrong tokens."""

import httpx
import pytest
from support.leases import Leases
from support.service import MODEL, service

from serving.state.records import SliceState

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
BORROWS = "one chip, 4"


def test_a_slice_that_gives_wrong_tokens_is_taken_out_and_left_for_a_diagnosis(leases: Leases) -> None:
    one_chip = {"generation": "v6e", "topology": "1x1"}
    with service(
        leases,
        slices=4,
        engine="simulated",
        slice=one_chip,
        replicas=3,
        router={"sentinel": {"share": 1.0}},
    ) as running:
        victim = running.serving()[0]
        running.fault(victim, corrupt=True)
        prompts = iter(range(10_000))

        def lost() -> str:
            prompt = f"question {next(prompts)}"
            running.post("/v1/completions", prompt=prompt, max_tokens=8, temperature=0, ignore_eos=True)
            (reason,) = [
                entry.reason
                for entry in running.entries()
                if entry.replica == victim.replica and entry.state is SliceState.LOST
            ] or [""]
            return reason

        reason = running.until(lost, "the wrong slice to be taken out")
        assert reason.startswith("it gave other tokens than slices ")
        found = running.until_serving(3)
        assert victim.slice not in {entry.slice for entry in found}
        (quarantined,) = httpx.get(f"{running.address}/status.json").json()["quarantined"]
        assert quarantined["slice"] == victim.slice
        assert quarantined["for_s"] > 3000
        assert running.post("/v1/completions", prompt="x", max_tokens=2).json()["model"] == MODEL
