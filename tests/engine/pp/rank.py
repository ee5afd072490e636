"""Stages as processes. `python -m tests.engine.pp.rank` reads a job a line, forks its ranks, which print JSON lines into a file
each and end as a worker would, and answers with their exit statuses. Forked, because torch takes seconds to import.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import signal
import sys
import threading
import time
import traceback
import zlib
from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from tests.engine.pp.program import MAX_REQS, NUM_DRAFTS, Batch, Program, need_mask, sampled

from farspark.engine.vllm.pp.faults import TokenTransportError, end_process
from farspark.engine.vllm.pp.header import Header
from farspark.engine.vllm.pp.lines import Wire
from farspark.engine.vllm.pp.schedule import FrameShape
from farspark.engine.vllm.pp.stage import StageHandler
from farspark.engine.vllm.pp.transport import TokenTransport


class Stage:
    """A stage of a random program; `group` carries the tokens, the default group (Gloo) the agreement at start."""

    def __init__(self, job: dict[str, Any], group: Any) -> None:
        self.rank, self.world = job["rank"], job["world"]
        self.seed, self.steps, self.fault, self.fault_at = (
            job.get("seed", 1),
            job["steps"],
            job.get("fault"),
            job.get("fault_at", -1),
        )
        self.is_faulty = self.rank == job.get("fault_rank")
        self.is_last = self.rank == self.world - 1
        self.device = torch.device(job.get("device", "cpu"))
        self.transport = TokenTransport(
            group,
            source=self.world - 1,
            is_source=self.is_last,
            shape=FrameShape(job.get("max_reqs", MAX_REQS), NUM_DRAFTS),
            depth=self.world,
            device=self.device,
            wire_device=torch.device(job.get("wire", "cpu")),
            label=f"stage {self.rank}",
            on_error=self.end,
        )
        self.transport.agree(dist.group.WORLD, self.world)
        self.handler = StageHandler()
        self.handler.set_up(
            self.transport, is_last=self.is_last, depth=self.world, max_num_reqs=MAX_REQS, need_mask=need_mask
        )
        self.handler.start_exchange()
        self.table = torch.zeros(MAX_REQS, NUM_DRAFTS, dtype=torch.int64, device=self.device)
        self.pending: deque[tuple[int, Batch, Any] | None] = deque([None] * self.world)
        self.consumed = 0
        self.digest = 0
        self.began = 0.0
        self.forgets = False

    def end(self, error: TokenTransportError) -> None:
        """Whoever found it first, this thread or the transport's own, says so."""
        if _ending.acquire(blocking=False):
            print(json.dumps({"raised": time.monotonic(), "error": str(error)}), flush=True)
            end_process(error, where=f"stage {self.rank}", history=str(self.transport.history))
        threading.Event().wait()

    def run(self) -> None:
        program = Program(self.seed, self.world)
        self.began = time.monotonic()
        for number in range(1, self.steps + 1):
            step = program.next()
            self.consume()
            for slot in step.freed:
                self.handler.on_req_idx_freed(slot)
            if step.batch is not None:
                self.exchange(number, step.batch)
        # Whatever is still in flight.
        for _ in range(self.world):
            self.consume()

    def consume(self) -> None:
        """Compare what the handler hands out with what the last stage must have sent; the last stage only knows it."""
        if self.forgets:
            return
        outputs = self.handler.get_prev_sampled_outputs(self.table)
        was = self.pending.popleft()
        self.pending.append(None)
        if was is None:
            assert outputs is None
            return
        number, batch, generations = was
        need = need_mask(batch)
        now = self.handler.req_idx_gen_np[batch.idx_mapping_np]
        keep = [row for row in range(batch.num_reqs) if need is not None and need[row] and now[row] == generations[row]]
        if not keep:
            assert outputs is None
            return
        tokens, num_sampled, num_rejected, drafts = sampled(number, batch)
        if not self.is_last:
            assert outputs is not None
            outputs = {name: tensor.cpu() for name, tensor in outputs.items()}
            table = self.table.cpu()
            got = outputs["idx_mapping"].tolist()
            assert got == [slot if row in keep else -1 for row, slot in enumerate(batch.idx_mapping_np.tolist())]
            assert torch.equal(outputs["sampled_tokens"][:, : tokens.shape[1]], tokens)
            assert torch.equal(outputs["num_sampled"], num_sampled)
            assert torch.equal(outputs["num_rejected"], num_rejected)
            assert torch.equal(table[batch.idx_mapping[keep]], drafts[keep])
            # What is logged is what came, not what was expected.
            tokens = outputs["sampled_tokens"][:, : tokens.shape[1]].contiguous()
            drafts = table[batch.idx_mapping[keep]]
        else:
            drafts = drafts[keep]
        self.consumed += 1
        for part in (torch.tensor([number, *keep]), tokens, num_sampled, drafts.contiguous()):
            self.digest = zlib.crc32(part.numpy().tobytes(), self.digest)

    def exchange(self, number: int, batch: Batch) -> None:
        fault = self.fault if self.is_faulty and number >= self.fault_at else None
        if fault:
            self.fault = None
            planted = time.monotonic()
            print(json.dumps({"planted": planted, "step_s": (planted - self.began) / number}), flush=True)
        if fault == "dead":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "skip":
            return
        self.forgets = fault == "forget" or self.forgets
        self.pending[-1] = (number, batch, self.handler.req_idx_gen_np[batch.idx_mapping_np])
        on_device = copy.copy(batch)
        on_device.idx_mapping = batch.idx_mapping.to(self.device)
        if not self.is_last:
            self.handler.receive(on_device)
            return
        if fault == "stale":
            plant_stale_header(self.transport)
        if fault in ("wide", "narrow"):
            plant_width(self.transport, 1 if fault == "wide" else -1)
        for _ in range(2 if fault == "double" else 1):
            tokens, num_sampled, num_rejected, drafts = (one.to(self.device) for one in sampled(number, batch))
            self.table[on_device.idx_mapping] = drafts
            self.handler.broadcast(tokens, num_sampled, num_rejected, on_device)
            self.handler.finish_step(self.table)


