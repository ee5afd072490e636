"""A TCP link between two ends on this machine that can be cut without either of them hearing of it."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from types import TracebackType

_LOOK_S = 0.02


class Forwarder:
    """Passes bytes between whoever connects to `endpoint` and `target`, until `cut`: both connections then stay open, and
    silent, as they do when a cable is pulled.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._is_cut = threading.Event()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self) -> Forwarder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._is_over.set()
        self._thread.join(10)
        self._listener.close()

    def cut(self) -> None:
        self._is_cut.set()

    def _run(self) -> None:
        with contextlib.ExitStack() as open_ones:
            other: dict[socket.socket, socket.socket] = {}
            while not self._is_over.is_set():
                watched = [] if self._is_cut.is_set() else [self._listener, *other]
                ready = select.select(watched, [], [], _LOOK_S)[0]
                for sock in ready:
                    if sock is self._listener:
                        near = open_ones.enter_context(self._listener.accept()[0])
                        far = open_ones.enter_context(socket.create_connection(self._target))
                        other |= {near: far, far: near}
                    else:
                        self._pass_on(sock, other)

    def _pass_on(self, sock: socket.socket, other: dict[socket.socket, socket.socket]) -> None:
        with contextlib.suppress(OSError):
            data = sock.recv(1 << 16)
            if data:
                other[sock].sendall(data)
                return
        with contextlib.suppress(OSError):
            other[sock].shutdown(socket.SHUT_WR)
        del other[sock]
