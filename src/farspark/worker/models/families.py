"""The maths of every family whose config is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from farspark.errors import ConfigError
from farspark.worker.checkpoint import DrafterConfig, Gemma4DSparkConfig, LoadedCheckpoint, Qwen3DSparkConfig
from farspark.worker.checkpoint.deepseek import DeepseekV4Config
from farspark.worker.models import deepseek_v4, dense
from farspark.worker.models.base import Arithmetic, DraftModel, Footprint
from farspark.worker.models.deepseek_v4 import DeepseekV4
from farspark.worker.models.gemma4 import Gemma4DSpark
from farspark.worker.models.qwen3 import Qwen3DSpark

FOLLOW: Final = ("vllm", "training")
QUANTISATIONS: Final = ("plain", "reference")


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Readings of a checkpoint that its config does not settle."""

    # Where vLLM runs a drafter otherwise than it was trained (Gemma 4: the soft cap on the Markov bias; layers with a
    # window: its edge, and whether they are causal): "vllm", which shadow compares with, or "training".
    follow: str = "vllm"
    # DeepSeek: "reference" sends activations and context through fp8 as DeepSeek's own code does; "plain" does not.
    quantisation: str = "plain"

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        if self.follow not in FOLLOW:
            raise ConfigError(f"to follow {self.follow!r}; supported: {', '.join(map(repr, FOLLOW))}")
        if self.quantisation not in QUANTISATIONS:
            raise ConfigError(
                f"a quantisation of {self.quantisation!r}; supported: {', '.join(map(repr, QUANTISATIONS))}"
            )


DEFAULT_OPTIONS: Final = ModelOptions()


class ModelKind(NamedTuple):
    """A family's maths; every config is of the type that this stands under in `MODELS`."""

    # (config, tensors, ids that may be drafted, arithmetic, options)
    build: Callable[[Any, dict[str, Tensor], int, Arithmetic, ModelOptions], DraftModel]
    # (config, arithmetic, device)
    footprint: Callable[[Any, Arithmetic, torch.device], Footprint]


MODELS: Final[Mapping[type[DrafterConfig], ModelKind]] = {
    Qwen3DSparkConfig: ModelKind(
        lambda config, tensors, vocab_size, arithmetic, options: Qwen3DSpark(
            config, tensors, vocab_size, arithmetic, as_trained=options.follow == "training"
        ),
        dense.footprint,
    ),
    Gemma4DSparkConfig: ModelKind(
        lambda config, tensors, vocab_size, arithmetic, options: Gemma4DSpark(
            config, tensors, vocab_size, arithmetic, as_trained=options.follow == "training"
        ),
        dense.footprint,
    ),
    DeepseekV4Config: ModelKind(
        lambda config, tensors, vocab_size, arithmetic, options: DeepseekV4(
            config, tensors, vocab_size, arithmetic, is_reference=options.quantisation == "reference"
        ),
        deepseek_v4.footprint,
    ),
}


def build_model(loaded: LoadedCheckpoint, arithmetic: Arithmetic, options: ModelOptions) -> DraftModel:
    """The model of a loaded checkpoint, whose tensors are in the carrier dtype or as stored; they are taken out of it."""
    return MODELS[type(loaded.config)].build(loaded.config, loaded.tensors, loaded.vocab_size, arithmetic, options)


def footprint_of(config: DrafterConfig, arithmetic: Arithmetic, device: torch.device) -> Footprint:
    """What the model of `config` will take on `device`."""
    return MODELS[type(config)].footprint(config, arithmetic, device)
