from __future__ import annotations

import random
import struct

import pytest
from tests.fakes.drafters import INFO, ArithmeticDrafter, expected, info

from farspark.errors import ProtocolError
from farspark.stats import Stats
from farspark.wire.layout import EntryFlag, RequestStatus, StepFlag
from farspark.wire.messages import Entry, Freed, Judge, Sampling, Step, StepReply
from farspark.worker.batch import DrafterInfo
from farspark.worker.session import Session, SlotPool

DRAFT, NEW, RESYNC = EntryFlag.NEED_DRAFT, EntryFlag.NEW_GEN, EntryFlag.RESYNC
OK, PARTIAL, NOT_NEEDED = RequestStatus.OK, RequestStatus.PARTIAL_WINDOW, RequestStatus.NOT_NEEDED
N = INFO.num_drafts


def row(owner: int, position: int, row_bytes: int = INFO.row_bytes) -> bytes:
    """The row of a position, different for every owner and position."""
    return (struct.pack("<II", owner, position) * (row_bytes // 8 + 1))[:row_bytes]


class Engine:
    """Drives one session as rank 0 would, with the real small drafter behind it."""

    def __init__(
        self,
        drafter_info: DrafterInfo = INFO,
        *,
        slots: int | None = None,
        context: int | None = None,
        drafter: ArithmeticDrafter | None = None,
        pool: SlotPool | None = None,
    ) -> None:
        self.info = drafter_info
        self.drafter = drafter or ArithmeticDrafter(drafter_info)
        self.pool = pool or SlotPool(drafter_info.slots)
        self.stats = Stats()
        self.context = context or drafter_info.context
        self.session = Session(
            drafter_info, self.pool, slots=slots or drafter_info.slots, context=self.context, stats=self.stats
        )
        self.steps = 0

    def step(self, *entries: Entry, owner: int = 7, margins: bool = False, fails: bool = False) -> StepReply:
        self.steps += 1
        rows = b"".join(
            row(owner + entry.slot, entry.first_pos + at, self.info.row_bytes)
            for entry in entries
            for at in range(entry.n_rows)
        )
        step = Step(self.steps, entries, memoryview(rows), StepFlag.MARGINS if margins else StepFlag(0))
        plan = self.session.plan(step)
        batch = self.session.batch(plan)
        result = self.drafter.draft(batch) if batch is not None and not fails else None
        reply = self.session.complete(plan, result, 12)
        self.session.count(plan, reply)
        return reply

    def statuses(self, *entries: Entry, **options: bool) -> list[RequestStatus]:
        return [entry.status for entry in self.step(*entries, **options).entries]

    def expect(self, slot: int, start: int, end: int, *, anchor: int = 5, n_out: int = N, owner: int = 7) -> list[int]:
        rows = {at: row(owner + slot, at, self.info.row_bytes) for at in range(start, end)}
        return expected(rows, anchor, end, num_drafts=N, vocab_size=self.info.vocab_size, n_out=n_out)[0]


def entry(
    slot: int,
    first: int,
    rows: int,
    flags: EntryFlag = DRAFT,
    *,
    gen: int = 1,
    anchor: int = 5,
    k: int = 0,
    n_out: int = 0,
) -> Entry:
    return Entry(slot, gen, first, rows, anchor, first + rows, flags, k, n_out)


def drafts(reply: StepReply, index: int) -> list[int]:
    return reply.tokens.tolist()[index * N : (index + 1) * N]


def test_a_request_drafts_from_exactly_the_rows_that_it_sent() -> None:
    engine = Engine()
    reply = engine.step(entry(0, 0, 3, DRAFT | NEW), entry(2, 0, 1, DRAFT | NEW, anchor=9), margins=True)
    assert reply.step_id == 1
    assert reply.worker_us == 12
    assert [(one.slot, one.generation, one.window_rows, one.status) for one in reply.entries] == [
        (0, 1, 3, OK),
        (2, 1, 1, OK),
    ]
    assert drafts(reply, 0) == engine.expect(0, 0, 3)
    assert drafts(reply, 1) == engine.expect(2, 0, 1, anchor=9)
    rows = {0: row(9, 0)}
    wanted = expected(rows, 9, 1, num_drafts=N, vocab_size=1000, n_out=N)
    assert reply.confidences.tolist()[N:] == wanted[1]
    assert reply.margins is not None
    assert reply.margins.tolist()[N:] == wanted[2]
    assert reply.flags == StepFlag.MARGINS
    again = engine.step(entry(0, 3, 2))
    assert drafts(again, 0) == engine.expect(0, 0, 5)
    assert again.margins is None


@pytest.mark.parametrize("middle", [DRAFT, DRAFT | NEW])
def test_a_step_is_judged_before_its_rows_are_there(middle: EntryFlag) -> None:
    engine = Engine()
    # With the entry in the middle refused the others' rows are joined, which must wait for them too.
    entries = [entry(0, 0, 2, DRAFT | NEW), entry(1, 0, 1, middle), entry(2, 0, 3, DRAFT | NEW)]
    rows = b"".join(row(7 + one.slot, at) for one in entries for at in range(one.n_rows))
    memory = bytearray(len(rows))
    plan = engine.session.plan(Step(1, entries, memoryview(memory)))
    assert [one.window_rows for one in plan.replies] == [2, 1 if middle & NEW else 0, 3]
    memory[:] = rows
    batch = engine.session.batch(plan)
    assert batch is not None
    reply = engine.session.complete(plan, engine.drafter.draft(batch), 12)
    assert drafts(reply, 0) == engine.expect(0, 0, 2)
    assert drafts(reply, 2) == engine.expect(2, 0, 3)


@pytest.mark.parametrize("n_out", [1, 2, N])
def test_positions_at_or_past_n_out_are_zero(n_out: int) -> None:
    engine = Engine()
    reply = engine.step(entry(0, 0, 1, DRAFT | NEW, n_out=n_out))
    assert drafts(reply, 0) == engine.expect(0, 0, 1, n_out=n_out)
    assert drafts(reply, 0)[n_out:] == [0] * (N - n_out)


def test_a_round_that_wants_no_drafts_still_appends_its_rows_K0_STATE() -> None:
    engine = Engine()
    engine.step(entry(0, 0, 2, DRAFT | NEW))
    reply = engine.step(entry(0, 2, 3, EntryFlag(0), anchor=-1))
    assert [(one.window_rows, one.status) for one in reply.entries] == [(5, NOT_NEEDED)]
    assert drafts(reply, 0) == [0] * N
    assert drafts(engine.step(entry(0, 5, 1)), 0) == engine.expect(0, 0, 6)


def test_what_an_entry_that_only_appends_says_of_drafts_is_not_handed_on() -> None:
    engine = Engine()
    one = entry(0, 0, 1, NEW, anchor=-1, n_out=N + 200)
    sampling = [Sampling(3, -1.0)]
    plan = engine.session.plan(Step(1, [one], memoryview(row(7, 0)), StepFlag.SAMPLED, sampling))
    batch = engine.session.batch(plan)
    assert batch is not None
    assert [(draft.n_out, draft.anchor_token, draft.temperature) for draft in batch.entries] == [(N, 0, 0.0)]


def test_rows_that_do_not_continue_the_window_are_a_gap_and_change_nothing() -> None:
    engine = Engine()
    engine.step(entry(0, 0, 3, DRAFT | NEW))
    assert engine.statuses(entry(0, 4, 1)) == [RequestStatus.GAP]
    assert engine.statuses(entry(0, 2, 1)) == [RequestStatus.GAP]
    assert drafts(engine.step(entry(0, 3, 1)), 0) == engine.expect(0, 0, 4)


def test_a_slot_never_announced_has_no_window() -> None:
    engine = Engine()
    reply = engine.step(entry(0, 0, 1))
    assert [(one.window_rows, one.status) for one in reply.entries] == [(0, RequestStatus.NO_WINDOW)]
    assert drafts(reply, 0) == [0] * N
    assert engine.pool.in_use == 0


def test_an_older_generation_is_stale_and_changes_nothing() -> None:
    engine = Engine()
    engine.step(entry(0, 0, 2, DRAFT | NEW, gen=5))
    assert engine.statuses(entry(0, 2, 1, gen=4)) == [RequestStatus.STALE_GENERATION]
    assert engine.statuses(entry(0, 0, 1, DRAFT | NEW, gen=4)) == [RequestStatus.STALE_GENERATION]
    assert drafts(engine.step(entry(0, 2, 1, gen=5)), 0) == engine.expect(0, 0, 3)


def test_a_newer_generation_must_begin_with_new_gen() -> None:
    engine = Engine()
    engine.step(entry(0, 0, 2, DRAFT | NEW))
    assert engine.statuses(entry(0, 2, 1, gen=2)) == [RequestStatus.NO_WINDOW]


def test_a_new_generation_sees_nothing_of_the_old_one_SLOT_BEGIN() -> None:
    engine = Engine()
    engine.step(entry(0, 0, 8, DRAFT | NEW), owner=100)
    reply = engine.step(entry(0, 0, 1, DRAFT | NEW, gen=2), owner=200)
    assert drafts(reply, 0) == engine.expect(0, 0, 1, owner=200)
    assert engine.pool.in_use == 1


def test_a_thousand_requests_in_one_slot_each_see_their_own_rows_only_SLOT_BEGIN() -> None:
    engine, generator = Engine(), random.Random(0)
    for generation in range(1, 1001):
        length, first = generator.randint(1, 12), generator.choice([0, 0, 3])
        reply = engine.step(entry(0, first, length, DRAFT | NEW, gen=generation), owner=generation)
        start = max(first, first + length - engine.context)
        assert drafts(reply, 0) == engine.expect(0, start, first + length, owner=generation)
    assert engine.pool.in_use == 1


def test_a_resync_of_the_same_generation_replaces_the_window() -> None:
    engine = Engine()
    engine.step(entry(0, 0, 3, DRAFT | NEW))
    reply = engine.step(entry(0, 2, 4, DRAFT | NEW | RESYNC))
    assert [(one.window_rows, one.status) for one in reply.entries] == [(4, PARTIAL)]
    assert drafts(reply, 0) == engine.expect(0, 2, 6)


def test_a_window_that_does_not_reach_back_as_far_as_it_could_is_partial_APC_GAP() -> None:
    engine = Engine()
    assert engine.statuses(entry(0, 100, 3, DRAFT | NEW)) == [PARTIAL]
    assert drafts(engine.step(entry(0, 103, 1)), 0) == engine.expect(0, 100, 104)
    assert engine.statuses(entry(0, 104, 3)) == [PARTIAL]
    assert engine.statuses(entry(0, 107, 1)) == [OK]  # 8 rows: all that the context allows
    assert engine.statuses(entry(1, 0, 3, DRAFT | NEW)) == [OK]  # nothing lies before position 0


@pytest.mark.parametrize("chunks", [[20], [3, 17], [8, 8, 4], [9, 11], [1] * 20, [19, 1]])
def test_prefill_in_any_chunks_equals_one_big_chunk_CHUNK_TRIM(chunks: list[int]) -> None:
    engine = Engine()
    at = 0
    for number, length in enumerate(chunks):
        last = number == len(chunks) - 1
        flags = (NEW if not number else EntryFlag(0)) | (DRAFT if last else EntryFlag(0))
        reply = engine.step(entry(0, at, length, flags))
        at += length
    assert reply.entries[0].window_rows == engine.context
    assert drafts(reply, 0) == engine.expect(0, 20 - engine.context, 20)


def test_a_trimmed_entry_between_others_keeps_their_rows_apart_CHUNK_TRIM() -> None:
    engine = Engine()
    reply = engine.step(
        entry(0, 0, 2, DRAFT | NEW), entry(1, 0, 15, DRAFT | NEW), entry(2, 9, 4, DRAFT), entry(3, 0, 1, DRAFT | NEW)
    )
    assert [one.status for one in reply.entries] == [OK, OK, RequestStatus.NO_WINDOW, OK]
    assert drafts(reply, 0) == engine.expect(0, 0, 2)
    assert drafts(reply, 1) == engine.expect(1, 7, 15)
    assert drafts(reply, 2) == [0] * N
    assert drafts(reply, 3) == engine.expect(3, 0, 1)


def test_a_session_with_a_smaller_context_than_the_workers_sees_no_further_HELLO_LIMITS() -> None:
    engine = Engine(context=3)
    engine.step(entry(0, 0, 2, DRAFT | NEW))
    reply = engine.step(entry(0, 2, 3))
    assert [(one.window_rows, one.status) for one in reply.entries] == [(3, OK)]
    assert drafts(reply, 0) == engine.expect(0, 2, 5)
    assert drafts(engine.step(entry(0, 5, 4)), 0) == engine.expect(0, 6, 9)


BAD = [
    pytest.param(entry(99, 0, 1, DRAFT | NEW), id="slot out of range"),
    pytest.param(Entry(0, 1, 0, 1, 5, 2, DRAFT | NEW), id="anchor position is not the next"),
    pytest.param(Entry(0, 1, 0, 0, 5, 0, DRAFT | NEW), id="a draft without a row"),
    pytest.param(entry(0, 0, 1, DRAFT | NEW, anchor=1000), id="token at the vocabulary"),
    pytest.param(entry(0, 0, 1, DRAFT | NEW, anchor=-1), id="negative token"),
    pytest.param(entry(0, 0, 1, DRAFT | NEW, n_out=N + 1), id="more drafts than there are"),
    pytest.param(entry(0, INFO.max_position, 1, DRAFT | NEW), id="past the last position"),
]


@pytest.mark.parametrize("bad", BAD)
def test_one_bad_entry_never_spoils_the_others(bad: Entry) -> None:
    engine = Engine(slots=4)
    reply = engine.step(entry(1, 0, 2, DRAFT | NEW), bad, entry(2, 0, 3, DRAFT | NEW))
    assert [one.status for one in reply.entries] == [OK, RequestStatus.BAD_ENTRY, OK]
    assert reply.entries[1].window_rows == 0
    assert drafts(reply, 0) == engine.expect(1, 0, 2)
    assert drafts(reply, 1) == [0] * N
    assert drafts(reply, 2) == engine.expect(2, 0, 3)


def test_the_first_token_and_the_last_position_are_in_range() -> None:
    engine, last = Engine(), INFO.max_position
    reply = engine.step(entry(0, last - 1, 1, DRAFT | NEW, anchor=0))
    assert [one.status for one in reply.entries] == [PARTIAL]
    assert drafts(reply, 0) == engine.expect(0, last - 1, last, anchor=0)


def test_a_bad_entry_with_new_gen_voids_what_the_slot_held() -> None:
    engine = Engine()
    engine.step(entry(0, 0, 2, DRAFT | NEW))
    assert engine.statuses(entry(0, 0, 1, DRAFT | NEW, anchor=-1)) == [RequestStatus.BAD_ENTRY]
    assert engine.statuses(entry(0, 2, 1)) == [RequestStatus.NO_WINDOW]


def test_a_slot_twice_in_one_step_is_judged_once() -> None:
    engine = Engine()
    reply = engine.step(entry(0, 0, 2, DRAFT | NEW), entry(0, 2, 1, DRAFT))
    assert [one.status for one in reply.entries] == [OK, RequestStatus.BAD_ENTRY]
    assert drafts(reply, 0) == engine.expect(0, 0, 2)


def test_more_requests_than_slots_draft_nothing_until_one_is_freed_NO_CAPACITY() -> None:
    engine = Engine(info(slots=2), slots=4)
    assert engine.statuses(*[entry(slot, 0, 1, DRAFT | NEW) for slot in range(3)]) == [
        OK,
        OK,
        RequestStatus.NO_CAPACITY,
    ]
    engine.session.free([Freed(0, 1)])
    assert engine.statuses(entry(2, 0, 1, DRAFT | NEW)) == [OK]
    assert engine.stats.count("entries_no_capacity") == 1


def test_two_sessions_share_the_pool_and_never_each_others_rows() -> None:
    drafter, pool = ArithmeticDrafter(), SlotPool(INFO.slots)
    one, two = Engine(drafter=drafter, pool=pool), Engine(drafter=drafter, pool=pool)
    first = one.step(entry(0, 0, 2, DRAFT | NEW), owner=10)
    second = two.step(entry(0, 0, 2, DRAFT | NEW), owner=20)
    assert drafts(first, 0) == one.expect(0, 0, 2, owner=10)
    assert drafts(second, 0) == two.expect(0, 0, 2, owner=20)
    assert pool.in_use == 2
    one.session.close()
    one.session.close()
    assert pool.in_use == 1
    assert drafts(two.step(entry(0, 2, 1), owner=20), 0) == two.expect(0, 0, 3, owner=20)


def test_free_forgets_a_slot_but_not_a_newer_request_in_it_ABORT_RACE() -> None:
    engine = Engine()
    engine.step(entry(0, 0, 1, DRAFT | NEW, gen=3))
    engine.session.free([Freed(0, 2), Freed(1, 9)])
    assert engine.statuses(entry(0, 1, 1, gen=3)) == [OK]
    engine.session.free([Freed(0, 3)])
    engine.session.free([Freed(0, 3)])
    assert engine.pool.in_use == 0
    assert engine.statuses(entry(0, 2, 1, gen=3)) == [RequestStatus.NO_WINDOW]


def test_a_failed_draft_voids_its_slots_until_new_gen_FAIL_LIFETIME() -> None:
    engine = Engine()
    engine.step(entry(0, 0, 2, DRAFT | NEW))
    reply = engine.step(entry(0, 2, 1), entry(1, 0, 1, EntryFlag(0)), fails=True, margins=True)
    assert [(one.window_rows, one.status) for one in reply.entries] == [
        (0, RequestStatus.INTERNAL),
        (0, RequestStatus.NO_WINDOW),
    ]
    assert reply.tokens.tolist() == [0] * 2 * N
    assert reply.margins is not None
    assert reply.margins.tolist() == [0.0] * 2 * N
    assert engine.statuses(entry(0, 3, 1)) == [RequestStatus.NO_WINDOW]
    resent = engine.step(entry(0, 0, 4, DRAFT | NEW | RESYNC))
    assert drafts(resent, 0) == engine.expect(0, 0, 4)


def test_logits_that_are_not_finite_void_that_slot_alone() -> None:
    engine = Engine()
    engine.step(entry(0, 0, 1, DRAFT | NEW), entry(1, 0, 1, DRAFT | NEW))
    lent = engine.session._held[0].drafter_slot
    engine.drafter.not_finite = {lent}
    assert engine.statuses(entry(0, 1, 1), entry(1, 1, 1)) == [RequestStatus.INTERNAL, OK]
    engine.drafter.not_finite = set()
    assert engine.statuses(entry(0, 2, 1), entry(1, 2, 1)) == [RequestStatus.NO_WINDOW, OK]
    assert engine.statuses(entry(0, 0, 3, DRAFT | NEW), entry(1, 3, 1)) == [OK, OK]


def test_acceptance_is_measured_from_the_drafts_that_were_verified() -> None:
    engine = Engine()
    engine.step(entry(0, 0, 4, DRAFT | NEW))
    engine.step(entry(0, 4, 3, k=5))  # the anchor's row and two accepted drafts
    engine.step(entry(0, 7, 1, k=5))  # all rejected
    engine.step(entry(0, 8, 6, k=5))  # all accepted
    assert (engine.stats.count("drafts_verified"), engine.stats.count("drafts_accepted")) == (15, 7)


def test_every_entry_is_counted_by_its_status() -> None:
    engine = Engine()
    engine.step(entry(0, 0, 1, DRAFT | NEW), entry(1, 0, 1), entry(2, 0, 1, NEW), entry(3, 5, 1, DRAFT | NEW))
    assert engine.stats.counters() == {
        "drafts": 10,
        "entries_no_window": 1,
        "entries_not_needed": 1,
        "entries_ok": 1,
        "entries_partial_window": 1,
    }


def test_a_pool_refuses_a_slot_that_is_not_lent() -> None:
    pool = SlotPool(2)
    assert pool.take() == 0
    pool.give_back(0)
    for wrong in (0, 1, 2, -1):
        with pytest.raises(ValueError, match="not lent"):
            pool.give_back(wrong)


@pytest.mark.parametrize("seed", range(4))
def test_random_steps_against_a_list_model_RING_REWIND(seed: int) -> None:
    """The model keeps every row that each request ever committed, as a list, and cuts the newest of it."""
    generator = random.Random(seed)
    engine = Engine(info(slots=3), slots=4, context=generator.choice([1, 3, 8]))
    model: dict[int, tuple[int, int, int]] = {}  # slot: generation, first position held, end
    generations = dict.fromkeys(range(4), 0)
    for _ in range(600):
        entries: list[Entry] = []
        wanted: list[tuple[RequestStatus, list[int]]] = []
        for slot in generator.sample(range(4), generator.randint(1, 4)):
            needs = generator.random() < 0.8
            rows = generator.randint(1 if needs else 0, 12)
            flags = DRAFT if needs else EntryFlag(0)
            kind = generator.random()
            known = model.get(slot)
            if known is None or kind < 0.2:
                generations[slot] += 1
                first = generator.choice([0, 0, 5])
                entries.append(entry(slot, first, rows, flags | NEW, gen=generations[slot]))
                if known is None and len(model) == 3:
                    wanted.append((RequestStatus.NO_CAPACITY, []))
                    generations[slot] -= 1
                    continue
                generation, start = generations[slot], first
            elif kind < 0.25:
                entries.append(entry(slot, known[2] + 1, rows, flags, gen=known[0]))
                wanted.append((RequestStatus.GAP, []))
                continue
            elif kind < 0.3 and known[0] > 1:
                entries.append(entry(slot, 0, rows, flags | NEW, gen=known[0] - 1))
                wanted.append((RequestStatus.STALE_GENERATION, []))
                continue
            else:
                generation, start, first = known
                entries.append(entry(slot, first, rows, flags, gen=generation))
            end = first + rows
            model[slot] = (generation, max(start, end - engine.context), end)
            start = model[slot][1]
            if not needs:
                wanted.append((NOT_NEEDED, []))
            else:
                is_partial = start > 0 and end - start < engine.context
                wanted.append((PARTIAL if is_partial else OK, engine.expect(slot, start, end)))
        reply = engine.step(*entries)
        for index, (status, ids) in enumerate(wanted):
            assert reply.entries[index].status == status
            assert drafts(reply, index) == (ids or [0] * N)
            if status in (OK, PARTIAL, NOT_NEEDED):
                _, start, end = model[entries[index].slot]
                assert reply.entries[index].window_rows == end - start
        if generator.random() < 0.05 and model:
            slot = generator.choice(list(model))
            engine.session.free([Freed(slot, model.pop(slot)[0])])
    engine.session.close()
    assert engine.pool.in_use == 0


# JUDGE -----------------------------------------------------------------------------------------------------------------


def ints(*values: int) -> memoryview:
    return memoryview(struct.pack(f"<{len(values)}i", *values)).cast("i")


def test_other_drafts_are_judged_for_the_newest_step_by_its_entries() -> None:
    engine = Engine()
    append = entry(0, 0, 3, NEW)  # asks for no draft, so the entries of batch and drafts differ
    reply = engine.step(append, entry(1, 0, 3, NEW | DRAFT), entry(2, 0, 4, NEW | DRAFT), margins=True)
    own, other = reply.tokens.tolist()[N : 2 * N], reply.tokens.tolist()[2 * N :]
    changed = [*other]
    changed[1] = (changed[1] + 1) % engine.info.vocab_size
    judgement = engine.session.judge(Judge(engine.steps, N, [2, 1], ints(*changed, *own)))
    assert judgement.step_id == engine.steps
    assert judgement.gaps.tolist() == [0, 1, 1, *[0] * (N - 3), *[0] * N], (
        "the token after a changed one is judged behind it"
    )
    assert judgement.best.tolist()[N:] == own
    assert judgement.confidences.tolist() == reply.confidences.tolist()[2 * N :] + reply.confidences.tolist()[N : 2 * N]


@pytest.mark.parametrize(
    ("judge", "why"),
    [
        (Judge(2, N, [0], ints(*[1] * N)), "only the newest step with margins"),
        (Judge(1, N - 1, [0], ints(*[1] * (N - 1))), "this worker drafts"),
        (Judge(1, N, [0, 0], ints(*[1] * 2 * N)), "twice"),
        (Judge(1, N, [1], ints(*[1] * N)), "no drafts"),
        (Judge(1, N, [7], ints(*[1] * N)), "no drafts"),
        (Judge(1, N, [0], ints(*[1] * (N - 1), 1000)), "outside 0"),
        (Judge(1, N, [0], ints(*[1] * (N - 1), -1)), "outside 0"),
    ],
)
def test_ID_RANGE_what_cannot_be_judged_is_refused(judge: Judge, why: str) -> None:
    engine = Engine()
    engine.step(entry(0, 0, 3, NEW | DRAFT), entry(1, 0, 3, NEW), margins=True)
    with pytest.raises(ProtocolError, match=why):
        engine.session.judge(judge)
    assert engine.session.judge(Judge(1, N, [0], ints(*[0] * N))).num_drafts == N


def test_what_the_drafter_could_not_draft_is_not_judged() -> None:
    engine = Engine()
    engine.step(entry(0, 0, 1, DRAFT | NEW), entry(1, 0, 1, DRAFT | NEW))
    engine.drafter.not_finite = {engine.session._held[0].drafter_slot}
    assert engine.statuses(entry(0, 1, 1), entry(1, 1, 1), margins=True) == [RequestStatus.INTERNAL, OK]
    with pytest.raises(ProtocolError, match="entry 0, which has no drafts"):
        engine.session.judge(Judge(2, N, [0], ints(*[1] * N)))
    assert engine.session.judge(Judge(2, N, [1], ints(*[1] * N))).num_drafts == N


def test_a_session_that_ended_judges_nothing_because_its_slots_may_be_anothers() -> None:
    engine = Engine()
    engine.step(entry(0, 0, 3, NEW | DRAFT), margins=True)
    engine.session.close()
    with pytest.raises(ProtocolError, match="there is none"):
        engine.session.judge(Judge(1, N, [0], ints(*[1] * N)))


def test_a_slot_that_was_freed_since_is_not_judged_any_more_because_it_may_be_anothers() -> None:
    engine = Engine()
    engine.step(entry(0, 0, 3, NEW), entry(1, 0, 3, NEW | DRAFT), entry(2, 0, 3, NEW | DRAFT), margins=True)
    engine.session.free([Freed(0, 1), Freed(1, 1), Freed(3, 1)])
    with pytest.raises(ProtocolError, match="entry 1, which has no drafts"):
        engine.session.judge(Judge(1, N, [1], ints(*[1] * N)))
    assert engine.session.judge(Judge(1, N, [2], ints(*[1] * N))).num_drafts == N


def test_a_step_without_margins_leaves_nothing_to_judge_by() -> None:
    engine = Engine()
    engine.step(entry(0, 0, 3, NEW | DRAFT), margins=True)
    engine.step(entry(0, 3, 1, DRAFT))
    with pytest.raises(ProtocolError, match="there is none"):
        engine.session.judge(Judge(1, N, [0], ints(*[1] * N)))
