"""`farspark export`: a drafter that lies in its target's checkpoint, in a folder of its own."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from farspark.cli.progress import shown_progress


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "export",
        help="take the drafter out of its target's checkpoint",
        description="DeepSeek-V4 and V4.1 ship their drafter inside the target's checkpoint, as mtp.*. Copy those tensors, the "
        "embedding, the head and the config into the folder OUT, which the worker takes as it takes the target: a few "
        "gigabytes instead of hundreds. Only the index and what is copied is read. An export that was cut short goes on "
        "where it stopped when it is run again; OUT appears only once everything is there and was read back.",
    )
    parser.add_argument(
        "target", metavar="TARGET", type=Path, help="folder of the target: config.json, the index and the shards"
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to write; it should not be there yet")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    # Imports torch.
    from farspark.worker.checkpoint import identities
    from farspark.worker.checkpoint.export import export, plan_export

    plan = plan_export(options.target)
    config = plan.config
    print(f"drafter           {config.kind}, {config.stages} stages of {config.experts} experts", flush=True)
    print(f"to copy           {plan.tensor_count:,} tensors, {plan.byte_count:,} bytes", flush=True)
    with shown_progress(sys.stderr) as progress:
        is_new = export(plan, options.out, progress)
        found = identities(options.out, progress=progress)
    print(f"{'exported to' if is_new else 'there already':<17} {options.out}")
    print(f"identity          {found.identity.hex()}")
    print(f"markov identity   {found.markov_identity.hex()}")
    return 0
