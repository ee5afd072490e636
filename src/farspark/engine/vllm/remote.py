"""The remote drafter as a speculator needs it: one step's tensors in, draft ids and confidences out, on every TP rank.

torch and numpy, no vLLM: the speculators of all policies and versions are thin around this, and its tests need no engine.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

import farspark
from farspark.clock import Deadline
from farspark.engine.capture import CaptureHeader
from farspark.engine.client import Client, ClientState
from farspark.engine.config import AsyncSettings, EngineConfig, OnFail, Policy, ShadowUse
from farspark.engine.depth import OFF, POLICY, plan_n_out
from farspark.engine.gather.forms import make_gather
from farspark.engine.gather.layout import GatherShape
from farspark.engine.gather.streams import current_stream
from farspark.engine.gather.torch_gather import StepTensors
from farspark.engine.handoff.cuda_stream import CudaStream
from farspark.engine.handoff.handoff import (
    DeviceBuffers,
    Handoff,
    HandoffRefusedError,
    MakeStream,
    open_handoff,
)
from farspark.engine.handoff.region import Submission
from farspark.engine.result import PackedResult, ResultLayout, RoundOutcome
from farspark.engine.round import MetaColumn, Phase, RemoteRound, RoundInput, RoundRequest
from farspark.engine.shadow import ShadowComparison
from farspark.engine.shape import ModelShape
from farspark.engine.stats_file import StatsFile
from farspark.engine.talker import Talker, TalkerSpec
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

    _owners: dict[int, tuple[str, int]] = field(default_factory=dict)
    _count: int = 0

    def admit(self, slot: int, req_id: str) -> None:
        self._count += 1
        self._owners[slot] = (req_id, self._count)

    def owner(self, slot: int) -> Hashable:
        """Raises KeyError for a slot that nobody was admitted to."""
        return self._owners[slot]

    def get(self, slot: int) -> Hashable:
        """None for a slot that nobody was admitted to."""
        return self._owners.get(slot)

    def number(self, slot: int) -> int:
        """Which admission, counted from 1, the slot's owner is. Raises KeyError."""
        return self._owners[slot][1]


class Batch(NamedTuple):
    """What the host knows of a step's requests, in batch order. A few numbers, which lists hold at less cost than numpy."""

    slots: list[int]  # [n], request-state indices
    query_lengths: list[int]  # [n], upper bounds where the device decides
    num_drafts: list[int] | None  # [n], drafts that the target verified; None: nobody had any


class RemoteDrafts(NamedTuple):
    """A round's result on the device: views that the next step overwrites."""

    tokens: torch.Tensor  # int32 [n, N]
    confidences: torch.Tensor  # float32 [n, N]
    ok: torch.Tensor  # int32 [n], 0 or 1; rows that are not ok hold zeros
    depths: torch.Tensor  # int32 [n]; how many of a row's drafts to verify
    # Where drafts are sampled; None elsewhere.
    sampled: torch.Tensor | None = None  # int32 [n], 0 or 1; the row's drafts were drawn from q
    support: torch.Tensor | None = None  # int32 [n, N, S]
    q: torch.Tensor | None = None  # float32 [n, N, S]


class RoundFailedError(FarsparkError):
    """A benchmark must not go on as if drafts had come."""


