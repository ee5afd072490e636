"""Programs for the engine simulator, and the machine that runs one against a real client, round and worker.

After every round each draft must equal that of a reference which saw exactly the rows that the contract gives the worker.
"""

from __future__ import annotations

import enum
import random
import struct
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from tests.fakes.engine_world import CONTEXT, INFO, RING, SLOTS, Row, World
from tests.sim.neighbour import Neighbour, SharedDrafter

from farspark.engine.breaker import State
from farspark.engine.depth import NOut
from farspark.engine.result import RoundOutcome

# A round may take its deadline; beyond that and some room for a busy machine it hangs.
TIMEOUT_S = 5.0
HANG_S = 2 * TIMEOUT_S
STARTS = (0, 0, 0, 1, 7, CONTEXT, 64)
# Of some workers' STEPs: room for what all requests decode and one window.
NARROW_ROWS = SLOTS * (INFO.num_drafts + 1) + RING
ROWS = (1, 1, 1, 2, 3, 6, RING, RING + 1, CONTEXT, CONTEXT + 1, 3 * CONTEXT)


class Fault(enum.Enum):
    """What goes wrong in one round."""

    NONE = "none"
    LATE = "late reply"
    LOST = "connection lost"
    CUT = "connection lost in the reply"
    GARBAGE = "refused reply"
    FRAME = "frame error"
    INTERNAL = "drafter failed"
    ENTRY = "entry failed"


@dataclass(frozen=True, slots=True)
class Admit:
    """A request takes `slot`, with a prefix-cache hit of `start` positions."""

    slot: int
    start: int


@dataclass(frozen=True, slots=True)
class Preempt:
    """The request of `slot` loses it and comes back at once, with `lost` positions to be computed again."""

    slot: int
    lost: int


@dataclass(frozen=True, slots=True)
class Restart:
    """The worker's process ends and another one takes its place; a client that is not told finds out with the next round."""

    is_told: bool = True


@dataclass(frozen=True, slots=True)
class Judge:
    """Shadow asks what the worker thinks of other drafts for the newest round, if that brought any."""

    fault: Fault = Fault.NONE


@dataclass(frozen=True, slots=True)
class Round:
    """One step: (slot, valid rows, sampled) in batch order; slots that nobody has are admitted first."""

    rows: tuple[tuple[int, int, bool], ...]
    fault: Fault = Fault.NONE


Op = Admit | Preempt | Restart | Judge | Round


class Mismatch(AssertionError):
    """A draft that the reference does not draft, or an outcome that the contract does not know."""


@dataclass(slots=True)
class Tally:
    rounds: int = 0
    checked: int = 0
    restarts: int = 0
    hangs: int = 0
    longest_s: float = 0.0
    judgements: int = 0
    waits: int = 0  # requests that found no room in a STEP
    neighbours: int = 0  # drafts of the second engine
    joint: int = 0  # calls of the drafter for both engines
    faults: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        faults = ", ".join(f"{name} {count}" for name, count in sorted(self.faults.items()))
        return (
            f"{self.rounds} rounds, {self.checked} drafts checked, {self.judgements} judgements, {self.waits} waits for room\n"
            f"{self.restarts} worker restarts, {self.hangs} hangs, longest round {self.longest_s * 1000:.0f} ms\n"
            f"{self.neighbours} drafts of a second engine checked, {self.joint} calls for both\n"
            f"failures injected: {faults or 'none'}"
        )


def random_program(rng: random.Random, length: int) -> Iterator[Op]:
    """Mostly decoding, some of everything else."""
    for _ in range(length):
        kind = rng.random()
        if kind < 0.06:
            yield Admit(rng.randrange(SLOTS), rng.choice(STARTS))
        elif kind < 0.09:
            yield Preempt(rng.randrange(SLOTS), rng.randrange(2 * CONTEXT))
        elif kind < 0.10:
            yield Restart(is_told=rng.random() < 0.5)
        elif kind < 0.15:
            yield Judge(rng.choice((Fault.NONE, Fault.NONE, Fault.LATE, Fault.LOST, Fault.CUT, Fault.FRAME)))
        else:
            slots = rng.sample(range(SLOTS), rng.randint(1, SLOTS))
            rows = tuple((slot, rng.choice(ROWS), rng.random() < 0.8) for slot in slots)
            fault = rng.choice(list(Fault)) if rng.random() < 0.25 else Fault.NONE
            yield Round(rows, fault)


