"""What every family's config offers the loader and the drafter, and what a family is to the loader."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from farspark.worker.checkpoint.keys import ConfigKeys

EMBEDDING: Final = "embed_tokens.weight"
LM_HEAD: Final = "lm_head.weight"

# In `stored_dtypes`: the one dtype that all tensors share which are not named there.
COMMON: Final = "the common dtype"


class DrafterConfig(Protocol):
    """A parsed config.json: all that the maths of one drafter depends on. Immutable."""

    @property
    def kind(self) -> str:
        """The family's name, as users meet it: the published architecture."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids that may come in as anchor or as a previous token: 0 .. vocab_size - 1, as the target counts them."""
        ...

    @property
    def draft_vocab_size(self) -> int:
        """Rows of the head: more than `vocab_size` where it is padded, fewer where the drafted vocabulary is reduced."""
        ...

    @property
    def max_drafts(self) -> int:
        """N: drafts of a whole block."""
        ...

    @property
    def anchor_predicts(self) -> bool:
        """True: a block is [anchor, mask * (N - 1)] and every position predicts the token after it. False: a block is
        [anchor, mask * N], position j predicts the token at its own position, and the anchor's own output is ignored."""
        ...

    @property
    def mask_token_id(self) -> int: ...

    @property
    def max_position(self) -> int:
        """Exclusive bound of positions."""
        ...

    @property
    def window(self) -> int:
        """Newest context positions that a draft can see; 0: all."""
        ...

    @property
    def taps(self) -> int:
        """Target layers that make a context row."""
        ...

    @property
    def tap_size(self) -> int:
        """Width of one tap: the target's hidden size."""
        ...

    @property
    def row_bytes(self) -> int:
        """Bytes of one context row: all taps of one position, bf16."""
        ...

    @property
    def context_layers(self) -> int:
        """Layers that keep entries of their own of every context position."""
        ...

    @property
    def context_entry(self) -> tuple[int, ...]:
        """Shape of what one context position takes in one layer."""
        ...

    def identity_values(self) -> dict[str, object]:
        """The part of the config that the identity covers, as JSON values; equal for every spelling of the same drafter."""
        ...

    def tensor_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name and shape of every tensor of the drafter."""
        ...

    def stored_dtypes(self) -> Mapping[str, frozenset[str]]:
        """Tensors that are kept as they are stored, and which dtypes (safetensors' names, or COMMON) they may have.

        All others share one of BF16, F16 and F32, and are served in the worker's dtype.
        """
        ...

    def ignores(self, name: str) -> bool:
        """Whether a checkpoint may hold the tensor `name` without its being used."""
        ...

    def lent_names(self) -> Mapping[str, tuple[str, ...]]:
        """Tensors that the target lends where the checkpoint lacks them: the names it may have there, the first found wins."""
        ...

    def is_markov(self, name: str) -> bool:
        """Whether the tensor `name` is part of the Markov identity."""
        ...


@dataclass(frozen=True, slots=True)
class Family:
    """How the loader reads one family's checkpoints."""

    # From config.json and the names that are claimed of the folder's tensors. Raises CheckpointError naming the key.
    parse: Callable[[ConfigKeys, frozenset[str]], DrafterConfig]
    # Which of a folder's tensors are the drafter's. Only the files that hold them are opened; the rest is somebody else's.
    claims: Callable[[str], bool] = lambda name: True
