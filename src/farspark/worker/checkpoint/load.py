"""Loading: what a checkpoint must hold, what the target lends, and the identities, in one pass over the bytes."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor

from farspark.errors import CheckpointError
from farspark.worker.batch import Progress
from farspark.worker.checkpoint.families import read_family
from farspark.worker.checkpoint.family import COMMON, EMBEDDING, LM_HEAD, DrafterConfig
from farspark.worker.checkpoint.files import TensorFiles, read_json, some
from farspark.worker.checkpoint.keys import ConfigKeys

FilePath = str | os.PathLike[str]

# Bytes of one element, by safetensors' name of the dtype.
ITEM_BYTES: Final[Mapping[str, int]] = {
    "BF16": 2,
    "F16": 2,
    "F32": 4,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "I8": 1,
    "I32": 4,
    "I64": 8,
}
# What a tensor may be whose dtype the family does not fix.
COMMON_DTYPES: Final = ("BF16", "F16", "F32")

IDENTITY_TAG: Final = b"farspark drafter identity 1\n"
MARKOV_TAG: Final = b"farspark markov identity 1\n"
NO_MARKOV: Final = bytes(32)

# Bytes hashed between two reports of progress.
HASH_CHUNK: Final = 32 << 20


class Place(Protocol):
    """Where a tensor goes once it is hashed: a copy on the device that serves, in the dtype that it is served in.

    `as_stored`: the family keeps this tensor in its own dtype. `tensor` is a view of the mapped file; what is returned
    must not be, or a file replaced under the worker would change its weights.
    """

    def __call__(self, name: str, tensor: Tensor, as_stored: bool) -> Tensor: ...


class Identities(NamedTuple):
    identity: bytes  # 32 bytes
    markov_identity: bytes  # 32 bytes; zeros without a Markov head


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """Everything that a drafter is made of."""

    config: DrafterConfig
    tensors: dict[str, Tensor]  # by name, as placed
    identity: bytes
    markov_identity: bytes
    vocab_size: int  # ids that may be drafted: without padding, and none that the target does not have


def no_progress(what: str, done: int, total: int) -> None:
    """The Progress of a caller that does not watch."""


def copy_of(name: str, tensor: Tensor, as_stored: bool) -> Tensor:
    """The Place of tests and tools: on the CPU, in the file's dtype."""
    return tensor.clone()


def load_checkpoint(
    path: FilePath,
    target: FilePath | None = None,
    progress: Progress = no_progress,
    *,
    place: Place = copy_of,
    admit: Callable[[DrafterConfig], None] = lambda config: None,
) -> LoadedCheckpoint:
    """Read the drafter in the folder `path`, with what it lacks from the target's folder, and hash it on the way.

    Every name, shape and dtype is checked before the first tensor is read; every tensor is read once. In between `admit` may
    raise, because of what the drafter turns out to be.
    Raises CheckpointError naming the file, the key or the tensor.
    """
    with ExitStack() as stack:
        found = _find(Path(path), None if target is None else Path(target), stack)
        admit(found.config)
        tensors: dict[str, Tensor] = {}
        as_stored = found.config.stored_dtypes().keys()

        def keep(name: str, tensor: Tensor) -> None:
            tensors[name] = place(name, tensor, name in as_stored)

        digests = _walk(found, progress, keep)
    return LoadedCheckpoint(found.config, tensors, digests.identity, digests.markov_identity, found.vocab_size)


def check_checkpoint(path: FilePath) -> DrafterConfig:
    """The config of the drafter in `path`, every name, shape and dtype checked, no value read. Raises as `load_checkpoint`."""
    with ExitStack() as stack:
        return _find(Path(path), None, stack).config


def identities(path: FilePath, target: FilePath | None = None, progress: Progress = no_progress) -> Identities:
    """Both identities of the drafter in `path`. Reads every byte, keeps none. Raises as `load_checkpoint` does."""
    with ExitStack() as stack:
        found = _find(Path(path), None if target is None else Path(target), stack)
        return _walk(found, progress, lambda name, tensor: None)


