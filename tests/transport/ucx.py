"""What tests over UCX share: whether there is one."""

from __future__ import annotations

import pytest

from farspark.native import NativeUnavailable
from farspark.native.ucx import load_ucx


def why_not() -> str | None:
    """Why there is no UCX here, or None."""
    try:
        load_ucx()
    except NativeUnavailable as error:
        return str(error)
    return None


_WHY_NOT = why_not()
needs_ucx = pytest.mark.skipif(_WHY_NOT is not None, reason=f"no UCX: {_WHY_NOT}")


def is_older_than(*release: int) -> bool:
    """Whether the UCX here is; True without one."""
    return _WHY_NOT is not None or load_ucx().release < release
