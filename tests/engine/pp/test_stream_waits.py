"""On a device: what was not judged is not used, and what was judged wrong never is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from tests.fakes.libcuda import has_driver, run_over

from farspark.engine.vllm.pp.faults import TokenTransportError
from farspark.engine.vllm.pp.header import WORDS, Header
from farspark.engine.vllm.pp.schedule import FrameShape
from farspark.engine.vllm.pp.stream_waits import StreamWaits, waits_of
from farspark.engine.vllm.pp.transport import TokenTransport

A_WHILE_S = 0.3
cuda: Any = torch.cuda


def test_without_a_device_there_is_nothing_that_could_wait() -> None:
    assert waits_of(torch.device("cpu")) is None


@pytest.mark.skipif(has_driver(), reason="there is a CUDA driver here")
def test_without_a_driver_the_host_waits_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    assert waits_of(torch.device("cuda")) is None
    assert "the token transport waits on the host, which costs time: the CUDA driver cannot be used" in caplog.text


def test_a_stream_is_told_to_wait_for_a_word_as_the_driver_takes_it(tmp_path: Path) -> None:
    program = """
import ctypes
from farspark.engine.cuda_driver import DriverError
from farspark.engine.vllm.pp.stream_waits import StreamWaits
StreamWaits._test = lambda self, device: None
waits, word = StreamWaits(None), ctypes.c_uint32(5)
waits.until_reached(0, ctypes.addressof(word), (1 << 32) + 5)
try:
    waits.until_equal(0, ctypes.addressof(word), 5)  # refused there
except DriverError as error:
    print(error)
"""
    lines = run_over(tmp_path, ["-DPTX=0"], "-c", program)
    assert lines == ["wait", "wait", "cuStreamWaitValue32_v2: planted (1)"]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Any]:
    """NCCL alone with itself: what lies in a slot is what came."""
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def receiver(group: Any, found: list[str], told: threading.Event) -> TokenTransport:
    def on_error(error: TokenTransportError) -> None:
        found.append(str(error))
        told.set()

    device = torch.device("cuda:0")
    return TokenTransport(
        group,
        source=0,
        is_source=False,
        shape=FrameShape(4, 5),
        depth=2,
        device=device,
        wire_device=device,
        label="stage 0",
        on_error=on_error,
    )


@pytest.mark.gpu
def test_a_stream_waits_for_a_word_of_the_devices_and_of_the_hosts() -> None:
    waits, stream = StreamWaits(torch.device("cuda:0")), cuda.Stream()
    on_device = torch.zeros(1, dtype=torch.int64, device="cuda")
    on_host = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    torch.cuda.synchronize()
    event: Any = cuda.Event()
    waits.until_equal(stream.cuda_stream, on_device.data_ptr(), 0xFFFF_FFF0)
    waits.until_reached(stream.cuda_stream, waits.address_of(on_host), 5)
    event.record(stream)
    assert not threading.Event().wait(A_WHILE_S)
    assert not event.query()
    on_device.copy_(torch.tensor([0xFFFF_FFF0]), non_blocking=True)
    assert not threading.Event().wait(A_WHILE_S)
    assert not event.query()
    on_host[0] = 6  # beyond is reached
    stream.synchronize()


@pytest.mark.gpu
def test_a_step_that_is_right_is_passed_on_and_a_wrong_one_stops_the_stream_before_it_is_used(group: Any) -> None:
    found: list[str] = []
    told = threading.Event()
    transport, used = receiver(group, found, told), torch.zeros(1, device="cuda")
    came = [transport._slots[at].message[-WORDS:] for at in range(3)]
    came[1].copy_(torch.tensor(Header(1, 77, 4).words()))
    came[2].copy_(torch.tensor(Header(1, 78, 4).words()))  # the step before
    torch.cuda.synchronize()
    transport.complete(transport.receive(77, 4))
    used.fill_(1)
    assert used.item() == 1
    slot = transport.receive(78, 4)
    # The host may know already, or not yet: the stream waits in either case.
    transport._line.deliver(slot)
    used.fill_(2)
    event: Any = cuda.Event()
    event.record()
    assert told.wait(1.0)
    assert found == ["step 2 from the last stage (rank 0): sequence expected 2, got 1"]
    assert not threading.Event().wait(A_WHILE_S)
    assert not event.query()
    with torch.cuda.stream(cuda.Stream()):  # so that the process can end
        came[2].copy_(torch.tensor(Header(2, 78, 4).words()).pin_memory(), non_blocking=True)
    torch.cuda.synchronize()
    transport.close()
