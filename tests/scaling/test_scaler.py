import json
from dataclasses import asdict

import pytest
from fleet_of import pool, settings

from serving.scaling.policy import Room
from serving.scaling.scaler import Scaler
from serving.scaling.serve import SlicePolicy

pytestmark = pytest.mark.unit


def test_a_board_that_cannot_be_read_leaves_serve_what_it_has() -> None:
    """No cluster here: every read fails, as while the head restarts."""
    time_s = [0.0]
    scaler = Scaler("app", Room(), clock=lambda: time_s[0])
    asked = settings(pool(most=5))
    assert scaler.wanted(asked, 0, target=3) == 3
    scaler.step()
    assert scaler.wanted(asked, 0, target=3) == 3
    time_s[0] = 1000.0  # nobody has called for long: the thread ends
    assert scaler._thread is not None
    scaler._thread.join(timeout=5)
    assert not scaler._thread.is_alive()


def test_what_serve_is_given_comes_back_as_it_was() -> None:
    asked = settings(pool("near", patience_s=100), pool("far", least=2), ttft_s=1.0)
    sent = json.loads(json.dumps(asdict(asked)))
    assert SlicePolicy(1, sent, {"slices": None})._settings == asked
