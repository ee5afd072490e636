"""The maths of every family whose config is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from farspark.errors import ConfigError
from farspark.worker.checkpoint import DrafterConfig, Gemma4DSparkConfig, LoadedCheckpoint, Qwen3DSparkConfig
from farspark.worker.checkpoint.deepseek import DeepseekV4Config
from farspark.worker.models.base import Arithmetic, DraftModel
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

# (config, tensors, ids that may be drafted, arithmetic, options); the config is of the type that the builder stands under.
Build = Callable[[Any, dict[str, Tensor], int, Arithmetic, ModelOptions], DraftModel]
MODELS: Final[Mapping[type[DrafterConfig], Build]] = {
    Qwen3DSparkConfig: lambda config, tensors, vocab_size, arithmetic, options: Qwen3DSpark(
        config, tensors, vocab_size, arithmetic, as_trained=options.follow == "training"
    ),
    Gemma4DSparkConfig: lambda config, tensors, vocab_size, arithmetic, options: Gemma4DSpark(
        config, tensors, vocab_size, arithmetic, as_trained=options.follow == "training"
    ),
    DeepseekV4Config: lambda config, tensors, vocab_size, arithmetic, options: DeepseekV4(
        config, tensors, vocab_size, arithmetic, is_reference=options.quantisation == "reference"
    ),
}


def build_model(loaded: LoadedCheckpoint, arithmetic: Arithmetic, options: ModelOptions) -> DraftModel:
    """The model of a loaded checkpoint, whose tensors are in the carrier dtype or as stored; they are taken out of it."""
    build = MODELS[type(loaded.config)]
    return build(loaded.config, loaded.tensors, loaded.vocab_size, arithmetic, options)
