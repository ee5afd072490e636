"""The families that are served, by the name that config.json gives them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from farspark.errors import CheckpointError
from farspark.worker.checkpoint import deepseek, gemma4, qwen3, speculators
from farspark.worker.checkpoint.family import DrafterConfig, Family
from farspark.worker.checkpoint.files import read_json
from farspark.worker.checkpoint.gemma4 import Gemma4DSparkConfig
from farspark.worker.checkpoint.keys import ConfigKeys
from farspark.worker.checkpoint.qwen3 import Qwen3DSparkConfig

# Names are looked for in this order: speculators_model_type, the one name in architectures, model_type.
FAMILIES: Final[Mapping[str, Family]] = {
    Qwen3DSparkConfig.kind: Family(qwen3.parse),
    qwen3.SPECFORGE: Family(qwen3.parse),
    Gemma4DSparkConfig.kind: Family(gemma4.parse),
    speculators.MODEL_TYPE: Family(speculators.parse),
    deepseek.V4: Family(deepseek.parse, deepseek.claims),
    deepseek.V41: Family(deepseek.parse, deepseek.claims),
}


def read_family(folder: Path) -> tuple[Family, ConfigKeys]:
    """The family of the checkpoint in `folder` and its config.json, unread. Raises CheckpointError."""
    keys = ConfigKeys(read_json(folder, "config.json"))
    architectures = keys.texts("architectures") or ()
    library, model_type = keys.text("speculators_model_type"), keys.text("model_type")
    names = [library] if library else [architectures[0] if len(architectures) == 1 else None, model_type]
    for name in names:
        if name is not None and name in FAMILIES:
            return FAMILIES[name], keys
    raise CheckpointError(
        f"{folder / 'config.json'}: architectures is {list(architectures)}, model_type {model_type!r}, "
        f"speculators_model_type {library!r}; supported: {', '.join(FAMILIES)}"
    )


def read_config(folder: Path, names: frozenset[str] = frozenset()) -> DrafterConfig:
    """The parsed config.json of a drafter whose tensors have these `names`. Raises CheckpointError."""
    family, keys = read_family(folder)
    return family.parse(keys, names)
