"""The gather on a GPU: its torch form and the fused one against one copy of the same bytes, in one run.

    python bench/gather.py [--rows 24] [--json]

Device time is that of many repetitions in one CUDA graph; host time that of enqueueing them one by one. The fused form both ways:
launched by Triton, and by the driver directly. Then the same onto the host, one behind the other on a stream: written there by
the kernel, and packed on the device and copied. A decode step of `--requests` requests; a row is taps x hidden size bf16 values,
written twice, as the ring keeps it.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "src")]

from farspark.engine.gather.direct import kernel_driver  # noqa: E402
from farspark.engine.gather.forms import check_fused  # noqa: E402
from farspark.engine.gather.layout import GatherShape  # noqa: E402
from farspark.engine.gather.torch_gather import StepTensors, TorchGather  # noqa: E402

_BUSY_CYCLES = 100_000_000  # some 50 ms: longer than the host needs for what it enqueues behind
_ENQUEUED = 20


def decode_step(shape: GatherShape, requests: int, query: int, device: torch.device) -> StepTensors:
    """`requests` requests that verify `query - 1` drafts each and accept all of them."""
    tokens = requests * query
    hidden = torch.randn(shape.taps, tokens, shape.hidden_size, device=device).bfloat16()

    def ints(values: list[int], kind: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=kind, device=device)

    return StepTensors(
        hidden=list(hidden.unbind()),
        positions=ints([100 + i % query for i in range(tokens)], torch.int64),
        query_start_loc=ints([i * query for i in range(requests + 1)]),
        slots=ints(list(range(requests))),
        num_sampled=ints([query] * requests),
        num_rejected=ints([0] * requests),
        last_sampled=ints([7] * shape.max_requests, torch.int64).unsqueeze(1),
        next_prefill_tokens=ints([8] * shape.max_requests),
        row_bound=tokens,
        wants_drafts=True,
    )


def measure(work: Callable[[], Any], repetitions: int) -> dict[str, float]:
    """Microseconds of one `work`: of the device alone, and of the host that enqueues it; the best of five blocks each.

    The device has `repetitions` of them in one graph, so that no host is in its way; the host enqueues some one after the other
    behind a device that is kept busy: no more than its queue takes without a wait.
    """
    for _ in range(20):
        work()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(repetitions):
            work()
    graph.replay()
    torch.cuda.synchronize()
    device_us, host_us = [], []
    for _ in range(5):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        began.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        device_us.append(began.elapsed_time(ended) * 1e3 / repetitions)
        torch.cuda._sleep(_BUSY_CYCLES)  # type: ignore[no-untyped-call]
        started = time.perf_counter()
        for _ in range(_ENQUEUED):
            work()
        host_us.append((time.perf_counter() - started) * 1e6 / _ENQUEUED)
        torch.cuda.synchronize()
    return {"device_us": round(min(device_us), 2), "host_us": round(min(host_us), 2)}


def measure_enqueued(work: Callable[[], Any]) -> float:
    """Microseconds that one of some takes on the stream, one behind the other; the best of five blocks."""
    found: list[float] = []
    for _ in range(6):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        torch.cuda._sleep(_BUSY_CYCLES)  # type: ignore[no-untyped-call]
        began.record()
        for _ in range(_ENQUEUED):
            work()
        ended.record()
        torch.cuda.synchronize()
        found.append(began.elapsed_time(ended) * 1e3 / _ENQUEUED)
    return round(min(found[1:]), 2)


def prepare_us(gather: TorchGather, step: StepTensors, repetitions: int) -> float:
    rows, meta = gather.rows_address, gather.meta_address
    started = time.perf_counter()
    for _ in range(repetitions):
        gather.prepare(step, rows, meta)
    return round((time.perf_counter() - started) * 1e6 / repetitions, 2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=4, help="default %(default)s")
    parser.add_argument("--query", type=int, default=6, help="rows of each; default %(default)s")
    parser.add_argument("--taps", type=int, default=5, help="default %(default)s")
    parser.add_argument("--hidden", type=int, default=3072, help="default %(default)s: rows of 30,720 bytes")
    parser.add_argument("--repetitions", type=int, default=300, help="default %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench/gather.py needs a CUDA device", file=sys.stderr)
        return 2
    device = torch.device("cuda")
    shape = GatherShape(
        max_requests=8, max_tokens=256, taps=options.taps, hidden_size=options.hidden, context=4096, ring=512
    )
    driver = kernel_driver()
    for name, why in (
        ("", check_fused(shape, device)),
        (" when launched directly", check_fused(shape, device, driver)),
    ):
        if why is not None:
            print(f"the fused gather is not usable here{name}: {why}", file=sys.stderr)
            return 1
    from farspark.engine.gather.triton_gather import TritonGather

    step = decode_step(shape, options.requests, options.query, device)
    forms: dict[str, TorchGather] = {
        "fused_direct": TritonGather(shape, device, driver=driver),
        "fused_by_triton": TritonGather(shape, device),
        "torch_form": TorchGather(shape, device),
    }
    source = torch.empty(options.requests * options.query, shape.row_values, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "rows": len(source),
        "row_bytes": shape.row_bytes,
        "one_copy": measure(lambda: target.copy_(source), options.repetitions),
    }
    for name, form in forms.items():
        found[name] = measure(functools.partial(form.pack, step), options.repetitions)
    # What an asynchronous round does of it itself: the launch is part of the round's one call.
    found["fused_direct"]["prepare_us"] = prepare_us(forms["fused_direct"], step, options.repetitions)
    direct = forms["fused_direct"]
    found["onto_the_host"] = {
        "written_us": measure_enqueued(functools.partial(direct._bring, step)),
        "copied_us": measure_enqueued(functools.partial(TorchGather._bring, direct, step)),
    }
    found["launched"] = forms["fused_direct"].how_launched
    for name in forms:
        found[f"{name}_over_copy"] = round(found[name]["device_us"] / found["one_copy"]["device_us"], 2)
    print(json.dumps(found, indent=None if options.json else 1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
