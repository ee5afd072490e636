"""Whether an engine serves somebody at the moment, as its Prometheus page says."""

from __future__ import annotations

import http.client
import re
import threading
import urllib.error
import urllib.request
from typing import Final
from urllib.parse import urlsplit

from farspark.errors import ConfigError, FarsparkError

# vLLM's own port on the engine's host.
DEFAULT_URL: Final = "http://127.0.0.1:8000/metrics"
RUNNING: Final = "vllm:num_requests_running"
WAITING: Final = "vllm:num_requests_waiting"

# A page of vLLM's has some 100 KB.
_MAX_PAGE_BYTES = 16 * 1024 * 1024
_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{.*\})?\s+(?P<value>\S+)(?:\s+-?\d+)?\s*")


class NotIdle(FarsparkError):
    """The engine has requests, or nobody can say: a second session would take slots and time from its rounds."""


def requests_in_engine(page: str) -> tuple[int, int]:
    """(running, waiting), summed over the engines of the page. Raises ConfigError where the page does not say."""
    counts: dict[str, float] = {}
    for line in page.splitlines():
        sample = _SAMPLE.fullmatch(line)
        if sample is None or sample["name"] not in (RUNNING, WAITING):
            continue
        try:
            value = float(sample["value"])
        except ValueError:
            value = float("nan")
        if not 0 <= value < 1e9:
            raise ConfigError(f"{line!r}: expected a number of requests")
        counts[sample["name"]] = counts.get(sample["name"], 0) + value
    for name in (RUNNING, WAITING):
        if name not in counts:
            raise ConfigError(f"the page has no {name}; is it the /metrics of vLLM?")
    return int(counts[RUNNING]), int(counts[WAITING])


def check_idle(url: str, timeout_s: float) -> None:
    """Raises NotIdle if requests run or wait or nobody can say, ConfigError on a bad URL or another page."""
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_good = False
    if not is_good:
        raise ConfigError(f"--metrics {url!r}: expected something like {DEFAULT_URL}")
    try:
        running, waiting = requests_in_engine(_fetch(url, timeout_s))
    except ConfigError as error:
        raise ConfigError(f"--metrics {url}: {error}") from error
    if running or waiting:
        raise NotIdle(
            f"{url}: the engine has {running} requests running and {waiting} waiting; --hello opens a session of its own on "
            "the worker and would disturb them. Try again when it is idle"
        )


def _fetch(url: str, timeout_s: float) -> str:
    """The page as text. On a thread of its own: neither a look-up nor a server that drips bytes ends by `timeout` alone."""
    outcome: list[str | Exception] = []

    def fetch() -> None:
        # Without proxies: the engine is on this host or beside it.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(url, timeout=timeout_s) as response:
                outcome.append(response.read(_MAX_PAGE_BYTES).decode(errors="replace"))
        except urllib.error.HTTPError as error:
            error.close()
            outcome.append(error)
        except (OSError, http.client.HTTPException, ValueError) as error:
            outcome.append(error)

    thread = threading.Thread(target=fetch, name="farspark-metrics", daemon=True)
    thread.start()
    thread.join(timeout_s)
    hint = "give the engine's --metrics URL, or --no-metrics-check if nothing is being served"
    if not outcome:
        raise NotIdle(f"{url}: no answer within {timeout_s:g} s, so nobody can say whether the engine is idle; {hint}")
    found = outcome[0]
    if isinstance(found, Exception):
        why = getattr(found, "reason", None) or found
        raise NotIdle(f"{url}: {why}, so nobody can say whether the engine is idle; {hint}") from found
    return found
