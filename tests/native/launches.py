"""Reads a prepared launch as a driver does."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from farspark.native import Launch


def parameters_of(launch: Launch, sizes: Sequence[int]) -> list[int]:
    """The values of its parameters, each of four or eight bytes, behind the addresses that it gives."""
    addresses = (ctypes.c_uint64 * len(sizes)).from_address(launch.parameters)
    return [
        int((ctypes.c_uint32 if size == 4 else ctypes.c_uint64).from_address(address).value)
        for address, size in zip(addresses, sizes, strict=True)
    ]
