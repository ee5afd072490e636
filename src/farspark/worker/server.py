"""The worker's socket side: who is connected, whose session it is, what each frame asks, and the reply that it gets.

Threads. `serve` accepts. Every connection has a thread that receives, decodes, encodes and sends. Whoever holds the lock
`_drafting` owns the drafter, the slot pool, all sessions and the counters, and so one thread at a time drafts. A thread of
its own for the drafter would cost every round two changes of thread, some 20 us.
"""

from __future__ import annotations

import functools
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, ClassVar, Final, NamedTuple

from farspark.clock import Clock, Deadline
from farspark.errors import ProtocolError, Refused, TransportError
from farspark.stats import Stats
from farspark.transport import listen
from farspark.transport.base import Channel, Listener, Piece
from farspark.wire import codec, layout
from farspark.wire.auth import WorkerSide
from farspark.wire.layout import FrameStatus, HeaderFlag, HelloFlag, Operation, StepFlag
from farspark.wire.messages import Header, Hello, Judge, Step, StepReply, Welcome
from farspark.worker.batch import Drafter
from farspark.worker.config import WorkerConfig
from farspark.worker.session import Plan, Session, SlotPool

logger = logging.getLogger(__name__)

# A peer that does not take a reply within this is not reading at all; its round is long lost.
SEND_TIMEOUT_S: Final = 5.0
# What a PING may carry.
MAX_PING_BYTES: Final = 4096
# How often `serve` and idle connections look whether they should stop: only a fallback, `stop` wakes them.
_ACCEPT_WAIT_S = 3600.0

_NEVER, _NONE = Deadline.never(), memoryview(b"")
_STEP_HEADERS = layout.HEADER.size + layout.STEP.size
_REPLY, _SAMPLED = int(HeaderFlag.REPLY), int(StepFlag.SAMPLED)
_NO_CHECK = bytes(layout.IDENTITY_BYTES)


@dataclass(eq=False, slots=True)
class _Connection:
    """One peer. The thread that serves it owns everything but `is_busy`."""

    channel: Channel
    number: int
    proof: WorkerSide
    is_served: bool = True  # False: it is told BUSY and closed
    thread: threading.Thread | None = None
    is_busy: bool = False  # a frame is in hand; read by `stop`
    session_id: int = 0  # 0: no session
    session: Session | None = None  # used with the drafting lock held
    engine: str = ""
    instance: int = 0  # the engine process that said HELLO here


class _Begun(NamedTuple):
    """A STEP that is judged, while its rows may still be on their way."""

    header: Header
    plan: Plan
    reply_head: bytearray  # as it will be if the drafter succeeds
    judging_ns: int


class _Reply(NamedTuple):
    status: FrameStatus
    payload: bytes


