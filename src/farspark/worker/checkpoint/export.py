"""Taking the drafter out of its target's checkpoint: its tensors, byte for byte, and the config, into a folder of their own.

Only the index, the headers of the shards that hold a part of the drafter, and those parts are read. What is written
grows in a folder beside the wanted one, file by file; a file counts once it was read back and equals what was copied.
So an export that was cut short goes on where it stopped, and the wanted folder appears only whole.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from farspark.errors import CheckpointError, ConfigError
from farspark.worker.batch import Progress
from farspark.worker.checkpoint.deepseek import DeepseekV4Config
from farspark.worker.checkpoint.families import read_family
from farspark.worker.checkpoint.files import INDEX_FILE, TensorFiles, read_json
from farspark.worker.checkpoint.load import ITEM_BYTES, check_checkpoint, no_progress

CONFIG_FILE: Final = "config.json"
MANIFEST_FILE: Final = "farspark-export.json"
MANIFEST_VERSION: Final = 1

# An output file, and so the most that an export which was cut short copies again.
FILE_BYTES: Final = 2 << 30
CHUNK_BYTES: Final = 16 << 20
# Of each shard, so many tensors' beginnings go into the fingerprint.
SAMPLES: Final = 16
SAMPLE_BYTES: Final = 4096
# What safetensors itself accepts.
MAX_HEADER_BYTES: Final = 100_000_000


class SourceTensor(NamedTuple):
    """A tensor's bytes in a shard of the target."""

    name: str
    dtype: str  # as safetensors names it
    shape: tuple[int, ...]
    path: Path
    offset: int  # in the file
    byte_count: int


