"""Each line that keeps the contract, broken on purpose: the C test that is named must then fail."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

TEST = Path(__file__).parent / "hostflag_test.c"
THREAD_SANITIZER = ["-O1", "-fsanitize=thread"]


@dataclass(frozen=True, slots=True)
class Fault:
    good: str
    bad: str
    arguments: str
    flags: tuple[str, ...] = ("-O2",)


FAULTS = {
    # The timed wait was meant for the round that was pending when it began; when it ends, another may be.
    "watchdog_acts_on_what_woke_it": Fault(
        "        pthread_cond_timedwait(&page->changed, &page->watching, &until);",
        """        bool is_for_round = watch.is_pending && next_look(&watch, now, page->deadline_ns) ==
                                                    add_ns(watch.since_ns, page->deadline_ns);
        if (pthread_cond_timedwait(&page->changed, &page->watching, &until) == ETIMEDOUT && is_for_round)
            preempt(page, atomic_load(&page->memory->gathered), 0);""",
        "race --race 20000",
    ),
    "watchdog_takes_the_next_round_for_the_one_before": Fault(
        "if (!watch->is_pending || watch->round != words->gathered) {",
        "if (!watch->is_pending) {",
        "judge",
    ),
    "comparison_is_not_cyclic": Fault("return (int32_t)(word - round) >= 0;", "return word >= round;", "wrap"),
    "release_may_go_backwards": Fault(
        """        if (reached(released, round))
            return HOSTFLAG_LATE;""",
        "        ;",
        "fuzz",
    ),
    "claim_is_a_load_and_a_store": Fault(
        """    } while (!atomic_compare_exchange_weak_explicit(&memory->claimed, &claim, claim_of(page->self, round),
                                                    memory_order_acq_rel, memory_order_acquire));""",
        """        sched_yield();
        atomic_store(&memory->claimed, claim_of(page->self, round));
    } while (false);""",
        "claims",
    ),
    "claim_takes_rounds_of_ages_ago": Fault(
        """        if (gathered != round)
            return reached(gathered, round) ? HOSTFLAG_LOST : HOSTFLAG_NOT_GATHERED;""",
        """        if (!reached(gathered, round))
            return HOSTFLAG_NOT_GATHERED;""",
        "fuzz --fuzz 3000000",
    ),
    "reply_is_copied_after_the_release": Fault(
        """    if (reply != NULL)
        memcpy(memory->reply, reply, memory->reply_bytes);""",
        """    if (reply != NULL) {
        status = release_round(memory, round);
        rest(1000);
        memcpy(memory->reply, reply, memory->reply_bytes);
        return status;
    }""",
        "storm",
    ),
    "release_publishes_nothing": Fault(
        """&memory->released, &released, round, memory_order_release,""",
        """&memory->released, &released, round, memory_order_relaxed,""",
        "storm",
        tuple(THREAD_SANITIZER),
    ),
    "failing_all_does_not_wait_for_the_reader": Fault(
        """    return reached(atomic_load_explicit(&memory->consumed, memory_order_acquire), last) ||
           atomic_load_explicit(&memory->gathered, memory_order_acquire) != last;""",
        "    return true;",
        "storm",
    ),
    "failing_all_does_not_wait_for_the_writer": Fault(
        "        return claimant_of(claim) != OWNER && is_proxy_dead(page); /* else it is being written */",
        "        return true;",
        "fuzz",
    ),
    "failing_all_forgets_what_was_numbered": Fault(
        "if (is_after(*far_p, gathered) && reached(*far_p, newest))",
        "if (is_after(*far_p, gathered))",
        "fuzz",
    ),
    "destroy_does_not_wait_for_calls": Fault(
        "    if (!calls_end(page, patience_ns))\n        return HOSTFLAG_BUSY;",
        "    (void)patience_ns;\n    (void)calls_end;",
        "life",
    ),
    "data_is_said_to_be_there_that_is_not": Fault(
        "        if (*result != 0)\n            return HOSTFLAG_CALL_COPY;",
        "        if (*result != 0)\n            continue;",
        "submit",
    ),
    "a_round_waits_that_was_not_gathered": Fault(
        "    if (*result != 0)\n        return HOSTFLAG_CALL_WRITE_GATHERED;",
        "    if (*result == 0)\n        *result = 0;",
        "submit",
    ),
    "the_wait_comes_first_in_the_batch": Fault(
        "{.kind = HOSTFLAG_WRITE_VALUE, .address = gathered, .value = round->round},",
        """{.kind = HOSTFLAG_WAIT_VALUE, .address = released, .value = round->round},
            {.kind = HOSTFLAG_WRITE_VALUE, .address = gathered, .value = round->round},""",
        "submit",
    ),
    "the_kernel_takes_bytes_for_words": Fault("memory->reply_bytes / 4;", "memory->reply_bytes;", "submit"),
    "a_forked_child_joins_a_thread_that_is_not_there": Fault("MADV_WIPEONFORK", "MADV_NORMAL", "life"),
}


def _run(source: str, fault: Fault, directory: Path) -> subprocess.CompletedProcess[str]:
    (directory / "hostflag.c").write_text(source)
    program = directory / "hostflag_test"
    include = [f"-I{directory}", f"-I{Path(__file__).resolve().parents[2] / 'src' / 'farspark' / 'native'}"]
    command = ["cc", "-std=c11", "-g", "-pthread", *fault.flags, *include, str(TEST), "-o", str(program)]
    subprocess.run(command, check=True)
    # Such a child never ends, for one: a test that hangs has failed as well.
    try:
        return subprocess.run([str(program), *fault.arguments.split()], capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired as error:
        return subprocess.CompletedProcess(error.args, -1, "", "not within 120 s")


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, sources: Path, tmp_path: Path) -> None:
    fault, source = FAULTS[name], (sources / "hostflag.c").read_text()
    assert source.count(fault.good) == 1
    done = _run(source.replace(fault.good, fault.bad), fault, tmp_path)
    assert done.returncode != 0, done.stdout + done.stderr
    print(done.stdout + done.stderr[-1500:])
