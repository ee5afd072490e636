"""A worker's server on a thread of the test's own process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from farspark.worker.server import Server


@contextmanager
def served(server: Server) -> Iterator[Server]:
    """Until the block ends, however it does. No thread of it may be left then."""
    with server:
        thread = threading.Thread(target=server.serve)
        thread.start()
        try:
            yield server
        finally:
            server.stop()
            thread.join(10)
            assert not thread.is_alive()
