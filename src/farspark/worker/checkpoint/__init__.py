"""Drafter checkpoints: config.json, tensors from one file or shards, what the target lends, and who the drafter is.

The identity is what HELLO compares, so that no engine ever verifies the drafts of another drafter in silence. It is a
SHA-256 over, in this order:

    b"farspark drafter identity 1\\n"
    the config           the parsed fields (`identity_values`) as JSON: keys sorted, no spaces, ASCII; length first
    for every tensor, by name (ascending bytes), embed_tokens and lm_head included wherever they came from:
        name             UTF-8, length first
        dtype            as safetensors names it ("BF16"), length first
        rank, sizes      u32, then u64 each
        bytes            u64 length, then the values as in the file: little-endian, row-major

Lengths of names, dtypes and JSON are u32; all integers are little-endian. A tensor taken from the target counts with
the drafter's name and the rows that are used. Nothing depends on shards, on the order within a file, on the device or on
the dtype that the drafter is served in. The Markov identity is made the same way from
b"farspark markov identity 1\\n" and the `markov_head.` tensors, without the config; 32 zero bytes when there are none.
"""

from __future__ import annotations

from farspark.worker.checkpoint.dense import D2T, DenseConfig
from farspark.worker.checkpoint.families import FAMILIES, read_config
from farspark.worker.checkpoint.family import COMMON, EMBEDDING, LM_HEAD, DrafterConfig, Family
from farspark.worker.checkpoint.gemma4 import Gemma4DSparkConfig
from farspark.worker.checkpoint.load import (
    Identities,
    LoadedCheckpoint,
    Place,
    copy_of,
    identities,
    load_checkpoint,
    no_progress,
)
from farspark.worker.checkpoint.qwen3 import Qwen3DSparkConfig

__all__ = [
    "COMMON",
    "D2T",
    "EMBEDDING",
    "FAMILIES",
    "LM_HEAD",
    "DenseConfig",
    "DrafterConfig",
    "Family",
    "Gemma4DSparkConfig",
    "Identities",
    "LoadedCheckpoint",
    "Place",
    "Qwen3DSparkConfig",
    "copy_of",
    "identities",
    "load_checkpoint",
    "no_progress",
    "read_config",
]
