"""What a device's stream does for a round, in order, and the check at start that it does it.

`CudaStream` enqueues driver calls on addresses; nothing here waits for a device but `wait_idle`. `HostStream` is a thread that
plays the same operations in order where there is no device, so that everything else is the same with and without one.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from farspark.engine.handoff import take_reply
from farspark.engine.handoff.region import Region, distance, next_round
from farspark.errors import FarsparkError
from farspark.native import Call, DeviceCalls, HostPage, Launch, Status, Submitter
from farspark.native.page import TAKE_REPLY_THREADS, WRITE_VALUE, Operation

logger = logging.getLogger(__name__)

_TEST_BYTES: Final = 1024
_TEST_S: Final = 5.0
# Long enough for a stream that does not wait to be seen past the wait.
_PARKED_S: Final = 0.01


class DriverError(FarsparkError):
    """The driver refused a call; the message has its name and the driver's words."""


class SelfTestError(FarsparkError):
    """The stream does not do what rounds need; it is not parked."""


class StreamStuckError(FarsparkError):
    """The stream waits for good, although everything that it could wait for was released. The engine must not go on with it."""


class Stream(Protocol):
    """Owned by the engine thread. Everything is done in the order of the calls; all but `wait_idle` return at once."""

    @property
    def mechanism(self) -> str:
        """For the statistics."""
        ...

    @property
    def device_offset(self) -> int:
        """What an address in the region is more on the device, where kernels write to it, than it is here."""
        ...

    def run(self, work: Callable[[], object]) -> None:
        """`work` enqueues operations of its own."""
        ...

    def to_host(self, to: int, source: int, size: int) -> None:
        """Copy from the device's address `source`."""
        ...

    def to_device(self, to: int, source: int, size: int) -> None: ...

    def stores(self, to: int, source: int, size: int) -> Launch | None:
        """A launch that has a kernel do what `to_host` does, for the check at start; None where there is no kernel."""
        ...

    def submit(self, round_: int, copies: Sequence[int], result: int, launch: int = 0) -> None:
        """A whole round in one go: the launch, the copies to the host (to, source, size, one after the other), `gathered`, the
        wait, the reply into `result` on the device, `consumed`. `launch` is the address of a `Launch`, 0 for none; what it
        writes into the region by itself is not copied.

        Raises DriverError; what was enqueued before the refusal stays, and may park the stream until everything is failed.
        """
        ...

    def wait_idle(self, timeout_s: float) -> bool:
        """Whether everything is done by then."""
        ...

    def close(self) -> None:
        """The stream is idle. Idempotent."""
        ...


# ---- CUDA

_PORTABLE_AND_MAPPED: Final = 1 | 2  # CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_DEVICEMAP
_NOT_READY: Final = 600
_POINTER, _U64, _U32, _SIZE = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_size_t
_CALLS: Final[dict[str, tuple[Any, ...]]] = {
    "cuCtxGetCurrent": (_POINTER,),
    "cuMemHostRegister_v2": (_POINTER, _SIZE, ctypes.c_uint),
    "cuMemHostGetDevicePointer_v2": (_POINTER, _POINTER, ctypes.c_uint),
    "cuMemHostUnregister": (_POINTER,),
    "cuMemcpyDtoHAsync_v2": (_POINTER, _U64, _SIZE, _POINTER),
    "cuMemcpyHtoDAsync_v2": (_U64, _POINTER, _SIZE, _POINTER),
    "cuStreamWriteValue32_v2": (_POINTER, _U64, _U32, ctypes.c_uint),
    "cuStreamWaitValue32_v2": (_POINTER, _U64, _U32, ctypes.c_uint),
    "cuLaunchKernel": (_POINTER, *[ctypes.c_uint] * 7, _POINTER, _POINTER, _POINTER),
    "cuModuleLoadData": (_POINTER, _POINTER),
    "cuModuleGetFunction": (_POINTER, _POINTER, ctypes.c_char_p),
    "cuModuleUnload": (_POINTER,),
    "cuStreamQuery": (_POINTER,),
    "cuGetErrorString": (ctypes.c_int, _POINTER),
}