def run(program: Sequence[Op], tally: Tally, *, seed: int = 0, listen: str = "") -> None:
    """Raises Mismatch at the first thing that is wrong. `listen`: where the worker listens; empty: in memory."""
    drafter = SharedDrafter()
    want_margin = seed % 2 == 0
    # A dynamic speculation schedule: fewer drafts, or none, by the number of requests.
    n_out = NOut((0, 5, 3, 0, 2), "the simulator's") if seed % 3 == 0 else None
    with (
        World(
            seed=seed,
            listen=listen,
            drafter=drafter,
            timeout_s=TIMEOUT_S,
            want_margin=want_margin,
            n_out=n_out,
            max_rows=NARROW_ROWS if seed % 5 == 0 else 4096,
            trip=3,
            cooldown=4,
        ) as world,
        Neighbour(world, seed) as neighbour,
    ):
        for op in program:
            match op:
                case Admit(slot, start):
                    world.admit(slot, start)
                case Preempt(slot, lost):
                    world.preempt(slot, lost)
                case Restart(is_told):
                    _restart(world, is_told=is_told)
                    tally.restarts += 1
                case Judge(fault):
                    _judge(world, fault, tally)
                case Round(rows, fault):
                    _round(world, rows, fault, tally)
        if world.stats.count("stale_generation_new_sessions"):
            raise Mismatch("generations went backwards")
    for wrong in neighbour.wrong:
        raise Mismatch(wrong)
    tally.neighbours += neighbour.checked
    tally.joint += drafter.joint_calls


def _restart(world: World, *, is_told: bool) -> None:
    world.stop_worker()
    for held in world.drafter.rows:
        held.clear()
    world.start_worker()
    _forget_all(world)
    if is_told:
        world.client_notices()
    elif (connection := world.client.connection()) is not None:
        world.stale_epoch = connection.epoch


def _judge(world: World, fault: Fault, tally: Tally) -> None:
    """The worker's own drafts: it must agree with all of them, or say nothing."""
    rows = np.flatnonzero(world.result.ok[: world.result.num_requests]).tolist()
    if not rows or not world.want_margin or world.n_out is not None:  # shadow asks for every position
        return
    world.wait_ready()
    if world.client.connection() is not world.round.last_drafts.connection:
        return  # nobody is asked
    _inject(world, fault)
    judged = world.round.judge(rows, world.result.tokens[rows])
    _heal(world)
    tally.judgements += judged is not None
    if fault is not Fault.NONE:
        tally.faults[f"{fault.value}, of a judgement"] += 1
    if judged is None:
        return
    if (judged.best != world.result.tokens[rows]).any() or judged.gaps.any():
        raise Mismatch(f"the worker drafted {world.result.tokens[rows]} and would draft {judged.best}")


def _forget_all(world: World) -> None:
    for request in world.by_slot.values():
        request.clean = False


def _round(world: World, planned: Sequence[tuple[int, int, bool]], fault: Fault, tally: Tally) -> None:
    world.wait_ready()
    if world.reconnected():
        _forget_all(world)
    for slot, _, _ in planned:
        if slot not in world.by_slot:
            world.admit(slot)
    rows = [Row(world.by_slot[slot], n_rows, sampled) for slot, n_rows, sampled in planned]
    stays_home = world.round.breaker.state is State.OPEN and world.round.breaker.cooldown_left > 0
    if stays_home or world.round._epoch <= world.stale_epoch:
        fault = Fault.NONE
    _inject(world, fault)
    epoch = world.round._epoch
    started = time.monotonic()
    outcome = world.step(*rows)
    took = time.monotonic() - started
    if world.round._epoch != epoch:
        _forget_all(world)
    is_stale = world.round._epoch <= world.stale_epoch
    _heal(world)
    tally.rounds += 1
    tally.longest_s = max(tally.longest_s, took)
    tally.hangs += took > HANG_S
    if fault is not Fault.NONE:
        tally.faults[fault.value] += 1
    wanted = any(row.sampled for row in rows) and _n_out(world, rows) > 0
    if stays_home or is_stale or fault not in (Fault.NONE, Fault.ENTRY):
        expected = RoundOutcome.FAILED if wanted else RoundOutcome.NOTHING
        if outcome is not expected or world.result.tokens.any() or world.result.confidences.any():
            raise Mismatch(f"{fault}: outcome {outcome.name}, {world.result!r}")
        world.lose(*rows)
        if fault in (Fault.LOST, Fault.CUT) or is_stale:
            _forget_all(world)
        return
    _check(world, rows, fault, outcome, tally)


