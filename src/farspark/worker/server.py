"""The worker's socket side: who may connect, for how long, and the thread that serves each connection.

Threads. `serve` accepts, and ends sessions whose lease has run out. Every connection has a thread that receives, and hands
each frame to `answers`, which judges, drafts and sends on that thread.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from dataclasses import asdict
from types import TracebackType
from typing import Any, ClassVar, Final

from farspark.clock import Clock, Deadline
from farspark.errors import ProtocolError, Refused, TransportError
from farspark.transport import listen
from farspark.transport.base import Channel, Listener
from farspark.wire import layout
from farspark.wire.auth import WorkerSide
from farspark.worker.answers import HEAD_BYTES, SEND_TIMEOUT_S, Answers
from farspark.worker.batch import Drafter
from farspark.worker.config import WorkerConfig
from farspark.worker.connection import Connection
from farspark.worker.tally import Tally

logger = logging.getLogger(__name__)

# How often `serve` looks for leases that have run out, so they last at most a quarter longer than they should.
LOOKS_PER_LEASE: Final = 4
# And without leases: only a fallback, `stop` wakes it.
_ACCEPT_WAIT_S = 3600.0
# An engine that has said nothing for so long has nothing to draft, and loses no round when its connection is closed.
IDLE_AFTER_S: Final = 1.0
_DRAIN_LOOK_S: Final = 0.05

_NEVER = Deadline.never()


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
        self._info = drafter.info
        self._config = config
        self._clock = clock
        self._started_s = clock()
        self._tally = Tally(self._info.row_bytes)
        self._answers = Answers(drafter, config, self._tally, self.snapshot)
        # Guards the three below, and that nobody is admitted any more by who drains or stops.
        self._lock = threading.Lock()
        self._connections: set[Connection] = set()
        self._is_stopping = False
        self._accepted = 0
        self._gone = threading.Condition(self._lock)  # a connection has ended
        self._ending = threading.Event()  # set with _is_stopping, for those who wait for nothing else
        self._listener: Listener = listen(config.listen, max_frame_bytes=layout.MAX_GREETING_BYTES)

    def __repr__(self) -> str:
        return f"<Server {self.endpoint} {len(self._connections)} connections, {self._answers!r}>"

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
        return self._answers.slots_in_use

    @property
    def sessions(self) -> int:
        """Engines that are connected."""
        with self._lock:
            return sum(one.session is not None for one in self._connections)

    @property
    def max_rows(self) -> int:
        """Rows per STEP that this worker takes."""
        return self._answers.max_rows

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
                if not (self._is_stopping or self._answers.is_draining):
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
            ended = self._answers.end_session(connection)
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
            self._answers.drain()
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
            accepted = self._accepted
        now = self._clock()
        return {
            "worker": self._config.name,
            "endpoint": self.endpoint,
            "lanes": self.lanes,
            "uptime_s": round(now - self._started_s, 3),
            "draining": self._answers.is_draining,
            "drafter": info,
            "max_rows": self.max_rows,
            "slots": {"total": self._info.slots, "in_use": self.slots_in_use},
            "connections": {
                "open": len(connections),
                "unproven": sum(one.is_served and not one.proof.is_satisfied for one in connections),
                "accepted": accepted,
                "limit": self._config.max_connections,
                "auth_failures": self._tally.auth_failures,
            },
            **self._tally.snapshot(connections, now),
        }

    # One thread per connection from here on.

    def _admit(self, channel: Channel) -> None:
        proof = WorkerSide(self._config.token, identity=self._info.identity, markov_identity=self._info.markov_identity)
        connection = Connection(channel, self._accepted, proof)
        with self._lock:
            if self._is_stopping or self._answers.is_draining:
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
            try:
                connection.thread.start()
            except RuntimeError as error:
                channel.close()
                logger.error(
                    "%s: closed: %s beside the %d of this process; raise the limit of tasks (pids.max of the container, "
                    "TasksMax of the service, ulimit -u) or lower --max-connections %d",
                    channel.lane,
                    error,
                    threading.active_count(),
                    self._config.max_connections,
                )
                return
            self._connections.add(connection)

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

    def _serve_one(self, connection: Connection) -> None:
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
            ended = self._answers.end_session(connection)
            self._forget(connection)
        logger.info("%s: gone: %s%s", channel.lane, why, f"; {ended}" if ended else "")

    def _forget(self, connection: Connection) -> None:
        with self._gone:
            self._connections.discard(connection)
            self._gone.notify_all()

    def _await_proof(self, connection: Connection) -> None:
        """Return once the peer may ask for something; at once without a token. Raises TimeoutError if it takes too long."""
        deadline = Deadline.after(self.PROVE_WITHIN_S)
        while not connection.proof.is_satisfied:
            # Not only the wait: a peer that asks for challenge after challenge has no longer.
            deadline.check("waiting for the peer's proof")
            self._answers.answer(connection, connection.channel.recv(deadline), None)

    def _answer_all(self, connection: Connection) -> None:
        """Until the connection ends, or the server."""
        channel, answers = connection.channel, self._answers
        while True:
            frame, arrived = channel.recv_head(HEAD_BYTES, _NEVER)
            # The rows of a long prefill may be on their way for longer than an idle engine has.
            connection.heard_s = self._clock()
            begun = answers.begin(connection, frame, arrived)
            channel.recv(_NEVER)
            # `stop` first says so and then looks who is busy; here it is the other way round, so one sees the other.
            connection.is_busy = True
            connection.heard_s = self._clock()
            if self._is_stopping:
                return
            answers.answer(connection, frame, begun)
            # The transport may use the memory again.
            del frame, begun
            connection.is_busy = False
            if self._is_stopping:
                return

    def _turn_away(self, connection: Connection, why: str) -> None:
        """Answer one frame with BUSY: the peer should know why it is closed."""
        channel = connection.channel
        logger.warning("%s: turned away: %s", channel.lane, why)
        try:
            self._answers.turn_away(channel, channel.recv(Deadline.after(SEND_TIMEOUT_S)), why)
        except (TransportError, ProtocolError, TimeoutError):
            pass
        finally:
            channel.close()
            self._forget(connection)
