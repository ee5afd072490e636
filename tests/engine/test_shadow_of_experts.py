"""Shadow with mixtures of experts, end to end: the real engine side in shadow over a real worker with tiny DeepSeek stages.

What a router near a tie may do is planted: two experts with the same scores, and a local drafter that takes the other one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.fakes.plain_deepseek import PlainDeepseek
from tests.fakes.recorded_engine import CONTEXT, SHAPE, LocalDrafter, N, RecordedEngine, serving
from tests.fakes.tiny_checkpoint import write_tiny
from tests.fakes.tiny_deepseek import text_of, tiny_config, tiny_tensors, write_deepseek
from torch import Tensor

from farspark.check.judge import parity
from farspark.cli.main import main
from farspark.worker.batch import DraftBatch, DraftEntry, Drafter, DrafterInfo, DraftResult, Judged, Judging, Progress
from farspark.worker.drafter import open_drafter

pytestmark = pytest.mark.usefixtures("one_thread")

Tensors = dict[str, Tensor]
STAGES = 3
ROUTING_BOUND = 2**-7


class Local:
    """The local drafter: what the engine's own would be, without an engine."""

    def __init__(self, folder: Path) -> None:
        self._drafter = open_drafter(folder, dtype="float32", slots=1, context=CONTEXT)

    def draft(self, rows: Tensor, first_pos: int, anchor: int, *, context: int) -> Drafted:
        seen = rows[-context:].bfloat16().contiguous()
        first = first_pos + len(rows) - len(seen)
        entry = DraftEntry(0, True, first, len(seen), first, anchor, True, N)
        result = self._drafter.draft(DraftBatch([entry], memoryview(seen.view(torch.uint8).numpy().tobytes())))
        return Drafted([int(one) for one in result.tokens], [float(one) for one in result.confidences])


class Drafted(NamedTuple):
    tokens: list[int]
    confidences: list[float]


class Checkpoint:
    """A tiny target of one version, in files under `at`, once for each list of changes."""

    def __init__(self, version: str, at: Path) -> None:
        self.at = at
        self.config = tiny_config(version, sliding_window=CONTEXT)
        text = text_of(self.config)
        self.per_token = text["dspark_num_experts_per_tok" if version == "v41" else "num_experts_per_tok"]
        self.shape = replace(SHAPE, hidden_size=text["hidden_size"], ring=CONTEXT)

    def tensors(self, *changes: Callable[[Tensors], None]) -> Tensors:
        tensors = tiny_tensors(self.config)
        for change in changes:
            change(tensors)
        return tensors

    def folder(self, *changes: Callable[[Tensors], None]) -> Path:
        path = self.at / "-".join(["target", *(change.__name__ for change in changes)])
        return path if path.exists() else write_deepseek(path, self.config, self.tensors(*changes))

    def local(self, *changes: Callable[[Tensors], None]) -> Local:
        return Local(self.folder(*changes))

    # Changes.

    def far_apart(self, tensors: Tensors) -> None:
        """The first experts are chosen, always, and by much."""
        for stage in range(STAGES):
            bias = tensors[f"mtp.{stage}.ffn.gate.bias"]
            bias.copy_(-2.0 * torch.arange(len(bias)))

    def tied(self, tensors: Tensors) -> None:
        """The last chosen expert and the first not chosen one have the same scores, always."""
        self.far_apart(tensors)
        last = self.per_token - 1
        for stage in range(STAGES):
            gate = f"mtp.{stage}.ffn.gate."
            for name in ("weight", "bias"):
                tensors[gate + name][last + 1] = tensors[gate + name][last]

    def tipped(self, tensors: Tensors) -> None:
        """What a rounding may do to a tie: the last chosen expert is a little above the first not chosen one."""
        for stage in range(STAGES):
            tensors[f"mtp.{stage}.ffn.gate.bias"][self.per_token - 1] += 1e-4

    def tipped_over(self, tensors: Tensors) -> None:
        """The other way round."""
        for stage in range(STAGES):
            tensors[f"mtp.{stage}.ffn.gate.bias"][self.per_token] += 1e-4

    def swapped(self, tensors: Tensors) -> None:
        """The last chosen expert is the first not chosen one, with its weights."""
        a, b = (f".experts.{self.per_token - 1 + index}." for index in (0, 1))
        for name in [name for name in tensors if a in name]:
            other = name.replace(a, b)
            tensors[name], tensors[other] = tensors[other], tensors[name]


@pytest.fixture(scope="module", params=["v41", pytest.param("v4", marks=pytest.mark.slow)])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(request.param, tmp_path_factory.mktemp(request.param))


def shadowed(
    checkpoint: Checkpoint,
    folder: Path,
    local: LocalDrafter,
    made: Callable[[Drafter], Drafter] = lambda drafter: drafter,
) -> dict[str, Any]:
    """What shadow says of a worker that serves what is `made` of the drafter in `folder`."""
    rounds = folder / "rounds"
    rounds.unlink(missing_ok=True)
    with (
        serving(folder, made=made) as server,
        RecordedEngine(folder, server.endpoint, rounds, shape=checkpoint.shape, local=local) as engine,
    ):
        engine.serve()
        snapshot = engine.drafter.snapshot()
    assert snapshot["counters"].get("judge_failures", 0) == 0
    found: dict[str, Any] = snapshot["shadow"]
    assert found["blocks"] == 22
    assert found["unjudged"] == 0
    return found


def failing(found: dict[str, Any]) -> set[str]:
    """What `farspark check shadow` fails by, of numbers that are too few for it."""
    many = found | {"blocks": found["blocks"] + 1000}
    return {finding.what for finding in parity({"shadow": many}) if finding.verdict.value == "FAIL"}


