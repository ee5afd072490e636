"""What the engine feels of a bad network and a bad worker: every drill of `tests/net`, with the engine's default times and
a steady step, two network namespaces on one machine. Prints a table for docs/measurements.md.

The processes of a drill run at real-time priority where that is allowed, so that other work on the machine is not measured.
Needs root and /dev/net/tun; about 4 minutes. Run from the root of the repository: `python bench/net_drills.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.net.drills import BOUND_MS, DRILLS, Drill, Outcome, run  # noqa: E402
from tests.net.engine import EngineSettings  # noqa: E402
from tests.net.hosts import why_not  # noqa: E402
from tests.net.lab import PORT, Lab  # noqa: E402

COLUMNS = (
    "drill",
    "rounds",
    "failed",
    "longest round, ms",
    "less time without a core",
    "longest send, ms",
    "guarded, us",
    "of a step",
    "probes",
    "rounds to recover",
    "wrong drafts",
)


def outcomes(drills: Sequence[Drill], settings: EngineSettings, folder: Path) -> Iterator[Outcome]:
    """Run the drills one after the other. Those that can share an engine do, unless one ends it."""
    with ExitStack() as stack:
        shared: dict[int, Lab] = {}
        for drill in drills:
            lab = shared.get(drill.hidden_size) if drill.heals else None
            if lab is None:
                lab = stack.enter_context(Lab(dataclasses.replace(settings, hidden_size=drill.hidden_size), folder))
                lab.start_worker()
                lab.start_engine()
                if drill.heals:
                    # One at a time: an idle engine is not idle for the machine.
                    for other in shared.values():
                        other.close()
                    shared = {drill.hidden_size: lab}
            yield run(drill, lab, timeout_s=120.0)


def row(outcome: Outcome, step_ms: float) -> str:
    guarded = outcome.guarded > 0
    cells = (
        outcome.name,
        f"{outcome.rounds:,}",
        f"{outcome.failed:,}",
        f"{outcome.longest_ms:.1f}",
        f"{outcome.longest_own_ms:.1f}",
        f"{outcome.longest_send_ms:.1f}",
        f"{outcome.guarded_us:.0f}" if guarded else "–",
        f"{outcome.guarded_share(step_ms):.2%}" if guarded else "–",
        str(len(outcome.cooldowns)),
        "–" if outcome.recovery_rounds is None else str(outcome.recovery_rounds),
        str(outcome.wrong),
    )
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, default=20.0, help="the engine's step (default: %(default)g)")
    parser.add_argument("--only", metavar="TEXT", help="drills whose name has this in it")
    parser.add_argument(
        "--hold-rounds", metavar="N", type=int, help="let a fault that lasts so many rounds last N, at least"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the engine's program (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write everything that was measured")
    options = parser.parse_args()
    if reason := why_not():
        print(f"no drills on this machine: {reason}", file=sys.stderr)
        return 2
    drills = [drill for drill in DRILLS if not options.only or options.only in drill.name]
    if not drills:
        print(
            f"no drill has {options.only!r} in its name: {', '.join(drill.name for drill in DRILLS)}", file=sys.stderr
        )
        return 2
    if options.hold_rounds is not None:
        drills = [
            dataclasses.replace(drill, hold_rounds=max(drill.hold_rounds, options.hold_rounds)) for drill in drills
        ]
    settings = EngineSettings(endpoints=f"tcp://10.77.1.2:{PORT}", pace_ms=options.step_ms, seed=options.seed)
    print(
        f"Python {platform.python_version()}, Linux {platform.release()}, {os.cpu_count()} CPUs, load "
        f"{os.getloadavg()[0]:.1f}; step {settings.pace_ms:g} ms, time-out {settings.timeout_ms:g} ms, trip "
        f"{settings.trip}, cool-down {settings.cooldown} rounds, connect time-out {settings.connect_timeout_ms:g} ms, "
        f"back-off {settings.backoff_ms:g} to {settings.backoff_max_ms:g} ms\n"
    )
    print(f"| {' | '.join(COLUMNS)} |\n| --- |{' ---: |' * (len(COLUMNS) - 1)}", flush=True)
    done = []
    with tempfile.TemporaryDirectory() as folder:
        for outcome in outcomes(drills, settings, Path(folder)):
            print(row(outcome, options.step_ms), flush=True)
            done.append(outcome)
    if options.json is not None:
        names = [field.name for field in dataclasses.fields(Outcome)]
        options.json.write_text(json.dumps([{name: getattr(one, name) for name in names} for one in done], indent=2))
    longest_ms = max(outcome.longest_own_ms for outcome in done)
    wrong = sum(outcome.wrong for outcome in done)
    print(f"\nlongest stall {longest_ms:.1f} ms, bound {settings.timeout_ms + BOUND_MS:g} ms; wrong drafts {wrong}")
    return 1 if wrong or longest_ms > settings.timeout_ms + BOUND_MS else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
