"""Rank 0's connection to the worker.

Two threads. The engine thread takes the connection that is ready, exchanges one STEP under a deadline, and never connects.
The connector thread connects, has both sides prove themselves where there is a token, says HELLO, and hands over a finished
`Connection`; it sleeps while one is in use. They share one reference, `_connection`, guarded by `_handover`.
"""

from __future__ import annotations

import enum
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from farspark.clock import Clock, Deadline
from farspark.engine.config import TOKEN_FILE
from farspark.errors import FarsparkError, ProtocolError, Refused, TransportError
from farspark.stats import Stats
from farspark.transport import Channel, Endpoint, Piece, exchange
from farspark.transport import connect as connect_transport
from farspark.wire import codec
from farspark.wire.auth import EngineSide, authenticate, token_missing
from farspark.wire.layout import MAX_REPLY_BYTES, NONCE_BYTES, VERSION, FrameStatus, Operation, StepFlag
from farspark.wire.messages import Entry, Header, Hello, Judge, Judgement, StepReply, Welcome

logger = logging.getLogger(__name__)

Connect = Callable[[Endpoint, Deadline], Channel]
Ask = Callable[[Operation, bytes], memoryview]
"""Sends a request and returns the payload of its reply."""


def _connect(endpoint: Endpoint, deadline: Deadline) -> Channel:
    return connect_transport(endpoint, deadline, max_frame_bytes=MAX_REPLY_BYTES)


# How long `close` waits for the connector thread; longer than any connect timeout that makes sense is not needed, the
# thread is a daemon.
_JOIN_S = 5.0


class ClientState(enum.Enum):
    CONNECTING = "connecting"
    READY = "ready"
    DISABLED = "disabled"  # engine and worker can never agree; a restart is needed
    CLOSED = "closed"


@dataclass(slots=True)
class Connection:
    """One session. Used by the engine thread only, once handed over."""

    epoch: int  # grows with every connection; what was sent under another epoch is void
    endpoint: Endpoint
    channel: Channel
    session: int
    welcome: Welcome
    sequence: int  # of the newest frame; HELLO's at first