# What hostflag_submit calls, in the order of `DeviceCalls`.
_OF_A_ROUND: Final = {
    Call.LAUNCH: "cuLaunchKernel",
    Call.COPY: "cuMemcpyDtoHAsync_v2",
    Call.COPY_REPLY: "cuMemcpyHtoDAsync_v2",
    Call.WRITE_GATHERED: "cuStreamWriteValue32_v2",
    Call.WAIT_RELEASED: "cuStreamWaitValue32_v2",
}
_BATCH: Final = "cuStreamBatchMemOp_v2"
_NAMES: Final = {
    **_OF_A_ROUND,
    Call.WRITE_CONSUMED: "cuStreamWriteValue32_v2",
    Call.GATHERED_AND_WAIT: _BATCH,
    Call.TAKE_REPLY: "cuLaunchKernel",
}


class _Driver:
    """libcuda, which is in the process already. Calls leave the GIL: the driver may make one wait for a module load."""

    def __init__(self) -> None:
        """Raises DriverError."""
        try:
            self.library = ctypes.CDLL("libcuda.so.1")
            for name, arguments in _CALLS.items():
                function = getattr(self.library, name)
                function.argtypes = arguments
                function.restype = ctypes.c_int
        except (OSError, AttributeError) as error:
            raise DriverError(f"the CUDA driver cannot be used: {error}") from error
        context = ctypes.c_void_p()
        self.check("cuCtxGetCurrent", self.library.cuCtxGetCurrent(ctypes.byref(context)))
        if not context.value:
            raise DriverError("this thread has no CUDA context")

    def address(self, name: str) -> int:
        """Of a function."""
        return ctypes.cast(getattr(self.library, name), ctypes.c_void_p).value or 0

    def check(self, name: str, result: int) -> None:
        if result:
            text = ctypes.c_char_p()
            self.library.cuGetErrorString(result, ctypes.byref(text))
            raise DriverError(f"{name}: {(text.value or b'unknown error').decode()} ({result})")


class _TakeReply:
    """The kernel of `take_reply`, compiled by the driver and launched once: a load while a stream waits for a round would wait
    for it."""

    def __init__(self, driver: _Driver, stream: int, page: HostPage, device_page: int) -> None:
        """Raises DriverError."""
        self._driver = driver
        self._page = page
        self._consumed = device_page + page.info.consumed_offset
        self._module = ctypes.c_void_p()
        function = ctypes.c_void_p()
        calls = driver.library
        driver.check("cuModuleLoadData", calls.cuModuleLoadData(ctypes.byref(self._module), take_reply.PTX))
        try:
            driver.check(
                "cuModuleGetFunction",
                calls.cuModuleGetFunction(ctypes.byref(function), self._module, take_reply.NAME),
            )
            self.function: Final = function.value or 0
            self._launch_on_nothing(stream)
        except DriverError:
            self.close()
            raise

    def launch(self, to: int, source: int, words: int) -> Launch:
        """As for a reply; `consumed` stays what it is, if no round is under way."""
        launch = Launch(self.function, TAKE_REPLY_THREADS, 0, 5)
        launch.fill(1, 1, source, to, words, self._consumed, self._page.words().consumed)
        return launch

    def _launch_on_nothing(self, stream: int) -> None:
        launch = self.launch(0, 0, 0)
        self._driver.check("cuLaunchKernel", self._driver.library.cuLaunchKernel(*launch.arguments(stream)))

    def close(self) -> None:
        """The stream is idle."""
        self._driver.library.cuModuleUnload(self._module)


