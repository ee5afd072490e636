"""The worker's socket side: who is connected, whose session it is, what each frame asks, and the reply that it gets.

Threads. `serve` accepts, and ends sessions whose lease has run out. Every connection has a thread that receives, judges,
encodes and sends; the drafter goes from one of them to the next, see `turns`. A thread of its own for the drafter would cost
every round two changes of thread, some 20 us. Sessions and the slot pool are looked at with the lock `_sessions` held, never
for as long as a draft takes.
"""

from __future__ import annotations

import functools
import json
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, ClassVar, Final, NamedTuple

from farspark.clock import Clock, Deadline
from farspark.errors import ProtocolError, Refused, TransportError
from farspark.native.round_calls import load_round_calls
from farspark.stats import Stats
from farspark.transport import listen
from farspark.transport.base import Channel, Listener, Piece
from farspark.wire import codec, layout
from farspark.wire.auth import WorkerSide
from farspark.wire.layout import FrameStatus, HeaderFlag, HelloFlag, Operation, StepFlag
from farspark.wire.messages import Header, Hello, Judge, Step, StepReply, make_header
from farspark.worker.batch import DraftBatch, Drafter
from farspark.worker.config import WorkerConfig
from farspark.worker.greeting import granted_context, judge_hello, make_welcome
from farspark.worker.session import Plan, Session, SlotPool
from farspark.worker.turns import Turns

logger = logging.getLogger(__name__)

# A peer that does not take a reply within this is not reading at all; its round is long lost.
SEND_TIMEOUT_S: Final = 5.0
# What a PING may carry.
MAX_PING_BYTES: Final = 4096
# How often `serve` looks for leases that have run out, so they last at most a quarter longer than they should.
LOOKS_PER_LEASE: Final = 4
# And without leases: only a fallback, `stop` wakes it.
_ACCEPT_WAIT_S = 3600.0
# An engine that has said nothing for so long has nothing to draft, and loses no round when its connection is closed.
IDLE_AFTER_S: Final = 1.0
_DRAIN_LOOK_S: Final = 0.05

_NEVER, _NONE = Deadline.never(), memoryview(b"")
_STEP_HEADERS = layout.HEADER.size + layout.STEP.size
_REPLY, _DRAINING, _SAMPLED = int(HeaderFlag.REPLY), int(HeaderFlag.DRAINING), int(StepFlag.SAMPLED)
_FLAGS_AT: Final = 7  # in a frame


@dataclass(eq=False, slots=True)
class _Connection:
    """One peer. The thread that serves it owns everything; others read `is_busy` and `heard_s`, and may end the session."""

    channel: Channel
    number: int
    proof: WorkerSide
    is_served: bool = True  # False: it is told BUSY and closed
    thread: threading.Thread | None = None
    is_busy: bool = False  # a frame is in hand
    heard_s: float = 0.0  # when the newest whole frame was there
    session_id: int = 0  # 0: no session
    session: Session | None = None  # used with the sessions' lock held
    engine: str = ""
    instance: int = 0  # the engine process that said HELLO here
    samples: bool = False  # sampled drafts were granted
    says_routing: bool = False  # routing margins in judgements were granted


class _Begun(NamedTuple):
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


class _Drafted(NamedTuple):
    """The reply to a STEP, and what is counted of it."""

    frame: Sequence[Piece]
    session: Session
    plan: Plan
    reply: StepReply
    waited_us: int  # for its turn
    companions: int  # steps that were drafted for together with it