class _Drafted(NamedTuple):
    """The reply to a STEP."""

    frame: Sequence[Piece]
    session: Session
    plan: Plan
    reply: StepReply


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
        self._pool = SlotPool(self._info.slots)
        self._stats = Stats()
        self._failures_seen: set[str] = set()  # kinds of drafter failures that are in the log already
        self._drafting = threading.Lock()
        self._lock = threading.Lock()  # guards the four below
        self._connections: set[_Connection] = set()
        self._is_stopping = False
        self._accepted = 0
        self._auth_failures = 0
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
    def max_rows(self) -> int:
        """Rows per STEP that this worker takes."""
        return self._max_rows

    def serve(self) -> None:
        """Accept until `stop`; the caller's thread does nothing else."""
        while True:
            try:
                channel = self._listener.accept(Deadline.after(_ACCEPT_WAIT_S))
            except TimeoutError:
                continue
            except TransportError as error:
                if not self._is_stopping:
                    logger.error("accepting has ended: %s", error)
                return
            self._admit(channel)

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
        stats = self._stats.snapshot()
        counters = stats["counters"]
        verified = counters.get("drafts_verified", 0)
        sessions = [
            {
                "engine": connection.engine,
                "lane": connection.channel.lane,
                "slots_in_use": session.slots_in_use,
            }
            for connection in connections
            if (session := connection.session) is not None
        ]
        return {
            "worker": self._config.name,
            "endpoint": self.endpoint,
            "lanes": self.lanes,
            "uptime_s": round(self._clock() - self._started_s, 3),
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
            "acceptance": round(counters.get("drafts_accepted", 0) / verified, 4) if verified else None,
            **stats,
        }

    # One thread per connection from here on.

    def _admit(self, channel: Channel) -> None:
        proof = WorkerSide(self._config.token, identity=self._info.identity, markov_identity=self._info.markov_identity)
        connection = _Connection(channel, self._accepted, proof)
        with self._lock:
            if self._is_stopping:
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
            if connection.session is not None:
                with self._drafting:
                    self._drop_session(connection)
            with self._lock:
                self._connections.discard(connection)
        logger.info("%s: gone: %s", channel.lane, why)

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
            begun = self._begin_step(connection, frame, arrived) if arrived < len(frame) else None
            channel.recv(_NEVER)
            # `stop` first says so and then looks who is busy; here it is the other way round, so one sees the other.
            connection.is_busy = True
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
            with self._lock:
                self._connections.discard(connection)

    def _begin_step(self, connection: _Connection, frame: memoryview, arrived: int) -> _Begun | None:
        """Judge a STEP while its rows are on their way; None where the whole frame must be there, to be answered then.

        Should the rest never come, then the connection is gone, and the session with it.
        """
        found = codec.peek_step(frame, connection.session_id)
        if found is None:
            return None
        header, head_bytes = found
        if arrived < head_bytes:
            connection.channel.recv_head(head_bytes, _NEVER)
        try:
            step = self._decode_step(frame[layout.HEADER.size :])
        except ProtocolError:
            return None
        # Another engine's draft may take long, and meanwhile the rest can be received.
        if not self._drafting.acquire(blocking=False):
            return None
        try:
            return None if connection.session is None else self._begin(connection.session, header, step)
        except Exception:
            # A bug of ours, as in `_answer`, which will say that there is no session any more.
            logger.exception("%s: a STEP could not be judged", connection.channel.lane)
            self._drop_session(connection)
            return None
        finally:
            self._drafting.release()

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
            with self._drafting:
                self._drop_session(connection)
            reply = _refusal(FrameStatus.INTERNAL, f"the worker failed: {type(error).__name__}: {error}")
        if isinstance(reply, _Reply):
            self._send(connection.channel, header, reply)
            return
        try:
            connection.channel.send(reply.frame, Deadline.after(SEND_TIMEOUT_S))
        finally:
            with self._drafting:
                self._count_step(reply)

    def _send(self, channel: Channel, request: Header, reply: _Reply) -> None:
        header = Header(request.operation, request.session, request.sequence, len(reply.payload), _REPLY, reply.status)
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
                return self._session_work(connection, header, lambda: self._judge_chains(connection, judge))
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
        return self._finish_step(connection, header, self._decode_step(payload))

    def _finish_step(self, connection: _Connection, header: Header, step: Step | _Begun) -> _Reply | _Drafted:
        with self._drafting:
            session = connection.session
            if session is None:
                return _no_session(header)
            begun = step if isinstance(step, _Begun) else self._begin(session, header, step)
            reply = self._draft(session, begun)
        head = begun.reply_head
        if reply.entries is not begun.plan.replies or reply.flags != begun.plan.step.flags:
            head = codec.encode_step_reply_head(header.session, header.sequence, reply)
        return _Drafted(codec.finish_step_reply(head, reply), session, begun.plan, reply)

    def _decode_step(self, payload: memoryview) -> Step:
        step = codec.decode_step(payload, self._info.row_bytes)
        n_rows = len(step.rows) // self._info.row_bytes
        if n_rows > self._max_rows:
            raise ProtocolError(f"STEP of {n_rows} rows, at most {self._max_rows} (the worker's --max-rows)")
        if int(step.flags) & _SAMPLED:
            raise ProtocolError("STEP with sampled drafts, which this worker did not grant")
        return step

    def _session_work(self, connection: _Connection, header: Header, work: Callable[[], _Reply]) -> _Reply:
        with self._drafting:
            if connection.session is None or header.session != connection.session_id:
                return _no_session(header)
            return work()

    def _hello(self, connection: _Connection, header: Header, hello: Hello) -> _Reply:
        if not connection.proof.is_proven(hello.identity, hello.markov_identity):
            return _refusal(FrameStatus.AUTH, "HELLO has other identities than were proven; prove these first")
        status, message = self._judge(header, hello)
        if status is FrameStatus.OK:
            with self._drafting:
                self._begin_session(connection, header.session, hello)
            logger.info(
                "%s: session %016x of engine %r: %d slots, context %d%s",
                connection.channel.lane,
                header.session,
                hello.engine,
                hello.slots,
                min(hello.context, self._info.context),
                f"; {message}" if message else "",
            )
        else:
            logger.warning("%s: HELLO of engine %r refused: %s", connection.channel.lane, hello.engine, message)
        info = self._info
        welcome = Welcome(
            worker=self._config.name,
            kind=info.kind,
            identity=info.identity,
            markov_identity=info.markov_identity,
            vocab_size=info.vocab_size,
            context=min(hello.context, info.context),
            window=info.window,
            slots=info.slots,
            max_rows=self._max_rows,
            num_drafts=info.num_drafts,
            flags=hello.flags & HelloFlag.MARGINS,
            message=message,
        )
        return _Reply(status, codec.encode_welcome(welcome))

    def _judge(self, header: Header, hello: Hello) -> tuple[FrameStatus, str]:
        """Whether this engine can be served; everything that differs, with both values and what to do about it."""
        info = self._info
        if hello.identity != info.identity:
            return FrameStatus.IDENTITY, _differs(
                "drafter identity",
                hello.identity.hex(),
                info.identity.hex(),
                "serve the checkpoint that the engine names",
            )
        if hello.markov_identity not in (_NO_CHECK, info.markov_identity):
            return FrameStatus.MARKOV_IDENTITY, _differs(
                "Markov identity", hello.markov_identity.hex(), info.markov_identity.hex(), "use equal Markov heads"
            )
        differences = [
            _differs(what, ours, theirs, remedy)
            for what, ours, theirs, remedy in (
                ("dtype", hello.dtype, int(layout.Dtype.BF16), "rows are sent as bf16"),
                ("taps", hello.taps, info.taps, "the target must tap the layers that the drafter was trained on"),
                ("hidden size", hello.hidden_size, info.hidden_size, "the drafter is of another target"),
                ("row bytes", hello.row_bytes, info.row_bytes, "the drafter is of another target"),
                ("vocabulary", hello.vocab_size, info.vocab_size, "the drafter is of another target"),
                ("N", hello.num_drafts, info.num_drafts, f"start the worker with --drafts {hello.num_drafts}"),
            )
            if ours != theirs
        ]
        if not 1 <= hello.slots <= info.slots:
            differences.append(
                _differs("slots", hello.slots, info.slots, f"start the worker with --slots {hello.slots}")
            )
        if hello.context < 1:
            differences.append(_differs("context", hello.context, info.context, "ask for at least 1 position"))
        if not header.session:
            differences.append("session 0 is not a session: the engine makes a random one")
        if differences:
            return FrameStatus.CONFIG, "; ".join(differences)
        if hello.context > info.context:
            return FrameStatus.OK, f"context: engine {hello.context}, worker {info.context}; the smaller one is used"
        return FrameStatus.OK, ""

    # With the drafting lock held, from here on.

    def _begin_session(self, connection: _Connection, session_id: int, hello: Hello) -> None:
        self._drop_session(connection)
        self._supersede(connection, hello.instance)
        connection.channel.max_frame_bytes = self._frame_bytes
        connection.session = Session(
            self._info,
            self._pool,
            slots=hello.slots,
            context=min(hello.context, self._info.context),
            stats=self._stats,
        )
        connection.session_id = session_id
        connection.engine = hello.engine
        connection.instance = hello.instance
        self._stats.add("sessions")

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
            self._drop_session(other)
            other.channel.close()
            logger.info("%s: superseded by a newer connection of the same engine", other.channel.lane)

    def _drop_session(self, connection: _Connection) -> None:
        session, connection.session = connection.session, None
        connection.session_id = connection.instance = 0
        if session is not None:
            session.close()

    def _begin(self, session: Session, header: Header, step: Step) -> _Begun:
        started = time.perf_counter_ns()
        plan = session.plan(step)
        expected = StepReply(step.step_id, self._info.num_drafts, 0, plan.replies, _NONE, _NONE, None, step.flags)
        head = codec.encode_step_reply_head(header.session, header.sequence, expected)
        return _Begun(header, plan, head, time.perf_counter_ns() - started)

    def _draft(self, session: Session, begun: _Begun) -> StepReply:
        """Draft for a step that is judged and whose rows are all there."""
        started = time.perf_counter_ns()
        plan = begun.plan
        batch = session.batch(plan)
        result = None
        if batch is not None:
            try:
                result = self._drafter.draft(batch)
            except Exception as error:
                self._note_failure(error)
        worker_us = (begun.judging_ns + time.perf_counter_ns() - started) // 1000
        return session.complete(plan, result, worker_us)

    def _count_step(self, drafted: _Drafted) -> None:
        """Once the reply is out: the engine does not wait for it."""
        drafted.session.count(drafted.plan, drafted.reply)
        self._stats.add("rows", len(drafted.plan.step.rows) // self._info.row_bytes)
        self._stats.record_us("step_us", drafted.reply.worker_us)
        self._stats.add("steps")

    def _note_failure(self, error: Exception) -> None:
        """A failed step is an answer (INTERNAL for its entries), not the end of the worker."""
        kind = type(error).__name__
        self._stats.add("draft_failures")
        if kind not in self._failures_seen:
            self._failures_seen.add(kind)
            logger.error("the drafter failed; further %s are only counted", kind, exc_info=error)

    def _free(self, connection: _Connection, freed: tuple[Any, ...]) -> _Reply:
        assert connection.session is not None
        connection.session.free(freed)
        return _Reply(FrameStatus.OK, b"")

    def _judge_chains(self, connection: _Connection, judge: Judge) -> _Reply:
        assert connection.session is not None
        try:
            judgement = connection.session.judge(judge)
        except ProtocolError:
            raise
        except Exception as error:
            self._note_failure(error)
            return _refusal(FrameStatus.INTERNAL, f"the drafter failed: {type(error).__name__}: {error}")
        self._stats.add("chains_judged", len(judge.places))
        return _Reply(FrameStatus.OK, codec.encode_judgement(judgement))

    def _bye(self, connection: _Connection) -> _Reply:
        self._drop_session(connection)
        return _Reply(FrameStatus.OK, b"")


def _refusal(status: FrameStatus, message: str) -> _Reply:
    return _Reply(status, codec.encode_message(message))


def _no_session(header: Header) -> _Reply:
    return _refusal(FrameStatus.NO_SESSION, f"session {header.session:016x} is not current; say HELLO first")


def _bad_frame(message: str) -> _Reply:
    return _refusal(FrameStatus.BAD_FRAME, message)


def _differs(what: str, engines: object, workers: object, remedy: str) -> str:
    return f"{what}: engine {engines}, worker {workers} ({remedy})"
