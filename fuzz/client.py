"""Anything that a worker may send an engine, at any moment: a whole result of legal values each round, within its deadline, and a
client whose state is sound.

The worker answers honestly unless the input says otherwise: it changes bytes, cuts, repeats, keeps silent, hangs up.
"""

from __future__ import annotations

import math
import struct
import sys
from typing import Final

import numpy as np

from farspark.clock import Deadline
from farspark.engine.breaker import Breaker
from farspark.engine.client import Client, ClientState
from farspark.engine.result import PackedResult, ResultLayout, RoundOutcome
from farspark.engine.round import Phase, RemoteRound, RoundInput, RoundRequest
from farspark.engine.shape import ModelShape
from farspark.errors import TransportError
from farspark.stats import Stats
from farspark.transport import Channel, Endpoint
from farspark.wire import auth, codec, layout
from farspark.wire.layout import EntryFlag, FrameStatus, HeaderFlag, HelloFlag, Operation, RequestStatus
from farspark.wire.messages import EntryReply, Header, Judgement, Proof, StepReply, Welcome
from fuzz.driver import reproduce
from fuzz.faults_of_ours import FaultsOfOurs
from fuzz.feed import Feed
from fuzz.sockets import Wire, framed, frames_of

TOKEN: Final = b"a token that both of them hold"
NONCE: Final = bytes(range(32))
IDENTITY: Final = bytes(range(32))
SHAPE: Final = ModelShape(
    num_drafts=3, vocab_size=100, hidden_size=1, taps=2, slots=4, context=8, ring=6, max_position=1 << 20
)
TIMEOUT_S: Final = 1.0
# What one read that finds nothing takes, so that a silent worker is late after a few of them.
TICK_S: Final = 0.3
MAX_OPERATIONS: Final = 24
# Ids that are none, and floats that are no confidence.
ODD_VALUES: Final = tuple(
    struct.pack(form, value)
    for form, value in (
        ("<i", SHAPE.vocab_size),
        ("<i", SHAPE.vocab_size - 1),
        ("<i", -1),
        ("<i", 2**31 - 1),
        ("<f", math.nan),
        ("<f", math.inf),
        ("<f", -0.5),
        ("<f", 1.5),
        ("<f", 1.0),
    )
)
MAX_CALLS_PER_ROUND: Final = 2_000
# The longest cool-down of the settings here, with some to spare.
MAX_ROUNDS_TO_RECOVER: Final = 200


