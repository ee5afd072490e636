"""Steps that are recorded once and replayed: each draft as if it were made anew, drawn ones too.

A replay does the same operations with whatever its inputs hold by then. On a GPU that is a CUDA graph; on a CPU the trace that
torch makes of the same functions stands in for it, which is as blind to anything that the host decides in between.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fakes.tiny_checkpoint import write_tiny
from tests.worker.test_drafter import Request, drawn, hot, make_rows, packed
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from farspark.worker.batch import DraftBatch, DraftEntry, Drafter
from farspark.worker.checkpoint import load_checkpoint
from farspark.worker.device import open_device, work_on
from farspark.worker.drafter import DSparkDrafter, Shapes, assemble
from farspark.worker.graphs import DeviceCalls, DirectCalls, GraphCalls
from farspark.worker.models.heads import draw_uniforms

pytestmark = pytest.mark.usefixtures("one_thread")

CONTEXT = 24
# Few, because each takes a second to trace.
SHAPES = {
    "cpu": Shapes(batches=(4,), contexts=(CONTEXT,), rows=(64,), steps=(5,)),
    "cuda": Shapes(batches=(1, 2, 4), contexts=(8, CONTEXT), rows=(16, 64), steps=(5,)),
}


class TracedCalls(DirectCalls):
    """Each key is traced at its first run, with the inputs of that, and replayed from then on."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._traced: dict[Hashable, Any] = {}

    def run(self, key: Hashable, function: Callable[..., Any]) -> Any:
        inputs = self._staged[key]
        if key not in self._traced:
            self._traced[key] = make_fx(lambda *given: function(*given))(*(one.clone() for one in inputs))
        return self._traced[key](*inputs)

    @property
    def traces(self) -> int:
        return len(self._traced)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("drafter"))


def make(folder: Path, device: str, calls: Callable[[torch.device], DeviceCalls], dtype: str) -> DSparkDrafter:
    """A drafter that differs from another one of these in how its calls are made, and in nothing else."""
    where = open_device(device)
    work = work_on(where, getattr(torch, dtype))
    arithmetic = work.arithmetic

    def place(name: str, tensor: Tensor, as_stored: bool) -> Tensor:
        return tensor.to(where, arithmetic.dtype, copy=True).to(arithmetic.carrier)

    loaded = load_checkpoint(folder, None, place=place)
    return assemble(loaded, where, work._replace(calls=calls(where)), 8, CONTEXT, shapes=SHAPES[where.type])


Answer = tuple[bytes, ...]


def answer_of(drafter: Drafter, entries: Sequence[DraftEntry], rows: Sequence[Tensor], *, margins: bool) -> Answer:
    """Every byte of a result."""
    result = drafter.draft(DraftBatch(entries, packed(rows), want_margins=margins))
    arrays = [result.tokens, result.confidences, *(result.drawn or ())]
    arrays += [] if result.margins is None else [result.margins]
    return bytes(result.ok), *(array.tobytes() for array in arrays)


def program(steps: int) -> Iterator[tuple[list[DraftEntry], list[Tensor], bool]]:
    """Batches of all sizes, with drawn requests, greedy ones and both, of seeds and temperatures that change."""
    requests = [Request(slot) for slot in range(4)]
    for step in range(steps):
        chosen = requests[: 1 + step % 4]
        rows = [make_rows(1 + (3 * step + request.slot) % 7, seed=10 * step + request.slot) for request in chosen]
        temperatures = [(0.0, 0.3, 1.0, 2.5)[(step // 4 + request.slot) % 4] * (step % 5 > 0) for request in chosen]
        entries = [
            hot(request, more, (7 * step) % 90, temperature, -(2**63) + 977 * step + request.slot)
            for request, more, temperature in zip(chosen, rows, temperatures, strict=True)
        ]
        yield entries, rows, step % 7 == 3


def check_replays(folder: Path, device: str, calls: Callable[[torch.device], DeviceCalls], dtype: str) -> Any:
    """The calls of the drafter that replayed."""
    replaying, anew = make(folder, device, calls, dtype), make(folder, device, DirectCalls, dtype)
    if device != "cpu":
        replaying.warm_up(lambda what, done, total: None)
    kinds = set()
    for entries, rows, margins in program(20 if device == "cpu" else 60):
        # As a server does, in a thread to which nobody has said on which device.
        with ThreadPoolExecutor(1) as other:
            found = other.submit(answer_of, replaying, entries, rows, margins=margins).result()
        assert found == answer_of(anew, entries, rows, margins=margins)
        kinds.add(frozenset(entry.temperature > 0 for entry in entries))
    assert len(kinds) == 3, "greedy batches, drawn ones and mixed ones"
    return replaying._calls


def check_repeats(folder: Path, device: str, calls: Callable[[torch.device], DeviceCalls], dtype: str) -> None:
    """The same request draws the same again: in a worker that was restarted, in another slot, after other steps."""
    rows = make_rows(9, seed=1)

    def draft(seed: int, slot: int, drafter: DSparkDrafter) -> Any:
        (answer,) = drawn(drafter, [hot(Request(slot), rows, 5, 2.0, seed)], [rows])
        return answer.tokens, answer.support.tolist(), answer.q.tolist()

    first, second = (make(folder, device, calls, dtype) for _ in range(2))
    others = [draft(seed, 1, first) for seed in range(8)]
    assert draft(7, 0, first) == draft(7, 3, first) == draft(7, 2, second) == others[7]
    assert len({tuple(tokens) for tokens, _, _ in others}) > 4


def test_a_traced_step_is_drafted_as_one_made_anew(folder: Path) -> None:
    calls = check_replays(folder, "cpu", TracedCalls, "float32")
    assert calls.traces == 4, (
        "rows, and greedy drafts without and with margins, and drawn ones; 20 steps replayed these"
    )


@pytest.mark.slow
def test_traced_draws_are_repeatable(folder: Path) -> None:
    check_repeats(folder, "cpu", TracedCalls, "float32")


@contextmanager
def planted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The host looks at the seeds while a step is recorded."""

    def looked_at(seeds: Tensor, anchors: Tensor, steps: int) -> Tensor:
        return draw_uniforms(torch.tensor(seeds.tolist()), anchors, steps)

    with monkeypatch.context() as patch:
        patch.setattr("farspark.worker.drafter.draw_uniforms", looked_at)
        yield


@pytest.mark.slow
def test_what_the_host_decides_in_a_recorded_step_is_found_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the tests above would prove nothing."""
    with planted(monkeypatch), pytest.raises((AssertionError, RuntimeError)):
        check_replays(folder, "cpu", TracedCalls, "float32")


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_replayed_graph_drafts_as_the_same_operations_made_anew(folder: Path, device: str, dtype: str) -> None:
    if device == "cuda:1" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    check_replays(folder, device, GraphCalls, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_draws_of_a_replayed_graph_are_repeatable(folder: Path, dtype: str) -> None:
    check_repeats(folder, "cuda", GraphCalls, dtype)