class CudaStream:
    """The stream that is current when a round is enqueued. Made, used and closed by the engine thread.

    What a driver lacks is done in more calls: a write and a wait where it has no batches, a copy and a write where it cannot
    compile the kernel that takes the reply.
    """

    def __init__(self, region: Region, page: HostPage, current: Callable[[], int]) -> None:
        """Registers the region with the driver; `current` says which stream is the current one. Raises DriverError."""
        self._driver = _Driver()
        self._page = page
        self._take_reply: _TakeReply | None = None
        self._lacks: list[str] = []
        calls = self._driver.library
        self._address = region.address
        self._current = current
        self._copy_to_host = calls.cuMemcpyDtoHAsync_v2
        self._copy_to_device = calls.cuMemcpyHtoDAsync_v2
        self._driver.check(
            "cuMemHostRegister", calls.cuMemHostRegister_v2(region.address, region.size, _PORTABLE_AND_MAPPED)
        )
        self._is_registered = True
        base = ctypes.c_uint64()
        try:
            self._driver.check(
                "cuMemHostGetDevicePointer",
                calls.cuMemHostGetDevicePointer_v2(ctypes.byref(base), region.address, 0),
            )
        except DriverError:
            self.close()
            raise
        self.device_offset: Final = base.value - region.address
        device_page = page.info.address + self.device_offset
        batch, kernel = self._batches(device_page), self._reply_taker(device_page)
        calls_of_a_round = DeviceCalls(*(self._driver.address(name) for name in _OF_A_ROUND.values()))
        self._submitter = Submitter(
            page,
            calls_of_a_round._replace(batch=batch, take_reply=kernel),
            device_page=device_page,
            max_copies=region.max_copies,
        )

    @property
    def mechanism(self) -> str:
        return "; ".join(["stream memory operations", *self._lacks])

    def _batches(self, device_page: int) -> int:
        """The address of the call for a batch; 0 where the driver has none or refuses one that changes nothing."""
        try:
            call = getattr(self._driver.library, _BATCH)
            call.argtypes, call.restype = (_POINTER, ctypes.c_uint, _POINTER, ctypes.c_uint), ctypes.c_int
            gathered = device_page + self._page.info.gathered_offset
            operation = Operation(WRITE_VALUE, 0, gathered, self._page.words().gathered)
            self._driver.check(_BATCH, call(self._current(), 1, ctypes.byref(operation), 0))
        except (AttributeError, DriverError) as error:
            self._lacks.append(f"without batches: {error}")
            return 0
        return self._driver.address(_BATCH)

    def _reply_taker(self, device_page: int) -> int:
        """The handle of the kernel that takes a reply; 0 where it cannot be had."""
        try:
            self._take_reply = _TakeReply(self._driver, self._current(), self._page, device_page)
        except DriverError as error:
            self._lacks.append(f"replies are copied: {error}")
            return 0
        return self._take_reply.function

    def run(self, work: Callable[[], object]) -> None:
        work()

    def to_host(self, to: int, source: int, size: int) -> None:
        result = self._copy_to_host(to, source, size, self._current())
        if result:
            self._driver.check("cuMemcpyDtoHAsync", result)

    def to_device(self, to: int, source: int, size: int) -> None:
        result = self._copy_to_device(to, source, size, self._current())
        if result:
            self._driver.check("cuMemcpyHtoDAsync", result)

    def stores(self, to: int, source: int, size: int) -> Launch | None:
        return None if self._take_reply is None else self._take_reply.launch(to + self.device_offset, source, size // 4)

    def submit(self, round_: int, copies: Sequence[int], result: int, launch: int = 0) -> None:
        status = self._submitter.submit(self._current(), round_, copies, result, launch)
        if status is not Status.OK:
            self._refuse(status)

    def _refuse(self, status: Status) -> None:
        if status is not Status.REFUSED:
            raise DriverError(f"a round was submitted to a page that is {status.name.lower()}")
        call, result = self._submitter.refusal()
        self._driver.check(f"{_NAMES[call]} ({call.name.lower().replace('_', ' ')})", result)

    def wait_idle(self, timeout_s: float) -> bool:
        """Never by a call that would wait for good. Raises DriverError where the device itself has failed."""
        until = time.monotonic() + timeout_s
        while (result := self._driver.library.cuStreamQuery(self._current())) == _NOT_READY:
            if time.monotonic() >= until:
                return False
            time.sleep(0.0002)
        self._driver.check("cuStreamQuery", result)
        return True

    def close(self) -> None:
        if self._take_reply is not None:
            self._take_reply.close()
            self._take_reply = None
        if self._is_registered:
            self._is_registered = False
            result = self._driver.library.cuMemHostUnregister(self._address)
            if result:
                logger.warning("farspark: the region was not unregistered (CUDA error %d)", result)

    def __repr__(self) -> str:
        return f"<CudaStream {'registered' if self._is_registered else 'closed'}>"


# ---- without a device


_LaunchCall: Final = ctypes.CFUNCTYPE(
    ctypes.c_int, _POINTER, *[ctypes.c_uint] * 7, _POINTER, ctypes.POINTER(_POINTER), _POINTER
)
_CopyCall: Final = ctypes.CFUNCTYPE(ctypes.c_int, _U64, _U64, _SIZE, _POINTER)
_ValueCall: Final = ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, _U64, _U32, ctypes.c_uint)
_BatchCall: Final = ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, ctypes.c_uint, ctypes.POINTER(Operation), ctypes.c_uint)
_TAKE_REPLY: Final = 1  # the handle of the kernel that takes a reply
_RAISED: Final = 1  # what a call returns whose Python raised
_MAX_COPIES: Final = 64