class Worker:
    """One connection, from the worker's side."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.wire = Wire(self._starved, self._room)
        self.answered = 0  # bytes of the requests that are answered
        self.reply = b""  # the newest, as it was sent
        self.late: list[bytes] = []  # to be sent before the next one
        self.nonces = (b"", b"")

    def _room(self) -> int | None:
        feed = self.program.feed
        if not self.program.is_mean or feed.byte() < 224:
            return None
        self.program.now_s += TICK_S
        return feed.byte()

    def _starved(self) -> None:
        self.program.now_s += TICK_S / 4
        requests = frames_of(self.wire.outgoing[self.answered :])
        self.answered += sum(4 + len(request) for request in requests)
        if not requests:
            self.program.now_s += TICK_S
        for request in requests:
            header, payload = codec.decode_frame(memoryview(request))
            frame = self._honest(header, payload)
            if frame is not None:
                self._send(frame)

    def _send(self, frame: bytes) -> None:
        """The frame, or what the input makes of it."""
        feed, wire = self.program.feed, self.wire
        how = feed.byte() if self.program.is_mean else 0
        stream = framed(frame)
        match how & 15:
            case 1:
                wire.incoming += framed(feed.take(feed.byte()))
                return
            case 2:
                wire.incoming += feed.take(feed.byte())
                return
            case 3 | 4 | 5:
                changed = bytearray(stream)
                for _ in range(how >> 4 & 3):
                    at = feed.number(2) % len(changed)
                    value = feed.take(1 + (how >> 6))
                    changed[at : at + len(value)] = value
                stream = bytes(changed)
            case 6:
                stream = stream[: feed.number(2) % (len(stream) + 1)]
            case 7:
                stream = framed(frame + feed.take(feed.byte()))
            case 8:
                self.late.append(stream)
                return
            case 9:
                stream = self.reply + stream
            case 10:
                wire.incoming += stream
                wire.is_ended = True
                return
            case 11:
                wire.is_ended = True
                return
            case 12:
                wire.chunk = feed.byte()
            case 13:
                stream += stream
            case 14:
                header, payload = codec.decode_frame(memoryview(frame))
                stream = framed(codec.encode_frame(header._replace(status=feed.byte() % 12), bytes(payload)))
            case 15:
                # The arrays stand at the end of what has any.
                at = max(4, len(stream) - 4 * (1 + feed.byte() % 12))
                stream = stream[:at] + feed.pick(ODD_VALUES) + stream[at + 4 :]
        wire.incoming += b"".join([*self.late, stream])
        self.late.clear()
        self.reply = stream

    def _honest(self, header: Header, payload: memoryview) -> bytes | None:
        match header.operation:
            case Operation.HELLO:
                answer = codec.encode_welcome(self._welcome())
            case Operation.STEP:
                answer = self._step(payload)
            case Operation.JUDGE:
                judge = codec.decode_judge(payload)
                zeros = memoryview(bytes(4 * len(judge.tokens)))
                floats = zeros.cast("f")
                routing = memoryview(bytes(4 * len(judge.places))).cast("f") if self.program.has_router else None
                answer = codec.encode_judgement(
                    Judgement(judge.step_id, judge.num_drafts, zeros.cast("i"), floats, floats, floats, routing)
                )
            case Operation.CHALLENGE:
                self.nonces = codec.decode_challenge(payload), NONCE
                answer = codec.encode_challenge_reply(NONCE, demands_proof=True)
            case Operation.PROVE:
                answer = codec.encode_proof(self._proof())
            case Operation.BYE:
                return None
            case unknown:
                raise AssertionError(f"the client sent operation {unknown}")
        reply = Header(header.operation, header.session, header.sequence, 0, int(HeaderFlag.REPLY), FrameStatus.OK)
        return codec.encode_frame(reply, answer)

    def _welcome(self) -> Welcome:
        return Welcome(
            worker="worker",
            kind="kind",
            identity=IDENTITY,
            markov_identity=bytes(32),
            vocab_size=SHAPE.vocab_size,
            context=SHAPE.context,
            window=0,
            slots=SHAPE.slots,
            max_rows=64,
            num_drafts=SHAPE.num_drafts,
            flags=HelloFlag.ROUTING | HelloFlag.ROUTER if self.program.has_router else HelloFlag(0),
        )

    def _proof(self) -> Proof:
        engine_nonce, worker_nonce = self.nonces
        proof = auth.worker_proof(
            TOKEN,
            engine_nonce=engine_nonce or NONCE,
            worker_nonce=worker_nonce or NONCE,
            identity=IDENTITY,
            markov_identity=bytes(32),
        )
        return Proof(identity=IDENTITY, markov_identity=bytes(32), proof=proof)

    def _step(self, payload: memoryview) -> bytes:
        step = codec.decode_step(payload, SHAPE.row_bytes)
        feed, n = self.program.feed, SHAPE.num_drafts
        statuses = []
        tokens: list[int] = []
        for entry in step.entries:
            wanted = entry.flags & int(EntryFlag.NEED_DRAFT)
            status = RequestStatus.OK if wanted else RequestStatus.NOT_NEEDED
            if self.program.is_mean and (chosen := feed.byte()) >= 128:
                status = RequestStatus(chosen % len(RequestStatus))
            drafted = (entry.n_out or n) if status.has_drafts else 0
            tokens += [entry.anchor_token % 100] * drafted + [0] * (n - drafted)
            rows = min(entry.n_rows, SHAPE.context)
            statuses.append(EntryReply(entry.slot, entry.generation, rows, status))
        confidences = memoryview(struct.pack(f"<{len(tokens)}f", *[min(token, 1) / 2 for token in tokens])).cast("f")
        ids = memoryview(struct.pack(f"<{len(tokens)}i", *tokens)).cast("i")
        return codec.encode_step_reply(
            StepReply(
                step.step_id, n, 1, statuses, ids, confidences, confidences if step.flags & 1 else None, step.flags
            )
        )


class Ring:
    """Rank 0's rows, all zero."""

    def window(self, slot: int, first_pos: int, n_rows: int) -> memoryview:
        assert 0 <= slot < SHAPE.slots
        assert 0 < n_rows <= SHAPE.ring
        return memoryview(bytes(n_rows * SHAPE.row_bytes))