class Server:
    """Serves one drafter on one listener, from construction (the port is then taken) to `stop`."""

    # With a token, strangers get this many connections at a time, and each has this long to prove that it is none. One
    # that was answered with AUTH keeps its place for a second: so many attempts a second are all that there can be.
    MAX_UNPROVEN: ClassVar[int] = 8
    PROVE_WITHIN_S: ClassVar[float] = 5.0
    REFUSED_KEEPS_PLACE_S: ClassVar[float] = 1.0
    # Of those that are told BUSY; what comes beyond is closed without a word, or a flood would be a flood of threads.
    MAX_TURNED_AWAY: ClassVar[int] = 16

    def __init__(
        self,
        drafter: Drafter,
        config: WorkerConfig,
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        self._drafter = drafter
        self._info = drafter.info
        self._config = config
        self._clock = clock
        self._started_s = clock()
        self._max_rows = config.rows_per_step(self._info.row_bytes)
        self._calls = load_round_calls()
        self._pool = SlotPool(self._info.slots)
        self._stats = Stats()
        self._failures_seen: set[str] = set()  # kinds of drafter failures that are in the log already
        self._turns = Turns(drafter)
        self._sessions = threading.Lock()  # guards the slot pool and all sessions
        self._counting = threading.Lock()  # guards the counters, those of sessions too
        self._lock = threading.Lock()  # guards the five below
        self._connections: set[_Connection] = set()
        self._is_draining = False
        self._is_stopping = False
        self._accepted = 0
        self._auth_failures = 0
        self._gone = threading.Condition(self._lock)  # a connection has ended
        self._ending = threading.Event()  # set with _is_stopping, for those who wait for nothing else
        self._frame_bytes = config.frame_bytes(self._info.row_bytes)  # once there is a session
        self._listener: Listener = listen(config.listen, max_frame_bytes=layout.MAX_GREETING_BYTES)

    def __repr__(self) -> str:
        return f"<Server {self.endpoint} {len(self._connections)} connections, {self._pool.in_use} slots in use>"

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    @property
    def endpoint(self) -> str:
        """The address in use, with the real port."""
        return self._listener.endpoint

    @property
    def lanes(self) -> str:
        """What connections may travel over; what each one does is in its log lines and in the stats."""
        return self._listener.lanes

    @property
    def slots_in_use(self) -> int:
        return self._pool.in_use

    @property
    def sessions(self) -> int:
        """Engines that are connected."""
        with self._lock:
            return sum(one.session is not None for one in self._connections)

    @property
    def max_rows(self) -> int:
        """Rows per STEP that this worker takes."""
        return self._max_rows

    def serve(self) -> None:
        """Accept until `drain` or `stop`; the caller's thread does nothing else."""
        look = self._next_look()
        while True:
            if look.has_passed():
                self._end_silent_sessions()
                look = self._next_look()
            try:
                channel = self._listener.accept(look)
            except TimeoutError:
                continue
            except TransportError as error:
                if not (self._is_stopping or self._is_draining):
                    logger.error("accepting has ended: %s", error)
                return
            self._admit(channel)

    def _next_look(self) -> Deadline:
        """When to look for leases that have run out."""
        return Deadline.after(self._config.lease_s / LOOKS_PER_LEASE or _ACCEPT_WAIT_S)

    def _end_silent_sessions(self) -> None:
        """An engine that has said nothing for its lease is taken for gone, however alive its connection looks."""
        if not self._config.lease_s:
            return
        now = self._clock()
        with self._lock:
            silent = [
                one
                for one in self._connections
                if one.session is not None and not one.is_busy and now - one.heard_s > self._config.lease_s
            ]
        for connection in silent:
            with self._sessions:
                ended = self._end_session(connection)
            connection.channel.close()
            if ended:
                logger.warning(
                    "%s: %s: silent for %.1f s, its lease (--lease-s) is %g s; its connection is closed",
                    connection.channel.lane,
                    ended,
                    now - connection.heard_s,
                    self._config.lease_s,
                )

    def drain(self) -> bool:
        """Let the engines move to other workers: take nobody new, tell those who are here with every reply, and wait until
        they are gone, at most `drain_s`. What is idle is closed. True if nobody is left; `stop` is still due.

        From any thread but ours.
        """
        deadline = Deadline.after(self._config.drain_s)
        with self._lock:
            self._is_draining = True
        self._listener.close()
        while not self._is_stopping:
            now = self._clock()
            with self._lock:
                if not self._connections:
                    return True
                if deadline.has_passed():
                    return False
                idle = [
                    one
                    for one in self._connections
                    if not one.is_busy and (one.session is None or now - one.heard_s > IDLE_AFTER_S)
                ]
            for connection in idle:
                connection.channel.close()
            with self._gone:
                self._gone.wait(min(_DRAIN_LOOK_S, deadline.left_s()))
        return False

    def stop(self) -> None:
        """Finish the rounds in hand, close every connection, end the threads. Idempotent; from any thread but ours."""
        self._ending.set()
        with self._lock:
            self._is_stopping = True
            idle = [connection for connection in self._connections if not connection.is_busy]
            threads = [connection.thread for connection in self._connections if connection.thread is not None]
        self._listener.close()
        for connection in idle:
            connection.channel.close()
        deadline = Deadline.after(self._config.drain_s)
        for thread in threads:
            thread.join(deadline.left_s())
        with self._lock:
            late = list(self._connections)
        for connection in late:
            logger.warning(
                "%s: closed in the middle of a round, which took longer than %g s",
                connection.channel.lane,
                self._config.drain_s,
            )
            connection.channel.close()

    def snapshot(self) -> dict[str, Any]:
        """What STATS answers; from any thread."""
        info = asdict(self._info)
        info["identity"], info["markov_identity"] = self._info.identity.hex(), self._info.markov_identity.hex()
        with self._lock:
            connections = sorted(self._connections, key=lambda connection: connection.number)
            accepted, auth_failures = self._accepted, self._auth_failures
        now = self._clock()
        with self._counting:
            counters = Counter(self._stats.counters())
            stats = self._stats.snapshot()
            sessions = {}
            for connection in connections:
                session = connection.session
                if session is not None:
                    counters.update(session.stats.counters())
                    sessions[f"{connection.session_id:016x}"] = _session_snapshot(connection, session, now)
        stats["counters"] = dict(sorted(counters.items()))
        return {
            "worker": self._config.name,
            "endpoint": self.endpoint,
            "lanes": self.lanes,
            "uptime_s": round(now - self._started_s, 3),
            "draining": self._is_draining,
            "drafter": info,
            "max_rows": self._max_rows,
            "slots": {"total": self._pool.slots, "in_use": self._pool.in_use},
            "connections": {
                "open": len(connections),
                "unproven": sum(one.is_served and not one.proof.is_satisfied for one in connections),
                "accepted": accepted,
                "limit": self._config.max_connections,
                "auth_failures": auth_failures,
            },
            "sessions": sessions,
            "acceptance": _acceptance(counters),
            **stats,
        }

    # One thread per connection from here on.

    def _admit(self, channel: Channel) -> None:
        proof = WorkerSide(self._config.token, identity=self._info.identity, markov_identity=self._info.markov_identity)
        connection = _Connection(channel, self._accepted, proof)
        with self._lock:
            if self._is_stopping or self._is_draining:
                channel.close()
                return
            self._accepted += 1
            why = self._no_place()
            if why is None:
                work = functools.partial(self._serve_one, connection)
            elif sum(not one.is_served for one in self._connections) < self.MAX_TURNED_AWAY:
                connection.is_served = False
                work = functools.partial(self._turn_away, connection, why)
            else:
                channel.close()
                return
            connection.thread = threading.Thread(
                target=work, name=f"farspark-connection-{connection.number}", daemon=True
            )
            # Both under the lock, so that `stop` finds threads that can be joined.
            self._connections.add(connection)
            connection.thread.start()

    def _no_place(self) -> str | None:
        """Why one more connection is not served; None if it is. Requires the lock."""
        served = [one for one in self._connections if one.is_served]
        if sum(not one.proof.is_satisfied for one in served) >= self.MAX_UNPROVEN:
            return "too many connections wait to be proven; try again"
        if len(served) < self._config.max_connections:
            return None
        if self._config.token is not None:
            return "too many connections are open; try again"  # a stranger learns no more
        return f"{self._config.max_connections} connections are open, the limit (--max-connections)"

    def _serve_one(self, connection: _Connection) -> None:
        channel = connection.channel
        logger.info("%s: connected", channel.lane)
        why = "closed"
        try:
            self._await_proof(connection)
            self._answer_all(connection)
        except (TransportError, ProtocolError, TimeoutError) as error:
            why = str(error)
        except Refused as refused:
            why = f"not proven: {refused}"
            channel.close()
            self._ending.wait(self.REFUSED_KEEPS_PLACE_S)
        finally:
            channel.close()
            ended = ""
            if connection.session is not None:
                with self._sessions:
                    ended = self._end_session(connection)
            self._forget(connection)
        logger.info("%s: gone: %s%s", channel.lane, why, f"; {ended}" if ended else "")

    def _forget(self, connection: _Connection) -> None:
        with self._gone:
            self._connections.discard(connection)
            self._gone.notify_all()

    def _await_proof(self, connection: _Connection) -> None:
        """Return once the peer may ask for something; at once without a token. Raises TimeoutError if it takes too long."""
        deadline = Deadline.after(self.PROVE_WITHIN_S)
        while not connection.proof.is_satisfied:
            # Not only the wait: a peer that asks for challenge after challenge has no longer.
            deadline.check("waiting for the peer's proof")
            self._answer(connection, connection.channel.recv(deadline), None)

    def _answer_all(self, connection: _Connection) -> None:
        """Until the connection ends, or the server."""
        channel = connection.channel
        while True:
            frame, arrived = channel.recv_head(_STEP_HEADERS, _NEVER)
            begun = self._begin_step(connection, frame, arrived)
            channel.recv(_NEVER)
            # `stop` first says so and then looks who is busy; here it is the other way round, so one sees the other.
            connection.is_busy = True
            connection.heard_s = self._clock()
            if self._is_stopping:
                return
            self._answer(connection, frame, begun)
            # The transport may use the memory again.
            del frame, begun
            connection.is_busy = False
            if self._is_stopping:
                return

    def _turn_away(self, connection: _Connection, why: str) -> None:
        """Answer one frame with BUSY: the peer should know why it is closed."""
        channel = connection.channel
        logger.warning("%s: turned away: %s", channel.lane, why)
        try:
            header, _ = codec.decode_frame(channel.recv(Deadline.after(SEND_TIMEOUT_S)))
            self._send(channel, header, _refusal(FrameStatus.BUSY, why))
        except (TransportError, ProtocolError, TimeoutError):
            pass
        finally:
            channel.close()
            self._forget(connection)

    def _begin_step(self, connection: _Connection, frame: memoryview, arrived: int) -> _Begun | None:
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

    def _begin_ordinary(self, connection: _Connection, frame: memoryview, arrived: int) -> _Begun | None:
        """The same in one call; None for all but the ordinary STEPs."""
        if self._calls is None:
            return None
        with self._sessions:
            session, session_id = connection.session, connection.session_id
            if session is None:
                return None
            started = time.perf_counter_ns()
            try:
                found = session.begin(self._calls, frame, arrived, session_id, self._max_rows)
            except Exception:
                self._give_up_judging(connection)
                return None
        if found is None:
            return None
        sequence, plan, head = found
        payload_bytes = len(frame) - layout.HEADER.size
        header = make_header((Operation.STEP, session_id, sequence, payload_bytes, 0, FrameStatus.OK, layout.VERSION))
        return _Begun(header, session, plan, session.batch(plan), head, time.perf_counter_ns() - started)

    def _give_up_judging(self, connection: _Connection) -> None:
        """A bug of ours, as in `_answer`, which will say that there is no session any more. Requires the sessions' lock."""
        logger.exception("%s: a STEP could not be judged", connection.channel.lane)
        self._end_session(connection)

    def _answer(self, connection: _Connection, frame: memoryview, begun: _Begun | None) -> None:
        try:
            header, payload = (begun.header, frame) if begun else codec.decode_frame(frame)
        except ProtocolError as error:
            # Not a frame of ours at all: said, so that nobody has to guess, and closed.
            self._send(connection.channel, Header(0, 0, 0, 0), _bad_frame(str(error)))
            raise
        try:
            reply = self._finish_step(connection, header, begun) if begun else self._reply(connection, header, payload)
        except ProtocolError as error:
            reply = _bad_frame(str(error))
        except Refused as refused:
            # Not proven: said, and closed.
            self._send(connection.channel, header, _refusal(FrameStatus.AUTH, str(refused)))
            raise
        except Exception as error:
            # A bug of ours. The peer is told, its session is void, and the worker lives for the others.
            logger.exception("%s: operation %s failed", connection.channel.lane, header.operation)
            with self._sessions:
                self._end_session(connection)
            reply = _refusal(FrameStatus.INTERNAL, f"the worker failed: {type(error).__name__}: {error}")
        if isinstance(reply, _Reply):
            self._send(connection.channel, header, reply)
            return
        try:
            connection.channel.send(reply.frame, Deadline.after(SEND_TIMEOUT_S))
        finally:
            self._count_step(reply, len(frame))

    def _send(self, channel: Channel, request: Header, reply: _Reply) -> None:
        flags = _REPLY | _DRAINING if self._is_draining else _REPLY
        header = Header(request.operation, request.session, request.sequence, len(reply.payload), flags, reply.status)
        channel.send([codec.encode_frame(header, reply.payload)], Deadline.after(SEND_TIMEOUT_S))

    def _reply(self, connection: _Connection, header: Header, payload: memoryview) -> _Reply | _Drafted:
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
                return _Reply(FrameStatus.OK, json.dumps(self.snapshot()).encode())
            case Operation.FREE:
                freed = codec.decode_free(payload)
                return self._session_work(connection, header, lambda: self._free(connection, freed))
            case Operation.JUDGE:
                judge = codec.decode_judge(payload)
                # First the turn, which may take long, then the sessions' lock; nobody asks for them the other way round.
                with self._turns.alone():
                    return self._judge_chains(connection, header, judge)
            case Operation.BYE:
                return self._session_work(connection, header, lambda: self._bye(connection))
            case Operation.CHALLENGE:
                nonce = secrets.token_bytes(layout.NONCE_BYTES)
                return _Reply(FrameStatus.OK, connection.proof.challenge(payload, nonce))
            case Operation.PROVE:
                return self._prove(connection, payload)
            case unknown:
                raise ProtocolError(f"operation {unknown}, which is not one of ours")

    def _prove(self, connection: _Connection, payload: memoryview) -> _Reply:
        try:
            return _Reply(FrameStatus.OK, connection.proof.prove(payload))
        except Refused as refused:
            with self._lock:
                self._auth_failures += 1
            logger.warning("%s: authentication failed: %s", connection.channel.lane, refused)
            raise

    def _step(self, connection: _Connection, header: Header, payload: memoryview) -> _Reply | _Drafted:
        if header.session != connection.session_id:
            return _no_session(header)
        return self._finish_step(connection, header, self._decode_step(connection, payload))

    def _finish_step(self, connection: _Connection, header: Header, step: Step | _Begun) -> _Reply | _Drafted:
        if isinstance(step, _Begun):
            begun = step
        else:
            with self._sessions:
                if connection.session is None:
                    return _no_session(header)
                begun = self._begin(connection.session, header, step)
        return self._draft(header, begun)

    def _draft(self, header: Header, begun: _Begun) -> _Reply | _Drafted:
        """Draft for a step that is judged and whose rows are all there."""
        _, session, plan, batch, head, judging_ns = begun
        if batch is None:
            batch = session.batch(plan)
        result, drafting_ns, waited_ns, companions = None, 0, 0, 0
        if batch is not None:
            turn = self._turns.draft(session, batch)
            if turn.is_void:
                return _no_session(header)
            for error in turn.errors:
                self._note_failure(error)
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
        return _Drafted(frame, session, plan, reply, waited_ns // 1000, companions)

    def _decode_step(self, connection: _Connection, payload: memoryview) -> Step:
        step = codec.decode_step(payload, self._info.row_bytes)
        n_rows = len(step.rows) // self._info.row_bytes
        if n_rows > self._max_rows:
            raise ProtocolError(f"STEP of {n_rows} rows, at most {self._max_rows} (the worker's --max-rows)")
        if int(step.flags) & _SAMPLED and not connection.samples:
            raise ProtocolError("STEP with sampled drafts, for which its HELLO did not ask")
        return step

    def _session_work(self, connection: _Connection, header: Header, work: Callable[[], _Reply]) -> _Reply:
        with self._sessions:
            if connection.session is None or header.session != connection.session_id:
                return _no_session(header)
            return work()

    def _hello(self, connection: _Connection, header: Header, hello: Hello) -> _Reply:
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
            max_rows=self._max_rows,
            lease_s=self._config.lease_s,
        )
        return _Reply(status, codec.encode_welcome(welcome))

    def _judge_chains(self, connection: _Connection, header: Header, judge: Judge) -> _Reply:
        """With the drafter to itself."""
        with self._sessions:
            session = connection.session
            if session is None or header.session != connection.session_id:
                return _no_session(header)
        try:
            judgement = session.judge(judge)
        except ProtocolError:
            raise
        except Exception as error:
            self._note_failure(error)
            return _refusal(FrameStatus.INTERNAL, f"the drafter failed: {type(error).__name__}: {error}")
        self._count("chains_judged", len(judge.places))
        if not connection.says_routing:
            judgement = judgement._replace(routing=None)
        return _Reply(FrameStatus.OK, codec.encode_judgement(judgement))

    def _note_failure(self, error: Exception) -> None:
        """A failed step is an answer (INTERNAL for its entries), not the end of the worker."""
        kind = type(error).__name__
        self._count("draft_failures")
        with self._counting:
            is_new = kind not in self._failures_seen
            self._failures_seen.add(kind)
        if is_new:
            logger.error("the drafter failed; further %s are only counted", kind, exc_info=error)

    def _count(self, name: str, amount: int = 1) -> None:
        with self._counting:
            self._stats.add(name, amount)

    def _count_step(self, drafted: _Drafted, frame_bytes: int) -> None:
        """Once the reply is out: the engine does not wait for it."""
        frame, session, plan, reply, waited_us, companions = drafted
        sent_bytes = sum([piece.nbytes if type(piece) is memoryview else len(piece) for piece in frame])
        with self._counting:
            self._stats.record_us("step_us", reply.worker_us)
            self._stats.record_us("wait_us", waited_us)
            # What comes after the end of a session is not lost: then the worker's own counters have the rest already.
            stats = self._stats if session.is_closed else session.stats
            session.count(plan, reply, stats)
            stats.add("steps")
            stats.add("rows", len(plan.step.rows) // self._info.row_bytes)
            stats.add("bytes_received", frame_bytes)
            stats.add("bytes_sent", sent_bytes)
            if companions:
                stats.add("steps_joined")
                stats.add("companions", companions)
            if stats is not self._stats:
                stats.record_us("worker_us", reply.worker_us)
                stats.record_us("wait_us", waited_us)

    # With the sessions' lock held, from here on.

    def _begin_session(self, connection: _Connection, session_id: int, hello: Hello) -> None:
        self._end_session(connection)
        self._supersede(connection, hello.instance)
        connection.channel.max_frame_bytes = self._frame_bytes
        connection.session = Session(
            self._info,
            self._pool,
            slots=hello.slots,
            context=granted_context(self._info, hello),
            stats=Stats(),
        )
        connection.session_id = session_id
        connection.engine = hello.engine
        connection.instance = hello.instance
        connection.samples = bool(hello.flags & HelloFlag.SAMPLED)
        connection.says_routing = bool(hello.flags & HelloFlag.ROUTING)
        self._count("sessions")

    def _supersede(self, connection: _Connection, instance: int) -> None:
        """End what the same engine process left behind on other connections.

        An engine that connects again has given its old connection up, but the worker may hear of that much later, or never
        (a peer that vanished); until then the old session would hold slots that the new one needs.
        """
        if not instance:
            return
        with self._lock:
            left = [other for other in self._connections if other is not connection and other.instance == instance]
        for other in left:
            ended = self._end_session(other)
            other.channel.close()
            logger.info("%s: superseded by a newer connection of the same engine; %s", other.channel.lane, ended)

    def _end_session(self, connection: _Connection) -> str:
        """Free its slots. What there is to say of it, for the log; empty if there is no session."""
        session = connection.session
        if session is None:
            return ""
        said = f"session {connection.session_id:016x} of engine {connection.engine!r}"
        slots = session.slots_in_use
        session.close()
        with self._counting:
            # Together, so that no snapshot lacks them or has them twice.
            connection.session, connection.session_id, connection.instance = None, 0, 0
            counters = session.stats.counters()
            for name, count in counters.items():
                self._stats.add(name, count)
        return f"{said}, {counters.get('steps', 0)} rounds, {counters.get('drafts', 0)} drafts, {slots} slots freed"

    def _begin(self, session: Session, header: Header, step: Step) -> _Begun:
        started = time.perf_counter_ns()
        plan = session.plan(step)
        expected = StepReply(step.step_id, self._info.num_drafts, 0, plan.replies, _NONE, _NONE, None, step.flags)
        head = codec.encode_step_reply_head(header.session, header.sequence, expected)
        return _Begun(header, session, plan, None, head, time.perf_counter_ns() - started)

    def _free(self, connection: _Connection, freed: tuple[Any, ...]) -> _Reply:
        assert connection.session is not None
        connection.session.free(freed)
        return _Reply(FrameStatus.OK, b"")

    def _bye(self, connection: _Connection) -> _Reply:
        logger.info("%s: BYE: %s", connection.channel.lane, self._end_session(connection))
        return _Reply(FrameStatus.OK, b"")


def _session_snapshot(connection: _Connection, session: Session, now: float) -> dict[str, Any]:
    """One engine's share, for STATS. Requires the counters' lock."""
    counters = session.stats.counters()
    latency = session.stats.snapshot()["latency"]
    steps = counters.get("steps", 0)

    def share(name: str, rank: str) -> float:
        return float(latency[name][rank]) if name in latency else 0.0

    return {
        "engine": connection.engine,
        "lane": connection.channel.lane,
        "silent_s": round(max(0.0, now - connection.heard_s), 1),
        "slots_in_use": session.slots_in_use,
        "rounds": steps,
        "rows": counters.get("rows", 0),
        "drafts": counters.get("drafts", 0),
        "accepted": counters.get("drafts_accepted", 0),
        "acceptance": _acceptance(counters),
        "bytes_received": counters.get("bytes_received", 0),
        "bytes_sent": counters.get("bytes_sent", 0),
        "batched_with": round(counters.get("companions", 0) / steps, 2) if steps else 0.0,
        **{f"{name}_{rank}": share(name, rank) for name in ("worker_us", "wait_us") for rank in ("p50", "p99")},
    }


def _acceptance(counters: Mapping[str, int]) -> float | None:
    verified = counters.get("drafts_verified", 0)
    return round(counters.get("drafts_accepted", 0) / verified, 4) if verified else None


def _refusal(status: FrameStatus, message: str) -> _Reply:
    return _Reply(status, codec.encode_message(message))


def _no_session(header: Header) -> _Reply:
    return _refusal(FrameStatus.NO_SESSION, f"session {header.session:016x} is not current; say HELLO first")


def _bad_frame(message: str) -> _Reply:
    return _refusal(FrameStatus.BAD_FRAME, message)