def _check(world: World, rows: Sequence[Row], fault: Fault, outcome: RoundOutcome, tally: Tally) -> None:
    statuses = world.round.last_drafts.entry_status
    failed = 0
    wants_drafts = _n_out(world, rows) > 0
    most = sum(max(RING, min(row.n_rows, CONTEXT)) for row in rows)
    if len(statuses) < len(rows) and most <= world.max_rows:
        raise Mismatch(f"no answer without a fault: {world.stats.counters()}")
    for index, row in enumerate(rows):
        has_room = index in statuses
        tally.waits += not has_room
        if has_room and statuses[index].is_usable:
            world.keep(row)
        elif fault is Fault.ENTRY or not has_room:
            failed += row.sampled and wants_drafts
            world.lose(row)
            if world.result.tokens[index].any():
                raise Mismatch(f"a failed entry with drafts: {world.result.tokens[index]}")
            continue
        else:
            raise Mismatch(f"row {index}: status {statuses[index].name} without a fault")
        if row.sampled and wants_drafts:
            try:
                world.check(index, row)
            except AssertionError as wrong:
                raise Mismatch(f"row {index} of slot {row.request.slot}: {wrong}") from wrong
            tally.checked += 1
    wanted = sum(row.sampled for row in rows) if wants_drafts else 0
    expected = (
        RoundOutcome.NOTHING
        if wanted == 0
        else RoundOutcome.OK
        if failed == 0
        else RoundOutcome.FAILED
        if failed == wanted
        else RoundOutcome.SOME_FAILED
    )
    if outcome is not expected:
        raise Mismatch(f"outcome {outcome.name}, expected {expected.name}")


def _n_out(world: World, rows: Sequence[Row]) -> int:
    return INFO.num_drafts if world.n_out is None else world.n_out.of(len(rows), INFO.num_drafts)


def _inject(world: World, fault: Fault) -> None:
    channel = world.channel
    assert channel is not None
    assert isinstance(world.drafter, SharedDrafter)
    match fault:
        case Fault.LATE:
            channel.late = True
        case Fault.LOST:
            channel.close()
        case Fault.CUT:
            channel.cut = True
        case Fault.GARBAGE:
            channel.corrupt = (4, struct.pack("<f", float("nan")))
        case Fault.FRAME:
            channel.status = 8
        case Fault.INTERNAL:
            world.drafter.is_told_to_fail = True
        case Fault.ENTRY:
            world.drafter.not_finite = {world.rng.randrange(INFO.slots)}


def _heal(world: World) -> None:
    assert isinstance(world.drafter, SharedDrafter)
    world.drafter.is_told_to_fail = False
    world.drafter.not_finite = set()


def shrink(program: Sequence[Op], seed: int) -> list[Op]:
    """A smaller program that still fails: pieces are left out, halves first, for as long as the rest fails."""
    small = list(program)
    size = len(small) // 2
    while size:
        at = 0
        while at < len(small):
            without = small[:at] + small[at + size :]
            if _fails(without, seed):
                small = without
            else:
                at += size
        size //= 2
    return small


def _fails(program: Sequence[Op], seed: int) -> bool:
    try:
        run(program, Tally(), seed=seed)
    except Mismatch:
        return True
    return False
