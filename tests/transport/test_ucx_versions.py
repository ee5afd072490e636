"""Both ends on different versions of UCX. Needs a second one beside the system's: the extra [ucx] brings it, or TEST_UCX_DIRS
names directories of libraries, joined by ':'.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import pytest
from tests.transport.contract import LIMIT, soon
from tests.transport.ucx import needs_ucx

from farspark.native.build import UCXCHANNEL
from farspark.native.loader import open_build
from farspark.native.ucx import UcxLibrary, _candidates, load_ucx
from farspark.transport import connect, exchange, listen, parse_endpoint, ucx

pytestmark = needs_ucx

SERVE = """
import sys
from farspark.clock import Deadline
from farspark.errors import FarsparkError
from farspark.native.ucx import load_ucx
from farspark.transport import listen
listener = listen(sys.argv[1], max_frame_bytes=1 << 20)
print(load_ucx().version, listener.endpoint, flush=True)
while True:
    channel = listener.accept(Deadline.never())
    try:
        while True:
            channel.send([b"to ", channel.recv(Deadline.after(20))], Deadline.after(20))
    except FarsparkError:
        channel.close()
"""

ASK = """
import sys
from farspark.clock import Deadline
from farspark.transport import connect, exchange
channel = connect(sys.argv[1], Deadline.after(20), max_frame_bytes=1 << 20)
for size in (0, 64, 75_000, 600_000):
    assert bytes(exchange(channel, [b"head", bytes(size)], Deadline.after(20))) == b"to head" + bytes(size)
print(channel.lane)
channel.close()
"""


def directories() -> list[Path]:
    """Where the libraries are of every UCX that is to be had here."""
    wheels = [path.parent for path in _candidates(None) if isinstance(path, Path)]
    named = [Path(one) for one in os.environ.get("TEST_UCX_DIRS", "").split(":") if one]
    return list(dict.fromkeys(one.resolve() for one in (load_ucx().path.parent, *wheels, *named)))


@contextmanager
def serving(directory: Path) -> Iterator[tuple[str, str]]:
    """The version that listens, and where."""
    command = [sys.executable, "-c", SERVE, f"o1tcp://127.0.0.1:0?ucx_dir={directory}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            version, endpoint = process.stdout.readline().split()
            yield version, endpoint
        finally:
            process.kill()


def test_ends_on_different_versions_of_ucx_understand_each_other() -> None:
    known = directories()
    if len(known) < 2:
        pytest.skip(f"one UCX only, {load_ucx()}; see TEST_UCX_DIRS")
    wrong = []
    for listening, connecting in product(known, known):
        with serving(listening) as (version, endpoint):
            ask = [sys.executable, "-c", ASK, f"{endpoint}?ucx_dir={connecting}"]
            done = subprocess.run(ask, capture_output=True, text=True, timeout=60)
        print(f"{version} serves {connecting}: {(done.stdout or done.stderr).strip()[-200:]}")
        if done.returncode or not done.stdout.startswith("ucx tcp/lo 127.0.0.1:"):
            wrong.append(f"{version} serves {connecting}: {done.stderr[-500:]}")
    assert not wrong


def test_what_ends_tell_of_their_devices_does_not_depend_on_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with listen("o1tcp://127.0.0.1:0", max_frame_bytes=LIMIT) as listener:  # type: ignore[attr-defined]
        monkeypatch.setenv("UCX_CM_USE_ALL_DEVICES", "y")
        ours = connect(listener.endpoint, soon())
        theirs = listener.accept(soon())
        theirs.send([b"understood"], soon())
        assert bytes(exchange(ours, [b"hello"], soon())) == b"understood"
        for channel in (ours, theirs):
            channel.close()


@pytest.mark.parametrize(
    ("modules", "is_limited"),
    [(("ib", "rdmacm"), True), ((), True), (("ib",), False)],
    ids=["rdma", "tcp", "no rdmacm"],
)
def test_devices_are_kept_where_rdma_can_only_be_connected_over_tcp(
    modules: tuple[str, ...], is_limited: bool, tmp_path: Path
) -> None:
    (tmp_path / "ucx").mkdir()
    for module in modules:
        (tmp_path / "ucx" / f"libuct_{module}.so.0").touch()
    build = open_build(UCXCHANNEL)
    library = UcxLibrary(build.calls, build, tmp_path / "libucp.so.0", "1.18.0")
    names = [name for name, _ in ucx._settings(library, parse_endpoint("ucx://10.0.0.1:1"), 2)]
    assert ("?CM_USE_ALL_DEVICES" in names) is is_limited