class _Source(NamedTuple):
    """A tensor that will be read."""

    files: TensorFiles
    name: str  # in those files
    shape: tuple[int, ...]  # of the rows that are used
    dtype: str

    def read(self) -> Tensor:
        return self.files.read(self.name)[: self.shape[0]]

    def byte_count(self) -> int:
        count = ITEM_BYTES[self.dtype]
        for size in self.shape:
            count *= size
        return count


class _Found(NamedTuple):
    config: DrafterConfig
    sources: Mapping[str, _Source]
    vocab_size: int


def _find(folder: Path, target: Path | None, stack: ExitStack) -> _Found:
    """Where every tensor is, all of it checked but the values. Opened files are closed by `stack`."""
    family, keys = read_family(folder)
    own = stack.enter_context(TensorFiles(folder, family.claims))
    config = family.parse(keys, own.names())
    shapes, lent = config.tensor_shapes(), config.lent_names()
    names = {name for name in own.names() if not config.ignores(name)}
    missing = sorted(shapes.keys() - names - lent.keys())
    unclaimed = sorted(names - shapes.keys())
    if missing or unclaimed:
        parts = ((missing, "missing"), (unclaimed, f"not part of a {config.kind} with this config.json"))
        raise CheckpointError(f"{folder}: " + "; ".join(f"{some(names)} {what}" for names, what in parts if names))
    sources = {}
    for name in sorted(names):
        shape, dtype = own.describe(name)
        if shape != shapes[name]:
            raise CheckpointError(
                f"{folder}: {name} has shape {list(shape)}; config.json makes it {list(shapes[name])}"
            )
        sources[name] = _Source(own, name, shape, dtype)
    _check_dtypes(folder, sources, config.stored_dtypes())
    vocab_size = config.vocab_size
    lacking = [name for name in lent if name not in names]
    if target is not None:
        lender = _Target.open(target)
        vocab_size = min(vocab_size, lender.vocab_size)
        if lacking:
            sources |= lender.lend(config, lacking, stack)
    elif lacking:
        raise CheckpointError(
            f"{folder} has no {' and no '.join(lacking)}: the drafter shares the target's; give the target's checkpoint "
            "folder (--target DIR)"
        )
    return _Found(config, dict(sorted(sources.items())), vocab_size)


def _check_dtypes(folder: Path, sources: Mapping[str, _Source], fixed: Mapping[str, frozenset[str]]) -> None:
    """Tensors that are not `fixed` have one dtype between them; the others have one of theirs."""
    free = [source.dtype for name, source in sources.items() if name not in fixed and source.dtype in COMMON_DTYPES]
    common = Counter(free).most_common(1)[0][0] if free else COMMON_DTYPES[0]
    for name, source in sources.items():
        allowed = {common if dtype == COMMON else dtype for dtype in fixed.get(name, {COMMON})}
        if source.dtype in allowed:
            continue
        if name in fixed or source.dtype not in COMMON_DTYPES:
            supported = sorted(allowed) if name in fixed else COMMON_DTYPES
            raise CheckpointError(f"{folder}: {name} is {source.dtype}; supported: {', '.join(supported)}")
        raise CheckpointError(f"{folder}: {name} is {source.dtype}, but the other tensors are {common}")


