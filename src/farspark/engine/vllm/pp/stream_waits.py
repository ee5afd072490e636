"""A CUDA stream that waits for a word of memory: what is behind it in the stream does not run before the word has come.

Driver calls on addresses. torch has none for it, and a kernel that spins would take a part of the device.
"""

from __future__ import annotations

import logging
import time
from typing import Any, Final

import torch

from farspark.engine.cuda_driver import CudaDriver, DriverError

logger = logging.getLogger(__name__)

_WAIT: Final = "cuStreamWaitValue32_v2"
_REACHED: Final = 0  # CU_STREAM_WAIT_VALUE_GEQ, cyclic
_EQUAL: Final = 1  # CU_STREAM_WAIT_VALUE_EQ
_TEST_S: Final = 5.0
# Long enough for a stream that does not wait to be seen past the wait.
_PARKED_S: Final = 0.01


class StreamWaits:
    """For the streams of one device, and the engine thread."""

    def __init__(self, device: torch.device) -> None:
        """Raises DriverError where the driver has no such calls, or where a stream does not do as told."""
        self._driver = CudaDriver()
        self._test(device)

    def until_equal(self, stream: int, address: int, value: int) -> None:
        """`stream` waits until the 32 bits at `address`, one of the device's, are `value`. Raises DriverError."""
        self._driver.call(_WAIT, stream, address, value, _EQUAL)

    def until_reached(self, stream: int, address: int, value: int) -> None:
        """As above, for a word that counts up, modulo 2^32."""
        self._driver.call(_WAIT, stream, address, value & 0xFFFFFFFF, _REACHED)

    def address_of(self, pinned: torch.Tensor) -> int:
        """Where the device finds page-locked host memory. Raises DriverError."""
        return self._driver.device_address(pinned.data_ptr())

    def _test(self, device: torch.device) -> None:
        cuda: Any = torch.cuda
        word = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        address = self.address_of(word)
        for value, wait in ((7, self.until_equal), (9, self.until_reached)):
            stream, event = cuda.Stream(device), cuda.Event()
            wait(stream.cuda_stream, address, value)
            event.record(stream)
            time.sleep(_PARKED_S)
            if event.query():
                raise DriverError("a stream that was told to wait for a word did not wait")
            word[0] = value
            ends = time.monotonic() + _TEST_S
            while not event.query():
                if time.monotonic() > ends:
                    raise DriverError(f"a stream did not see a word of the host's within {_TEST_S:g} s")
                time.sleep(0.0002)


def waits_of(device: torch.device) -> StreamWaits | None:
    """None where streams cannot wait for a word: then the host waits in their place."""
    if device.type != "cuda":
        return None
    try:
        return StreamWaits(device)
    except DriverError as error:
        logger.warning("farspark: the token transport waits on the host, which costs time: %s", error)
        return None