class Unsaid:
    """A worker's drafter that keeps its router to itself, and so is judged as a dense one."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter

    @property
    def info(self) -> DrafterInfo:
        return replace(self._drafter.info, has_router=False)

    def warm_up(self, progress: Progress) -> None:
        self._drafter.warm_up(progress)

    def draft(self, batch: DraftBatch) -> DraftResult:
        result = self._drafter.draft(batch)
        judging = result.judge
        return result if judging is None else result._replace(judge=_unsaid(judging))


def _unsaid(judging: Judging) -> Judging:
    def judge(entries: Any, tokens: memoryview) -> Judged:
        return judging(entries, tokens)._replace(routing=None)

    return judge


def test_a_random_drafter_passes_and_as_many_blocks_are_kept_out_as_the_formulas_say(tmp_path: Path) -> None:
    """The local drafter is the formulas, which sum in another order."""
    checkpoint, smallest = Checkpoint("v41", tmp_path), []

    class Noting(PlainDeepseek):
        def draft(self, *args: Any, **options: Any) -> Any:
            drafted = super().draft(*args, **options)
            smallest.append(min(self.margins))
            return drafted

    found = shadowed(checkpoint, checkpoint.folder(), Noting(checkpoint.config, checkpoint.tensors()))
    assert found["has_router"] is True
    assert (found["full_block_agree_rate"], found["diverged"], found["passes"]) == (1.0, 0, True)
    assert 0 < found["routing_ambiguous"] < 22
    assert found["steps"] == N * (22 - found["routing_ambiguous"])
    assert sum(found["routing_margins"].values()) == 22
    # Some of the local drafts have nothing to compare with.
    assert found["routing_ambiguous"] <= sum(one < ROUTING_BOUND for one in smallest)
    assert found["largest_confidence_difference"] < 1e-3
    assert found["bounds"]["confidence_difference"] == 0.03


def test_blocks_at_a_tie_of_the_router_are_kept_out_whatever_the_other_side_chose(checkpoint: Checkpoint) -> None:
    folder = checkpoint.folder(checkpoint.tied)
    agreed = set()
    for other in (checkpoint.tipped, checkpoint.tipped_over):
        found = shadowed(checkpoint, folder, checkpoint.local(checkpoint.tied, other))
        assert (found["routing_ambiguous"], found["steps"], found["passes"]) == (22, 0, None)
        assert found["largest_confidence_difference"] is None
        agreed.add(found["full_block_agree_rate"] > 0.9)
    assert agreed == {True, False}, "one of the two is the worker's own way out"


def test_without_what_the_worker_says_of_its_router_a_tie_fails_shadow_without_a_fault(checkpoint: Checkpoint) -> None:
    folder = checkpoint.folder(checkpoint.tied)
    both = [
        shadowed(checkpoint, folder, checkpoint.local(checkpoint.tied, other), Unsaid)
        for other in (checkpoint.tipped, checkpoint.tipped_over)
    ]
    wrong = min(both, key=lambda found: float(found["full_block_agree_rate"]))
    assert {found["passes"] for found in both} == {True, False}
    assert wrong["has_router"] is False
    assert failing(wrong) >= {"equal or a near tie", "drafts far off", "confidences"}


def test_a_wrong_expert_that_was_chosen_by_much_fails_shadow(checkpoint: Checkpoint) -> None:
    local = checkpoint.local(checkpoint.far_apart)
    found = shadowed(checkpoint, checkpoint.folder(checkpoint.far_apart, checkpoint.swapped), local)
    assert (found["has_router"], found["routing_ambiguous"], found["passes"]) == (True, 0, False)
    assert failing(found) >= {"equal or a near tie", "drafts far off", "confidences"}
    found = shadowed(checkpoint, checkpoint.folder(checkpoint.far_apart), local)
    assert (found["routing_ambiguous"], found["diverged"], found["passes"]) == (0, 0, True)
    assert failing(found) == set()


def test_a_dense_drafter_is_held_to_a_hundredth_and_nothing_of_it_is_kept_out(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "dense")
    with serving(folder) as server, RecordedEngine(folder, server.endpoint, tmp_path / "rounds") as engine:
        engine.serve()
        found = engine.drafter.snapshot()["shadow"]
    assert (found["has_router"], found["routing_ambiguous"], found["routing_margins"]) == (False, 0, {})
    assert found["bounds"] == {"equal_or_tie_rate": 0.995, "confidence_difference": 0.01}
    assert found["passes"] is True


def test_replay_keeps_blocks_at_a_tie_out_and_says_so(
    checkpoint: Checkpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, tied = checkpoint.folder(), checkpoint.folder(checkpoint.tied)
    recorded = shadowed(checkpoint, folder, checkpoint.local())
    with serving(folder) as server:
        assert main(["replay", str(folder / "rounds"), str(server.endpoint), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["shadow"]["routing_ambiguous"] == recorded["routing_ambiguous"] > 0
        assert main(["replay", str(folder / "rounds"), str(server.endpoint)]) == 0
        out = capsys.readouterr().out
        assert f"  routing ties    {recorded['routing_ambiguous']} blocks kept out: a margin below 0.0078125" in out
        assert "  routing margins " in out
    shadowed(checkpoint, tied, checkpoint.local(checkpoint.tied, checkpoint.tipped_over))
    with serving(tied) as server:
        assert main(["replay", str(tied / "rounds"), str(server.endpoint)]) == 2
        assert "22 blocks, and in each of them a router was near a tie" in capsys.readouterr().err
