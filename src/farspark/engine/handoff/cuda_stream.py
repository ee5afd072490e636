"""CUDA's stream for rounds: driver calls on addresses. Nothing here waits for the device but `wait_idle`."""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from farspark.engine.cuda_driver import CudaDriver, DriverError
from farspark.engine.handoff import take_reply
from farspark.engine.handoff.region import Region
from farspark.native import Call, DeviceCalls, HostPage, Launch, Status, Submitter
from farspark.native.page import TAKE_REPLY_THREADS, WRITE_VALUE, Operation

logger = logging.getLogger(__name__)

_PORTABLE_AND_MAPPED: Final = 1 | 2  # CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_DEVICEMAP
_NOT_READY: Final = 600
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


class _TakeReply:
    """The kernel of `take_reply`, compiled by the driver and launched once: a load while a stream waits for a round would wait
    for it."""

    def __init__(self, driver: CudaDriver, stream: int, page: HostPage, device_page: int) -> None:
        """Raises DriverError."""
        self._driver = driver
        self._page = page
        self._consumed = device_page + page.info.consumed_offset
        self._module = ctypes.c_void_p()
        function = ctypes.c_void_p()
        driver.call("cuModuleLoadData", ctypes.byref(self._module), take_reply.PTX)
        try:
            driver.call("cuModuleGetFunction", ctypes.byref(function), self._module, take_reply.NAME)
            self.function: Final = function.value or 0
            driver.launch(self.launch(0, 0, 0), stream)  # on nothing
        except DriverError:
            self.close()
            raise

    def launch(self, to: int, source: int, words: int) -> Launch:
        """As for a reply; `consumed` stays what it is, if no round is under way."""
        launch = Launch(self.function, TAKE_REPLY_THREADS, 0, 5)
        launch.fill(1, 1, source, to, words, self._consumed, self._page.words().consumed)
        return launch

    def close(self) -> None:
        """The stream is idle."""
        self._driver.function("cuModuleUnload")(self._module)


class CudaStream:
    """The stream that is current when a round is enqueued. Made, used and closed by the engine thread.

    What a driver lacks is done in more calls: a write and a wait where it has no batches, a copy and a write where it cannot
    compile the kernel that takes the reply.
    """

    def __init__(self, region: Region, page: HostPage, current: Callable[[], int]) -> None:
        """Registers the region with the driver; `current` says which stream is the current one. Raises DriverError."""
        self._driver = CudaDriver()
        self._page = page
        self._take_reply: _TakeReply | None = None
        self._lacks: list[str] = []
        self._address = region.address
        self._current = current
        context = ctypes.c_void_p()
        self._driver.call("cuCtxGetCurrent", ctypes.byref(context))
        if not context.value:
            raise DriverError("this thread has no CUDA context")
        self._driver.call("cuMemHostRegister_v2", region.address, region.size, _PORTABLE_AND_MAPPED)
        self._is_registered = True
        try:
            self.device_offset: Final = self._driver.device_address(region.address) - region.address
        except DriverError:
            self.close()
            raise
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
            gathered = device_page + self._page.info.gathered_offset
            operation = Operation(WRITE_VALUE, 0, gathered, self._page.words().gathered)
            self._driver.call(_BATCH, self._current(), 1, ctypes.byref(operation), 0)
        except DriverError as error:
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
        self._driver.call("cuMemcpyDtoHAsync_v2", to, source, size, self._current())

    def to_device(self, to: int, source: int, size: int) -> None:
        self._driver.call("cuMemcpyHtoDAsync_v2", to, source, size, self._current())

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
        query, until = self._driver.function("cuStreamQuery"), time.monotonic() + timeout_s
        while (result := query(self._current())) == _NOT_READY:
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
            try:
                self._driver.call("cuMemHostUnregister", self._address)
            except DriverError as error:
                logger.warning("farspark: the region was not unregistered: %s", error)

    def __repr__(self) -> str:
        return f"<CudaStream {'registered' if self._is_registered else 'closed'}>"
