"""Typed reading of a checkpoint's config.json that remembers which keys were looked at.

A key that nobody looked at is a key whose meaning nobody checked: the loader says so instead of passing over it.
`null` reads as absent, as Hugging Face writes it.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Final

from farspark.errors import CheckpointError

# Far above every size, and still a number that floats and tensors can hold.
_MOST: Final = 2**62


class ConfigKeys:
    """One JSON object of a config.json. Every reader raises CheckpointError with the key's full name and its value."""

    def __init__(self, values: Mapping[str, object], prefix: str = "") -> None:
        self._values = values
        self._prefix = prefix
        self._read: set[str] = set()

    def name(self, key: str) -> str:
        return f"config.json: {self._prefix}{key}"

    def names(self) -> list[str]:
        """The keys that have a value."""
        return [key for key in self._values if self.has(key)]

    def has(self, key: str) -> bool:
        return self._values.get(key) is not None

    def unread(self) -> list[str]:
        """Keys with a value that were never looked at, sorted, with the object's name before them."""
        return sorted(self._prefix + key for key in self.names() if key not in self._read)

    def skip(self, keys: Collection[str]) -> None:
        """Count `keys` as looked at: known, and without influence on a draft."""
        self._read.update(keys)

    def _get(self, key: str) -> object:
        self._read.add(key)
        return self._values.get(key)

    def integer(self, key: str, *, at_least: int) -> int:
        value = self.optional_integer(key, at_least=at_least)
        if value is None:
            raise CheckpointError(f"{self.name(key)} is missing")
        return value

    def optional_integer(self, key: str, *, at_least: int) -> int | None:
        value = self._get(key)
        if value is None:
            return None
        # bool is an int in Python; `true` as a size is a mistake all the same.
        if not isinstance(value, int) or isinstance(value, bool):
            raise CheckpointError(f"{self.name(key)} is {value!r}; expected an integer")
        if value < at_least:
            raise CheckpointError(f"{self.name(key)} is {value}; expected {at_least} or more")
        if value > _MOST:
            raise CheckpointError(f"{self.name(key)} is {value}; expected {_MOST} or less")
        return value

    def number(self, key: str) -> float:
        value = self.optional_number(key)
        if value is None:
            raise CheckpointError(f"{self.name(key)} is missing")
        return value

    def optional_number(self, key: str) -> float | None:
        value = self._get(key)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise CheckpointError(f"{self.name(key)} is {value!r}; expected a number")
        # NaN fails the comparison too, and an integer may be larger than any float.
        if not abs(value) <= sys.float_info.max:
            raise CheckpointError(f"{self.name(key)} is {value!r}; expected a finite number")
        return float(value)

    def flag(self, key: str) -> bool | None:
        value = self._get(key)
        if value is not None and not isinstance(value, bool):
            raise CheckpointError(f"{self.name(key)} is {value!r}; expected true or false")
        return value

    def text(self, key: str) -> str | None:
        value = self._get(key)
        if value is not None and not isinstance(value, str):
            raise CheckpointError(f"{self.name(key)} is {value!r}; expected a string")
        return value

    def integers(self, key: str) -> tuple[int, ...] | None:
        value = self._get(key)
        if value is None:
            return None
        if not isinstance(value, list) or any(not isinstance(v, int) or isinstance(v, bool) for v in value):
            raise CheckpointError(f"{self.name(key)} is {value!r}; expected a list of integers")
        return tuple(value)

    def texts(self, key: str) -> tuple[str, ...] | None:
        value = self._get(key)
        if value is None:
            return None
        if not isinstance(value, list) or any(not isinstance(v, str) for v in value):
            raise CheckpointError(f"{self.name(key)} is {value!r}; expected a list of strings")
        return tuple(value)

    def nested(self, key: str) -> ConfigKeys:
        """The object at `key`; empty when absent."""
        value = self._get(key)
        if value is None:
            return ConfigKeys({}, f"{self._prefix}{key}.")
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.name(key)} is {value!r}; expected an object")
        return ConfigKeys(value, f"{self._prefix}{key}.")

    def objects(self, key: str) -> tuple[ConfigKeys, ...] | None:
        value = self._get(key)
        if value is None:
            return None
        if not isinstance(value, list) or any(not isinstance(one, dict) for one in value):
            raise CheckpointError(f"{self.name(key)} is {value!r}; expected a list of objects")
        return tuple(ConfigKeys(one, f"{self._prefix}{key}[{index}].") for index, one in enumerate(value))

    def require_same(self, key: str, other: ConfigKeys) -> None:
        """Raise if `key` has a value here that it has not got in `other`, which is where it is read."""
        value = self._get(key)
        if value is not None and value != other._values.get(key):
            raise CheckpointError(
                f"{self.name(key)} is {value!r}, but {other.name(key).removeprefix('config.json: ')}, which is what counts, is "
                f"{other._values.get(key)!r}"
            )

    def refuse(self, key: str, why: str) -> None:
        """Raise if `key` has a value: it asks for something that is not served."""
        value = self._get(key)
        if value is not None:
            raise CheckpointError(f"{self.name(key)} is {value!r}: {why}")
