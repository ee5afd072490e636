"""What each frame asks of the worker, and the reply that it gets: from HELLO, which begins a session, to BYE, which ends it.

A STEP is judged while its rows are on their way, and drafted for by the thread of its connection; the drafter goes from one
of these threads to the next, see `turns`. A thread of its own for the drafter would cost every round two changes of thread,
some 20 us. Sessions and the slot pool are looked at with the lock `_sessions` held, never for as long as a draft takes.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from farspark.clock import Deadline
from farspark.errors import ProtocolError, Refused
from farspark.native.round_calls import load_round_calls
from farspark.stats import Stats
from farspark.transport.base import Channel
from farspark.wire import codec, layout
from farspark.wire.layout import FrameStatus, HeaderFlag, HelloFlag, Operation, StepFlag
from farspark.wire.messages import Freed, Header, Hello, Judge, Step, StepReply, make_header
from farspark.worker.batch import DraftBatch, Drafter
from farspark.worker.config import WorkerConfig
from farspark.worker.connection import Connection
from farspark.worker.greeting import granted_context, judge_hello, make_welcome
from farspark.worker.session import Plan, Session, SlotPool
from farspark.worker.tally import Drafted, Tally
from farspark.worker.turns import Turns

logger = logging.getLogger(__name__)

HEAD_BYTES: Final = layout.HEADER.size + layout.STEP.size
"""How much of a frame `Answers.begin` must see, or all of it."""

# A peer that does not take a reply within this is not reading at all; its round is long lost.
SEND_TIMEOUT_S: Final = 5.0
# What a PING may carry.
MAX_PING_BYTES: Final = 4096

_NEVER, _NONE = Deadline.never(), memoryview(b"")
_REPLY, _DRAINING, _SAMPLED = int(HeaderFlag.REPLY), int(HeaderFlag.DRAINING), int(StepFlag.SAMPLED)
_FLAGS_AT: Final = 7  # in a frame


class Begun(NamedTuple):
    """A STEP that is judged, while its rows may still be on their way."""

    header: Header
    session: Session
    plan: Plan
    batch: DraftBatch | None  # of the plan; None where its rows must be looked at first, or there is nothing to do
    reply_head: bytearray  # as it will be if the drafter succeeds
    judging_ns: int


class _Reply(NamedTuple):
    status: FrameStatus
    payload: bytes


class Answers:
    """Answers the frames of all connections: `begin` and `answer` on each one's own thread, all else from any.

    `statistics` makes what STATS answers.
    """

    def __init__(
        self, drafter: Drafter, config: WorkerConfig, tally: Tally, statistics: Callable[[], Mapping[str, Any]]
    ) -> None:
        self._info = drafter.info
        self._config = config
        self._tally = tally
        self._statistics = statistics
        self.max_rows = config.rows_per_step(self._info.row_bytes)  # per STEP
        self._frame_bytes = config.frame_bytes(self._info.row_bytes)  # once there is a session
        self._calls = load_round_calls()
        self._turns = Turns(drafter)
        self._is_draining = False  # set once, for good; a reply that does not see it yet was made just before
        self._sessions = threading.Lock()  # guards the two below, all sessions, and which connection has which
        self._pool = SlotPool(self._info.slots)
        self._by_instance: dict[int, Connection] = {}  # those with a session, by the engine process that it is of

    def __repr__(self) -> str:
        return f"<Answers {self._pool.in_use} slots in use, {self._turns!r}>"

    @property
    def slots_in_use(self) -> int:
        return self._pool.in_use

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    def drain(self) -> None:
        """From here on no session begins, and every reply says that this worker goes."""
        self._is_draining = True

    def begin(self, connection: Connection, frame: memoryview, arrived: int) -> Begun | None:
        """Judge a STEP while its rows are on their way; None where the whole frame must be there, to be answered then.

        Should the rest never come, then the connection is gone, and the session with it.
        """
        begun = self._begin_ordinary(connection, frame, arrived)
        if begun is not None or arrived == len(frame):
            return begun
        found = codec.peek_step(frame, connection.session_id)
        if found is None:
            return None
        header, head_bytes = found
        if arrived < head_bytes:
            connection.channel.recv_head(head_bytes, _NEVER)
        try:
            step = self._decode_step(connection, frame[layout.HEADER.size :])
        except ProtocolError:
            return None
        with self._sessions:
            try:
                return None if connection.session is None else self._begin(connection.session, header, step)
            except Exception:
                self._give_up_judging(connection)
                return None

    def answer(self, connection: Connection, frame: memoryview, begun: Begun | None) -> None:
        """Send the reply to a frame that is all there; `begun` is what `begin` has made of it.

        Raises ProtocolError and Refused where the peer was told why it is closed, TransportError and TimeoutError where it
        could not be told.
        """
        try:
            header, payload = (begun.header, frame) if begun else codec.decode_frame(frame)
        except ProtocolError as error:
            # Not a frame of ours at all: said, so that nobody has to guess, and closed.
            self._send(connection.channel, Header(0, 0, 0, 0), _bad_frame(str(error)))
            raise
        try:
            reply = self._draft(begun) if begun else self._reply(connection, header, payload)
        except ProtocolError as error:
            reply = _bad_frame(str(error))
        except Refused as refused:
            # Not proven: said, and closed.
            self._send(connection.channel, header, _refusal(FrameStatus.AUTH, str(refused)))
            raise
        except Exception as error:
            # A bug of ours. The peer is told, its session is void, and the worker lives for the others.
            logger.exception("%s: operation %s failed", connection.channel.lane, header.operation)
            self.end_session(connection)
            reply = _refusal(FrameStatus.INTERNAL, f"the worker failed: {type(error).__name__}: {error}")
        if isinstance(reply, _Reply):
            self._send(connection.channel, header, reply)
            return
        try:
            connection.channel.send(reply.frame, Deadline.after(SEND_TIMEOUT_S))
        finally:
            self._tally.count_step(reply, len(frame))

    def turn_away(self, channel: Channel, frame: memoryview, why: str) -> None:
        """Answer BUSY. Raises ProtocolError where that is no frame of ours, and as `Channel.send`."""
        header, _ = codec.decode_frame(frame)
        self._send(channel, header, _refusal(FrameStatus.BUSY, why))

    def end_session(self, connection: Connection) -> str:
        """Free its slots. What there is to say of it, for the log; empty if there is no session."""
        with self._sessions:
            return self._end_session(connection)

    def _send(self, channel: Channel, request: Header, reply: _Reply) -> None:
        flags = _REPLY | _DRAINING if self._is_draining else _REPLY
        header = Header(request.operation, request.session, request.sequence, len(reply.payload), flags, reply.status)
        channel.send([codec.encode_frame(header, reply.payload)], Deadline.after(SEND_TIMEOUT_S))

    def _reply(self, connection: Connection, header: Header, payload: memoryview) -> _Reply | Drafted:
        """Raises Refused where the peer is not proven: it is told so, and closed."""
        if not connection.proof.is_satisfied and header.operation not in (Operation.CHALLENGE, Operation.PROVE):
            raise Refused(FrameStatus.AUTH, "this worker demands a proof of the token before anything else")
        if header.version != layout.VERSION:
            return _refusal(
                FrameStatus.VERSION,
                f"protocol version: engine {header.version}, worker {layout.VERSION}; use equal versions",
            )
        if header.is_reply:
            raise ProtocolError("a reply where a request was expected")
        match header.operation:
            case Operation.STEP:
                return self._step(connection, header, payload)
            case Operation.HELLO:
                return self._hello(connection, header, codec.decode_hello(payload))
            case Operation.PING:
                if len(payload) > MAX_PING_BYTES:
                    raise ProtocolError(f"PING of {len(payload)} bytes, at most {MAX_PING_BYTES}")
                return _Reply(FrameStatus.OK, bytes(payload))
            case Operation.STATS:
                return _Reply(FrameStatus.OK, json.dumps(self._statistics()).encode())
            case Operation.FREE:
                return self._free(connection, header, codec.decode_free(payload))
            case Operation.JUDGE:
                judge = codec.decode_judge(payload)
                # First the turn, which may take long, then the sessions' lock; nobody asks for them the other way round.
                with self._turns.alone():
                    return self._judge_chains(connection, header, judge)
            case Operation.BYE:
                return self._bye(connection, header)
            case Operation.CHALLENGE:
                nonce = secrets.token_bytes(layout.NONCE_BYTES)
                return _Reply(FrameStatus.OK, connection.proof.challenge(payload, nonce))
            case Operation.PROVE:
                return self._prove(connection, payload)
            case unknown:
                raise ProtocolError(f"operation {unknown}, which is not one of ours")

    def _prove(self, connection: Connection, payload: memoryview) -> _Reply:
        try:
            return _Reply(FrameStatus.OK, connection.proof.prove(payload))
        except Refused as refused:
            self._tally.count_auth_failure()
            logger.warning("%s: authentication failed: %s", connection.channel.lane, refused)
            raise

    # A STEP.

    def _begin_ordinary(self, connection: Connection, frame: memoryview, arrived: int) -> Begun | None:
        """`begin` in one call; None for all but the ordinary STEPs."""
        if self._calls is None:
            return None
        with self._sessions:
            session, session_id = connection.session, connection.session_id
            if session is None:
                return None
            started = time.perf_counter_ns()
            try:
                found = session.begin(self._calls, frame, arrived, session_id, self.max_rows)
            except Exception:
                self._give_up_judging(connection)
                return None
        if found is None:
            return None
        sequence, plan, head = found
        payload_bytes = len(frame) - layout.HEADER.size
        header = make_header((Operation.STEP, session_id, sequence, payload_bytes, 0, FrameStatus.OK, layout.VERSION))
        return Begun(header, session, plan, session.batch(plan), head, time.perf_counter_ns() - started)

    def _begin(self, session: Session, header: Header, step: Step) -> Begun:
        """Requires the sessions' lock."""
        started = time.perf_counter_ns()
        plan = session.plan(step)
        expected = StepReply(step.step_id, self._info.num_drafts, 0, plan.replies, _NONE, _NONE, None, step.flags)
        head = codec.encode_step_reply_head(header.session, header.sequence, expected)
        return Begun(header, session, plan, None, head, time.perf_counter_ns() - started)

    def _give_up_judging(self, connection: Connection) -> None:
        """A bug of ours, as in `answer`, which will say that there is no session any more. Requires the sessions' lock."""
        logger.exception("%s: a STEP could not be judged", connection.channel.lane)
        self._end_session(connection)

    def _step(self, connection: Connection, header: Header, payload: memoryview) -> _Reply | Drafted:
        """One that could not be begun."""
        if header.session != connection.session_id:
            return _no_session(header)
        step = self._decode_step(connection, payload)
        with self._sessions:
            if connection.session is None:
                return _no_session(header)
            begun = self._begin(connection.session, header, step)
        return self._draft(begun)

    def _decode_step(self, connection: Connection, payload: memoryview) -> Step:
        step = codec.decode_step(payload, self._info.row_bytes)
        n_rows = len(step.rows) // self._info.row_bytes
        if n_rows > self.max_rows:
            raise ProtocolError(f"STEP of {n_rows} rows, at most {self.max_rows} (the worker's --max-rows)")
        if int(step.flags) & _SAMPLED and not connection.samples:
            raise ProtocolError("STEP with sampled drafts, for which its HELLO did not ask")
        return step

    def _draft(self, begun: Begun) -> _Reply | Drafted:
        """Draft for a step that is judged and whose rows are all there."""
        header, session, plan, batch, head, judging_ns = begun
        if batch is None:
            batch = session.batch(plan)
        result, drafting_ns, waited_ns, companions = None, 0, 0, 0
        if batch is not None:
            turn = self._turns.draft(session, batch)
            if turn.is_void:
                return _no_session(header)
            for error in turn.errors:
                self._tally.note_failure(error)
            result, companions = turn.result, turn.companions
            drafting_ns, waited_ns = turn.ended_ns - turn.began_ns, turn.began_ns - turn.asked_ns
        elif session.is_closed:
            return _no_session(header)
        reply = session.complete(plan, result, (judging_ns + drafting_ns) // 1000)
        if reply.entries is not plan.replies or reply.flags != plan.step.flags:
            head = codec.encode_step_reply_head(header.session, header.sequence, reply)
        if self._is_draining:
            head[_FLAGS_AT] |= _DRAINING
        frame = None if self._calls is None else self._calls.finish_reply(head, reply)
        if frame is None:
            frame = codec.finish_step_reply(head, reply)
        return Drafted(frame, session, plan, reply, waited_ns // 1000, companions)

    # All else that a session asks for.

    def _judge_chains(self, connection: Connection, header: Header, judge: Judge) -> _Reply:
        """With the drafter to itself."""
        with self._sessions:
            session = _session_of(connection, header)
        if session is None:
            return _no_session(header)
        try:
            judgement = session.judge(judge)
        except ProtocolError:
            raise
        except Exception as error:
            self._tally.note_failure(error)
            return _refusal(FrameStatus.INTERNAL, f"the drafter failed: {type(error).__name__}: {error}")
        self._tally.count("chains_judged", len(judge.places))
        if not connection.says_routing:
            judgement = judgement._replace(routing=None)
        return _Reply(FrameStatus.OK, codec.encode_judgement(judgement))

    def _free(self, connection: Connection, header: Header, freed: Sequence[Freed]) -> _Reply:
        with self._sessions:
            session = _session_of(connection, header)
            if session is None:
                return _no_session(header)
            session.free(freed)
        return _Reply(FrameStatus.OK, b"")

    def _bye(self, connection: Connection, header: Header) -> _Reply:
        with self._sessions:
            if _session_of(connection, header) is None:
                return _no_session(header)
            ended = self._end_session(connection)
        logger.info("%s: BYE: %s", connection.channel.lane, ended)
        return _Reply(FrameStatus.OK, b"")

    # Where sessions begin and end.

    def _hello(self, connection: Connection, header: Header, hello: Hello) -> _Reply:
        if not connection.proof.is_proven(hello.identity, hello.markov_identity):
            return _refusal(FrameStatus.AUTH, "HELLO has other identities than were proven; prove these first")
        if self._is_draining:
            return _refusal(FrameStatus.BUSY, "this worker is about to stop; use another one")
        status, message = judge_hello(self._info, header.session, hello)
        if status is FrameStatus.OK:
            with self._sessions:
                self._begin_session(connection, header.session, hello)
            logger.info(
                "%s: session %016x of engine %r: %d slots, context %d%s",
                connection.channel.lane,
                header.session,
                hello.engine,
                hello.slots,
                granted_context(self._info, hello),
                f"; {message}" if message else "",
            )
        else:
            logger.warning("%s: HELLO of engine %r refused: %s", connection.channel.lane, hello.engine, message)
        welcome = make_welcome(
            self._info,
            hello,
            message,
            worker=self._config.name,
            max_rows=self.max_rows,
            lease_s=self._config.lease_s,
        )
        return _Reply(status, codec.encode_welcome(welcome))

    def _begin_session(self, connection: Connection, session_id: int, hello: Hello) -> None:
        """Requires the sessions' lock, as all below."""
        self._end_session(connection)
        if hello.instance:
            self._supersede(hello.instance)
        connection.channel.max_frame_bytes = self._frame_bytes
        connection.session_id = session_id
        connection.engine = hello.engine
        connection.instance = hello.instance
        connection.samples = bool(hello.flags & HelloFlag.SAMPLED)
        connection.says_routing = bool(hello.flags & HelloFlag.ROUTING)
        connection.session = Session(
            self._info,
            self._pool,
            slots=hello.slots,
            context=granted_context(self._info, hello),
            stats=Stats(),
        )
        if hello.instance:
            self._by_instance[hello.instance] = connection
        self._tally.count("sessions")

    def _supersede(self, instance: int) -> None:
        """End what the same engine process left behind on another connection.

        An engine that connects again has given its old connection up, but the worker may hear of that much later, or never
        (a peer that vanished); until then the old session would hold slots that the new one needs.
        """
        left = self._by_instance.get(instance)
        if left is not None:
            ended = self._end_session(left)
            left.channel.close()
            logger.info("%s: superseded by a newer connection of the same engine; %s", left.channel.lane, ended)

    def _end_session(self, connection: Connection) -> str:
        session = connection.session
        if session is None:
            return ""
        said = f"session {connection.session_id:016x} of engine {connection.engine!r}"
        slots = session.slots_in_use
        session.close()
        self._by_instance.pop(connection.instance, None)
        counters = self._tally.take_over(connection, session)
        return f"{said}, {counters.get('steps', 0)} rounds, {counters.get('drafts', 0)} drafts, {slots} slots freed"


def _session_of(connection: Connection, header: Header) -> Session | None:
    """The one that a frame is for, if it is current. Requires the sessions' lock."""
    return connection.session if header.session == connection.session_id else None


def _refusal(status: FrameStatus, message: str) -> _Reply:
    return _Reply(status, codec.encode_message(message))


def _no_session(header: Header) -> _Reply:
    return _refusal(FrameStatus.NO_SESSION, f"session {header.session:016x} is not current; say HELLO first")


def _bad_frame(message: str) -> _Reply:
    return _refusal(FrameStatus.BAD_FRAME, message)
