"""Workers in processes of their own, and engines around the real hand-off with a thread in place of a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from tests.fakes.async_soak import Soak
from tests.fakes.async_worker import WorkerProcess
from tests.fakes.async_world import HostDevice, World, make_info, settings, talker_spec

from farspark.engine.config import AsyncProxy

TIMEOUT_S = 0.1
Open = Callable[..., tuple[World, Soak]]


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    with WorkerProcess(make_info()) as worker:
        yield worker


@pytest.fixture
def open_world(worker: WorkerProcess) -> Iterator[Open]:
    """`open_world(proxy, seed=…, start=…, is_plain=…, spec={…}, **settings)`; closed at the end."""
    with ExitStack() as stack:

        def make(
            proxy: AsyncProxy = AsyncProxy.THREAD,
            *,
            seed: int = 1,
            start: int = 0,
            is_plain: bool = False,
            spec: dict[str, Any] | None = None,
            is_ready: bool = True,
            **changes: Any,
        ) -> tuple[World, Soak]:
            info = make_info()
            chosen = settings(proxy, **changes)
            asked = talker_spec(info, worker.endpoint, **({"timeout_s": TIMEOUT_S} | (spec or {})))
            world = stack.enter_context(
                World(HostDevice(info, is_plain=is_plain), info, chosen, asked, seed=seed, start=start)
            )
            if is_ready:
                world.wait_ready()
            return world, Soak(world, worker, chosen, asked.timeout_s)

        yield make
