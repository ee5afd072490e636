from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = """
import signal, sys, time
from pathlib import Path
from farspark.demo.process import Child, left_in_order
with left_in_order(), Child("a child", ["sh", "-c", "echo $$; exec sleep 60"], Path(sys.argv[1]), {}) as child:
    while not child.log.read_text().endswith("\\n"):
        time.sleep(0.01)
    print("started", flush=True)
    signal.pause()
"""


def demo(log: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", DEMO, str(log)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_children_end_where_their_parent_is_told_to_stop(number: signal.Signals, tmp_path: Path) -> None:
    """They have a session of their own, so neither a closed terminal nor a `kill` of the parent reaches them."""
    process = demo(tmp_path / "log")
    child = int((tmp_path / "log").read_text())
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == 128 + number
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
