"""How a model is cut over the devices of a slice: the sizes of tpu-inference's mesh."""

from dataclasses import dataclass

# Axes of tpu-inference 0.26's meshes, in order (layers/common/sharding.py). The short one is its default.
AXES = ("data", "attn_dp", "attn_dp_expert", "expert", "model", "dcp", "pcp")
SHORT_AXES = ("data", "model")


@dataclass(frozen=True)
class Layout:
    """`data` copies of the model in the slice, each of `pipeline` stages of `width` devices.

    Attention heads are cut over `tensor` devices, experts over `expert` times as many. Attention data parallelism: `attention_data`
    of the `tensor` devices and `attention_expert` of the `expert` devices share attention by requests instead. Context parallelism:
    `decode_context` of the `tensor` devices, and `prefill_context` devices more, share attention by tokens.
    """

    tensor: int
    pipeline: int = 1
    data: int = 1
    expert: int = 1
    attention_data: int = 1
    attention_expert: int = 1
    decode_context: int = 1
    prefill_context: int = 1
    long_mesh: bool = False  # all seven axes (NEW_MODEL_DESIGN), not data and model alone

    @property
    def width(self) -> int:
        """Devices of one stage of one copy."""
        return self.tensor * self.expert * self.prefill_context

    @property
    def devices(self) -> int:
        return self.width * self.pipeline * self.data

    @property
    def attention_groups(self) -> int:
        """Groups of a stage's devices that attend to different requests."""
        return self.attention_data * self.attention_expert

    @property
    def context(self) -> int:
        """Devices that hold different tokens of one sequence."""
        return self.decode_context * self.prefill_context

    @property
    def attention_tensor(self) -> int:
        """Devices of a group that hold different heads of the same token (axes model and expert)."""
        return (
            self.tensor // self.attention_data // self.decode_context * self.expert // self.attention_expert
        )

    @property
    def attention_copies(self) -> int:
        """Copies of attention's weights in a stage: queries are cut over a group's devices, less those of prefill."""
        return self.attention_groups * self.prefill_context

    @property
    def head_shards(self) -> int:
        """Devices that attention's weights are cut over (ShardingAxisName.ATTN_HEAD)."""
        return self.width // self.attention_copies

    @property
    def mesh(self) -> dict[str, int]:
        """The engine's mesh of one stage, by axis."""
        sizes = {
            "data": self.data,
            "attn_dp": self.attention_data,
            "attn_dp_expert": self.attention_expert,
            "expert": self.expert // self.attention_expert,
            "model": self.tensor // self.attention_data // self.decode_context,
            "dcp": self.decode_context,
            "pcp": self.prefill_context,
        }
        return {axis: sizes[axis] for axis in (AXES if self.long_mesh else SHORT_AXES)}
