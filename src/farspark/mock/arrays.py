"""Typed arrays as the wire has them."""

from __future__ import annotations

import struct
from typing import cast


def array(kind: str, values: list[int] | list[float]) -> memoryview:
    """Little-endian, C-contiguous; `kind` is the letter of `struct`: "i" for int32, "f" for float32."""
    return cast(memoryview, memoryview(struct.pack(f"<{len(values)}{kind}", *values)).cast(kind))  # type: ignore[call-overload]
