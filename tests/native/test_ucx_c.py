"""The shim's C tests over UCX's TCP, as they are and under the sanitizers; `make ucx-check` runs them at full length."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.native.test_c import SANITIZERS, WARNINGS
from tests.transport.ucx import needs_ucx

TEST = Path(__file__).parent / "ucx_channel_test.c"
# UCX's own code is not instrumented: what the sanitizers see is the shim, and every byte and lock that passes between the two.
# UCX's memory hooks must be off, because they take locks in threads that the thread sanitizer has not met yet.
OF_UCX = "Assertion `handler->async == async' failed"
ENVIRONMENT = {"UCX_LOG_LEVEL": "fatal", "UCX_HANDLE_ERRORS": "none", "UCX_MEM_EVENTS": "n"}

pytestmark = needs_ucx


def compiled(sources: Path, directory: Path, flags: list[str], source: Path | None = None) -> Path:
    """The test program. Skips where this machine has no headers of UCX, or the compiler no such sanitizer."""
    sample = directory / "sample.c"
    sample.write_text("#include <ucp/api/ucp.h>\nint main(void) { return ucp_get_version_string() == 0; }\n")
    command = ["cc", "-std=c11", *flags, str(sample), "-lucp", "-lucs", "-o", str(directory / "sample")]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"no headers of UCX, or no {' '.join(flags)}: {done.stderr.strip()[:200]}")
    program = directory / "ucx_channel_test"
    files = [str(TEST), str(source or sources / "ucx_channel.c")]
    subprocess.run(
        ["cc", *WARNINGS, "-D_GNU_SOURCE", *flags, f"-I{sources}", *files, "-lucp", "-lucs", "-o", str(program)],
        check=True,
    )
    return program


def run(program: Path, rounds: int = 30) -> subprocess.CompletedProcess[str]:
    done = _run(program, rounds)
    # An event that UCX has put off is dispatched by its descriptor's number, which another endpoint may have by then. UCX ends
    # the process where it sees that: a fault of its own that can be met on machines with few cores, not often.
    return _run(program, rounds) if OF_UCX in done.stderr else done


def _run(program: Path, rounds: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(program), "--rounds", str(rounds)],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_the_c_tests_pass_under(sanitizer: str, sources: Path, tmp_path: Path) -> None:
    done = run(compiled(sources, tmp_path, SANITIZERS[sanitizer]))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "30 rounds each" in done.stdout


@dataclass(frozen=True, slots=True)
class Fault:
    good: str
    bad: str
    seen_by: str = "none"


FAULTS = {
    "the_end_does_not_wait_for_the_peer": Fault("    wait_for_end(channel, deadline_ns);\n", ""),
    "nothing_bounds_what_lies_unread": Fault(
        "if (bytes > channel->max_unread_bytes - channel->unread_bytes) {", "if (false) {"
    ),
    "a_wake_is_not_looked_at": Fault(
        '    if (atomic_load(&channel->is_woken))\n        return fail(UCXCHANNEL_CLOSED, "closed");\n    /* Before',
        "    /* Before",
    ),
    "a_late_send_is_not_closed": Fault(
        "        request = ucp_ep_close_nbx(channel->endpoint, &params);\n    channel->endpoint = NULL;",
        "        request = NULL;",
    ),
    "what_is_woken_is_not_atomic": Fault(
        "    atomic_bool is_woken;\n\n    uint32_t sent;", "    bool is_woken;\n\n    uint32_t sent;", "thread"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, sources: Path, tmp_path: Path) -> None:
    fault = FAULTS[name]
    text = (sources / "ucx_channel.c").read_text()
    assert text.count(fault.good) == 1
    changed = tmp_path / "ucx_channel.c"
    text = text.replace(fault.good, fault.bad)
    if fault.seen_by == "thread":
        # A plain word, read and written as one.
        text = text.replace("atomic_load(&channel->is_woken)", "channel->is_woken")
        text = text.replace("atomic_store(&channel->is_woken, true)", "channel->is_woken = true")
        text = text.replace("atomic_init(&channel->is_woken, false);", "")
    changed.write_text(text)
    program = compiled(sources, tmp_path, [*SANITIZERS[fault.seen_by], "-Wno-error"], changed)
    try:
        done = run(program, rounds=10)
    except subprocess.TimeoutExpired:
        return  # it hangs, which is found too
    assert done.returncode != 0, done.stdout
