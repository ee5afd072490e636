"""How a process of the engine ends, and what it says when it is asked: real processes, real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from farspark.engine.vllm.pp.faults import EXIT_STATUS

END = """
import logging, sys
from farspark.engine.vllm.pp.faults import TokenTransportError, end_process
sys.stdout.write("not yet flushed")
try:
    {raises}
except Exception as error:
    end_process(error, where="PP stage 0 of 2", history="step 6 receive\\nstep 7 receive: MISMATCH")
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_a_mismatch_ends_the_process_with_its_own_status_and_one_line_that_says_what_and_where() -> None:
    done = run(END.format(raises="raise TokenTransportError('step 7: sequence expected 7, got 6')"))
    assert done.returncode == EXIT_STATUS
    assert done.stdout == "not yet flushed"
    first, *rest = done.stderr.splitlines()
    assert first.startswith("farspark: PP stage 0 of 2: step 7: sequence expected 7, got 6; process ")
    assert first.endswith(f"ends with status {EXIT_STATUS}")
    assert rest == ["step 6 receive", "step 7 receive: MISMATCH"]


def test_another_error_comes_with_its_traceback() -> None:
    done = run(END.format(raises="[][1]"))
    assert done.returncode == EXIT_STATUS
    assert "IndexError: list index out of range" in done.stderr
    assert "step 7 receive: MISMATCH" in done.stderr


@pytest.mark.parametrize(
    "output",
    ["os.close(reader)", "os.close(writer); os.close(1)", "sys.stdout = None", "os.close(2)"],
    ids=["nobody reads", "closed", "none", "no stderr"],
)
def test_a_process_whose_output_nobody_takes_ends_all_the_same(output: str) -> None:
    program = f"import os, sys; reader, writer = os.pipe(); os.dup2(writer, 1)\n{END}\n".replace(
        "try:", f"{output}\ntry:", 1
    )
    done = run(program.format(raises="raise TokenTransportError('planted')"))
    assert done.returncode == EXIT_STATUS
    assert "close(2)" in output or "step 7 receive: MISMATCH" in done.stderr


SIGNALLED = """
import os, signal, sys, time
from farspark.engine.vllm.pp.header import Header
from farspark.engine.vllm.pp.history import StepHistory
from farspark.engine.vllm.pp.signals import print_on_signal, stacks_on_signal
{before}
stacks_on_signal()
history = StepHistory("PP stage 1 of 2")
history.add("receive", Header(41, 7, 3), "", "posted")
{prints}
def hanging_here():
    print("ready", flush=True)
    {hangs}
hanging_here()
print("alive", flush=True)
"""
# In C, holding no bytecode boundary: a handler of Python's own would not run before it is over.
IN_C = "import threading; lock = threading.Lock(); lock.acquire(); lock.acquire(timeout=3)"


def signalled(before: str = "", prints: str = "print_on_signal(history)", hangs: str = IN_C) -> tuple[str, str, float]:
    """Standard output and error of a process that got the signal while it hung, and the seconds until it had answered."""
    program = SIGNALLED.format(before=before, prints=prints, hangs=hangs)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as file:
            process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=file, text=True)
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            time.sleep(0.1)
            began = time.monotonic()
            process.send_signal(signal.SIGUSR1)
            # The main thread's outermost frame comes last. A process that the signal has ended says nothing more.
            while "in <module>" not in log.read_text() and process.poll() is None:
                time.sleep(0.01)
            answered = time.monotonic() - began
            out, _ = process.communicate(timeout=60)
        finally:
            process.kill()
        assert process.returncode == 0
        return out, log.read_text(), answered


def test_the_signal_prints_stacks_and_history_while_the_main_thread_hangs_and_the_process_lives_on() -> None:
    out, log, answered = signalled()
    assert answered < 2  # long before the hang is over
    assert out == "alive\n"
    assert "in hanging_here" in log
    assert "step 41 receive mask 00000007 num_reqs 3: posted" in log


def test_a_process_without_a_stage_prints_its_stacks_alone() -> None:
    out, log, _ = signalled(prints="")
    assert out == "alive\n"
    assert "in hanging_here" in log
    assert "step 41" not in log


def test_a_wakeup_descriptor_of_somebody_else_stays_theirs() -> None:
    before = "r, w = os.pipe(); os.set_blocking(w, False); signal.set_wakeup_fd(w)"
    out, log, _ = signalled(before, hangs=f"{IN_C}; assert signal.set_wakeup_fd(-1) == w")
    assert out == "alive\n"
    assert "in hanging_here" in log
    assert "step 41 receive" in log  # when the main thread came back


@pytest.mark.parametrize("name", ["VLLM_DSPARK_PP_TRANSPORT", "VLLM_WEDGE_AB_DSPARK_EAGER"])
def test_switched_off_the_plugin_imports_nothing_of_it(name: str) -> None:
    program = (
        "import sys; from farspark.engine.vllm.plugin import register; register()\n"
        "print([module for module in sys.modules if '.pp' in module or module in ('torch', 'vllm')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {name: "0"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "[]"
