"""Rank 0's connection to the worker.

Two threads. The engine thread takes the connection that is ready, exchanges one STEP under a deadline, and never connects.
The connector thread connects, has both sides prove themselves where there is a token, says HELLO, and hands over a finished
`Connection`. While one is in use it looks after it: it says PING where nothing else is said, and makes a connection beside
it where a preferred worker is back or this one is about to go. What it hands over then takes effect with the next round;
the round at hand ends where it began. They share the references `_connection` and `_leaving`, guarded by `_handover`.
"""

from __future__ import annotations

import enum
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from farspark.clock import Clock, Deadline
from farspark.engine.config import TOKEN_FILE
from farspark.engine.greeting import greet
from farspark.engine.route import Loss, Route
from farspark.errors import FarsparkError, ProtocolError, Refused, TransportError
from farspark.native.round_calls import load_round_calls
from farspark.stats import Stats
from farspark.transport import Channel, Endpoint, Piece, exchange
from farspark.transport import connect as connect_transport
from farspark.wire import codec
from farspark.wire.layout import (
    MAX_REPLY_BYTES,
    VERSION,
    FrameStatus,
    Operation,
    RequestStatus,
    StepFlag,
)
from farspark.wire.messages import (
    Entry,
    EntryReply,
    Header,
    Hello,
    Judge,
    Judgement,
    Sampling,
    StepReply,
    Welcome,
)

logger = logging.getLogger(__name__)

_STATUSES = tuple(RequestStatus)

Connect = Callable[[Endpoint, Deadline], Channel]


def _connect(endpoint: Endpoint, deadline: Deadline) -> Channel:
    return connect_transport(endpoint, deadline, max_frame_bytes=MAX_REPLY_BYTES)


# How long `close` waits for the connector thread; longer than any connect timeout that makes sense is not needed, the
# thread is a daemon.
_JOIN_S = 5.0
# For BYE, which nobody waits for.
_BYE_S: Final = 0.05
# For a PING and its answer: a round that comes meanwhile waits for it.
_PING_S: Final = 0.1
# So many PINGs in a row without an answer, and the connection is given up.
_SILENT_PINGS: Final = 3
# Looks at whether something was said, in a lease: one finds out that nothing was, the next is the PING, and the worker wants
# three of these.
_LOOKS_PER_LEASE: Final = 6
# When a connection that was replaced is closed where no round comes to do it. Longer than a round that began on it.
_LEAVE_AFTER_S: Final = 1.0


class ClientState(enum.Enum):
    CONNECTING = "connecting"
    READY = "ready"
    DISABLED = "disabled"  # engine and worker can never agree; a restart is needed
    CLOSED = "closed"


class Event(enum.Enum):
    CONNECTED = "connected"  # a connection is there to be handed over
    LOST = "lost"  # the one in use
    HOPELESS = "hopeless"
    CLOSE = "close"


TRANSITIONS: Final[Mapping[ClientState, Mapping[Event, ClientState]]] = {
    ClientState.CONNECTING: {
        Event.CONNECTED: ClientState.READY,
        Event.LOST: ClientState.CONNECTING,
        Event.HOPELESS: ClientState.DISABLED,
        Event.CLOSE: ClientState.CLOSED,
    },
    ClientState.READY: {
        Event.CONNECTED: ClientState.READY,  # it takes the place of the one in use
        Event.LOST: ClientState.CONNECTING,
        Event.HOPELESS: ClientState.DISABLED,
        Event.CLOSE: ClientState.CLOSED,
    },
    # A connection that was made meanwhile is closed, not taken.
    ClientState.DISABLED: {
        Event.CONNECTED: ClientState.DISABLED,
        Event.LOST: ClientState.DISABLED,
        Event.HOPELESS: ClientState.DISABLED,
        Event.CLOSE: ClientState.CLOSED,
    },
    ClientState.CLOSED: dict.fromkeys(Event, ClientState.CLOSED),
}


