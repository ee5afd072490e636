"""The mock worker: the real engine client and round against every fault, over TCP."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from dataclasses import dataclass, field, replace

import pytest
from tests.fakes.engine_world import CONTEXT, INFO, SLOTS, Row, World
from tests.fakes.shape import shape_for

from farspark.clock import Deadline
from farspark.engine.client import Client, ClientState
from farspark.engine.result import RoundOutcome
from farspark.engine.round import SILENT_STEPS
from farspark.errors import ConfigError, Refused, TransportError
from farspark.mock.drafter import mock_info
from farspark.mock.faults import KINDS, Fault
from farspark.mock.relay import MockWorker
from farspark.probe.peer import Peer
from farspark.stats import Stats
from farspark.transport import connect, parse_endpoint
from farspark.wire.layout import SUPPORT_IDS, Operation
from farspark.wire.messages import Hello

ANY_PORT = parse_endpoint("tcp://127.0.0.1:0")
SHAPE = mock_info(
    num_drafts=INFO.num_drafts,
    vocab_size=INFO.vocab_size,
    hidden_size=INFO.hidden_size,
    taps=INFO.taps,
    slots=SLOTS,
    context=CONTEXT,
    identity=INFO.identity,
)


def hello_of(identity: bytes) -> Hello:
    shape = shape_for(INFO, slots=SLOTS, context=CONTEXT, ring=CONTEXT)
    return shape.hello(engine="engine", identity=identity, markov_identity=identity, want_margin=False)


def mock(fault: str | None = None, routing_margin: float | None = None, **options: object) -> MockWorker:
    parsed = None if fault is None else Fault.parse(fault, INFO.vocab_size)
    info = replace(SHAPE, has_router=routing_margin is not None)
    return MockWorker(info, ANY_PORT, fault=parsed, routing_margin=routing_margin or 0.0, **options)  # type: ignore[arg-type]


@dataclass
class MockWorld(World):
    """The small engine, with a mock worker behind TCP in place of the real one."""

    timeout_s: float = 0.5
    fault: str | None = None
    every: int = 1
    operation: Operation = Operation.STEP
    routing_margin: float | None = None
    worker: MockWorker = field(init=False)

    def start_worker(self) -> None:
        self.worker = mock(self.fault, every=self.every, operation=self.operation, routing_margin=self.routing_margin)
        self.endpoint = self.worker.endpoint

    def stop_worker(self) -> None:
        self.worker.stop()

    def __enter__(self) -> MockWorld:
        super().__enter__()
        return self

    def timed(self, n_rows: int = 1) -> tuple[RoundOutcome, float]:
        """One round of one request: how it went and how many seconds it took."""
        request = self.by_slot.get(1) or self.admit(1)
        began_s = time.monotonic()
        outcome = self.step(Row(request, n_rows, sampled=True))
        return outcome, time.monotonic() - began_s


def test_without_a_fault_every_round_has_the_anchors_successors() -> None:
    with MockWorld(want_margin=True, timeout_s=5) as world:
        for _ in range(3):
            assert world.timed()[0] is RoundOutcome.OK
            token = world.by_slot[1].token
            assert world.result.tokens[0].tolist() == [(token + 1 + depth) % INFO.vocab_size for depth in range(5)]
            assert world.result.confidences[0].tolist() == [0.5] * 5
        assert world.worker.faults == 0


def test_with_a_router_it_judges_other_drafts_and_says_how_close_every_choice_was() -> None:
    with MockWorld(want_margin=True, timeout_s=5, routing_margin=0.25) as world:
        world.timed()
        assert world.round.last_drafts.has_router is True
        chain = world.result.tokens[:1].copy()
        own = world.round.judge([0], chain)
        assert own is not None
        assert (own.best.tolist(), own.gaps.tolist()) == (chain.tolist(), [[0.0] * 5])
        chain[0, 1] = 7
        other = world.round.judge([0], chain)
        assert other is not None
        assert other.gaps.tolist() == [[0.0, 1.0, 1.0, 0.0, 0.0]], (
            "the token behind the changed one is not its successor"
        )
        assert other.best[0, 2] == 8
        assert other.confidences.tolist() == [[0.5] * 5]
        assert other.routing is not None
        assert other.routing.tolist() == [0.25]


def test_without_a_router_it_has_no_opinion_of_other_drafts() -> None:
    with MockWorld(want_margin=True, timeout_s=5) as world:
        world.timed()
        assert world.round.last_drafts.has_router is False
        assert world.round.judge([0], world.result.tokens[:1]) is None
        assert world.stats.count("judge_failures") == 1
        assert world.round.last_bad_reply is None, "it says so; it does not answer nonsense"


# Fault, and what the engine keeps as the reason why it does not take the judgement.
JUDGE_FAILURES = [
    ("routing", "judgement with a routing margin of nan, expected a finite number, 0 or more"),
    ("routing:inf", "judgement with a routing margin of inf, expected a finite number, 0 or more"),
    ("routing:-0.5", "judgement with a routing margin of -0.5, expected a finite number, 0 or more"),
    ("no-routing", "judgement without routing margins, from a drafter with a router"),
]


@pytest.mark.parametrize(("fault", "reason"), JUDGE_FAILURES, ids=[fault for fault, _ in JUDGE_FAILURES])
def test_ID_RANGE_a_judgement_with_a_fault_in_its_routing_margins_is_not_taken_and_costs_no_round(
    fault: str, reason: str
) -> None:
    with MockWorld(
        want_margin=True, timeout_s=5, routing_margin=0.25, fault=fault, operation=Operation.JUDGE, every=2
    ) as world:
        for judges in (True, False, True):
            assert world.timed()[0] is RoundOutcome.OK
            judged = world.round.judge([0], world.result.tokens[:1])
            assert (judged is not None) == judges
        assert world.round.last_bad_reply == reason
        assert (world.stats.count("judge_failures"), world.worker.faults) == (1, 1)
        assert world.stats.count("hellos") == 1


# Fault, the counter that must be 1, and what the engine keeps as the reason.
FAILURES = [
    ("delay:2000", "fallback_timeout", ""),
    ("silence", "fallback_timeout", ""),
    ("late", "fallback_timeout", ""),
    ("half", "fallback_timeout", ""),
    ("close:0", "fallback_transport_error", ""),
    ("close:3", "fallback_transport_error", ""),
    ("close:40", "fallback_transport_error", ""),
    ("garbage", "fallback_bad_reply", "announced, at most"),
    ("magic", "fallback_bad_reply", "magic b'HTTP'"),
    ("lengths", "fallback_bad_reply", "payload bytes, the frame has"),
    ("frame-status:1", "fallback_frame_no_session", ""),
    ("frame-status:3", "fallback_frame_identity", ""),
    ("frame-status:7", "fallback_frame_busy", ""),
    ("frame-status:8", "fallback_frame_internal", ""),
    ("frame-status:9", "fallback_frame_bad_frame", ""),
    ("frame-status:99", "fallback_frame_unknown_99", ""),
    ("version", "fallback_frame_version", ""),
    ("session", "fallback_bad_reply", "reply of session"),
    ("sequence", "fallback_bad_reply", "expected the reply to STEP"),
    ("operation", "fallback_bad_reply", "expected the reply to STEP"),
    ("step-id", "fallback_bad_reply", "reply to step 0, in flight is 1"),
    ("counts", "fallback_bad_reply", "2 entries by 5 drafts, asked were 1 by 5"),
    ("drafts", "fallback_bad_reply", "1 entries by 4 drafts, asked were 1 by 5"),
    ("slot", "fallback_bad_reply", "answer for slot 0 generation"),
    ("generation", "fallback_bad_reply", "answer for slot 1 generation"),
    ("window", "fallback_bad_reply", "window of 4294967295 rows, the context is 10"),
    ("window:11", "fallback_bad_reply", "window of 11 rows, the context is 10"),
    ("request-status:99", "fallback_bad_reply", "request status 99"),
    ("request-status:2", "fallback_bad_reply", "status NOT_NEEDED though a draft was asked for"),
    ("request-status:8", "fallback_bad_reply", "drafts past the positions asked for"),
    ("id:V", "fallback_bad_reply", "draft id 1000 at entry 0, position 0, the vocabulary has 1000"),
    ("id:V+1", "fallback_bad_reply", "draft id 1001"),
    ("id:2147483647", "fallback_bad_reply", "draft id 2147483647"),
    ("id:-7", "fallback_bad_reply", "draft id -7"),
    ("confidence", "fallback_bad_reply", "confidence nan"),
    ("confidence:1.5", "fallback_bad_reply", "confidence 1.5"),
    ("confidence:-inf", "fallback_bad_reply", "confidence -inf"),
]


@pytest.mark.parametrize(("fault", "counter", "reason"), FAILURES, ids=[fault for fault, _, _ in FAILURES])
def test_FRAMING_ID_RANGE_HALF_OPEN_every_fault_fails_its_round_in_time_and_is_counted(
    fault: str, counter: str, reason: str
) -> None:
    with MockWorld(fault=fault) as world:
        outcome, took_s = world.timed()
        assert outcome is RoundOutcome.FAILED
        assert world.stats.count(counter) == 1, world.stats.counters()
        assert world.stats.count("rounds_failed") == 1
        # The deadline, and what a busy machine takes to notice that it has passed.
        assert took_s < world.timeout_s + 1
        assert (world.round.last_bad_reply or "").find(reason) >= 0, world.round.last_bad_reply
        assert bool(world.round.last_bad_reply) == (counter == "fallback_bad_reply")
        assert world.result.tokens.max() == world.result.confidences.max() == 0
        assert world.worker.faults == 1


# Of one of two requests: its drafts are dropped, the other one's stand.
REFUSALS = [
    ("q", "position 0: a probability is not finite or below 0"),
    ("q:-0.5", "position 0: a probability is not finite or below 0"),
    ("q:inf", "position 0: a probability is not finite or below 0"),
    ("q:1.01", "position 0: q does not sum to 1"),
    ("q:0", "position 0: q does not sum to 1"),
    ("support:V", "position 0: an id of its support is outside 0 .. 999"),
    ("support:-1", "position 0: an id of its support is outside 0 .. 999"),
    ("unsampled", "temperature 0.7, but the drafts are greedy"),
    ("undrawn", "position 0: the draft is not in its support"),
]


def two_requests(world: MockWorld) -> tuple[Row, Row]:
    greedy, drawn = world.by_slot.get(0) or world.admit(0), world.by_slot.get(1) or world.admit(1)
    return Row(greedy, 1, sampled=True), Row(drawn, 1, sampled=True, temperature=0.7, seed=-3)


@pytest.mark.parametrize(("fault", "reason"), REFUSALS, ids=[fault for fault, _ in REFUSALS])
def test_a_request_whose_probabilities_cannot_be_has_its_drafts_dropped_alone(fault: str, reason: str) -> None:
    with MockWorld(fault=fault, support=SUPPORT_IDS, timeout_s=5) as world:
        for count in (1, 2):
            assert world.step(*two_requests(world)) is RoundOutcome.SOME_FAILED
            assert world.result.ok[:2].tolist() == [1, 0]
            assert world.result.sampled.max() == world.result.q.max() == world.result.tokens[1].max() == 0
            # Nothing of it is verified, and neither is anything of it drafted anew.
            assert world.result.depths[:2].tolist() == [5, 0]
            assert world.stats.count("sampled_refused") == world.stats.count("undrafted_dropped") == count
            assert world.round.last_bad_reply == f"slot 1: {reason}"
        assert world.stats.count("sampled_requests") == world.stats.count("fallback_bad_reply") == 0
        # The worker holds what it should all the same.
        assert world.stats.count("resync_rounds") == 0


def test_an_id_twice_in_a_support_is_refused() -> None:
    with MockWorld(support=SUPPORT_IDS, timeout_s=5) as world:
        rows = two_requests(world)
        assert world.step(*rows) is RoundOutcome.OK
        first = int(world.result.support_ids[1, 0, 0])
    with MockWorld(fault=f"support:{first}", support=SUPPORT_IDS, timeout_s=5) as world:
        assert world.step(*two_requests(world)) is RoundOutcome.SOME_FAILED
        assert world.round.last_bad_reply == "slot 1: position 0: an id is twice in its support"


def test_a_sampled_answer_without_its_probabilities_fails_the_round() -> None:
    with MockWorld(fault="no-probabilities", support=SUPPORT_IDS, timeout_s=5) as world:
        assert world.step(*two_requests(world)) is RoundOutcome.FAILED
        assert world.stats.count("fallback_bad_reply") == 1
        assert world.round.last_bad_reply == "probabilities missing"


def test_sampled_drafts_come_with_what_they_were_drawn_from() -> None:
    with MockWorld(support=SUPPORT_IDS, timeout_s=5) as world:
        for _ in range(2):
            assert world.step(*two_requests(world)) is RoundOutcome.OK
            assert world.result.ok[:2].tolist() == [1, 1]
            assert world.result.sampled[:2].tolist() == [0, 1]
            assert world.result.support_ids[1, :, 0].tolist() == world.result.tokens[1].tolist()
            assert world.result.q[1].sum(axis=-1).tolist() == [1.0] * 5
            assert not world.result.q[0].any()
        assert world.stats.count("sampled_requests") == world.stats.count("rounds_sampled") == 2


def test_a_round_of_greedy_requests_is_as_it_is_without_sampling() -> None:
    sent = []
    for support in (0, SUPPORT_IDS):
        with MockWorld(support=support, timeout_s=5) as world:
            for _ in range(3):
                assert world.timed()[0] is RoundOutcome.OK
            sent.append((world.stats.count("bytes_sent"), world.stats.count("bytes_received")))
            assert world.stats.count("rounds_sampled") == 0
    assert sent[0] == sent[1]


def test_every_kind_of_fault_is_tried() -> None:
    tried = {fault.partition(":")[0] for fault, *_ in (*FAILURES, *REFUSALS)}
    tried |= {fault.partition(":")[0] for fault, _ in JUDGE_FAILURES}
    assert tried | {"no-probabilities"} == {kind.name for kind in KINDS}


# `half` takes more than a round, see below; statuses 3 and `version` are final by design.
RECOVERS = ["silence", "close:40", "garbage", "magic", "frame-status:1", "frame-status:7", "session", "counts", "id:V"]


@pytest.mark.parametrize("fault", RECOVERS)
def test_FAIL_LIFETIME_rounds_succeed_again_after_one_fault(fault: str) -> None:
    # A machine that is busy must not turn a good round into a late one; only silence has to wait for the deadline.
    with MockWorld(fault=fault, every=2, timeout_s=0.5 if fault == "silence" else 5) as world:
        assert world.timed()[0] is RoundOutcome.OK
        assert world.timed()[0] is RoundOutcome.FAILED
        world.wait_ready()
        assert world.timed()[0] is RoundOutcome.OK, world.stats.counters()
        assert world.worker.faults == 1


def test_HALF_OPEN_half_a_frame_and_then_silence_costs_the_connection_and_drafting_resumes() -> None:
    with MockWorld(fault="half", every=2) as world:
        assert world.timed()[0] is RoundOutcome.OK
        outcomes = [world.timed()[0]]
        while outcomes[-1] is not RoundOutcome.OK and len(outcomes) <= 2 * SILENT_STEPS:
            world.wait_ready()
            outcomes.append(world.timed()[0])
        assert outcomes[-1] is RoundOutcome.OK, world.stats.counters()
        assert world.stats.count("hellos") == 2


def test_LATE_REPLY_the_answer_comes_after_the_next_request_and_is_dropped() -> None:
    with MockWorld(fault="late", every=2) as world:
        outcomes = [world.timed()[0] for _ in range(3)]
        assert outcomes == [RoundOutcome.OK, RoundOutcome.FAILED, RoundOutcome.OK]
        assert world.stats.count("late_replies") == 1
        assert world.stats.count("hellos") == 1
    with MockWorld(fault="late") as world:
        assert [world.timed()[0] for _ in range(3)] == [RoundOutcome.FAILED] * 3
        assert world.stats.count("late_replies") == 2


def test_a_delay_below_the_deadline_costs_only_time() -> None:
    with MockWorld(fault="delay:60", timeout_s=5) as world:
        outcome, took_s = world.timed()
        assert outcome is RoundOutcome.OK
        assert took_s >= 0.06


@pytest.mark.parametrize(("fault", "state"), [("frame-status:3", "disabled"), ("version", "disabled")])
def test_a_final_status_turns_the_remote_off(fault: str, state: str) -> None:
    with MockWorld(fault=fault) as world:
        assert world.timed()[0] is RoundOutcome.FAILED
        assert world.client.state is ClientState(state)
        assert world.timed()[0] is RoundOutcome.FAILED
        assert world.stats.count("fallback_disabled") == 1


@pytest.mark.parametrize("fault", ["frame-status:3", "frame-status:5", "version"])
def test_a_final_status_turns_one_of_two_workers_off_and_the_next_round_but_one_is_the_others(fault: str) -> None:
    with mock() as other, MockWorld(fault=fault, others=(other.endpoint,), timeout_s=5) as world:
        assert world.timed()[0] is RoundOutcome.FAILED
        world.wait_ready()
        for _ in range(20):
            assert world.timed()[0] is RoundOutcome.OK
        assert str(world.client.serving) == str(other.endpoint)
        assert world.worker.faults == 1
        assert world.client.endpoints()[str(world.endpoint)]["state"] == "not used"
        counters = world.stats.counters()
        assert (counters["hellos"], counters["rounds_ok"], counters["rounds_failed"]) == (2, 20, 1)


def test_only_the_chosen_operation_fails() -> None:
    with (
        mock("frame-status:7", operation=Operation.PING, every=2) as worker,
        Peer(worker.endpoint, 5) as peer,
    ):
        peer.ping(b"one")
        assert peer.stats()["worker"] == "farspark mock"
        with pytest.raises(Refused, match="answered PING with BUSY: the mock worker was told to refuse"):
            peer.ping(b"two")
        peer.ping(b"three")


def test_a_hello_that_is_never_answered_leaves_the_engine_without_a_worker() -> None:
    stats = Stats()
    with mock("silence", operation=Operation.HELLO) as worker:
        client = Client(
            hello_of(INFO.identity),
            [worker.endpoint],
            connect_timeout_s=0.1,
            backoff_s=0.01,
            backoff_max_s=0.02,
            stats=stats,
        )
        client.start()
        assert not client.wait_ready(Deadline.after(0.5))
        assert client.connection() is None
        client.close()
    assert stats.count("connect_failures") >= 1


def test_any_identity_is_the_one_that_the_engine_demands() -> None:
    for demanded in (b"\1" * 32, b"\2" * 32):
        hello = hello_of(demanded)
        with mock(any_identity=True) as worker, Peer(worker.endpoint, 5) as peer:
            welcome = peer.hello(hello)
            assert (welcome.identity, welcome.markov_identity) == (demanded, demanded)
            assert welcome.kind == "MockDrafter"
        with (
            mock() as worker,
            Peer(worker.endpoint, 5) as peer,
            pytest.raises(Refused, match=f"drafter identity: engine {demanded.hex()}, worker {INFO.identity.hex()}"),
        ):
            peer.hello(hello)


TOKEN = b"the token of both sides"


@pytest.mark.parametrize("any_identity", [False, True])
def test_with_a_token_the_mock_demands_and_gives_proofs(any_identity: bool) -> None:
    demanded = b"\5" * 32 if any_identity else INFO.identity
    with mock(any_identity=any_identity, token=TOKEN) as worker:
        with Peer(worker.endpoint, 5, token=TOKEN) as peer:
            peer.ping(b"x")
            hello = hello_of(demanded)
            hello = hello if any_identity else replace(hello, markov_identity=bytes(32))
            assert peer.hello(hello).identity == demanded
        with pytest.raises(Refused, match="answered PROVE with AUTH: the proof is wrong"):
            Peer(worker.endpoint, 5, token=TOKEN + b"x")
        with Peer(worker.endpoint, 5) as peer, pytest.raises(Refused, match="answered PING with AUTH"):
            peer.ping(b"x")
        with Peer(worker.endpoint, 5) as peer, pytest.raises(Refused, match="set --token-file to a file"):
            peer.hello(hello_of(demanded))
    with mock(any_identity=any_identity) as worker, pytest.raises(Refused, match="the worker has no token"):
        Peer(worker.endpoint, 5, token=TOKEN)


def test_a_large_frame_before_HELLO_is_not_taken_and_after_it_is() -> None:
    with mock(any_identity=True) as worker:
        with Peer(worker.endpoint, 5) as peer, pytest.raises(TransportError):
            peer.ping(bytes(70_000))
        with Peer(worker.endpoint, 5) as peer:
            peer.hello(hello_of(b"\1" * 32))
            with pytest.raises(Refused, match="PING of 70000 bytes, at most 4096"):
                peer.ping(bytes(70_000))


def test_a_peer_that_breaks_framing_is_closed_and_others_are_served() -> None:
    with mock() as worker:
        host, port = worker.endpoint.host, worker.endpoint.port
        for junk in (struct.pack("<I", 0xFFFFFFFF), b"\x08\0\0\0notafrme", b"\x08\0\0\0half"):
            with socket.create_connection((host, port), timeout=5) as sock:
                sock.sendall(junk)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(65536):
                    pass
        with Peer(worker.endpoint, 5) as peer:
            peer.ping(b"x")


def test_stopping_ends_every_connection_in_the_middle_of_a_fault() -> None:
    worker = mock("delay:60000", operation=Operation.PING)
    with (
        contextlib.closing(connect(worker.endpoint, Deadline.after(5))) as channel,
        Peer(worker.endpoint, 0.05) as peer,
    ):
        with pytest.raises(TimeoutError):
            peer.ping(b"x")
        began = time.monotonic()
        worker.stop()
        worker.stop()
        assert time.monotonic() - began < 4
        with pytest.raises(TransportError, match="closed"):
            channel.recv(Deadline.after(5))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nonsense", "unknown; expected one of delay, silence, late"),
        ("delay", "expected delay:MS"),
        ("delay:soon", "expected delay:MS of 0 to 3600000"),
        ("silence:5", "silence takes no argument"),
        ("id:2147483648", "expected id:ID of -2147483648 to 2147483647"),
        ("id:W", "expected id:ID"),
        ("confidence:1e99", "expected a number, nan or inf"),
        ("confidence:x", "expected a number, nan or inf"),
        ("frame-status:65536", "expected frame-status:STATUS of 0 to 65535"),
    ],
)
def test_a_fault_that_cannot_be_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Fault.parse(text, 1000)
