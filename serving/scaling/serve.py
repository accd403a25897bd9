"""The Serve autoscaling policy of a slice deployment, named by import path; Serve sends this module's code to the controller.

The state is in serving.scaling.scaler, which is imported; this module is pickled by value, once a deployment.
"""

from collections.abc import Sequence
from typing import Any

from ray.serve.config import AutoscalingContext

from serving.scaling.capacity import Pool
from serving.scaling.policy import Room, Settings
from serving.scaling.scaler import scaler
from serving.slices import controller

POLICY = "serving.scaling.serve:SlicePolicy"


class SlicePolicy:
    """One pool of one model, beside those with a fixed number of slices. Its arguments are plain JSON, as Serve wants them."""

    def __init__(
        self,
        pool: str,
        settings: dict[str, Any],
        budget: dict[str, float | None],
        fixed: Sequence[dict[str, Any]] = (),
    ) -> None:
        self._settings = _settings(settings)
        self._pool = pool
        self._budget = Room(**budget)
        self._fixed = [_settings(model) for model in fixed]
        self._deployed = True  # Serve makes another policy of every deployment of the pool

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Serve's call, several times a second in the controller's loop."""
        deployed, self._deployed = self._deployed, False
        application = context.app_name or ""
        wanted = scaler(application).wanted(
            self._settings,
            self._pool,
            context.target_num_replicas,
            self._budget,
            fixed=self._fixed,
            leaving=controller.leaving(application),
            deployed=deployed,
        )
        in_full, pools = scaler(application).in_full(self._settings.model, self._pool)
        controller.tell_wanted(application, context.deployment_name, in_full, pools)
        return wanted, {}


def _settings(sent: dict[str, Any]) -> Settings:
    pools = [
        Pool(**{**fields, "steps": tuple((count, seconds) for count, seconds in fields["steps"])})
        for fields in sent["pools"]
    ]
    return Settings(**{**sent, "pools": tuple(pools)})