@dataclass(frozen=True, slots=True)
class _Target:
    """The target's checkpoint folder: its vocabulary, and the tensors that it may lend."""

    folder: Path
    vocab_size: int
    ties_embeddings: bool

    @classmethod
    def open(cls, folder: Path) -> _Target:
        keys = ConfigKeys(read_json(folder, "config.json"))
        try:
            # Multimodal targets keep their language model's settings one level down.
            text = keys.nested("text_config")
            scope = text if text.has("vocab_size") else keys
            tied = text if text.has("tie_word_embeddings") else keys
            return cls(folder, scope.integer("vocab_size", at_least=2), bool(tied.flag("tie_word_embeddings")))
        except CheckpointError as error:
            raise CheckpointError(f"target {folder}: {error}") from error

    def lend(self, config: DrafterConfig, lacking: list[str], stack: ExitStack) -> dict[str, _Source]:
        """The tensors named in `lacking`, by the drafter's names. Only the files that hold them are opened."""
        if config.vocab_size > self.vocab_size:
            raise CheckpointError(
                f"the drafter's vocab_size is {config.vocab_size}, the target's in {self.folder} is {self.vocab_size}: "
                f"the target cannot lend {' and '.join(lacking)}"
            )
        if LM_HEAD in lacking and not config.vocab_size == config.draft_vocab_size == self.vocab_size:
            raise CheckpointError(
                f"the drafter's vocabulary is {config.vocab_size} (drafting {config.draft_vocab_size}), the target's in "
                f"{self.folder} is {self.vocab_size}: an lm_head can only be lent between equal vocabularies"
            )
        lent = config.lent_names()
        names = {name: lent[EMBEDDING] if name == LM_HEAD and self.ties_embeddings else lent[name] for name in lacking}
        wanted = frozenset(itertools.chain(*names.values()))
        files = stack.enter_context(TensorFiles(self.folder, wanted.__contains__))
        shapes = config.tensor_shapes()
        sources = {}
        for name, possible in names.items():
            theirs = next((one for one in possible if one in files.names()), None)
            if theirs is None:
                raise CheckpointError(
                    f"target {self.folder} has no {' or '.join(possible)}, which is to be the drafter's {name}"
                )
            shape, dtype = files.describe(theirs)
            rows, width = shapes[name]
            # A target's tables may be padded to more rows than its vocabulary; the rest is never an id.
            if len(shape) != 2 or shape[0] < rows or shape[1] != width:
                raise CheckpointError(
                    f"target {self.folder}: {theirs} has shape {list(shape)}; the drafter's {name} needs "
                    f"{rows} rows or more of {width}"
                )
            if dtype not in COMMON_DTYPES:
                raise CheckpointError(
                    f"target {self.folder}: {theirs} is {dtype}; supported: {', '.join(COMMON_DTYPES)}"
                )
            sources[name] = _Source(files, theirs, (rows, width), dtype)
        return sources


def _walk(found: _Found, progress: Progress, keep: Callable[[str, Tensor], None]) -> Identities:
    """Read every tensor once, in name order: hash it, then hand it to `keep`."""
    drafter, markov = hashlib.sha256(IDENTITY_TAG), hashlib.sha256(MARKOV_TAG)
    values = json.dumps(found.config.identity_values(), sort_keys=True, separators=(",", ":"), allow_nan=False)
    drafter.update(_prefixed(values.encode()))
    total = sum(source.byte_count() for source in found.sources.values())
    done, has_markov = 0, False
    progress("reading the drafter", 0, total)
    for name in sorted(found.sources, key=str.encode):
        source = found.sources[name]
        tensor = source.read()
        digests = [drafter]
        if found.config.is_markov(name):
            has_markov = True
            digests.append(markov)
        head = _prefixed(name.encode()) + _prefixed(source.dtype.encode()) + struct.pack("<I", len(source.shape))
        head += b"".join(struct.pack("<Q", size) for size in source.shape) + struct.pack("<Q", source.byte_count())
        for digest in digests:
            digest.update(head)
        raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
        for start in range(0, len(raw), HASH_CHUNK):
            for digest in digests:
                digest.update(raw[start : start + HASH_CHUNK])
            done += len(raw[start : start + HASH_CHUNK])
            progress("reading the drafter", done, total)
        keep(name, tensor)
    return Identities(drafter.digest(), markov.digest() if has_markov else NO_MARKOV)


def _prefixed(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data
