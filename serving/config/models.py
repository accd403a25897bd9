"""Models, the slices that serve them, and how many. Pure."""

import re
from enum import StrEnum
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from serving.config.spec import Spec, without_tilde

MOST_SLICES = 10_000  # of one pool: more is a slip of the keyboard, no zone has them

_RESERVATION = re.compile(
    r"(projects/[a-z][-a-z0-9]{4,28}[a-z0-9]/reservations/)?[a-z]([-a-z0-9]{0,61}[a-z0-9])?"
)


class CapacityType(StrEnum):
    """How a slice is bought."""

    RESERVED = "reserved"
    FLEX_START = "flex-start"
    SPOT = "spot"
    ON_DEMAND = "on-demand"


class SliceSpec(Spec):
    """A slice shape as the user names it, and the ways to buy it, tried in order."""

    generation: str = Field(description="TPU generation: v4, v5e, v5p, v6e or v7x.")
    topology: str = Field(description="Chips along each axis of the slice, as in 2x4 or 2x2x2.")
    hosts: int | None = Field(
        default=None, ge=1, description="VMs of the slice, where the topology leaves a choice."
    )
    machine_type: str | None = Field(default=None, description="GKE machine type instead of hosts.")
    capacity: tuple[CapacityType, ...] = Field(
        default=(CapacityType.ON_DEMAND,),
        min_length=1,
        description="Ways to buy the slice, tried in order; one of them may stand alone, without a list.",
    )
    reservation: str | None = Field(
        default=None,
        description="Reservation that `reserved` capacity comes from; `projects/PROJECT/reservations/NAME` of another project.",
    )

    @field_validator("capacity", mode="before")
    @classmethod
    def _one_way(cls, raw: Any) -> Any:
        return (raw,) if isinstance(raw, str) else raw

    @field_validator("reservation")
    @classmethod
    def _is_a_reservation(cls, value: str | None) -> str | None:
        if value is None or _RESERVATION.fullmatch(value):
            return value
        raise ValueError("the name of a reservation is needed, or projects/PROJECT/reservations/NAME")

    @model_validator(mode="after")
    def _reservation_named(self) -> Self:
        if (CapacityType.RESERVED in self.capacity) != (self.reservation is not None):
            raise ValueError("capacity: reserved and reservation: NAME come together")
        return self


AUTO = "auto"


class ParallelSpec(Spec):
    """Parallelism that overrides the derived one; it must fill the slice. Sizes count JAX devices."""

    tensor: int | None = Field(default=None, ge=1, description="Devices that attention heads are cut over.")
    pipeline: int | None = Field(default=None, ge=1, description="Pipeline stages: 1 or the number of hosts.")
    data: int | None = Field(default=None, ge=1, description="Copies of the model in one slice of one host.")
    expert: int | None = Field(
        default=None,
        ge=1,
        description="The mesh's axis for experts (expert_parallelism); the slice has tensor x expert devices then.",
    )
    attention_data: int | str | None = Field(
        default=None,
        description="Of the tensor devices, those that share attention by requests (attn_dp_size); "
        "auto: as many as have no KV head of their own. Latent attention has auto unless a number is set.",
    )
    decode_context: int | None = Field(
        default=None,
        ge=1,
        description="Of the tensor devices, those that hold different tokens of a sequence (decode_context_parallel_size).",
    )
    prefill_context: int | None = Field(
        default=None,
        ge=1,
        description="Devices beside tensor that read one prompt together (prefill_context_parallel_size).",
    )

    @field_validator("attention_data")
    @classmethod
    def _is_a_size_or_auto(cls, value: int | str | None) -> int | str | None:
        if value in (None, AUTO) or (isinstance(value, int) and value >= 1):
            return value
        raise ValueError("this is neither a whole number from 1 nor auto")


class ReplicaSpec(Spec):
    """How many slices serve the model: between `min` and `max`, by its load."""

    min: int = Field(
        default=1, ge=0, description="Slices that serve however little there is to do; 0 lets all go."
    )
    max: int = Field(
        default=1, ge=1, le=MOST_SLICES, description="The most slices that are ordered for load."
    )
    patience_s: float = Field(
        default=600, gt=0, description="Seconds after which slices ordered here are sought in the next pool."
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}")
        return self

    @property
    def scales(self) -> bool:
        return self.min < self.max


class SloSpec(Spec):
    """What nine of ten requests should see; scaling buys slices for it, and a plan that can't keep it is refused."""

    ttft_s: float | None = Field(default=None, gt=0, description="Seconds to the first token.")
    itl_s: float | None = Field(default=None, gt=0, description="Seconds between tokens.")


class PoolSpec(Spec):
    """Slices of one shape among several that serve a model."""

    slice: SliceSpec = Field(description="The pool's slice.")
    replicas: ReplicaSpec = Field(
        default=ReplicaSpec(), description="How many of them; a number means exactly so many."
    )
    parallel: ParallelSpec = Field(
        default=ParallelSpec(), description="In place of the derived sizes, on these slices."
    )

    @field_validator("replicas", mode="before")
    @classmethod
    def _fixed_count(cls, raw: Any) -> Any:
        return _as_range(raw)


class QueueSpec(Spec):
    """Requests that wait in a router for a slice of the model. With 0 for either key, no request waits."""

    requests: int = Field(default=512, ge=0, description="The most that wait in one router.")
    wait_s: float = Field(default=30, ge=0, description="Seconds after which a waiting request is refused.")


