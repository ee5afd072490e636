"""The remote drafter as a speculator needs it: one step's tensors in, draft ids and confidences out, on every TP rank.

torch and numpy, no vLLM: the speculators of all policies and versions are thin around this, and its tests need no engine.
"""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from farspark.clock import Deadline
from farspark.engine.breaker import Breaker
from farspark.engine.client import Client
from farspark.engine.config import EngineConfig, OnFail
from farspark.engine.gather.layout import GatherShape
from farspark.engine.gather.torch_gather import StepTensors, TorchGather
from farspark.engine.result import PackedResult, ResultLayout, RoundOutcome
from farspark.engine.round import Phase, RemoteRound, RoundInput, RoundRequest
from farspark.engine.shadow import ShadowComparison
from farspark.engine.shape import ModelShape
from farspark.engine.stats_file import StatsFile
from farspark.errors import ConfigError, FarsparkError
from farspark.stats import Stats
from farspark.wire.layout import RequestStatus

logger = logging.getLogger(__name__)

# A stats file older than this is written again with the next round, so that `farspark stats` shows a live engine.
STATS_EVERY_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class TpGroup:
    """The tensor-parallel ranks, as far as the rounds need them."""

    rank: int
    size: int
    broadcast: Callable[[torch.Tensor], object]  # from rank 0, in place, ordered by the current stream


@dataclass(slots=True)
class Admissions:
    """Who owns each request-state slot: the request id and how many admissions there were before it.

    vLLM reuses a freed index at once, and a preempted request comes back under its own id, so neither the index nor the
    id says whether rows still belong to what they belonged to before. Owned by the engine thread.
    """

    _owners: dict[int, Hashable] = field(default_factory=dict)
    _count: int = 0

    def admit(self, slot: int, req_id: str) -> None:
        self._count += 1
        self._owners[slot] = (req_id, self._count)

    def owner(self, slot: int) -> Hashable:
        """Raises KeyError for a slot that nobody was admitted to."""
        return self._owners[slot]


@dataclass(frozen=True, slots=True)
class Batch:
    """What the host knows of a step's requests, in batch order."""

    slots: npt.NDArray[np.integer[Any]]  # [n], request-state indices
    query_lengths: npt.NDArray[np.integer[Any]]  # [n], upper bounds where the device decides
    num_drafts: npt.NDArray[np.integer[Any]] | None  # [n], drafts that the target verified; None: nobody had any


class RemoteDrafts(NamedTuple):
    """A round's result on the device: views that the next step overwrites."""

    tokens: torch.Tensor  # int32 [n, N]
    confidences: torch.Tensor  # float32 [n, N]
    ok: torch.Tensor  # bool [n]; rows that are not ok hold zeros


class RoundFailedError(FarsparkError):
    """A benchmark must not go on as if drafts had come."""


class Rank0:
    """What only the rank that talks has: the device buffers, the connection, the statistics. Owned by the engine thread."""

    def __init__(
        self, config: EngineConfig, shape: ModelShape, max_tokens: int, device: torch.device, engine: str
    ) -> None:
        self.config = config
        self.stats = Stats()
        self.gather = TorchGather(
            GatherShape(
                max_requests=shape.slots,
                max_tokens=max_tokens,
                taps=shape.taps,
                hidden_size=shape.hidden_size,
                context=shape.context,
                ring=shape.ring,
            ),
            device,
        )
        hello = shape.hello(
            engine=engine,
            identity=config.identity,
            markov_identity=config.markov_identity,
            want_margin=config.want_margin,
        )
        self.client = Client(
            hello,
            config.endpoints,
            connect_timeout_s=config.connect_timeout_s,
            backoff_s=config.backoff_s,
            backoff_max_s=config.backoff_max_s,
            stats=self.stats,
        )
        self.round = RemoteRound(
            client=self.client,
            shape=shape,
            ring=self.gather.ring,
            breaker=Breaker(trip=config.trip, cooldown=config.cooldown),
            stats=self.stats,
            timeout_s=config.timeout_s,
            want_margin=config.want_margin,
        )

    def start(self) -> None:
        self.client.start()
        strict = self.config.strict_start or self.config.on_fail is OnFail.RAISE
        if strict and not self.client.wait_ready(Deadline.after(2 * self.config.connect_timeout_s)):
            why = self.client.last_failure or "no answer"
            self.client.close()
            raise ConfigError(
                f"VLLM_DSPARK_REMOTE_STRICT_START is set and the worker cannot be used: {why}. Start the worker first, or "
                "unset it to serve without drafts until one is there"
            )


