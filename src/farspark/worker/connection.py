"""One peer of the worker, as its threads share it."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from farspark.transport.base import Channel
from farspark.wire.auth import WorkerSide
from farspark.worker.session import Session


@dataclass(eq=False, slots=True)
class Connection:
    """From the moment it is accepted until its thread ends. That thread alone receives and sends."""

    channel: Channel  # closed by any thread
    number: int  # in the order of acceptance
    proof: WorkerSide  # its thread's; others look whether it is satisfied
    # Of the server, before the thread begins.
    is_served: bool = True  # False: it is told BUSY and closed
    thread: threading.Thread | None = None
    # Of its thread; others look, so as not to end it in the middle of a round.
    is_busy: bool = False  # a frame is in hand
    heard_s: float = 0.0  # when the newest frame began to come, and then when it was whole
    # What HELLO began: written with the sessions' lock held, see `answers`; by its thread, but for the end of the session,
    # which may come from any. `session` comes last and goes first, so whoever sees one sees what belongs to it.
    session: Session | None = None  # used with that lock held
    session_id: int = 0  # 0: no session
    engine: str = ""
    instance: int = 0  # the engine process that said HELLO here; 0: no session, or it did not say
    samples: bool = False  # sampled drafts were granted
    says_routing: bool = False  # routing margins in judgements were granted
