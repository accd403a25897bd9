"""How a model is cut over the devices of a slice."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """`data` copies of the model in the slice, each of `pipeline` stages of `tensor` devices.

    `attention_data` of a stage's devices share attention by requests instead of by heads (attention data parallelism);
    the rest of the model is cut over all of them.
    """

    tensor: int
    pipeline: int = 1
    data: int = 1
    attention_data: int = 1

    @property
    def devices(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def attention_tensor(self) -> int:
        """Devices that attention heads are cut over."""
        return self.tensor // self.attention_data