@dataclass(frozen=True, slots=True)
class OutputFile:
    """One file of the export, all of it known beforehand."""

    name: str
    tensors: tuple[SourceTensor, ...]  # in the order of their bytes

    def header(self) -> bytes:
        """The length and the JSON that a safetensors file begins with, padded so that the tensors are aligned."""
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        start = 0
        for tensor in self.tensors:
            entries[tensor.name] = {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "data_offsets": [start, start + tensor.byte_count],
            }
            start += tensor.byte_count
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text

    @property
    def byte_count(self) -> int:
        return len(self.header()) + sum(tensor.byte_count for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """What an export of `target` copies."""

    target: Path
    config: DeepseekV4Config
    files: tuple[OutputFile, ...]
    fingerprint: str  # of the target: its config, its index, and of the shards that are read the headers and samples

    @property
    def byte_count(self) -> int:
        return sum(file.byte_count for file in self.files)

    @property
    def tensor_count(self) -> int:
        return sum(len(file.tensors) for file in self.files)


def plan_export(target: Path, file_bytes: int = FILE_BYTES) -> ExportPlan:
    """Find the drafter in the target's folder and check it as the worker's loader does; no tensor is read.

    Raises CheckpointError naming the file, the key or the tensor.
    """
    family, _ = read_family(target)
    config = check_checkpoint(target)
    if not isinstance(config, DeepseekV4Config):
        raise CheckpointError(
            f"{target} holds a {config.kind}, which is a drafter's own checkpoint: there is nothing to take out of it; "
            "give it to the worker as it is"
        )
    with TensorFiles(target, family.claims) as opened:
        paths = {name: opened.path_of(name) for name in config.tensor_shapes()}
    shards = sorted(set(paths.values()))
    headers = {path: read_header(path) for path in shards}
    tensors = [_located(name, path, headers[path]) for name, path in paths.items()]
    tensors.sort(key=lambda tensor: (tensor.path, tensor.offset))
    return ExportPlan(target, config, _split(tensors, file_bytes), _fingerprint(target, headers, tensors))


def export(plan: ExportPlan, out: Path, progress: Progress = no_progress) -> bool:
    """Write the folder `out`; False if it was there already, whole and of this target.

    Raises ConfigError for a folder that holds anything else, a full disk, a source that changes or ends early, and data
    that does not read back as it was written. Then, and when it is interrupted, what is done stays beside `out` and the
    next call goes on with it.
    """
    out = Path(os.path.abspath(out))
    partial = out.with_name(out.name + ".partial")
    with _explained(plan, out):
        if _is_whole(plan, out, progress):
            return False
        partial.mkdir(parents=True, exist_ok=True)
        with _locked(partial):
            _fill(plan, partial, progress)
        partial.rename(out)
        _sync_folder(out.parent)
    return True


class Header(NamedTuple):
    """The beginning of a safetensors file."""

    entries: dict[str, Any]  # name -> dtype, shape, data_offsets
    data_start: int
    digest: bytes  # SHA-256 of the header, and the size of the file
    file_bytes: int


def read_header(path: Path) -> Header:
    """Raises CheckpointError for a file that does not begin as safetensors does."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise CheckpointError(f"{path} does not begin as a safetensors file does")
            text = file.read(length)
        entries = json.loads(text)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: its header is not JSON: {error}") from error
    return Header(entries, 8 + length, hashlib.sha256(prefix + text + struct.pack("<Q", size)).digest(), size)


def _located(name: str, path: Path, header: Header) -> SourceTensor:
    entry = header.entries[name]
    start, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    expected = ITEM_BYTES[entry["dtype"]]
    for size in shape:
        expected *= size
    if end - start != expected or header.data_start + end > header.file_bytes:
        raise CheckpointError(f"{path}: {name} lies outside the file, or its size does not fit its shape {list(shape)}")
    return SourceTensor(name, entry["dtype"], shape, path, header.data_start + start, end - start)


def _split(tensors: list[SourceTensor], file_bytes: int) -> tuple[OutputFile, ...]:
    """Neighbours stay together, so that the source is read from front to back; at least one tensor in each file."""
    parts: list[list[SourceTensor]] = [[]]
    held = 0
    for tensor in tensors:
        if parts[-1] and held + tensor.byte_count > file_bytes:
            parts.append([])
            held = 0
        parts[-1].append(tensor)
        held += tensor.byte_count
    files = []
    for index, part in enumerate(parts):
        # The widest values first: then every tensor is aligned to its own.
        part.sort(key=lambda tensor: -ITEM_BYTES[tensor.dtype])
        files.append(OutputFile(f"model-{index + 1:05d}-of-{len(parts):05d}.safetensors", tuple(part)))
    return tuple(files)


def _fingerprint(target: Path, headers: dict[Path, Header], tensors: list[SourceTensor]) -> str:
    """Tells one revision of a target from another of the same shapes, without reading all of it: samples of every shard."""
    digest = hashlib.sha256()
    try:
        for name in (CONFIG_FILE, INDEX_FILE):
            path = target / name
            digest.update(path.read_bytes() if path.exists() else b"")
        for path, header in sorted(headers.items()):
            digest.update(path.name.encode() + header.digest)
            held = [tensor for tensor in tensors if tensor.path == path]
            with path.open("rb") as file:
                for tensor in held[:: -(-len(held) // SAMPLES)]:
                    file.seek(tensor.offset)
                    digest.update(file.read(min(SAMPLE_BYTES, tensor.byte_count)))
    except OSError as error:
        raise CheckpointError(f"{error.filename or target} cannot be read: {error.strerror}") from error
    return digest.hexdigest()


# Writing --------------------------------------------------------------------------------------------------------------


def _is_whole(plan: ExportPlan, out: Path, progress: Progress) -> bool:
    """Whether `out` is a finished export of this target; raises ConfigError if it is anything else but free."""
    if not out.exists():
        return False
    if not out.is_dir():
        raise ConfigError(f"{out} is there already, and not a folder")
    if not any(out.iterdir()):
        return False
    done = _Manifest.read(out)
    if done is None or done.fingerprint != plan.fingerprint:
        raise ConfigError(f"{out} is there already and not an export of {plan.target}; name a folder that is not there")
    checked = _Counted(progress, "checking", plan.byte_count)
    for file in plan.files:
        if not done.is_intact(out, file, checked):
            raise ConfigError(f"{out / file.name} is not as it was exported; remove {out} and export again")
    return True


def _fill(plan: ExportPlan, folder: Path, progress: Progress) -> None:
    done = _Manifest.read(folder)
    if done is not None and done.fingerprint != plan.fingerprint:
        raise ConfigError(f"{folder} is the beginning of an export of something else; remove it and export again")
    manifest = done or _Manifest(plan.fingerprint, {})
    checked = _Counted(progress, "checking what is there", sum(manifest.sizes(plan)))
    for file in plan.files:
        if file.name in manifest.digests and not manifest.is_intact(folder, file, checked):
            del manifest.digests[file.name]
    missing = [file for file in plan.files if file.name not in manifest.digests]
    _require_room(plan, folder, sum(file.byte_count for file in missing))
    copied = _Counted(progress, "copying", sum(file.byte_count for file in missing))
    for file in missing:
        manifest.digests[file.name] = _copy(file, folder, copied)
        manifest.write(folder)
    weight_map = {tensor.name: file.name for file in plan.files for tensor in file.tensors}
    total = sum(tensor.byte_count for file in plan.files for tensor in file.tensors)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_whole(folder / INDEX_FILE, json.dumps(index, indent=1).encode())
    _write_whole(folder / CONFIG_FILE, (plan.target / CONFIG_FILE).read_bytes())
    _sync_folder(folder)


def _copy(file: OutputFile, folder: Path, copied: _Counted) -> str:
    """Write one output file and read it back; its SHA-256."""
    growing = folder / (file.name + ".growing")
    digest = hashlib.sha256()
    with growing.open("wb") as written:
        for chunk in _contents(file):
            written.write(chunk)
            digest.update(chunk)
            copied.add(len(chunk))
        written.flush()
        os.fsync(written.fileno())
        # What is read back should come from the disk, not from memory.
        os.posix_fadvise(written.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if file_digest(growing) != digest.hexdigest():
        raise ConfigError(f"{growing} does not read back as it was written; is the disk sound?")
    growing.rename(folder / file.name)
    return digest.hexdigest()


def _contents(file: OutputFile) -> Iterator[bytes]:
    yield file.header()
    for tensor in file.tensors:
        with tensor.path.open("rb") as source:
            source.seek(tensor.offset)
            left = tensor.byte_count
            while left:
                chunk = source.read(min(left, CHUNK_BYTES))
                if not chunk:
                    raise CheckpointError(f"{tensor.path} ends within {tensor.name}; it was changed meanwhile")
                left -= len(chunk)
                yield chunk


def file_digest(path: Path, checked: _Counted | None = None) -> str:
    """SHA-256 of a file, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for chunk in _chunks(file):
            digest.update(chunk)
            if checked is not None:
                checked.add(len(chunk))
    return digest.hexdigest()


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    while chunk := file.read(CHUNK_BYTES):
        yield chunk


class _Counted:
    """Progress in bytes."""

    def __init__(self, progress: Progress, what: str, total: int) -> None:
        self._progress, self._what, self._total, self._done = progress, what, total, 0
        if total:
            progress(what, 0, total)

    def add(self, count: int) -> None:
        self._done += count
        self._progress(self._what, self._done, self._total)


@dataclass(frozen=True, slots=True)
class _Manifest:
    """What is done: of which target, and the SHA-256 of every finished file."""

    fingerprint: str
    digests: dict[str, str]

    @classmethod
    def read(cls, folder: Path) -> _Manifest | None:
        if not (folder / MANIFEST_FILE).exists():
            return None
        values = read_json(folder, MANIFEST_FILE)
        fingerprint, digests = values.get("target_sha256"), values.get("files_sha256")
        if (
            values.get("version") != MANIFEST_VERSION
            or not isinstance(fingerprint, str)
            or not isinstance(digests, dict)
        ):
            raise ConfigError(
                f"{folder / MANIFEST_FILE} was not written by this version; remove {folder} and export again"
            )
        return cls(fingerprint, digests)

    def write(self, folder: Path) -> None:
        values = {"version": MANIFEST_VERSION, "target_sha256": self.fingerprint, "files_sha256": self.digests}
        _write_whole(folder / MANIFEST_FILE, json.dumps(values, indent=1).encode())

    def sizes(self, plan: ExportPlan) -> list[int]:
        return [file.byte_count for file in plan.files if file.name in self.digests]

    def is_intact(self, folder: Path, file: OutputFile, checked: _Counted) -> bool:
        path = folder / file.name
        if not path.is_file() or path.stat().st_size != file.byte_count:
            return False
        return file_digest(path, checked) == self.digests.get(file.name)


def _write_whole(path: Path, data: bytes) -> None:
    growing = path.with_name(path.name + ".growing")
    with growing.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    growing.rename(path)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Two exports into one folder would write over each other. The lock goes with the process."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"{folder} is being written by another export") from error
        yield
    finally:
        os.close(descriptor)


def _require_room(plan: ExportPlan, folder: Path, needed: int) -> None:
    # Half-written files of a run before are written over, so what they take is free.
    growing = sum(path.stat().st_size for path in folder.glob("*.growing"))
    free = shutil.disk_usage(folder).free + growing
    if needed > free:
        raise ConfigError(
            f"{folder}: the export of {plan.target} takes another {needed:,} bytes and {free:,} are free; make room and "
            "run it again"
        )


@contextlib.contextmanager
def _explained(plan: ExportPlan, out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = error.filename or out
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ConfigError(
                f"{out}: the disk is full; the export of {plan.target} takes {plan.byte_count:,} bytes in all. Make room and "
                "run it again: what is done is kept"
            ) from error
        raise ConfigError(f"{where}: {error.strerror or error}") from error