class RolloutSpec(Spec):
    """How a changed engine goes through the slices: one slice first, then several at a time.

    At most `at_once` less `spare` slices fewer serve meanwhile, and one fewer where there is no spare hardware.
    """

    at_once: int | str = Field(
        default="10%", description="Slices replaced at a time: a number, or a share of them, rounded up."
    )
    spare: int = Field(
        default=1, ge=0, description="Slices among them that are ordered beyond the wanted number."
    )

    @field_validator("at_once")
    @classmethod
    def _is_a_count(cls, value: int | str) -> int | str:
        if isinstance(value, int):
            fits = value >= 1
        else:
            share = re.fullmatch(r"(\d+(?:\.\d+)?)%", value)
            fits = share is not None and 0 < float(share[1]) <= 100
        if not fits:
            raise ValueError("this is neither a number from 1 nor a share from 1% to 100%")
        return value


class ModelSpec(Spec):
    """One model on slices of one shape, or of several in `pools`, the preferred first.

    With `pools`, the keys `slice`, `replicas` and `parallel` are the first pool's; `per_pool` has every pool's.
    """

    name: str = Field(default="", description="Name clients use; the model id where left out.")
    model: str = Field(min_length=1, description="Hugging Face id or a local path of a checkpoint.")
    slice: SliceSpec = Field(description="The slice that one replica takes whole.")
    replicas: ReplicaSpec = Field(
        default=ReplicaSpec(), description="How many slices; a number means exactly so many."
    )
    parallel: ParallelSpec = Field(default=ParallelSpec(), description="In place of the derived sizes.")
    pools: tuple[PoolSpec, ...] = Field(
        default=(),
        description="In place of slice, replicas and parallel: several slices, the preferred first.",
    )
    engine: dict[str, Any] = Field(default_factory=dict, description="vLLM engine options by vLLM's names.")
    engine_env: dict[str, str] = Field(
        default_factory=dict,
        description="Environment of the engine's processes on every host of the slice, by tpu-inference's names.",
    )
    queue: QueueSpec = Field(default=QueueSpec(), description="How many requests may wait, and how long.")
    slo: SloSpec = Field(default=SloSpec(), description="Targets that scaling buys slices for.")
    cool_down_s: float = Field(
        default=300, ge=0, description="Seconds a slice stays unneeded before it is let go."
    )
    drain_s: float = Field(
        default=60, ge=0, description="Seconds a slice may take to finish its requests when it stops."
    )
    surge_s: float = Field(
        default=30,
        ge=0,
        description="Seconds that a changed engine waits for a spare slice before an old one makes room.",
    )
    rollout: RolloutSpec = Field(
        default=RolloutSpec(), description="How many slices change their engine at a time."
    )
    stall_s: float = Field(
        default=30,
        gt=0,
        description="Seconds without an answer after which an engine counts as hung, unless it compiles a program (for up to 15 minutes).",
    )
    start_s: float = Field(
        default=1800,
        gt=0,
        description="Seconds after which a start counts as late: its stacks go to a file, and it goes on.",
    )

    @model_validator(mode="before")
    @classmethod
    def _named(cls, raw: Any) -> Any:
        if isinstance(raw, dict) and not raw.get("name") and isinstance(raw.get("model"), str):
            return {**raw, "name": raw["model"]}
        return raw

    _without_tilde = field_validator("model")(without_tilde)

    @field_validator("engine")
    @classmethod
    def _paths_without_tilde(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Of what vLLM opens as it is written. It takes a ~ of an adapter's path for a home."""
        for key in ("hf_config_path", "tokenizer"):
            if isinstance(path := value.get(key), str) and path.startswith("~"):
                raise ValueError(f"{key} is {path}; write the path from / on, for ~ is for shells")
        return value

    @field_validator("name")
    @classmethod
    def _is_one_line(cls, value: str) -> str:
        if not value.isprintable():
            raise ValueError(f"{value!a} has control characters; metrics, logs and clients have the name")
        return value

    @field_validator("replicas", mode="before")
    @classmethod
    def _fixed_count(cls, raw: Any) -> Any:
        return _as_range(raw)

    @model_validator(mode="before")
    @classmethod
    def _first_pool(cls, raw: Any) -> Any:
        if not isinstance(raw, dict) or not raw.get("pools"):
            return raw
        if misplaced := sorted({"slice", "replicas", "parallel"} & raw.keys()):
            raise ValueError(f"pools stand in the place of {', '.join(misplaced)}; put that into each pool")
        first = raw["pools"][0] if isinstance(raw["pools"], list | tuple) else {}
        return {**raw, **(first if isinstance(first, dict) else {})}

    def per_pool(self) -> "tuple[ModelSpec, ...]":
        """One spec a pool, in order of preference; the model itself where it lists no pools."""
        return tuple(
            self.model_copy(
                update={
                    "slice": pool.slice,
                    "replicas": pool.replicas,
                    "parallel": pool.parallel,
                    "pools": (),
                }
            )
            for pool in self.pools
        ) or (self,)


def _as_range(raw: Any) -> Any:
    if isinstance(raw, int) and not isinstance(raw, bool):
        return {"min": raw, "max": raw}
    if isinstance(raw, dict | ReplicaSpec):
        return raw
    raise ValueError("a whole number of slices is needed, or a mapping with min and max")
