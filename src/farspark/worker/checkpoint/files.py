"""The files of a checkpoint folder: JSON, and tensors in one safetensors file or in shards named by an index.

What the disk or the file format refuses becomes a CheckpointError that names the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from safetensors import SafetensorError, safe_open
from torch import Tensor

from farspark.errors import CheckpointError

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"


class TensorFiles:
    """The tensors of one folder, in `model.safetensors` or in shards named by an index.

    Only names that are `wanted` are looked for, and only the files that hold them are opened.
    """

    def __init__(self, folder: Path, wanted: Callable[[str], bool] = lambda name: True) -> None:
        self._folder = folder
        self._wanted = wanted
        self._stack = ExitStack()
        self._files: dict[Path, Any] = {}  # safe_open has no types
        try:
            self._where = dict(self._locate())
        except OSError as error:
            self._stack.close()
            raise CheckpointError(f"{folder} cannot be read: {error}") from error
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def names(self) -> frozenset[str]:
        return frozenset(self._where)

    def path_of(self, name: str) -> Path:
        return self._where[name]

    def describe(self, name: str) -> tuple[tuple[int, ...], str]:
        """(shape, dtype as safetensors names it), from the header alone."""
        view = self._files[self._where[name]].get_slice(name)
        return tuple(int(size) for size in view.get_shape()), str(view.get_dtype())

    def read(self, name: str) -> Tensor:
        """A view of the mapped file, valid while these files are open."""
        path = self._where[name]
        try:
            tensor: Tensor = self._files[path].get_tensor(name)
        except (OSError, SafetensorError, RuntimeError) as error:
            raise CheckpointError(f"{path}: {name} cannot be read: {error}") from error
        return tensor

    def _locate(self) -> Iterator[tuple[str, Path]]:
        single, index = self._folder / SINGLE_FILE, self._folder / INDEX_FILE
        if single.exists():
            for name in self._open(single):
                yield name, single
            return
        if not index.exists():
            raise CheckpointError(f"{self._folder} has neither {SINGLE_FILE} nor {INDEX_FILE}")
        weight_map = read_json(self._folder, INDEX_FILE).get("weight_map")
        if not isinstance(weight_map, dict) or any(not isinstance(file, str) for file in weight_map.values()):
            raise CheckpointError(f"{index}: weight_map is not an object of file names")
        named = {name: file for name, file in weight_map.items() if self._wanted(name)}
        shards = sorted(set(named.values()))
        for file in shards:
            # A shard lies beside its index; a path would let a checkpoint read files of the host.
            if Path(file).name != file:
                raise CheckpointError(f"{index}: {file!r} is not a plain file name")
            if not (self._folder / file).exists():
                raise CheckpointError(f"{index} names {file}, which is not in the folder")
        for file in shards:
            held = self._open(self._folder / file)
            promised = {name for name, where in named.items() if where == file}
            if promised - held:
                raise CheckpointError(f"{self._folder / file} lacks {some(sorted(promised - held))} of the index")
            if held - promised:
                raise CheckpointError(f"{self._folder / file} holds {some(sorted(held - promised))}, not in the index")
            for name in promised:
                yield name, self._folder / file

    def _open(self, path: Path) -> set[str]:
        """The wanted names in the file."""
        try:
            file = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            names = {name for name in file.keys() if self._wanted(name)}  # noqa: SIM118 - it is not a dict
        except (OSError, SafetensorError, RuntimeError) as error:
            raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error
        self._files[path] = file
        return names


def some(names: list[str]) -> str:
    """The first few names: a wrong family lacks hundreds."""
    shown = ", ".join(names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"


def read_json(folder: Path, name: str) -> dict[str, object]:
    path = folder / name
    try:
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder; a checkpoint is one with config.json and {SINGLE_FILE}")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} has no {name}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits, and lists as deep
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return values
