"""What a test run has started ends with it, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUN = """
import signal, subprocess, sys
from tests.vllm.processes import end_with_us
child = "import subprocess, time; subprocess.Popen(['sleep', '60']); print('started', flush=True); time.sleep(60)"
leader = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, start_new_session=True)
leader.stdout.readline()
end_with_us(leader)
print(leader.pid, flush=True)
signal.pause()
"""


def alive_in(session: int) -> list[str]:
    """The commands of a session's processes, without those that only wait to be asked for their status."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = file.read_text().rpartition(")")
        except OSError:
            continue
        state, _, _, its_session = rest.split()[:4]
        if int(its_session) == session and state != "Z":
            found.append(name)
    return found


def test_a_session_ends_with_the_test_run_that_is_killed() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    run = subprocess.Popen([sys.executable, "-c", RUN], env=environment, stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    session = int(run.stdout.readline())
    assert len(alive_in(session)) == 2
    run.send_signal(signal.SIGKILL)
    run.communicate()
    ends = time.monotonic() + 20
    while alive_in(session) and time.monotonic() < ends:
        time.sleep(0.02)
    assert alive_in(session) == []