class Rank0:
    """What only the rank that talks has: the device buffers, the statistics, and the side that talks: a `Talker` on this thread,
    or a `Handoff` to another's. Owned by the engine thread."""

    def __init__(
        self,
        config: EngineConfig,
        shape: ModelShape,
        max_tokens: int,
        device: torch.device,
        engine: str,
        caps: Sequence[int] | None,
        result: torch.Tensor,
        make_stream: MakeStream | None,
    ) -> None:
        """`result` is the device's buffer for a packed result. Raises StreamStuckError: the engine must not start."""
        self.config = config
        self.stats = Stats()  # the engine thread's; without a hand-off everybody's
        is_shadow = config.policy is Policy.SHADOW
        self.n_out = plan_n_out(
            config.depth_policy,
            has_file=config.depth_file is not None,
            is_shadow=is_shadow,
            is_allowed=config.may_cut_n_out,
            caps=caps,
            num_drafts=shape.num_drafts,
        )
        self.gather_form = make_gather(
            config.fused_gather,
            GatherShape(
                max_requests=shape.slots,
                max_tokens=max_tokens,
                taps=shape.taps,
                hidden_size=shape.hidden_size,
                context=shape.context,
                ring=shape.ring,
                is_sampled=shape.support > 0,
            ),
            device,
            has_host_buffers=config.asynchronous is None,
        )
        self.gather = self.gather_form.gather
        logger.info(
            "farspark: gather in %s: %s",
            "one Triton launch" if self.gather_form.is_fused else "torch operations",
            self.gather_form.reason,
        )
        hello = shape.hello(
            engine=engine,
            identity=config.identity,
            markov_identity=config.markov_identity,
            want_margin=config.want_margin,
        )
        spec = TalkerSpec(
            shape=shape,
            hello=hello,
            endpoints=config.endpoints,
            timeout_s=config.timeout_s,
            connect_timeout_s=config.connect_timeout_s,
            backoff_s=config.backoff_s,
            backoff_max_s=config.backoff_max_s,
            trip=config.trip,
            cooldown=config.cooldown,
            want_margin=config.want_margin,
            token=config.token,
            # Shadow changes no schedule.
            depth_policy=OFF if is_shadow else config.depth_policy,
            depth_costs=config.depth_costs(),
            depth_file=None if is_shadow else config.depth_file,
            n_out=self.n_out,
            capture=config.capture,
            capture_header=CaptureHeader(
                shape=shape,
                identity=config.identity,
                markov_identity=config.markov_identity,
                policy=config.policy.value,
                engine=engine,
                farspark=farspark.__version__,
            ),
            capture_bytes=config.capture_bytes,
        )
        self.why_not_async: str | None = None
        self.handoff: Handoff | None = None
        if config.asynchronous is not None:
            self.handoff = self._hand_off(config.asynchronous, spec, max_tokens, device, result, make_stream)
            if self.handoff is None:
                self.gather.make_host_buffers()
        self._talker = Talker(spec, self.gather.ring, self.stats) if self.handoff is None else None
        self._say_depth(is_shadow)

    @property
    def talker(self) -> Talker:
        """Of synchronous rounds."""
        assert self._talker is not None, "rounds are asynchronous"
        return self._talker

    @property
    def client(self) -> Client:
        """Of synchronous rounds."""
        return self.talker.client

    @property
    def round(self) -> RemoteRound:
        """Of synchronous rounds."""
        return self.talker.round

    def _hand_off(
        self,
        settings: AsyncSettings,
        spec: TalkerSpec,
        max_tokens: int,
        device: torch.device,
        result: torch.Tensor,
        make_stream: MakeStream | None,
    ) -> Handoff | None:
        """None where it cannot be had, which is said. Raises StreamStuckError."""
        gather = self.gather
        try:
            if make_stream is None:
                make_stream = _cuda_stream(device)
            handoff = open_handoff(
                settings,
                spec,
                max_rows=gather.shape.max_rows,
                buffers=DeviceBuffers(
                    gather.rows_address, gather.meta_address, gather.ring.rows.data_ptr(), result.data_ptr()
                ),
                make_stream=make_stream,
                stats=self.stats,
            )
        except HandoffRefusedError as refused:
            self.why_not_async = str(refused)
            logger.warning("farspark: asynchronous rounds refused, they are synchronous: %s", refused)
            return None
        logger.info(
            "farspark: asynchronous rounds on (self-test passed): proxy %s, watchdog %g ms, %s",
            settings.proxy.value,
            settings.watchdog_s * 1000,
            handoff.stream.mechanism,
        )
        if not settings.loads_modules_eagerly:
            logger.warning(
                "farspark: CUDA_MODULE_LOADING=EAGER is not set: a kernel that is loaded while the stream waits for a round can "
                "hold that round up until the watchdog ends it"
            )
        return handoff

    def counters(self) -> dict[str, int]:
        """Of all threads and processes that take part."""
        counters = Counter(self.stats.counters())
        if self.handoff is not None:
            counters.update(self.handoff.side.counters())
        return dict(sorted(counters.items()))

    def snapshot(self) -> dict[str, Any]:
        """Counters, latencies and what the side that talks has to say, as the stats file has it."""
        latency = self.stats.snapshot()["latency"]
        if self.handoff is None:
            about = {"is_on": False, "fallback_reason": self.why_not_async}
            return {"counters": self.counters(), "latency": latency, "async": about} | self.talker.details()
        latency |= self.handoff.side.latency()
        return (
            {"counters": self.counters(), "latency": dict(sorted(latency.items()))}
            | self.handoff.side.details()
            | self.handoff.snapshot()
        )

    def give_up(self, why: str) -> None:
        """No more rounds in this engine run."""
        if self.handoff is None:
            self.client.disable(why)
        else:
            self.handoff.abandon(why)

    def close(self) -> None:
        if self.handoff is None:
            self.talker.close()
        else:
            self.handoff.close()

    def _say_depth(self, is_shadow: bool) -> None:
        config = self.config
        if is_shadow and (config.depth_policy != OFF or config.depth_file is not None):
            logger.info(
                "farspark: %s=%s has no effect in shadow, which changes no schedule", POLICY, config.depth_policy
            )
        elif config.asynchronous is not None:
            logger.info(
                "farspark: depth policy %s acts through adaptive verification only: the host never waits for a round's depths",
                config.depth_policy,
            )
        elif not is_shadow:
            logger.info("farspark: depth %r, costs %s", self.talker.depth, config.depth_costs())
        table = list(self.n_out.by_requests) if self.n_out.by_requests else "all"
        logger.info("farspark: positions to draft by number of requests: %s; %s", table, self.n_out.reason)

    def start(self) -> None:
        if self.handoff is None:
            self.talker.start()
        strict = self.config.strict_start or self.config.on_fail is OnFail.RAISE
        why = self._why_not_ready(Deadline.after(2 * self.config.connect_timeout_s)) if strict else None
        if why is not None:
            self.close()
            raise ConfigError(
                f"VLLM_DSPARK_REMOTE_STRICT_START is set and the worker cannot be used: {why}. Start the worker first, or "
                "unset it to serve without drafts until one is there"
            )

    def _why_not_ready(self, deadline: Deadline) -> str | None:
        """Waits; None once the worker is ready."""
        if self.handoff is None:
            return None if self.client.wait_ready(deadline) else self.client.last_failure or "no answer"
        while True:
            worker = self.handoff.side.details().get("worker", {})
            if worker.get("state") == ClientState.READY.value:
                return None
            if deadline.has_passed() or worker.get("state") == ClientState.DISABLED.value:
                return worker.get("last_failure") or "no answer"
            time.sleep(0.01)


