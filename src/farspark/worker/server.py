"""The worker's socket side: who is connected, whose session it is, what each frame asks, and the reply that it gets.

Threads. `serve` accepts. Every connection has a thread that receives, decodes, encodes and sends. Whoever holds the lock
`_drafting` owns the drafter, the slot pool, all sessions and the counters, and so one thread at a time drafts. A thread of
its own for the drafter would cost every round two changes of thread, some 20 us.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Final

from farspark.clock import Clock, Deadline
from farspark.errors import ProtocolError, TransportError
from farspark.stats import Stats
from farspark.transport import listen
from farspark.transport.base import Channel, Listener
from farspark.wire import codec, layout
from farspark.wire.layout import FrameStatus, HeaderFlag, HelloFlag, Operation, StepFlag
from farspark.wire.messages import Header, Hello, Step, StepReply, Welcome
from farspark.worker.batch import Drafter
from farspark.worker.config import WorkerConfig
from farspark.worker.session import Session, SlotPool

logger = logging.getLogger(__name__)

# A peer that does not take a reply within this is not reading at all; its round is long lost.
SEND_TIMEOUT_S: Final = 5.0
# What a PING may carry.
MAX_PING_BYTES: Final = 4096
# How often `serve` and idle connections look whether they should stop: only a fallback, `stop` wakes them.
_ACCEPT_WAIT_S = 3600.0

_SAMPLED = int(StepFlag.SAMPLED)
_NO_CHECK = bytes(layout.IDENTITY_BYTES)


@dataclass(eq=False, slots=True)
class _Connection:
    """One peer. The thread that serves it owns everything but `is_busy`."""

    channel: Channel
    number: int
    thread: threading.Thread | None = None
    is_busy: bool = False  # a frame is in hand; guarded by Server._lock
    session_id: int = 0  # 0: no session
    session: Session | None = None  # used with the drafting lock held
    engine: str = ""
    instance: int = 0  # the engine process that said HELLO here


@dataclass(slots=True)
class _Reply:
    status: FrameStatus
    payload: bytes


class Server:
    """Serves one drafter on one listener, from construction (the port is then taken) to `stop`."""

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
        self._lock = threading.Lock()  # guards the three below and _Connection.is_busy
        self._connections: set[_Connection] = set()
        self._is_stopping = False
        self._accepted = 0
        self._listener: Listener = listen(config.listen, max_frame_bytes=config.frame_bytes(self._info.row_bytes))

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
            accepted = self._accepted
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
            "uptime_s": round(self._clock() - self._started_s, 3),
            "drafter": info,
            "max_rows": self._max_rows,
            "slots": {"total": self._pool.slots, "in_use": self._pool.in_use},
            "connections": {"open": len(connections), "accepted": accepted, "limit": self._config.max_connections},
            "sessions": sessions,
            "acceptance": round(counters.get("drafts_accepted", 0) / verified, 4) if verified else None,
            **stats,
        }

    # One thread per connection from here on.

    def _admit(self, channel: Channel) -> None:
        connection = _Connection(channel, self._accepted)
        with self._lock:
            if self._is_stopping:
                channel.close()
                return
            self._accepted += 1
            is_full = len(self._connections) >= self._config.max_connections
            connection.thread = threading.Thread(
                target=self._turn_away if is_full else self._serve_one,
                args=(connection,),
                name=f"farspark-connection-{connection.number}",
                daemon=True,
            )
            # Both under the lock, so that `stop` finds threads that can be joined.
            self._connections.add(connection)
            connection.thread.start()

    def _serve_one(self, connection: _Connection) -> None:
        channel = connection.channel
        logger.info("%s: connected", channel.lane)
        why = "closed"
        try:
            while True:
                frame = channel.recv(Deadline.never())
                with self._lock:
                    if self._is_stopping:
                        break
                    connection.is_busy = True
                self._answer(connection, frame)
                # The transport may use the memory again.
                del frame
                with self._lock:
                    connection.is_busy = False
                    if self._is_stopping:
                        break
        except (TransportError, ProtocolError, TimeoutError) as error:
            why = str(error)
        finally:
            channel.close()
            with self._drafting:
                self._drop_session(connection)
            with self._lock:
                self._connections.discard(connection)
        logger.info("%s: gone: %s", channel.lane, why)

    def _turn_away(self, connection: _Connection) -> None:
        """Answer one frame with BUSY: the peer should know why it is closed."""
        channel = connection.channel
        logger.warning("%s: turned away, %d connections are the limit", channel.lane, self._config.max_connections)
        try:
            header, _ = codec.decode_frame(channel.recv(Deadline.after(SEND_TIMEOUT_S)))
            message = f"{self._config.max_connections} connections are open, the limit (--max-connections)"
            self._send(channel, header, _Reply(FrameStatus.BUSY, codec.encode_message(message)))
        except (TransportError, ProtocolError, TimeoutError):
            pass
        finally:
            channel.close()
            with self._lock:
                self._connections.discard(connection)

    def _answer(self, connection: _Connection, frame: memoryview) -> None:
        try:
            header, payload = codec.decode_frame(frame)
        except ProtocolError as error:
            # Not a frame of ours at all: said, so that nobody has to guess, and closed.
            self._send(connection.channel, Header(0, 0, 0, 0), _bad_frame(str(error)))
            raise
        try:
            reply = self._reply(connection, header, payload)
        except ProtocolError as error:
            reply = _bad_frame(str(error))
        except Exception as error:
            # A bug of ours. The peer is told, its session is void, and the worker lives for the others.
            logger.exception("%s: operation %s failed", connection.channel.lane, header.operation)
            with self._drafting:
                self._drop_session(connection)
            reply = _refusal(FrameStatus.INTERNAL, f"the worker failed: {type(error).__name__}: {error}")
        self._send(connection.channel, header, reply)

    def _send(self, channel: Channel, request: Header, reply: _Reply) -> None:
        header = Header(
            operation=request.operation,
            session=request.session,
            sequence=request.sequence,
            payload_bytes=len(reply.payload),
            flags=HeaderFlag.REPLY,
            status=reply.status,
        )
        channel.send([codec.encode_frame(header, reply.payload)], Deadline.after(SEND_TIMEOUT_S))

    def _reply(self, connection: _Connection, header: Header, payload: memoryview) -> _Reply:
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
            case Operation.BYE:
                return self._session_work(connection, header, lambda: self._bye(connection))
            case unknown:
                raise ProtocolError(f"operation {unknown}, which is not one of ours")

    def _step(self, connection: _Connection, header: Header, payload: memoryview) -> _Reply:
        if header.session != connection.session_id:
            return _no_session(header)
        step = codec.decode_step(payload, self._info.row_bytes)
        n_rows = len(step.rows) // self._info.row_bytes
        if n_rows > self._max_rows:
            raise ProtocolError(f"STEP of {n_rows} rows, at most {self._max_rows} (the worker's --max-rows)")
        if int(step.flags) & _SAMPLED:
            raise ProtocolError("STEP with sampled drafts, which this worker did not grant")
        with self._drafting:
            session = connection.session
            if session is None:
                return _no_session(header)
            reply = self._draft(session, step, n_rows)
        return _Reply(FrameStatus.OK, codec.encode_step_reply(reply))

    def _session_work(self, connection: _Connection, header: Header, work: Callable[[], _Reply]) -> _Reply:
        with self._drafting:
            if connection.session is None or header.session != connection.session_id:
                return _no_session(header)
            return work()

    def _hello(self, connection: _Connection, header: Header, hello: Hello) -> _Reply:
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

    def _draft(self, session: Session, step: Step, n_rows: int) -> StepReply:
        started = time.perf_counter_ns()
        plan = session.plan(step)
        result = None
        if plan.batch is not None:
            try:
                result = self._drafter.draft(plan.batch)
            except Exception as error:
                self._note_failure(error)
        worker_us = (time.perf_counter_ns() - started) // 1000
        self._stats.add("steps")
        self._stats.add("rows", n_rows)
        self._stats.record_us("step_us", worker_us)
        return session.complete(plan, result, worker_us)

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
