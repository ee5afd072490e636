"""Where our log lines go inside vLLM's processes. Imports nothing of vLLM."""

from __future__ import annotations

import logging


def log_where_vllm_logs() -> None:
    """vLLM configures only its own logger, some time after plugins were loaded; ours speaks through the same handlers."""
    ours, theirs = logging.getLogger("farspark"), logging.getLogger("vllm")
    if theirs.handlers and not ours.handlers:
        for handler in theirs.handlers:
            ours.addHandler(handler)
        ours.setLevel(theirs.getEffectiveLevel())
        ours.propagate = False