class HostStream:
    """A thread that does what a stream does, in order, on addresses of the host's. For tests.

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
        self._thread.join(_TEST_S)

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


# ---- the check at start


def self_test(stream: Stream, region: Region, page: HostPage, scratch: int, newest: int) -> int:
    """Two rounds numbered behind `newest`; returns the newest number then. `scratch`: a device buffer of a reply's size.

    Raises SelfTestError with the reason once the stream is idle again, StreamStuckError if it stays parked.
    """
    round_ = newest
    try:
        for turn in range(2):
            round_ = next_round(round_)
            _test_round(stream, region, page, scratch, round_, turn)
    except (SelfTestError, DriverError) as error:
        rescue(stream, page, round_, str(error))
        raise SelfTestError(str(error)) from error
    return round_


def rescue(stream: Stream, page: HostPage, newest: int, why: str) -> None:
    """Release everything with a plain store, and see the stream come to its end. Raises StreamStuckError."""
    page.fail_all(newest)
    try:
        is_idle = stream.wait_idle(_TEST_S)
    except DriverError as error:
        raise StreamStuckError(f"{why}; and then: {error}") from error
    if not is_idle:
        raise StreamStuckError(
            f"{why}; and the stream is parked for good: it does not see a released word. The engine cannot go on with it; "
            "start without VLLM_DSPARK_REMOTE_ASYNC"
        )


def _test_round(stream: Stream, region: Region, page: HostPage, scratch: int, round_: int, turn: int) -> None:
    size = min(page.info.reply_bytes, _TEST_BYTES)
    sent, back = region.rows_address, region.rows_address + _TEST_BYTES
    out = bytes((7 * i + 3 + turn) % 251 for i in range(size))
    answer = bytes((11 * i + 5 + turn) % 241 for i in range(page.info.reply_bytes))
    ctypes.memmove(sent, out, size)
    ctypes.memset(back, 0, size)
    stream.to_device(scratch, sent, size)
    # Of the two rounds one has its data copied, and the other, where it can, written by a kernel.
    launch = stream.stores(back, scratch, size) if turn else None
    if launch is None:
        stream.submit(round_, (back, scratch, size), scratch)
    else:
        stream.submit(round_, (), scratch, launch.address)
    stream.to_host(sent, scratch, size)

    deadline = time.monotonic_ns() + int(_TEST_S * 1e9)
    status = page.wait_gathered(round_, spin_ns=0, nap_ns=50_000, deadline_ns=deadline)
    if status is not Status.OK:
        raise SelfTestError(f"the CPU did not see `gathered` within {_TEST_S:g} s ({status.name})")
    if ctypes.string_at(back, size) != out:
        how = "copied" if launch is None else "written by a kernel"
        raise SelfTestError(f"`gathered` was seen before the data that was {how} in front of it")
    time.sleep(_PARKED_S)
    if distance(page.words().consumed, round_) >= 0:
        raise SelfTestError("the stream passed the wait before anything was published")
    reply = page.make_reply()
    reply.memory[:] = answer
    if page.publish(round_, reply) is not Status.OK:
        raise SelfTestError("the round could not be published")
    while distance(page.words().consumed, round_) < 0:
        if time.monotonic_ns() >= deadline:
            raise SelfTestError(f"the stream did not pass the wait within {_TEST_S:g} s of the release")
        time.sleep(0.0001)
    if not stream.wait_idle(_TEST_S):
        raise SelfTestError(f"the stream did not come to its end within {_TEST_S:g} s")
    if ctypes.string_at(sent, size) != answer[:size]:
        raise SelfTestError("the copy behind the wait did not read what was published")
