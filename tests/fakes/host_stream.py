"""A thread in place of a device's stream, so that everything else is the same with and without a device."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from farspark.engine.cuda_driver import DriverError
from farspark.native import DeviceCalls, HostPage, Launch, Status, Submitter
from farspark.native.page import Operation

_POINTER, _U64, _U32, _SIZE = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_size_t
_LaunchCall: Final = ctypes.CFUNCTYPE(
    ctypes.c_int, _POINTER, *[ctypes.c_uint] * 7, _POINTER, ctypes.POINTER(_POINTER), _POINTER
)
_CopyCall: Final = ctypes.CFUNCTYPE(ctypes.c_int, _U64, _U64, _SIZE, _POINTER)
_ValueCall: Final = ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, _U64, _U32, ctypes.c_uint)
_BatchCall: Final = ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, ctypes.c_uint, ctypes.POINTER(Operation), ctypes.c_uint)
_TAKE_REPLY: Final = 1  # the handle of the kernel that takes a reply
_RAISED: Final = 1  # what a call returns whose Python raised
_MAX_COPIES: Final = 64
_END_S: Final = 5.0


class HostStream:
    """A thread that does what a stream does, in order, on addresses of the host's.

    Rounds come to it as they come to a device's driver, through the native helper.
    """

    mechanism: Final = "a thread in place of a stream"
    device_offset: Final = 0

    def __init__(self, page: HostPage, *, is_plain: bool = False) -> None:
        """`is_plain`: as a driver without batches and without a kernel that takes replies."""
        self._page = page
        self.kernels: dict[int, Callable[[], object]] = {}  # what a launch does, by the function's handle, each once
        self._raised: BaseException | None = None  # by a call of the submission at hand
        info = page.info
        self._is_plain = is_plain
        self._words = {
            info.address + info.gathered_offset: lambda round_: self.write_gathered(round_),
            info.address + info.released_offset: lambda round_: self.wait_released(round_),
            info.address + info.consumed_offset: lambda round_: self.write_consumed(round_),
        }
        self._driver = (
            _LaunchCall(self._launched),
            _CopyCall(lambda to, source, size, _: self._answer(self.to_host, to, source, size)),
            _CopyCall(lambda to, source, size, _: self._answer(self.to_device, to, source, size)),
            _ValueCall(lambda _, address, value, __: self._answer(self._words[address], value)),
            _BatchCall(lambda _, count, operations, __: self._answer(self._batched, operations[:count])),
        )
        launch, to_host, to_device, value, batch = (
            ctypes.cast(call, ctypes.c_void_p).value or 0 for call in self._driver
        )
        quick = () if is_plain else (batch, _TAKE_REPLY)
        self._submitter = Submitter(
            page,
            DeviceCalls(launch, to_host, to_device, value, value, *quick),
            device_page=info.address,
            max_copies=_MAX_COPIES,
        )
        self._work: deque[Callable[[], object]] = deque()  # guarded by _changed, as is what follows
        self._changed = threading.Condition()
        self._is_busy = False
        self._is_closed = False
        self.failure: BaseException | None = None  # of the first operation that raised; the rest are done all the same
        self._thread = threading.Thread(target=self._play, name="farspark-stream", daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], object]) -> None:
        with self._changed:
            self._work.append(work)
            self._changed.notify_all()

    def to_host(self, to: int, source: int, size: int) -> None:
        self.run(lambda: ctypes.memmove(to, source, size))

    def to_device(self, to: int, source: int, size: int) -> None:
        self.run(lambda: ctypes.memmove(to, source, size))

    def stores(self, to: int, source: int, size: int) -> Launch | None:
        if self._is_plain:
            return None
        launch = Launch(2, 1, 0, 1)
        self.kernels[launch.function] = lambda: ctypes.memmove(to, source, size)
        return launch

    def launch(self, function: int) -> None:
        """Raises DriverError where nobody has said what `function` does."""
        if function not in self.kernels:
            raise DriverError(f"function {function:#x} cannot be launched without a device")
        self.run(self.kernels.pop(function))

    def submit(self, round_: int, copies: Sequence[int], result: int, launch: int = 0) -> None:
        self._raised = None
        status = self._submitter.submit(0, round_, copies, result, launch)
        if self._raised is not None:
            raise self._raised
        if status is not Status.OK:
            raise DriverError(f"a round was submitted to a page that is {status.name.lower()}")

    def take_reply(self, reply: int, result: int, words: int, round_: int) -> None:
        self.to_device(result, reply, 4 * words)
        self.write_consumed(round_)

    def _launched(self, function: int | None, *shape_and_more: Any) -> int:
        if function != _TAKE_REPLY:
            return self._answer(self.launch, function or 0)
        parameters = shape_and_more[-2]
        kinds = (_U64, _U64, _U32, _U64, _U32)
        reply, result, words, _, round_ = (kind.from_address(parameters[at]).value for at, kind in enumerate(kinds))
        return self._answer(self.take_reply, reply, result, words, round_)

    def _batched(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            self._words[operation.address](operation.value)

    def _answer(self, work: Callable[..., object], *arguments: Any) -> int:
        """As a driver does: no exception passes through the helper."""
        try:
            work(*arguments)
        except BaseException as error:
            self._raised = error
            return _RAISED
        return 0

    def write_gathered(self, round_: int) -> None:
        self.run(lambda: self._page.gather(round_))

    def wait_released(self, round_: int) -> None:
        def wait() -> None:
            while (
                self._page.wait_released(
                    round_, spin_ns=20_000, nap_ns=20_000, deadline_ns=time.monotonic_ns() + 100_000_000
                )
                is Status.TIMED_OUT
            ):
                pass

        self.run(wait)

    def write_consumed(self, round_: int) -> None:
        self.run(lambda: self._page.consume(round_))

    def wait_idle(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._work and not self._is_busy, timeout_s)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(_END_S)

    def _play(self) -> None:
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._work or self._is_closed)
                if not self._work:
                    return
                work = self._work.popleft()
                self._is_busy = True
            try:
                work()
            except BaseException as error:  # a device goes on, too; tests look at it
                self.failure = self.failure or error

    def __repr__(self) -> str:
        return f"<HostStream {len(self._work)} operations to do>"
