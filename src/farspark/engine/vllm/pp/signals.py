"""SIGUSR1: where every thread of every process of the engine is, and what the transport did last."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from collections.abc import Callable

from farspark.engine.vllm.pp.history import StepHistory

SIGNAL = signal.SIGUSR1


def stacks_on_signal() -> None:
    """Have the process write all Python stacks to stderr. Works while its threads hang in C, also with the GIL held."""
    faulthandler.register(SIGNAL, file=2, all_threads=True)


def print_on_signal(history: StepHistory) -> None:
    """Have the process also write `history`, from a thread, because the main thread may hang in a collective.

    Python runs a signal's handler on the main thread only, but writes the signal's number to the wake-up descriptor at once.
    A process that has given that descriptor to somebody else keeps it, and prints when its main thread comes back.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    taken = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if taken == -1:
        _chain(lambda *_: None)
        threading.Thread(target=_watch, args=(reader, history), name="farspark-pp-history", daemon=True).start()
    else:
        signal.set_wakeup_fd(taken)
        os.close(reader)
        os.close(writer)
        _chain(lambda *_: _write(history))


def _chain(handler: Callable[..., None]) -> None:
    """The stacks first, then Python's own handling of the signal. The order of the calls matters: each replaces the other's."""
    faulthandler.unregister(SIGNAL)
    signal.signal(SIGNAL, handler)
    faulthandler.register(SIGNAL, file=2, all_threads=True, chain=True)


def _watch(reader: int, history: StepHistory) -> None:
    while numbers := os.read(reader, 64):
        if SIGNAL in numbers:
            _write(history)


def _write(history: StepHistory) -> None:
    os.write(2, f"{history}\n".encode())