class Program:
    """One input."""

    def __init__(self, data: bytes) -> None:
        self.feed = Feed(data)
        settings = self.feed.byte()
        self.has_router = bool(settings & 16)
        self.now_s = 0.0
        self.is_mean = True
        self.worker: Worker | None = None
        clock = self.clock
        want_margin = bool(settings & 1)
        hello = SHAPE.hello(engine="fuzz", identity=IDENTITY, markov_identity=bytes(32), want_margin=want_margin)
        self.stats = Stats()
        self.client = Client(
            hello,
            [Endpoint("tcp", "fuzz", 1)],
            connect_timeout_s=TIMEOUT_S,
            backoff_s=1,
            backoff_max_s=1,
            stats=self.stats,
            token=TOKEN if settings & 2 else None,
            connect=self._connect,
            clock=clock,
        )
        self.round = RemoteRound(
            client=self.client,
            shape=SHAPE,
            ring=Ring(),
            breaker=Breaker(trip=settings >> 2 & 3, cooldown=3),
            stats=self.stats,
            timeout_s=TIMEOUT_S,
            want_margin=want_margin,
            clock=clock,
        )
        self.result = PackedResult.empty(ResultLayout(SHAPE.slots, SHAPE.num_drafts))
        self.positions = [0] * SHAPE.slots
        self.owners = [0] * SHAPE.slots
        self.newest: list[int] = []  # batch rows of the newest round

    def clock(self) -> float:
        return self.now_s

    def _connect(self, endpoint: Endpoint, deadline: Deadline) -> Channel:
        how = self.feed.byte()
        if how >= 248:
            raise TransportError("connection refused")
        if how >= 240:
            self.now_s = deadline.at_s
            raise TimeoutError("no answer in time")
        self.worker = Worker(self)
        return self.worker.wire.channel(layout.MAX_REPLY_BYTES)

    def run(self) -> None:
        self._reconnect()
        for _ in range(MAX_OPERATIONS):
            if self.feed.is_empty:
                break
            self._operation()
        self._recover()
        self.client.close()
        assert self.client.state is ClientState.CLOSED
        FAULTS.check()

    def _operation(self) -> None:
        what = self.feed.byte()
        if what < 192:
            self._run_round(what)
        elif what < 224:
            self._judge()
        else:
            self._reconnect()

    def _reconnect(self) -> None:
        """What the connector's thread does where there is no connection."""
        if self.client.state is not ClientState.CONNECTING:
            return
        began_s = self.now_s
        self.client._try_endpoints()
        # CHALLENGE, PROVE and HELLO share one deadline. Each may be sent and answered behind it, as long as nobody has to wait.
        assert self.now_s - began_s <= TIMEOUT_S + 8 * TICK_S
        self._check_client()

    def _run_round(self, what: int) -> None:
        slots = [slot for slot in range(SHAPE.slots) if what >> slot & 1]
        requests, meta = [], []
        n_rows = 0
        for slot in slots:
            shape = self.feed.byte()
            if shape >= 224:
                self.owners[slot] += 1
                self.positions[slot] = shape & 15
            valid = shape & 15
            meta.append([self.positions[slot], valid, shape, shape >> 4 & 1])
            self.positions[slot] += valid
            n_rows += min(valid, SHAPE.context)
            requests.append(RoundRequest(slot, self.owners[slot], shape >> 5 & 3))
        step = RoundInput(
            requests,
            np.array(meta, dtype=np.int32).reshape(-1, 4),
            memoryview(bytes(n_rows * SHAPE.row_bytes)),
            Phase.DECODE if what & 16 else Phase.PREFILL,
        )
        began_s, calls = self.now_s, self._calls()
        outcome = self.round.run(step, self.result)
        assert self.now_s - began_s <= TIMEOUT_S + 4 * TICK_S, "longer than its deadline"
        assert self._calls() - calls < MAX_CALLS_PER_ROUND
        self.newest = list(range(len(slots)))
        self._check_result(outcome, len(slots), [bool(row[3]) for row in meta])
        self._check_client()

    def _calls(self) -> int:
        return 0 if self.worker is None else self.worker.wire.calls

    def _check_result(self, outcome: RoundOutcome, n: int, wanted: list[bool]) -> None:
        result = self.result
        assert result.outcome is outcome
        assert result.num_requests == n
        assert ((result.ok == 0) | (result.ok == 1)).all()
        assert ((result.tokens >= 0) & (result.tokens < SHAPE.vocab_size)).all()
        assert ((result.confidences >= 0) & (result.confidences <= 1)).all()
        assert ((result.depths >= 0) & (result.depths <= SHAPE.num_drafts)).all()
        failed = result.ok == 0
        assert not result.tokens[failed].any()
        assert not result.confidences[failed].any()
        got = [bool(one) for one in result.ok[:n]]
        assert not any(is_ok and not is_wanted for is_ok, is_wanted in zip(got, wanted, strict=True))
        expected = RoundOutcome.OK if got == wanted else RoundOutcome.SOME_FAILED if any(got) else RoundOutcome.FAILED
        assert outcome is (expected if any(wanted) else RoundOutcome.NOTHING)

    def _check_client(self) -> None:
        connection = self.client.connection()
        assert (connection is not None) == (self.client.state is ClientState.READY)
        if connection is not None:
            assert not connection.channel.is_closed
            assert self.worker is not None
            assert len(connection.channel._memory) <= layout.MAX_REPLY_BYTES + 256 * 1024  # type: ignore[attr-defined]
        if self.client.state is ClientState.DISABLED:
            assert self.client.last_failure

    def _judge(self) -> None:
        if not self.newest:
            return
        rows = self.newest[: 1 + self.feed.byte() % len(self.newest)]
        chains = np.zeros((len(rows), SHAPE.num_drafts), dtype=np.int32)
        began_s = self.now_s
        judged = self.round.judge(rows, chains)
        if judged is not None and judged.routing is not None:
            assert (np.isfinite(judged.routing) & (judged.routing >= 0)).all()
        assert self.now_s - began_s <= TIMEOUT_S + 4 * TICK_S
        self._check_client()

    def _recover(self) -> None:
        """Whatever happened: a worker that is honest again gives drafts again, after the cool-down at most."""
        self.is_mean = False
        if self.client.state is ClientState.DISABLED:
            return
        connection = self.client.connection()
        if connection is not None:
            self.client.drop(connection, "a new worker")
        self.feed = Feed(b"")
        for _ in range(MAX_ROUNDS_TO_RECOVER):
            self._reconnect()
            self.owners[0] += 1
            step = RoundInput(
                [RoundRequest(0, self.owners[0], 0)],
                np.array([[0, 2, 7, 1]], dtype=np.int32),
                memoryview(bytes(2 * SHAPE.row_bytes)),
                Phase.PREFILL,
            )
            if self.round.run(step, self.result) is RoundOutcome.OK:
                assert self.result.tokens[0].tolist() == [7] * SHAPE.num_drafts
                return
        raise AssertionError(f"no drafts from an honest worker: {self.client}, {self.round.breaker}")


FAULTS: Final = FaultsOfOurs()


def run(data: bytes) -> None:
    Program(data).run()


if __name__ == "__main__":
    sys.exit(reproduce(run))