class Client:
    """`start`, `wait_ready` and `close` belong to the engine thread, as do `connection`, `step` and `drop`.

    With a `token` only a worker that holds it too is talked to. `token_setting` is what a person would set it with.
    """

    def __init__(
        self,
        hello: Hello,
        endpoints: Sequence[Endpoint],
        *,
        connect_timeout_s: float,
        backoff_s: float,
        backoff_max_s: float,
        stats: Stats,
        token: bytes | None = None,
        token_setting: str = TOKEN_FILE,
        connect: Connect = _connect,
        clock: Clock = time.monotonic,
    ) -> None:
        self._hello = replace(hello, instance=secrets.randbits(64) or 1)
        self._endpoints = tuple(endpoints)
        self._connect_timeout_s = connect_timeout_s
        self._backoff_s = backoff_s
        self._backoff_max_s = backoff_max_s
        self._stats = stats
        self._token = token
        self._token_setting = token_setting
        self._connect = connect
        self._clock = clock
        self._handover = threading.Condition()
        self._connection: Connection | None = None
        self._state = ClientState.CONNECTING
        self._epoch = 0
        self._why: str | None = None  # the newest failure, as a sentence
        self._unfit: dict[Endpoint, str] = {}  # endpoints that can never serve this engine, and why; the connector's
        self._thread = threading.Thread(target=self._run, name="farspark-connector", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def state(self) -> ClientState:
        return self._state

    @property
    def last_failure(self) -> str | None:
        """The newest reason for not being connected, kept for the stats."""
        return self._why

    def wait_ready(self, deadline: Deadline) -> bool:
        """Wait until a connection is ready; False at the deadline or once none can ever be."""
        with self._handover:
            while self._state is ClientState.CONNECTING and not deadline.has_passed():
                self._handover.wait(min(deadline.left_s(), 0.1))
            return self._state is ClientState.READY

    def connection(self) -> Connection | None:
        """The connection to use for this round, or None: never waits."""
        return self._connection

    def step(
        self,
        connection: Connection,
        step_id: int,
        entries: Sequence[Entry],
        rows: Sequence[Piece],
        flags: StepFlag,
        deadline: Deadline,
    ) -> StepReply:
        """One STEP and its reply. Replies to earlier steps are dropped and counted.

        Raises TimeoutError (the connection stays unless a part of the frame is out), TransportError, ProtocolError where
        the frames themselves are wrong (the connection is of no more use), and Refused.
        """
        connection.sequence += 1
        rows_bytes = sum([memoryview(piece).nbytes for piece in rows])
        head = codec.encode_step_head(connection.session, connection.sequence, step_id, entries, rows_bytes, flags)
        self._stats.add("bytes_sent", len(head) + rows_bytes)
        session, sequence = connection.session, connection.sequence
        frame = exchange(connection.channel, [head, *rows], deadline)
        while True:
            reply = codec.decode_answer(frame, session, sequence)
            self._stats.add("bytes_received", len(frame))
            if reply is not None:
                return reply
            payload = self._payload(frame, Operation.STEP, session, sequence)
            if payload is not None:
                return codec.decode_step_reply(payload)
            frame = connection.channel.recv(deadline)

    def judge(self, connection: Connection, judge: Judge, deadline: Deadline) -> Judgement:
        """What the worker's drafter thinks of other drafts for the newest STEP. Raises as `step` does."""
        connection.sequence += 1
        header = Header(Operation.JUDGE, connection.session, connection.sequence, 0)
        frame = codec.encode_frame(header, codec.encode_judge(judge))
        connection.channel.send([frame], deadline)
        self._stats.add("bytes_sent", len(frame))
        payload = self._reply(connection.channel, Operation.JUDGE, connection.session, connection.sequence, deadline)
        return codec.decode_judgement(payload)

    def drop(self, connection: Connection, why: str) -> None:
        """Give the connection up and have another made. Idempotent."""
        connection.channel.close()
        with self._handover:
            if self._connection is not connection:
                return
            self._connection = None
            self._why = why
            if self._state is ClientState.READY:
                self._state = ClientState.CONNECTING
                self._stats.add("disconnects")
                logger.warning("farspark: connection to %s given up: %s", connection.endpoint, why)
            self._handover.notify_all()

    def disable(self, why: str) -> None:
        """No more rounds in this engine run. Only the first reason is said."""
        with self._handover:
            if self._state in (ClientState.DISABLED, ClientState.CLOSED):
                return
            logger.error("farspark: remote drafter disabled for this engine run: %s", why)
            connection, self._connection = self._connection, None
            self._state = ClientState.DISABLED
            self._why = why
            self._handover.notify_all()
        if connection is not None:
            connection.channel.close()

    def close(self) -> None:
        """Idempotent. Says BYE if that costs nothing, then ends the connector thread."""
        with self._handover:
            connection, self._connection = self._connection, None
            self._state = ClientState.CLOSED
            self._handover.notify_all()
        if connection is not None:
            bye = Header(Operation.BYE, connection.session, connection.sequence + 1, 0)
            try:
                connection.channel.send([codec.encode_frame(bye)], Deadline.after(0.05, self._clock))
            except (TransportError, TimeoutError):
                pass  # the worker frees the session when the connection ends
            connection.channel.close()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)
            if self._thread.is_alive():
                logger.warning("farspark: the connector thread did not stop within %g s", _JOIN_S)

    def __repr__(self) -> str:
        connection = self._connection
        where = f" {connection.endpoint} epoch {connection.epoch}" if connection else ""
        return f"<Client {self._state.value}{where}>"

    # The connector thread from here on.

    def _run(self) -> None:
        try:
            self._keep_connected()
        except Exception:
            # A thread that dies leaves nobody to tell: without this the client would stay "connecting" for ever.
            logger.exception("farspark: the connector thread failed")
            self.disable("internal error in the connector thread, see the log")

    def _keep_connected(self) -> None:
        delay_s = self._backoff_s
        while True:
            with self._handover:
                while self._state is ClientState.READY:
                    self._handover.wait()
                if self._state is not ClientState.CONNECTING:
                    return
            if self._try_endpoints():
                delay_s = self._backoff_s
                continue
            with self._handover:
                if self._state is ClientState.CONNECTING:
                    self._handover.wait(delay_s)
            delay_s = min(2 * delay_s, self._backoff_max_s)

    def _try_endpoints(self) -> bool:
        """Connect to the first endpoint that takes us. True also once there is nothing left to try for."""
        for endpoint in self._endpoints:
            if self._state is not ClientState.CONNECTING:
                return True
            if endpoint in self._unfit:
                continue
            deadline = Deadline.after(self._connect_timeout_s, self._clock)
            try:
                connection = self._greet(endpoint, deadline)
            except Refused as refused:
                self._stats.add("connect_failures")
                if _is_final(refused.status):
                    self._strike_off(endpoint, f"{endpoint}: {_status_name(refused.status)}: {refused}")
                else:
                    self._fail(endpoint, f"refused with {_status_name(refused.status)}: {refused}")
            except (FarsparkError, TimeoutError) as error:
                self._stats.add("connect_failures")
                self._fail(endpoint, str(error) or type(error).__name__)
            else:
                self._publish(connection)
                return True
        return self._state is not ClientState.CONNECTING

    def _strike_off(self, endpoint: Endpoint, why: str) -> None:
        """It can never serve this engine; the remote is disabled once that is true of all."""
        self._unfit[endpoint] = why
        if all(one in self._unfit for one in self._endpoints):
            self.disable("; ".join(self._unfit.values()))
            return
        logger.error("farspark: not used any more in this engine run: %s", why)
        self._why = why

    def _fail(self, endpoint: Endpoint, why: str) -> None:
        message = f"{endpoint}: {why}"
        if message != self._why:
            logger.warning("farspark: worker not reached, %s", message)
        self._why = message

    def _publish(self, connection: Connection) -> None:
        with self._handover:
            taken = self._state is ClientState.CONNECTING
            if taken:
                self._connection = connection
                self._state = ClientState.READY
                self._why = None
                self._handover.notify_all()
        if not taken:
            connection.channel.close()
            return
        self._stats.add("hellos")
        logger.info(
            "farspark: worker ready: %s (%s), session %016x, epoch %d, lane %s",
            connection.welcome.worker,
            connection.welcome.kind,
            connection.session,
            connection.epoch,
            connection.channel.lane,
        )
        if connection.welcome.message:
            logger.warning("farspark: %s says: %s", connection.endpoint, connection.welcome.message)

    def _greet(self, endpoint: Endpoint, deadline: Deadline) -> Connection:
        channel = self._connect(endpoint, deadline)
        session = secrets.randbits(64) or 1
        sequence = 0

        def ask(operation: Operation, payload: bytes) -> memoryview:
            nonlocal sequence
            sequence += 1
            channel.send([codec.encode_frame(Header(operation, session, sequence, 0), payload)], deadline)
            return self._reply(channel, operation, session, sequence, deadline)

        try:
            welcome = self._say_hello(ask) if self._token is None else self._prove_and_say_hello(ask, self._token)
            self._check_welcome(welcome)
        except BaseException:
            channel.close()
            raise
        self._epoch += 1
        return Connection(self._epoch, endpoint, channel, session, welcome, sequence)

    def _say_hello(self, ask: Ask) -> Welcome:
        try:
            return codec.decode_welcome(ask(Operation.HELLO, codec.encode_hello(self._hello)))
        except Refused as refused:
            if refused.status == FrameStatus.AUTH and self._token is None:
                raise token_missing(str(refused), self._token_setting) from refused
            raise

    def _prove_and_say_hello(self, ask: Ask, token: bytes) -> Welcome:
        side = EngineSide(
            token,
            identity=self._hello.identity,
            markov_identity=self._hello.markov_identity,
            nonce=secrets.token_bytes(NONCE_BYTES),
            setting=self._token_setting,
        )
        authenticate(side, ask)
        welcome = self._say_hello(ask)
        side.check_welcome(welcome.identity, welcome.markov_identity)
        return welcome

    def _check_welcome(self, welcome: Welcome) -> None:
        """The worker said OK; believe it only where its own numbers agree. Raises Refused with a final status."""
        hello = self._hello
        checks: tuple[tuple[FrameStatus, bool, str, object, object], ...] = (
            (
                FrameStatus.IDENTITY,
                welcome.identity == hello.identity,
                "drafter identity",
                hello.identity,
                welcome.identity,
            ),
            (
                FrameStatus.MARKOV_IDENTITY,
                not any(hello.markov_identity) or welcome.markov_identity == hello.markov_identity,
                "Markov identity",
                hello.markov_identity,
                welcome.markov_identity,
            ),
            (FrameStatus.CONFIG, welcome.num_drafts == hello.num_drafts, "N", hello.num_drafts, welcome.num_drafts),
            (
                FrameStatus.CONFIG,
                welcome.vocab_size == hello.vocab_size,
                "vocabulary",
                hello.vocab_size,
                welcome.vocab_size,
            ),
            (FrameStatus.CONFIG, 1 <= welcome.context <= hello.context, "context", hello.context, welcome.context),
            (
                FrameStatus.CONFIG,
                welcome.max_rows >= hello.slots * (hello.num_drafts + 1),
                "rows per STEP",
                hello.slots * (hello.num_drafts + 1),
                welcome.max_rows,
            ),
        )
        for status, holds, what, ours, theirs in checks:
            if not holds:
                raise Refused(status, f"{what}: engine {_show(ours)}, worker {_show(theirs)}")

    # Both threads, each on a channel that it owns.

    def _reply(
        self, channel: Channel, operation: Operation, session: int, sequence: int, deadline: Deadline
    ) -> memoryview:
        while True:
            frame = channel.recv(deadline)
            self._stats.add("bytes_received", len(frame))
            payload = self._payload(frame, operation, session, sequence)
            if payload is not None:
                return payload

    def _payload(self, frame: memoryview, operation: Operation, session: int, sequence: int) -> memoryview | None:
        """Of the reply to that request; None for a late reply to an earlier one."""
        header, payload = codec.decode_frame(frame)
        if header.sequence < sequence and header.is_reply and header.session == session:
            self._stats.add("late_replies")
            return None
        if header.version != VERSION:
            raise Refused(FrameStatus.VERSION, f"protocol version: engine {VERSION}, worker {header.version}")
        if not header.is_reply or header.sequence != sequence or header.operation != operation:
            raise ProtocolError(
                f"expected the reply to {operation.name} {sequence}, got operation {int(header.operation)} "
                f"sequence {header.sequence}"
            )
        if header.status != FrameStatus.OK:
            raise Refused(int(header.status), codec.decode_refusal(operation, payload))
        if header.session != session:
            raise ProtocolError(f"reply of session {header.session:016x}, ours is {session:016x}")
        return payload


def _is_final(status: int) -> bool:
    return status in FrameStatus._value2member_map_ and FrameStatus(status).is_final


def _status_name(status: int) -> str:
    return FrameStatus(status).name if status in FrameStatus._value2member_map_ else f"status {status}"


def _show(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