def _cuda_stream(device: torch.device) -> MakeStream:
    """The current stream of `device`. Raises HandoffRefusedError."""
    if device.type != "cuda":
        raise HandoffRefusedError(f"the device is {device.type}, whose streams cannot wait for a word in memory")
    current = current_stream(device)
    return lambda region, page: CudaStream(region, page, current)


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
        caps: Sequence[int] | None = None,  # the dynamic speculation schedule's, by number of requests; index 0 unused
        make_stream: MakeStream | None = None,  # in place of CUDA's current stream
    ) -> None:
        """Raises ConfigError for settings that do not fit `shape`, StreamStuckError where the engine must not start."""
        config.check_depths(shape.num_drafts)
        self.config = config
        self.shape = shape
        self.shadow = ShadowComparison(shape.num_drafts)
        self._tp = tp
        self._admissions = admissions
        self._facts = dict(facts)
        self._layout = ResultLayout(shape.slots, shape.num_drafts, shape.support)
        on_cuda = device.type == "cuda"
        self._result_device = torch.zeros(self._layout.size, dtype=torch.int32, device=device)
        self.rank0 = (
            Rank0(config, shape, max_tokens, device, engine, caps, self._result_device, make_stream)
            if tp.rank == 0
            else None
        )
        # On the CPU rank 0 packs the result in place.
        self._result_host = (
            torch.zeros(self._layout.size, dtype=torch.int32, pin_memory=True) if on_cuda else self._result_device
        )
        self._result = PackedResult(self._layout, self._result_host.numpy())
        self._drafts_of: dict[int, RemoteDrafts] = {}  # by number of requests: views of one buffer
        self._is_serving = False
        self._off_because: str | None = None
        self._rounds = 0
        self._depths: dict[int, tuple[Hashable, int]] = {}  # by slot: whose, and how many drafts to verify
        self._newest: RoundInput | None = None  # synchronous rounds; its arrays are the next round's, too
        self._undecided: list[int] = []  # slots of the newest round, until its depths are read
        self._stats_file = StatsFile(config.stats_file)
        self._row_bound = 0  # of the step that `begin` had
        self._written_at = float("-inf")
        if self.rank0 is not None:
            self.rank0.start()
            # Not atexit: what multiprocessing has forked, as vLLM's engine mostly is, runs these and no atexit handler.
            self._at_exit = Finalize(None, self.close, exitpriority=0)

    def start_serving(self) -> None:
        """Warm-up is over: steps from now on are requests of users."""
        self._is_serving = True

    def note(self, **facts: Any) -> None:
        """What else the stats file is to hold, under these names."""
        self._facts |= facts

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
        gather, handoff = self.rank0.gather, self.rank0.handoff
        try:
            if handoff is None:
                gather.run(step)
            else:
                self._row_bound = min(step.row_bound, gather.shape.max_rows)
                handoff.begin(gather.pack, step, prepare=gather.prepare)
        except Exception:  # the one place that fails open: see `_turn_off`
            self._turn_off()

    def finish(self, batch: Batch) -> RemoteDrafts:
        """The round and its result on every rank. Whatever fails on rank 0, the broadcast takes place and brings legal ids.

        Where rounds are asynchronous nothing is waited for: the result is there once the stream has come so far.

        Raises RoundFailedError, on every rank, where nobody got a draft and the settings say ON_FAIL=raise.
        """
        if self.rank0 is not None and self.rank0.handoff is not None:
            self._submit_round(self.rank0, self.rank0.handoff, batch)
        elif self.rank0 is not None:
            self._run_round(self.rank0, batch)
        if self._tp.size > 1:
            self._tp.broadcast(self._result_device)
        if self.config.on_fail is OnFail.RAISE and self.outcome() is RoundOutcome.FAILED:
            raise RoundFailedError(
                "VLLM_DSPARK_REMOTE_ON_FAIL=raise: a round brought no drafts; rank 0's log and statistics say why"
            )
        self._undecided = batch.slots
        n = len(batch.slots)
        drafts = self._drafts_of.get(n)
        if drafts is None:
            drafts = self._drafts_of[n] = self._view(n)
        return drafts

    def _view(self, n: int) -> RemoteDrafts:
        layout, result = self._layout, self._result_device
        shape = layout.max_requests, layout.num_drafts
        drafts = RemoteDrafts(
            tokens=result[layout.tokens].view(shape)[:n],
            confidences=result[layout.confidences].view(torch.float32).view(shape)[:n],
            ok=result[layout.ok][:n],
            depths=result[layout.depths][:n],
        )
        if not layout.support:
            return drafts
        wide = *shape, layout.support
        return drafts._replace(
            sampled=result[layout.sampled][:n],
            support=result[layout.support_ids].view(wide)[:n],
            q=result[layout.q].view(torch.float32).view(wide)[:n],
        )

    def outcome(self) -> RoundOutcome:
        """Of the newest round, the same on every rank. Waits for the device."""
        return RoundOutcome(int(self._result_device[0]))

    def depth_of(self, slot: int) -> int:
        """How many drafts of the request in `slot` are worth verifying, from what was broadcast; the same on every rank.

        Waits for the device on ranks other than 0, and for the round where rounds are asynchronous: not for a step in serving
        then. N for a request that no round has had.
        """
        if self._undecided:
            self._read_depths()
        owner, depth = self._depths.get(slot, (None, self.shape.num_drafts))
        return depth if owner == self._admissions.get(slot) else self.shape.num_drafts

    def _read_depths(self) -> None:
        if self.rank0 is not None and self.rank0.handoff is None and self._off_because is None:
            depths = self._result.depths.tolist()
        else:
            depths = self._result_device[self._layout.depths].tolist()
        for slot, depth in zip(self._undecided, depths, strict=False):
            self._depths[slot] = (self._admissions.get(slot), depth)
        self._undecided = []

    def note_local_fallback(
        self, local: torch.Tensor | None = None, local_confidences: torch.Tensor | None = None
    ) -> None:
        """A local draft [n, N] stood in for what the worker did not bring."""
        if self.rank0 is not None:
            self.rank0.stats.add("local_fallback_rounds")
            if local is not None:
                self._record_local(self.rank0, local, local_confidences)

    def compare(self, local: torch.Tensor, local_confidences: torch.Tensor | None) -> None:
        """Compare the local drafts [n, N] of this step with the remote ones. Rank 0 only; waits for the local drafter."""
        if self.rank0 is None or self._off_because is not None:
            return
        self._record_local(self.rank0, local, local_confidences)
        last = self.rank0.round.last_drafts
        n = local.shape[0]
        # After a prefix-cache hit the worker misses rows that the local drafter's cache has: its drafts are other ones by
        # right, and say nothing about parity.
        is_partial = [last.entry_status.get(row) is RequestStatus.PARTIAL_WINDOW for row in range(n)]
        self.rank0.stats.add("shadow_partial_windows", sum(is_partial))
        ok = self._result.ok[:n].astype(bool) & ~np.array(is_partial)
        drafts = local.cpu().numpy()
        self._observe_accepted(drafts, ok)
        if not ok.any():
            return
        margins = last.margins
        ours, theirs = drafts[ok], self._result.tokens[:n][ok]
        judge, rows = self.rank0.round.judge, np.flatnonzero(ok)
        self.shadow.observe(
            ours,
            theirs,
            # Without margins the worker keeps nothing to judge by.
            judge=None if margins is None else lambda asked: judge(rows[asked].tolist(), ours[asked]),
            has_router=last.has_router,
            margins=None if margins is None else margins[:n][ok],
            local_confidences=None if local_confidences is None else local_confidences.float().cpu().numpy()[ok],
            remote_confidences=self._result.confidences[:n][ok],
        )

    def _observe_accepted(self, local: npt.NDArray[np.integer[Any]], ok: npt.NDArray[np.bool_]) -> None:
        """Of the newest round's rows [n]: what the target goes on with, and what either drafter says follows."""
        step = self._newest
        if step is None:
            return
        takes_remote = self.config.shadow_use is ShadowUse.REMOTE
        for row, request in enumerate(step.requests):
            start, valid, anchor = step.meta[row, : MetaColumn.SAMPLED].tolist()
            mine, theirs = local[row].tolist(), self._result.tokens[row].tolist()
            self.shadow.accepted.observe(
                request.slot,
                request.owner,
                start + valid,
                anchor,
                local=mine,
                remote=theirs if ok[row] else None,
                verified=theirs if takes_remote and self._result.ok[row] else mine,
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
                step = self._newest = RoundInput(
                    self._requests(batch), gathered.meta, gathered.rows, self._phase(batch)
                )
                started = time.perf_counter()
                if rank0.round.run(step, self._result) is not RoundOutcome.FAILED:
                    # Without the wait for the target's own step: what a round costs on top of it.
                    rank0.stats.record_us("rank0_round_us", gather_us + (time.perf_counter() - started) * 1e6)
                self._keep_local_depths(rank0, len(batch.slots))
                rank0.talker.record(self._rounds, step, self._result)
            self._report(rank0)
        except Exception:
            self._turn_off()
        if self._off_because is not None:
            self._count_switched_off(rank0)
            self._result_device.zero_()
            self._result_device[0] = int(RoundOutcome.FAILED)
            self._result_device[1] = len(batch.slots)
            if self.config.policy is not Policy.CAPACITY:
                self._result_device[self._layout.depths] = self.shape.num_drafts
        elif self._result_host is not self._result_device:
            self._result_device.copy_(self._result_host, non_blocking=True)

    def _submit_round(self, rank0: Rank0, handoff: Handoff, batch: Batch) -> None:
        """As `_run_round`, without the wait: the result will be in the device's buffer. Raises nothing."""
        self._rounds += 1
        is_handed_over = False
        try:
            if self._off_because is None:
                number = self._admissions.number
                is_handed_over = handoff.submit(
                    Submission(
                        batch.slots,
                        [number(slot) for slot in batch.slots],
                        0 if batch.num_drafts is None else batch.num_drafts,
                        self._phase(batch),
                        self._row_bound,
                    )
                )
            self._report(rank0)
        except Exception:
            self._turn_off()
        if self._off_because is not None:
            self._count_switched_off(rank0)
        if not is_handed_over or self._off_because is not None:
            handoff.stream.run(self._result_device.zero_)  # nobody has drafts, none of them is worth verifying

    def _count_switched_off(self, rank0: Rank0) -> None:
        rank0.stats.add("rounds_failed")
        rank0.stats.add(f"fallback_{self._off_because}")

    def _keep_local_depths(self, rank0: Rank0, n: int) -> None:
        """Where a local drafter stands in, a row that the worker failed has drafts all the same, of unknown confidence."""
        if self.config.policy is not Policy.CAPACITY:
            self._result.depths[:n][self._result.ok[:n] == 0] = rank0.talker.depth.without_confidences

    def _record_local(self, rank0: Rank0, drafts: torch.Tensor, confidences: torch.Tensor | None) -> None:
        if rank0.talker.capture is not None:
            rank0.talker.capture.local(
                drafts.cpu().numpy(), None if confidences is None else confidences.float().cpu().numpy()
            )

    def _requests(self, batch: Batch) -> list[RoundRequest]:
        drafts = batch.num_drafts
        return [
            RoundRequest(slot, self._admissions.owner(slot), 0 if drafts is None else drafts[row])
            for row, slot in enumerate(batch.slots)
        ]

    def _phase(self, batch: Batch) -> Phase:
        is_decode = max(batch.query_lengths) <= self.shape.num_drafts + 1
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
        rank0.give_up("internal error, see the traceback above")

    def _report(self, rank0: Rank0) -> None:
        every = self.config.log_every
        if every and self._rounds % every == 0:
            logger.info("farspark: %s", self.summary())
        now = time.monotonic()
        if now - self._written_at >= STATS_EVERY_S:
            self._written_at = now
            self._stats_file.write_soon(self.snapshot())

    def summary(self) -> str:
        """One line for the log."""
        assert self.rank0 is not None
        counters = self.rank0.counters()
        side = self.rank0.client if self.rank0.handoff is None else self.rank0.handoff
        agreement = self.shadow.snapshot()["full_block_agree_rate"]
        rounds = {name: counters.get(f"rounds_{name}", 0) for name in ("ok", "some_failed", "failed")}
        return (
            f"{self._rounds} rounds ({rounds['ok']} ok, {rounds['some_failed']} partly, {rounds['failed']} failed), "
            f"{counters.get('rows_sent', 0)} rows sent, {side!r}"
            + (f", whole blocks equal {agreement:.2%}" if agreement is not None else "")
        )

    def snapshot(self) -> dict[str, Any]:
        """What the stats file holds."""
        rank0 = self.rank0
        assert rank0 is not None
        snapshot = rank0.snapshot()
        snapshot |= {
            "policy": self.config.policy.value,
            "rounds": self._rounds,
            "off_because": self._off_because,
            "rank0_buffers": {
                "device_bytes": rank0.gather.device_nbytes + self._result_device.nbytes,
                "pinned_bytes": rank0.gather.pinned_nbytes
                + (rank0.handoff.pinned_nbytes if rank0.handoff is not None else 0)
                + (self._result_host.nbytes if self._result_host is not self._result_device else 0),
                "context": self.shape.context,
                "ring": self.shape.ring,
            },
            **verification(snapshot["counters"]),
            "n_out_by_reqs": list(rank0.n_out.by_requests) if rank0.n_out.by_requests else None,
            "n_out_reason": rank0.n_out.reason,
            "fused_gather": {
                "on": rank0.gather_form.is_fused,
                "check": rank0.gather_form.reason,
                "launched": rank0.gather.how_launched,
            },
            "shadow": self.shadow.snapshot(),
            **self._facts,
        }
        return snapshot

    def close(self) -> None:
        """Write the last statistics and end the connection. Idempotent; any rank."""
        if self.rank0 is None:
            return
        self._at_exit.cancel()
        if self.rank0.handoff is not None:
            self.rank0.handoff.close()  # the newest rounds are in the statistics once the proxy has ended
        elif self.rank0.talker.capture is not None:
            self.rank0.talker.capture.close()
        self._stats_file.close(self.snapshot())
        self.rank0.close()


def verification(counters: Mapping[str, int]) -> dict[str, Any]:
    """What was sent to verify, what of it was accepted, and the traffic that it took; None where nothing was yet."""
    drafted, accepted = counters.get("drafted_tokens", 0), counters.get("accepted_drafts", 0)
    traffic = counters.get("bytes_sent", 0) + counters.get("bytes_received", 0)
    return {
        "drafted_tokens": drafted,
        "accepted_drafts": accepted,
        "acceptance_rate": round(accepted / drafted, 4) if drafted else None,
        "bytes_per_accepted_token": round(traffic / accepted, 1) if accepted else None,
    }