@dataclass(slots=True)
class Connection:
    """One session. Used by the engine thread, once handed over; by the connector between two exchanges, with `turn` held."""

    epoch: int  # grows with every connection; what was sent under another epoch is void
    endpoint: Endpoint
    channel: Channel
    session: int
    welcome: Welcome
    sequence: int  # of the newest frame; HELLO's at first
    is_draining: bool = False  # the worker is about to go
    turn: threading.Lock = field(default_factory=threading.Lock, repr=False)  # held through an exchange


@dataclass(slots=True)
class Answered:
    """A STEP that was sent over a channel which `lend` gave, and what came of it."""

    connection: Connection
    head: memoryview  # of the frame that went out, in front of its rows
    sent_s: float
    answered_s: float | None  # None: its answer is not whole yet, or not what was hoped for
    got: memoryview | int | OSError  # as `take_back` of the channel takes it
    is_taken: bool = False


Lent = tuple[int, bytearray, int, int]


class Client:
    """`start`, `wait_ready` and `close` belong to the engine thread, as do `connection`, `step`, `drop` and `give_up`.

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
        # One for each endpoint: a session ends what the same endpoint still holds of an earlier one, and leaves that of another
        # endpoint alone, should both lead to the same worker.
        self._instances = {endpoint: secrets.randbits(64) or 1 for endpoint in endpoints}
        self._hello = hello
        self._connect_timeout_s = connect_timeout_s
        self._backoff_s = backoff_s
        self._backoff_max_s = backoff_max_s
        self._stats = stats
        self._token = token
        self._token_setting = token_setting
        self._connect = connect
        self._calls = load_round_calls()
        self._clock = clock
        self.serving: Endpoint | None = None  # the newest that a round went to; the engine thread's
        self._handover = threading.Condition()  # guards what follows, up to the connector's own
        self._connection: Connection | None = None
        self._leaving: Connection | None = None  # was replaced, and no round began on its successor yet
        self._leave_at_s = math.inf
        self._state = ClientState.CONNECTING
        self._why: str | None = None  # the newest failure, as a sentence
        self._why_lost: str | None = None  # why the newest connection that served was given up
        self._route = Route(endpoints, first_s=backoff_s, longest_s=backoff_max_s)
        self._pass_at_s = -math.inf  # when the endpoints are asked again, without a connection
        self._delay_s = backoff_s  # between the next two passes
        # The connector's own.
        self._epoch = 0
        self._last: Endpoint | None = None  # of the newest connection
        self._lost: Endpoint | None = None  # whose worker may not know yet that its session is over
        self._said: dict[Endpoint, str] = {}  # the newest failure of each that is in the log
        self._watched: tuple[Connection, int] | None = None  # the connection in use, and its sequence at the last look
        self._watch_at_s = math.inf
        self._silent_pings = 0
        self._thread = threading.Thread(target=self._run, name="farspark-connector", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def state(self) -> ClientState:
        return self._state

    @property
    def last_failure(self) -> str | None:
        """The newest reason for not being connected, kept for the stats; None while one is."""
        return self._why

    @property
    def last_disconnect(self) -> str | None:
        """Why a connection that served was given up the last time, whatever came after."""
        return self._why_lost

    def wait_ready(self, deadline: Deadline) -> bool:
        """Wait until a connection is ready; False at the deadline or once none can ever be."""
        with self._handover:
            while self._state is ClientState.CONNECTING and not deadline.has_passed():
                self._handover.wait(min(deadline.left_s(), 0.1))
            return self._state is ClientState.READY

    def connection(self) -> Connection | None:
        """The connection to use for this round, or None: never waits."""
        return self._connection

    @property
    def leaving(self) -> Connection | None:
        """The one that the next round need not go to any more, while it still can."""
        return self._leaving

    def holds(self, connection: Connection) -> bool:
        """Whether a round that began on `connection` may end on it."""
        return connection is self._connection or connection is self._leaving

    def begin(self, connection: Connection) -> bool:
        """The first round over `connection` begins: the one that it took the place of is left. Whether it leads to another
        endpoint than the last one that rounds went to."""
        with self._handover:
            left = None if self._leaving is connection else self._take_leaving()
        if left is not None:
            self._say_bye(left)
        last, self.serving = self.serving, connection.endpoint
        return last is not None and last != connection.endpoint

    def endpoints(self) -> dict[str, dict[str, Any]]:
        """What the stats say of each endpoint, in order of preference."""
        with self._handover:
            return self._route.snapshot()

    def step(
        self,
        connection: Connection,
        step_id: int,
        entries: Sequence[Entry],
        rows: Sequence[Piece],
        flags: StepFlag,
        deadline: Deadline,
        sampling: Sequence[Sampling] = (),
        answered: Answered | None = None,
    ) -> StepReply:
        """One STEP and its reply, a sampled one with `sampling` [entries]. Replies to earlier steps are dropped and counted.

        Where it is `answered` already nothing is sent, and what was lent is taken back.

        Raises TimeoutError (the connection stays unless a part of the frame is out), TransportError, ProtocolError where
        the frames themselves are wrong (the connection is of no more use), and Refused.
        """
        if answered is not None:
            answered.is_taken = True
        elif not connection.turn.acquire(blocking=False):
            _await_turn(connection, deadline)
        try:
            connection.sequence += 1
            rows_bytes = sum([memoryview(piece).nbytes for piece in rows])
            session, sequence, calls = connection.session, connection.sequence, self._calls
            head = None
            if calls is not None and not sampling:
                head = calls.step_head(session, sequence, step_id, entries, rows_bytes, flags)
            if head is None:
                head = codec.encode_step_head(session, sequence, step_id, entries, rows_bytes, flags, sampling)
            self._stats.add("bytes_sent", len(head) + rows_bytes)
            if answered is None:
                frame = exchange(connection.channel, [head, *rows], deadline)
            else:
                take_back = connection.channel.take_back  # type: ignore[attr-defined]  # what is lent has it
                frame = take_back(answered.got, [head, *rows], deadline)
                if head != answered.head:
                    raise ProtocolError("a STEP was sent that is not what the books say")
            while True:
                reply: StepReply | None = None
                if calls is not None:
                    reply = calls.read_answer(frame, session, sequence, StepReply, EntryReply, _STATUSES)
                if reply is None:
                    reply = codec.decode_answer(frame, session, sequence)
                self._stats.add("bytes_received", len(frame))
                if reply is not None:
                    return reply
                # A worker that is about to go comes here with every reply, since that is a flag of the header.
                payload = self._payload(frame, Operation.STEP, session, sequence)
                if payload is not None:
                    return codec.decode_step_reply(payload)
                frame = connection.channel.recv(deadline)
        finally:
            connection.turn.release()

    def lend(self, connection: Connection) -> Lent | None:
        """`connection`'s channel, as its own `lend` has it, for one STEP with the connection's next sequence; then `step` or
        `end_loan`. None where it is not the one in use any more, or cannot be had at once.
        """
        lend = getattr(connection.channel, "lend", None)
        if lend is None or connection is not self._connection or not connection.turn.acquire(blocking=False):
            return None
        lent: Lent | None = None
        try:
            lent = lend()
        except TransportError:
            pass  # the round finds out
        finally:
            if lent is None:
                connection.turn.release()
        return lent

    def end_loan(self, connection: Connection) -> None:
        """What was lent was not used."""
        connection.channel.give_up()  # type: ignore[attr-defined]
        connection.turn.release()

    def judge(self, connection: Connection, judge: Judge, deadline: Deadline) -> Judgement:
        """What the worker's drafter thinks of other drafts for the newest STEP. Raises as `step` does."""
        if not connection.turn.acquire(blocking=False):
            _await_turn(connection, deadline)
        try:
            return codec.decode_judgement(self._ask(connection, Operation.JUDGE, codec.encode_judge(judge), deadline))
        finally:
            connection.turn.release()

    def _ask(self, connection: Connection, operation: Operation, payload: bytes, deadline: Deadline) -> memoryview:
        """A request and the payload of its reply, with the turn held. Raises as `step` does."""
        connection.sequence += 1
        frame = codec.encode_frame(Header(operation, connection.session, connection.sequence, 0), payload)
        connection.channel.send([frame], deadline)
        self._stats.add("bytes_sent", len(frame))
        return self._reply(connection.channel, operation, connection.session, connection.sequence, deadline)

    def drop(self, connection: Connection, why: str, how: Loss = Loss.FAILED) -> None:
        """Give the connection up and have another made. Idempotent."""
        connection.channel.close()
        with self._handover:
            if self._leaving is connection:
                self._take_leaving()
            if self._connection is not connection:
                return
            self._lose(why, Loss.DRAINED if connection.is_draining else how)

    def _lose(self, why: str, how: Loss) -> None:
        """The connection in use is of no more use. Requires the lock."""
        connection, self._connection = self._connection, None
        self._why = why
        was_ready = self._state is ClientState.READY
        self._move(Event.LOST)
        self._route.lost(self._clock(), how)
        self._pass_at_s, self._delay_s = -math.inf, self._backoff_s
        if was_ready and connection is not None:
            self._lost = connection.endpoint
            self._stats.add("disconnects")
            self._why_lost = f"{connection.endpoint}: {why}"
            logger.warning("farspark: connection to %s given up: %s", connection.endpoint, why)
        self._handover.notify_all()

    def _move(self, event: Event) -> ClientState:
        """Requires the lock."""
        self._state = TRANSITIONS[self._state][event]
        return self._state

    def _take_leaving(self) -> Connection | None:
        """Requires the lock."""
        left, self._leaving = self._leaving, None
        self._leave_at_s = math.inf
        return left

    def _say_bye(self, connection: Connection) -> None:
        """Says that the session ends, if that costs nothing, and closes: never in the middle of an exchange."""
        has_turn = connection.turn.acquire(timeout=_BYE_S)
        try:
            bye = Header(Operation.BYE, connection.session, connection.sequence + 1, 0)
            if has_turn:
                connection.channel.send([codec.encode_frame(bye)], Deadline.after(_BYE_S, self._clock))
        except (TransportError, TimeoutError):
            pass  # the worker frees the session when the connection ends
        finally:
            connection.channel.close()
            if has_turn:
                connection.turn.release()

    def give_up(self, connection: Connection, why: str) -> None:
        """Its worker can never serve this engine: the next of the other endpoints is used. The remote is off where none is left.
        Idempotent."""
        self._strike_off(connection.endpoint, why)
        self.drop(connection, why)

    def disable(self, why: str) -> None:
        """No more rounds in this engine run. Only the first reason is said."""
        with self._handover:
            if self._state in (ClientState.DISABLED, ClientState.CLOSED):
                return
            logger.error("farspark: remote drafter disabled for this engine run: %s", why)
            connection, self._connection = self._connection, None
            left = self._take_leaving()
            self._move(Event.HOPELESS)
            self._why = why
            self._handover.notify_all()
        for one in (left, connection):
            if one is not None:
                one.channel.close()

    def close(self) -> None:
        """Idempotent. Says BYE if that costs nothing, then ends the connector thread."""
        with self._handover:
            connection, self._connection = self._connection, None
            left = self._take_leaving()
            self._move(Event.CLOSE)
            self._handover.notify_all()
        for one in (left, connection):
            if one is not None:
                self._say_bye(one)
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
        while (duty := self._await_duty()) is not None:
            duty()

    def _await_duty(self) -> Callable[[], None] | None:
        """What to do next, once it is time; None at the end."""
        with self._handover:
            while True:
                now = self._clock()
                at_s, duty = self._next_duty(now)
                if duty is None or at_s <= now:
                    return duty
                self._handover.wait(None if at_s == math.inf else at_s - now)

    def _next_duty(self, now: float) -> tuple[float, Callable[[], None] | None]:
        """When to do what; None: there is no more to do. Requires the lock."""
        if self._state is ClientState.CONNECTING:
            return self._pass_at_s, self._try_endpoints
        connection = self._connection
        if self._state is not ClientState.READY or connection is None:
            return now, None
        if connection.is_draining:
            return now, self._make_way
        if self._watched is None or self._watched[0] is not connection:
            self._watch(connection, now)
        return min(
            (self._leave_at_s, self._leave),
            (self._route.next_look_s(), self._look_at_preferred),
            (self._watch_at_s, self._keep_alive),
            key=lambda one: one[0],
        )

    def _try_endpoints(self) -> None:
        """Connect to the first endpoint that takes us."""
        with self._handover:
            endpoints = self._route.new_pass()
        if self._take_first(endpoints, ClientState.CONNECTING, self._lost):
            return
        with self._handover:
            self._pass_at_s = self._clock() + self._delay_s
            self._delay_s = min(2 * self._delay_s, self._backoff_max_s)

    def _look_at_preferred(self) -> None:
        """See whether the first worker that is due is back: it is preferred to the one in use, so move to it."""
        with self._handover:
            due = self._route.due(self._clock())[:1]
        if not self._take_first(due, ClientState.READY):
            with self._handover:
                for endpoint in due:
                    self._route.not_reached(endpoint, self._clock())

    def _make_way(self) -> None:
        """The worker in use is about to go: move to any other, or end the session if there is none."""
        going = self._connection
        with self._handover:
            others = self._route.others
        if self._take_first(others, ClientState.READY):
            return
        with self._handover:
            if going is None or self._connection is not going:
                return
            self._lose("the worker is about to go and no other takes its place", Loss.DRAINED)
        self._say_bye(going)

    def _take_first(self, endpoints: Sequence[Endpoint], state: ClientState, lost: Endpoint | None = None) -> bool:
        """Connect to the first of them that takes us, as long as the client is in `state`. Whether one has; `lost` as of
        `_greet`."""
        for endpoint in endpoints:
            if self._state is not state:
                break
            connection = self._try(endpoint, lost)
            if connection is not None:
                self._publish(connection)
                return True
        return False

    def _leave(self) -> None:
        """No round came since the move."""
        with self._handover:
            left = self._take_leaving()
        if left is not None:
            self._say_bye(left)

    def _watch(self, connection: Connection, now: float) -> None:
        lease_s = connection.welcome.lease_s
        self._watched = connection, connection.sequence
        self._watch_at_s = now + lease_s / _LOOKS_PER_LEASE if lease_s else math.inf

    def _keep_alive(self) -> None:
        """Say PING if nothing was said since the last look."""
        assert self._watched is not None
        connection, sequence = self._watched
        if connection.sequence == sequence and connection.turn.acquire(blocking=False):
            try:
                self._ping(connection)
            finally:
                connection.turn.release()
        else:
            self._silent_pings = 0
        self._watch(connection, self._clock())

    def _ping(self, connection: Connection) -> None:
        try:
            self._ask(connection, Operation.PING, b"", Deadline.after(_PING_S, self._clock))
        except TimeoutError:
            self._silent_pings += 1
            if connection.channel.is_closed or self._silent_pings >= _SILENT_PINGS:
                self.drop(connection, f"no answer to {self._silent_pings} PINGs in a row")
        except FarsparkError as error:
            self.drop(connection, str(error))
        else:
            self._silent_pings = 0

    def _try(self, endpoint: Endpoint, lost: Endpoint | None = None) -> Connection | None:
        """A connection, or None: why is counted, and said if it is news. `lost` as of `_greet`."""
        deadline = Deadline.after(self._connect_timeout_s, self._clock)
        try:
            return self._greet(endpoint, lost, deadline)
        except Refused as refused:
            self._stats.add("connect_failures")
            if _is_final(refused.status):
                self._strike_off(endpoint, f"{endpoint}: {_status_name(refused.status)}: {refused}")
            else:
                self._fail(endpoint, f"refused with {_status_name(refused.status)}: {refused}")
        except (FarsparkError, TimeoutError) as error:
            self._stats.add("connect_failures")
            self._fail(endpoint, str(error) or type(error).__name__)
        return None

    def _strike_off(self, endpoint: Endpoint, why: str) -> None:
        """It can never serve this engine; the remote is disabled once that is true of all. Either thread."""
        with self._handover:
            has_others = self._route.strike_off(endpoint, why)
        if not has_others:
            self.disable(self._route.why_none)
            return
        logger.error("farspark: not used any more in this engine run: %s", why)
        if self._connection is None:
            self._why = why

    def _fail(self, endpoint: Endpoint, why: str) -> None:
        message = why if str(endpoint) in why else f"{endpoint}: {why}"  # a transport names it, a worker does not
        if message != self._said.get(endpoint):
            logger.warning("farspark: worker not reached, %s", message)
        self._said[endpoint] = message
        if self._connection is None:
            self._why = message

    def _publish(self, connection: Connection) -> None:
        """Hand the connection over; in place of the one in use, if there is one, from the next round on."""
        with self._handover:
            # A STEP may have found out meanwhile that this endpoint can never serve.
            is_fit = connection.endpoint in self._route.fit
            taken = is_fit and self._move(Event.CONNECTED) is ClientState.READY
            before, stale = self._connection, None
            if taken:
                self._connection = connection
                self._why = None
                if before is not None:
                    stale = self._take_leaving()
                    self._leaving, self._leave_at_s = before, self._clock() + _LEAVE_AFTER_S
                    self._route.lost(self._clock(), Loss.DRAINED if before.is_draining else Loss.SESSION)
                self._route.connected(connection.endpoint, self._clock())
                self._delay_s = self._backoff_s
                self._handover.notify_all()
        if stale is not None:
            self._say_bye(stale)
        if not taken:
            connection.channel.close()
            return
        self._lost = None
        self._silent_pings = 0
        self._said.pop(connection.endpoint, None)
        self._stats.add("hellos")
        self._say_where(connection, before)
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

    def _say_where(self, connection: Connection, before: Connection | None) -> None:
        """Count and log that the engine is served by another endpoint than it was."""
        last, self._last = self._last, connection.endpoint
        if last is None or last == connection.endpoint:
            return
        is_return = before is not None and not before.is_draining
        self._stats.add("returns" if is_return else "failovers")
        logger.info(
            "farspark: drafts come from %s now, not from %s%s",
            connection.endpoint,
            last,
            ", which is less preferred" if is_return else "",
        )

    def _note_draining(self, session: int) -> None:
        """A reply said that its worker is about to go. Once for each connection; either thread, with the turn held."""
        connection = self._connection
        if connection is None or connection.session != session or connection.is_draining:
            return
        connection.is_draining = True
        self._stats.add("drains")
        logger.info("farspark: the worker at %s is about to go, another one is looked for", connection.endpoint)
        with self._handover:
            self._handover.notify_all()

    def _greet(self, endpoint: Endpoint, lost: Endpoint | None, deadline: Deadline) -> Connection:
        """`lost`: if that leads to the same worker, the session over it ends, too."""
        channel = self._connect(endpoint, deadline)
        hello = replace(self._hello, instance=self._instances[endpoint])
        session = secrets.randbits(64) or 1
        sequence = 0

        def ask(operation: Operation, payload: bytes) -> memoryview:
            nonlocal sequence
            sequence += 1
            channel.send([codec.encode_frame(Header(operation, session, sequence, 0), payload)], deadline)
            return self._reply(channel, operation, session, sequence, deadline)

        try:
            welcome = greet(
                ask,
                hello,
                token=self._token,
                token_setting=self._token_setting,
                lost=replace(hello, instance=self._instances[lost]) if lost not in (None, endpoint) else None,
            )
        except BaseException:
            channel.close()
            raise
        self._epoch += 1
        return Connection(self._epoch, endpoint, channel, session, welcome, sequence)

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
        if header.is_reply and header.is_draining:
            self._note_draining(header.session)
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


def _await_turn(connection: Connection, deadline: Deadline) -> None:
    """Raises TimeoutError."""
    if not connection.turn.acquire(timeout=deadline.left_s()):
        raise TimeoutError("the connector thread still waits for the answer to a PING")


def _is_final(status: int) -> bool:
    return status in FrameStatus._value2member_map_ and FrameStatus(status).is_final


def _status_name(status: int) -> str:
    return FrameStatus(status).name if status in FrameStatus._value2member_map_ else f"status {status}"
