"""How many blocks of a mixture of experts are near a tie of a router, and how two arithmetics compare with and without them.

`python bench/routing_margins.py`, from the root of the repository, a few minutes. Tiny random DeepSeek stages with the published
numbers of experts: a worker's drafter in bf16, a local one in float32, the same rows, each block judged as shadow judges it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.fakes.tiny_deepseek import write_tiny_deepseek  # noqa: E402

from farspark.engine.shadow import ROUTING_BOUND, JudgedChains, ShadowComparison  # noqa: E402
from farspark.worker.batch import DraftBatch, DraftEntry, Drafter  # noqa: E402
from farspark.worker.drafter import open_drafter  # noqa: E402
from farspark.worker.models.experts import Router, Routing  # noqa: E402

ROWS = 8
CASES = {
    "V4.1, 3 of 8 experts": ("v41", {}),
    "V4.1, 3 of 128 (published)": ("v41", {"dspark_n_routed_experts": 128, "dspark_num_experts_per_tok": 3}),
    "V4, 6 of 256 (published)": ("v4", {"n_routed_experts": 256, "num_experts_per_tok": 6}),
}


class NotedRouter:
    """Keeps what every router has chosen since it was last asked."""

    def __init__(self) -> None:
        self._chosen: list[list[list[int]]] = []
        choose = Router.__call__

        def noting(router: Router, x: torch.Tensor) -> Routing:
            routing = choose(router, x)
            self._chosen.append(routing.experts.sort(dim=-1).values.tolist())
            return routing

        Router.__call__ = noting  # type: ignore[assignment, method-assign]

    def take(self) -> list[list[list[int]]]:
        """By stage, token and rank."""
        chosen, self._chosen = self._chosen, []
        return chosen


@dataclass
class Found:
    comparison: ShadowComparison
    margins_of_others: list[float]  # of blocks in which the two drafters chose different experts
    differences_of_same: list[float]  # of confidences, in the blocks in which they chose the same


def compare(worker: Drafter, local: Drafter, blocks: int, routers: NotedRouter, *, has_router: bool) -> Found:
    n, width = worker.info.num_drafts, worker.info.row_bytes // 2
    found = Found(ShadowComparison(n), [], [])
    for seed in range(blocks):
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randn(ROWS, width, generator=generator).bfloat16()
        anchor = int(torch.randint(worker.info.vocab_size - 1, (1,), generator=generator))
        packed = memoryview(rows.view(torch.uint8).numpy().tobytes())
        entry = DraftEntry(0, True, 0, ROWS, 0, anchor, True, n)
        routers.take()
        remote = worker.draft(DraftBatch([entry], packed, want_margins=True))
        theirs = routers.take()
        ours = local.draft(DraftBatch([entry], packed))
        chose_the_same = routers.take() == theirs
        assert remote.judge is not None
        judged = remote.judge([0], ours.tokens)
        assert judged.routing is not None
        if chose_the_same:
            apart = np.abs(np.array(judged.confidences) - np.array(ours.confidences))
            found.differences_of_same.append(float(apart.max()))
        else:
            found.margins_of_others.append(float(judged.routing[0]))
        best, gaps, peaks, confidences = (np.array(plane)[None] for plane in judged[:4])
        chains = JudgedChains(best, gaps, peaks, confidences, np.array(judged.routing) if has_router else None)
        found.comparison.observe(
            np.array(ours.tokens)[None],
            np.array(remote.tokens)[None],
            judge=lambda _, chains=chains: chains,  # type: ignore[misc]
            has_router=has_router,
            local_confidences=np.array(ours.confidences)[None],
            remote_confidences=np.array(remote.confidences)[None],
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=300, help="of each case; default %(default)s")
    options = parser.parse_args()
    torch.set_num_threads(1)
    routers = NotedRouter()
    for name, (version, changes) in CASES.items():
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory() as place:
            folder = write_tiny_deepseek(Path(place) / "target", version, **changes)
            worker, local = (open_drafter(folder, dtype=dtype, slots=1) for dtype in ("bfloat16", "float32"))
        print(f"{name}: {options.blocks} blocks")
        for has_router in (False, True):
            both = compare(worker, local, options.blocks, routers, has_router=has_router)
            found = both.comparison.snapshot()
            print(
                f"  {'near ties kept out' if has_router else 'all blocks':18}  {found['steps']:5} drafts, {found['ties']} ties, "
                f"{found['diverged']} diverged, {found['far_diverged']} far, largest gap {found['largest_gap_ulps']} steps, "
                f"confidences differ by {found['largest_confidence_difference']:.3f} at most"
            )
        margins = "  ".join(f"{bound}: {count}" for bound, count in found["routing_margins"].items())
        print(f"  {found['routing_ambiguous']} near a tie; smallest margins {margins}")
        others, same = np.array(both.margins_of_others), np.array(both.differences_of_same)
        print(
            f"  other experts in {len(others)} blocks, {int((others >= ROUTING_BOUND).sum())} of them not near a tie; the same "
            f"in {len(same)}, whose confidences differ by {np.median(same):.3f} in the middle, {same.max():.3f} at most"
        )
        print(f"  {time.monotonic() - began_s:.0f} s", flush=True)


if __name__ == "__main__":
    main()
