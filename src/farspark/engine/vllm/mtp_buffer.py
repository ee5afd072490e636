"""Capacity gives back the hidden-state buffer that a DeepSeek-V4 target keeps for classic MTP: DSpark never reads it.

It is freed between loading and the measurement of what loading took, so that its memory goes to the KV cache, and once it is gone
nothing is copied into it. A vLLM that touches it otherwise than recorded keeps it, with a warning: the buffer costs memory and
nothing else, so a guess would risk more than it could win, and stopping the start would too.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

from farspark.engine.vllm.mtp_uses import MTP_BUFFER, BufferUse
from farspark.engine.vllm.versions import (
    LAST_TOUCH,
    HookPoints,
    Sources,
    installed_sources,
    mtp_buffer_differences,
)

logger = logging.getLogger(__name__)


class _Nowhere:
    """Where a version does not ask whether there is a buffer: takes every row, keeps none, and is its own slice."""

    def __getitem__(self, rows: object) -> _Nowhere:
        return self

    def copy_(self, rows: object) -> _Nowhere:
        return self


def reclaim_after_load(record: HookPoints, note: Callable[[dict[str, Any]], None]) -> None:
    """Have the next target that this process loads give its buffer back; `note` is called now and with what became of it."""
    import vllm.v1.worker.gpu.model_runner as runner

    original = getattr(runner, LAST_TOUCH)

    @functools.wraps(original)
    def touch_last(model: Any, *rest: Any, **more: Any) -> Any:
        setattr(runner, LAST_TOUCH, original)
        result = original(model, *rest, **more)
        note(reclaim(model, record, installed_sources()))
        return result

    setattr(runner, LAST_TOUCH, touch_last)
    note(_found(0, "no target was loaded yet"))


def reclaim(model: torch.nn.Module, record: HookPoints, sources: Sources | None) -> dict[str, Any]:
    """Take the buffer from `model`: `{"reclaimed_bytes": of this rank, "kept_because": a sentence or None}`."""
    holders = list(_holders(model))
    if not holders:
        return _found(0)
    differences = [_unrecorded(holder) for holder in holders if not _is_recorded(holder, record)]
    if sources is not None:
        differences += mtp_buffer_differences(sources, record)
    if differences:
        why = "; ".join(differences)
        logger.warning("farspark: the target keeps its MTP hidden-state buffer, which nothing reads: %s", why)
        return _found(0, why)
    nothing = None if record.mtp_buffer_may_be_none else _Nowhere()
    reclaimed = 0
    for holder in holders:
        reclaimed += getattr(holder, MTP_BUFFER).nbytes
        setattr(holder, MTP_BUFFER, nothing)
    logger.info(
        "farspark: %.1f MiB reclaimed on this rank: the target's MTP hidden-state buffer, which DSpark never reads",
        reclaimed / (1 << 20),
    )
    return _found(reclaimed)


def _holders(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    return (one for one in model.modules() if isinstance(getattr(one, MTP_BUFFER, None), torch.Tensor))


def _is_recorded(holder: torch.nn.Module, record: HookPoints) -> bool:
    return record.mtp_buffer.get(_constructor(holder)) is BufferUse.SETS


def _constructor(holder: torch.nn.Module) -> str:
    kind = type(holder)
    return f"{kind.__module__.removeprefix('vllm.').replace('.', '/')}.py::{kind.__qualname__}.__init__"


def _unrecorded(holder: torch.nn.Module) -> str:
    return f"{_constructor(holder)} is not recorded to set it"


def _found(reclaimed: int, why: str | None = None) -> dict[str, Any]:
    return {"reclaimed_bytes": reclaimed, "kept_because": why}
