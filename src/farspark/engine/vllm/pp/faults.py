"""What is wrong between the stages, and how a process that finds it ends.

vLLM's executor forwards an exception only from the rank whose output it awaits. Any other rank's is logged, and the rank's
peers then wait for a message that never comes. A process that is gone, on the other hand, is noticed at once: by its peers,
whose connections close, and by the executor's monitor, which ends the engine.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import traceback
from typing import NoReturn

from farspark.errors import FarsparkError

# Not one of Python's, the shell's or a signal's, so that the monitor's line says what happened.
EXIT_STATUS = 83
_ending = threading.Lock()


class TokenTransportError(FarsparkError):
    """The stages disagree about a step, or a stage is gone. Not to be survived: tokens would go to the wrong requests."""


def end_process(error: BaseException, *, where: str, history: str) -> NoReturn:
    """Write what happened, all of it, then leave. No clean-up: it would wait for the peers that this is about. The first of two
    threads that come here is the one that is heard."""
    _ending.acquire()
    report = "".join(traceback.format_exception(error)) if not isinstance(error, TokenTransportError) else ""
    lines = [
        f"farspark: {where}: {error or type(error).__name__}; process {os.getpid()} ends with status {EXIT_STATUS}",
        *report.splitlines(),
        *history.splitlines(),
    ]
    try:
        for one in (sys.stdout, sys.stderr, *logging.getLogger("vllm").handlers, *logging.getLogger().handlers):
            with contextlib.suppress(Exception):  # there is none, or nobody reads it any more
                one.flush()
        os.write(2, ("\n".join(lines) + "\n").encode(errors="replace"))
    finally:
        os._exit(EXIT_STATUS)
