"""What one training run is: enough to repeat it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

TABLE_OPTIMIZERS = ("rowwise_adagrad", "sparse_adam")
PRECISIONS = ("fp32", "bf16")


@dataclass(frozen=True)
class TrainConfig:
    """How a model is trained on a stream.

    Raises:
        ValueError: a value is illegal; the text names the field and what is legal.
    """

    #: "fp32", or "bf16": autocast of the dense part; parameters and optimizer stay fp32.
    precision: str = "bf16"
    #: TF32 in what is left of fp32 matrix products.
    tf32: bool = False
    #: "eager": not compiled; any other name is a backend of torch.compile, with its options.
    backend: str = "inductor"
    options: dict[str, Any] = field(default_factory=dict)
    mode: str | None = None
    #: Adam for the dense part, after a linear warm-up of so many steps.
    lr: float = 1e-3
    warmup: int = 100
    table_optimizer: str = "rowwise_adagrad"
    table_lr: float = 0.02
    #: Of the initial weights; the stream has its own.
    seed: int = 0
    #: Steps of one window of metrics.
    window: int = 100
    #: Repeat bit by bit on a GPU, at some cost in speed.
    deterministic: bool = False
    #: Capture the step as one CUDA graph once the warm-up of the learning rate is over: the same numbers, sooner.
    cuda_graph: bool = False

    def __post_init__(self) -> None:
        for name, legal in (("precision", PRECISIONS), ("table_optimizer", TABLE_OPTIMIZERS)):
            if getattr(self, name) not in legal:
                raise ValueError(f"{name} is {getattr(self, name)!r}; legal: {', '.join(legal)}")
        if self.window < 1 or self.warmup < 0 or self.lr < 0 or self.table_lr < 0:
            raise ValueError(f"window is at least 1, warmup and learning rates at least 0: {self}")
        if self.backend == "eager" and (self.options or self.mode):
            raise ValueError('backend "eager" does not compile, so it takes neither options nor a mode')

    @property
    def steps_before_capture(self) -> int:
        """A graph holds the learning rate, so it must stand still; and loka has to have made its plan by then."""
        sampled = int(self.options.get("auto_calls", 20)) if self.backend == "loka" else 0
        return max(self.warmup, sampled + 3, 3)

    def differences(self, other: dict[str, Any]) -> list[str]:
        """One text per field in which a saved configuration differs from this one."""
        mine = dataclasses.asdict(self)
        return [f"{k}: {other.get(k)!r} there, {mine.get(k)!r} here" for k in mine if mine[k] != other.get(k)]
