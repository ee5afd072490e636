"""What a real engine sends are the planes that the drafter was trained on: Hugging Face's own forward pass says which."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.vllm import tiny_pair
from tests.vllm.processes import run_engine

from farspark.engine.capture import CapturedRound, CaptureReader

pytest.importorskip("vllm")

N = 5
PROMPTS = [[7 * i % 500 for i in range(40)], [3, 1, 4, 1, 5]]


@pytest.fixture(scope="module")
def captured(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[tiny_pair.TinyPair, dict[str, Any], list[CapturedRound]]:
    """An engine without a worker: the rows of a round do not depend on one."""
    folder = tmp_path_factory.mktemp("taps")
    pair = tiny_pair.make_tiny_pair(folder, 3, dtype=torch.float32)
    settings = {
        "VLLM_DSPARK_REMOTE": "tcp://127.0.0.1:9",
        "VLLM_DSPARK_REMOTE_POLICY": "capacity",
        "VLLM_DSPARK_REMOTE_IDENTITY": "0" * 64,
        "VLLM_DSPARK_REMOTE_CAPTURE": str(folder / "rounds.cap"),
        "VLLM_DSPARK_REMOTE_STATS_FILE": str(folder / "stats.json"),
    }
    job = {
        "target": str(pair.target),
        "drafter": str(pair.drafter),
        "num_drafts": N,
        "engine": {"dtype": "float32", "max_num_batched_tokens": 24},  # so the longer prompt comes in chunks
        "phases": [{"name": "only", "prompts": PROMPTS, "max_tokens": 12}],
    }
    result = run_engine(job, settings)
    with CaptureReader(folder / "rounds.cap") as capture:
        return pair, result, list(capture.rounds())


def planes(pair: tiny_pair.TinyPair, tokens: list[int]) -> torch.Tensor:
    """[positions, taps, hidden]: the outputs of the tapped layers, before any final norm."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32).eval()
    with torch.no_grad():
        states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    # The first of the states is the embedding, so a layer's output is one further on.
    return torch.stack([states[tap + 1][0] for tap in tiny_pair.TAPS], dim=1)


def test_AUX_INDEX_every_row_is_the_output_of_the_tapped_layers_at_its_position(
    captured: tuple[tiny_pair.TinyPair, dict[str, Any], list[CapturedRound]],
) -> None:
    pair, result, rounds = captured
    texts = [prompt + result["phases"]["only"]["tokens"][str(index)] for index, prompt in enumerate(PROMPTS)]
    expected = [planes(pair, text) for text in texts]
    seen: list[set[int]] = [set() for _ in PROMPTS]
    owners: dict[int, int] = {}
    for one in rounds:
        rows = torch.frombuffer(bytearray(one.rows), dtype=torch.bfloat16).view(
            -1, len(tiny_pair.TAPS), tiny_pair.HIDDEN
        )
        at = 0
        for entry in one.entries:
            first, count = int(entry["start_pos"]), int(entry["valid_rows"])
            # Whose it is, by the length of the first chunk: the short prompt is there as a whole.
            index = owners.setdefault(int(entry["owner"]), 1 if first == 0 and count == len(PROMPTS[1]) else 0)
            for row, position in zip(rows[at : at + count], range(first, first + count), strict=True):
                torch.testing.assert_close(row.float(), expected[index][position], rtol=2**-7, atol=2**-9)
                seen[index].add(position)
            at += count
            assert texts[index][first + count] == int(entry["anchor_token"]), "the anchor is the token without a row"
    for index, prompt in enumerate(PROMPTS):
        assert seen[index] == set(range(len(texts[index]) - 1)), f"rows of {prompt[:3]}..."


def test_AUX_INDEX_the_planes_differ_by_far_more_than_the_tolerance(
    captured: tuple[tiny_pair.TinyPair, dict[str, Any], list[CapturedRound]],
) -> None:
    """Otherwise the test above could not tell one layer from the next."""
    pair, _, _ = captured
    found = planes(pair, PROMPTS[0])
    for first, second in ((0, 1), (1, 2)):
        assert ((found[:, first] - found[:, second]).abs().amax(dim=-1) > 2**-4).all()