_ending = threading.Lock()


def plant_stale_header(transport: TokenTransport) -> None:
    def outgoing(header: Header) -> Header:
        del transport.__dict__["_outgoing"]
        return dataclasses.replace(header, sequence=header.sequence - 1)

    transport._outgoing = outgoing  # type: ignore[method-assign]


def plant_width(transport: TokenTransport, more: int) -> None:
    """The next step goes out with another number of words than agreed, past every check of our own."""
    wire: Wire = transport._line._wire  # type: ignore[attr-defined]
    broadcast = wire.broadcast

    def broadcast_other(message: torch.Tensor, *, is_async: bool) -> Any:
        wire.other = torch.full((message.shape[0] + more,), -1, dtype=torch.int64)  # type: ignore[attr-defined]  # kept: being sent
        wire.broadcast = broadcast  # type: ignore[method-assign]
        return broadcast(wire.other, is_async=is_async)  # type: ignore[attr-defined]

    wire.broadcast = broadcast_other  # type: ignore[method-assign]


def run_rank(job: dict[str, Any]) -> None:
    for stream, kind in ((1, "out"), (2, "log")):
        os.dup2(os.open(f"{job['folder']}/{job['rank']}.{kind}", os.O_CREAT | os.O_WRONLY | os.O_APPEND), stream)
    torch.set_num_threads(1)
    if job["world"] > (os.cpu_count() or 1) and not job.get("fault"):
        # Ranks that wake up do not push those out that run: a step of eight on two cores takes a third of the time.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    store = f"file://{job['folder']}/store"
    dist.init_process_group("gloo", init_method=store, rank=job["rank"], world_size=job["world"])
    stage: Stage | None = None
    try:
        # A group of its own, as in vLLM: its broadcasts are posted by another thread.
        stage = Stage(job, dist.new_group(backend="gloo"))
        stage.run()
    except TokenTransportError as error:
        if stage is None:
            print(json.dumps({"raised": time.monotonic(), "error": str(error)}), flush=True)
            end_process(error, where=f"stage {job['rank']}", history="")
        stage.end(error)
    assert stage is not None
    print(json.dumps({"consumed": stage.consumed, "digest": stage.digest}), flush=True)
    dist.barrier()


def fork_rank(job: dict[str, Any]) -> int:
    if pid := os.fork():
        return pid
    status = 1
    try:
        run_rank(job)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def main() -> None:
    for line in sys.stdin:
        job = json.loads(line)
        each = job.pop("each", {})
        pids = [fork_rank(job | {"rank": rank} | each.get(str(rank), {})) for rank in range(job["world"])]
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(json.dumps(statuses), flush=True)


if __name__ == "__main__":
    main()