class RemoteDrafter:
    """One per process, the same steps on every TP rank; only rank 0 has a `Rank0`. Owned by the engine thread.

    Each serving step costs exactly one broadcast of one buffer whose size never changes, whatever happened on rank 0.
    """

    def __init__(
        self,
        config: EngineConfig,
        shape: ModelShape,
        *,
        max_tokens: int,
        device: torch.device,
        tp: TpGroup,
        admissions: Admissions,
        engine: str,
        facts: Mapping[str, Any],
    ) -> None:
        self.config = config
        self.shape = shape
        self.shadow = ShadowComparison(shape.num_drafts)
        self.rank0 = Rank0(config, shape, max_tokens, device, engine) if tp.rank == 0 else None
        self._tp = tp
        self._admissions = admissions
        self._facts = dict(facts)
        self._layout = ResultLayout(shape.slots, shape.num_drafts)
        on_cuda = device.type == "cuda"
        self._result_device = torch.zeros(self._layout.size, dtype=torch.int32, device=device)
        # On the CPU rank 0 packs the result in place.
        self._result_host = (
            torch.zeros(self._layout.size, dtype=torch.int32, pin_memory=True) if on_cuda else self._result_device
        )
        self._result = PackedResult(self._layout, self._result_host.numpy())
        self._is_serving = False
        self._off_because: str | None = None
        self._rounds = 0
        self._stats_file = StatsFile(config.stats_file)
        self._written_at = float("-inf")
        if self.rank0 is not None:
            self.rank0.start()
            atexit.register(self.close)

    def start_serving(self) -> None:
        """Warm-up is over: steps from now on are requests of users."""
        self._is_serving = True

    @property
    def is_serving(self) -> bool:
        return self._is_serving

    def rehearse(self, step: StepTensors) -> None:
        """A profiling, capturing or warm-up step: the device work of a round, but no slot, no message, no wait, no collective.

        Raises ConfigError where the step's hidden states are not what was promised to the worker: the engine must not start.
        """
        if self.rank0 is None:
            return
        try:
            self.rank0.gather.rehearse(step)
        except ValueError as error:
            raise ConfigError(
                f"the target's hidden states are not what the drafter reads: {error}. Check the drafter's target layer ids "
                "against the target model"
            ) from error

    def begin(self, step: StepTensors) -> None:
        """Enqueue the gather, so that a local draft can be enqueued behind it before `finish` waits. Raises nothing."""
        if self.rank0 is None or self._off_because is not None:
            return
        try:
            self.rank0.gather.run(step)
        except Exception:  # the one place that fails open: see `_turn_off`
            self._turn_off()

    def finish(self, batch: Batch) -> RemoteDrafts:
        """The round and its result on every rank. Whatever fails on rank 0, the broadcast takes place and brings legal ids.

        Raises RoundFailedError, on every rank, where nobody got a draft and the settings say ON_FAIL=raise.
        """
        if self.rank0 is not None:
            self._run_round(self.rank0, batch)
        if self._tp.size > 1:
            self._tp.broadcast(self._result_device)
        n, shape = len(batch.slots), (self._layout.max_requests, self._layout.num_drafts)
        tokens = self._result_device[self._layout.tokens].view(shape)[:n]
        confidences = self._result_device[self._layout.confidences].view(torch.float32).view(shape)[:n]
        if self.config.on_fail is OnFail.RAISE and self.outcome() is RoundOutcome.FAILED:
            raise RoundFailedError(
                "VLLM_DSPARK_REMOTE_ON_FAIL=raise: a round brought no drafts; rank 0's log and statistics say why"
            )
        return RemoteDrafts(tokens, confidences, self._result_device[self._layout.ok][:n].bool())

    def outcome(self) -> RoundOutcome:
        """Of the newest round, the same on every rank. Waits for the device."""
        return RoundOutcome(int(self._result_device[0]))

    def note_local_fallback(self) -> None:
        """A local draft stood in for what the worker did not bring."""
        if self.rank0 is not None:
            self.rank0.stats.add("local_fallback_rounds")

    def compare(self, local: torch.Tensor, local_confidences: torch.Tensor | None) -> None:
        """Compare the local drafts [n, N] of this step with the remote ones. Rank 0 only; waits for the local drafter."""
        if self.rank0 is None or self._off_because is not None:
            return
        last = self.rank0.round.last_drafts
        n = local.shape[0]
        # After a prefix-cache hit the worker misses rows that the local drafter's cache has: its drafts are other ones by
        # right, and say nothing about parity.
        is_partial = [last.entry_status.get(row) is RequestStatus.PARTIAL_WINDOW for row in range(n)]
        self.rank0.stats.add("shadow_partial_windows", sum(is_partial))
        ok = self._result.ok[:n].astype(bool) & ~np.array(is_partial)
        if not ok.any():
            return
        margins = last.margins
        self.shadow.observe(
            local.cpu().numpy()[ok],
            self._result.tokens[:n][ok],
            margins=None if margins is None else margins[:n][ok],
            local_confidences=None if local_confidences is None else local_confidences.float().cpu().numpy()[ok],
            remote_confidences=self._result.confidences[:n][ok],
        )

    def _run_round(self, rank0: Rank0, batch: Batch) -> None:
        """Leaves the result in the device's buffer. Raises nothing: behind this comes a collective of all ranks."""
        self._rounds += 1
        try:
            if self._off_because is None:
                started = time.perf_counter()
                gathered = rank0.gather.wait()
                waited_us = (time.perf_counter() - started) * 1e6
                gather_us = rank0.gather.device_us() or waited_us
                rank0.stats.record_us("gather_us", gather_us)
                # The previous step's copy out of the result's buffer lies before this gather on the stream, hence is done.
                step = RoundInput(self._requests(batch), gathered.meta, gathered.rows, self._phase(batch))
                started = time.perf_counter()
                if rank0.round.run(step, self._result) is not RoundOutcome.FAILED:
                    # Without the wait for the target's own step: what a round costs on top of it.
                    rank0.stats.record_us("rank0_round_us", gather_us + (time.perf_counter() - started) * 1e6)
            self._report(rank0)
        except Exception:
            self._turn_off()
        if self._off_because is not None:
            rank0.stats.add("rounds_failed")
            rank0.stats.add(f"fallback_{self._off_because}")
            self._result_device.zero_()
            self._result_device[0] = int(RoundOutcome.FAILED)
            self._result_device[1] = len(batch.slots)
        elif self._result_host is not self._result_device:
            self._result_device.copy_(self._result_host, non_blocking=True)

    def _requests(self, batch: Batch) -> list[RoundRequest]:
        drafts = batch.num_drafts
        return [
            RoundRequest(int(slot), self._admissions.owner(int(slot)), 0 if drafts is None else int(drafts[row]))
            for row, slot in enumerate(batch.slots)
        ]

    def _phase(self, batch: Batch) -> Phase:
        is_decode = int(batch.query_lengths.max()) <= self.shape.num_drafts + 1
        return Phase.DECODE if is_decode else Phase.PREFILL

    def _turn_off(self) -> None:
        """A bug, not a fault of the worker or the network: those do not raise. Drafting ends, the engine lives."""
        rank0 = self.rank0
        assert rank0 is not None
        rank0.stats.add("internal_error")
        if self._off_because is not None:
            return
        self._off_because = "internal_error"
        logger.exception(
            "farspark: internal error; the remote drafter is off for this engine run and the target decodes without drafts"
        )
        rank0.client.disable("internal error, see the traceback above")

    def _report(self, rank0: Rank0) -> None:
        every = self.config.log_every
        if every and self._rounds % every == 0:
            logger.info("farspark: %s", self.summary())
        now = time.monotonic()
        if now - self._written_at >= STATS_EVERY_S:
            self._written_at = now
            self._stats_file.write(self.snapshot())

    def summary(self) -> str:
        """One line for the log."""
        assert self.rank0 is not None
        counters = self.rank0.stats.counters()
        agreement = self.shadow.snapshot()["full_block_agree_rate"]
        rounds = {name: counters.get(f"rounds_{name}", 0) for name in ("ok", "some_failed", "failed")}
        return (
            f"{self._rounds} rounds ({rounds['ok']} ok, {rounds['some_failed']} partly, {rounds['failed']} failed), "
            f"{counters.get('rows_sent', 0)} rows sent, {self.rank0.client!r}"
            + (f", whole blocks equal {agreement:.2%}" if agreement is not None else "")
        )

    def snapshot(self) -> dict[str, Any]:
        """What the stats file holds."""
        rank0 = self.rank0
        assert rank0 is not None
        snapshot = rank0.stats.snapshot()
        connection = rank0.client.connection()
        snapshot |= {
            "policy": self.config.policy.value,
            "rounds": self._rounds,
            "endpoint": ",".join(map(str, [connection.endpoint] if connection else self.config.endpoints)),
            "lane": connection.channel.lane if connection else None,
            "worker": {
                "state": rank0.client.state.value,
                "name": connection.welcome.worker if connection else None,
                "kind": connection.welcome.kind if connection else None,
                "epoch": connection.epoch if connection else None,
                "context": connection.welcome.context if connection else None,
                "last_failure": rank0.client.last_failure,
            },
            "breaker": rank0.round.breaker.snapshot(),
            "off_because": self._off_because,
            "last_bad_reply": rank0.round.last_bad_reply,
            "rank0_buffers": {
                "device_bytes": rank0.gather.device_nbytes + self._result_device.nbytes,
                "pinned_bytes": rank0.gather.pinned_nbytes
                + (self._result_host.nbytes if self._result_host is not self._result_device else 0),
                "context": self.shape.context,
                "ring": self.shape.ring,
            },
            "shadow": self.shadow.snapshot(),
            **self._facts,
        }
        return snapshot

    def close(self) -> None:
        """Write the last statistics and end the connection. Idempotent; any rank."""
        if self.rank0 is None:
            return
        atexit.unregister(self.close)
        self._stats_file.write(self.snapshot())
        self.rank0.client.close()
