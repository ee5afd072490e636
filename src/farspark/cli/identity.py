"""`farspark identity`: the digests by which engine and worker know that they mean the same drafter."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from farspark.cli.progress import shown_progress


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "identity",
        help="print the drafter identity and the Markov identity of a checkpoint",
        description="Read every weight of a drafter checkpoint and print its identities. The engine is given the first as "
        "VLLM_DSPARK_REMOTE_IDENTITY; a worker that serves anything else is refused.",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="folder with config.json and the weights")
    parser.add_argument(
        "--target",
        metavar="DIR",
        type=Path,
        help="folder of the target model, for the embedding and the head where the drafter shares them; give it here if "
        "and only if the worker is given it",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    # Imports torch.
    from farspark.worker.checkpoint import identities

    with shown_progress() as progress:
        found = identities(options.checkpoint, options.target, progress)
    identity, markov = found.identity.hex(), found.markov_identity.hex()
    if options.json:
        print(json.dumps({"identity": identity, "markov_identity": markov}))
    else:
        print(f"identity          {identity}")
        print(f"markov identity   {markov}{'' if any(found.markov_identity) else '  (no Markov head)'}")
    return 0
