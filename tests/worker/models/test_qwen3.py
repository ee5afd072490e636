from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fakes.plain_dspark import PlainDSpark
from tests.fakes.tiny_checkpoint import write_tiny
from torch import Tensor

from farspark.worker.checkpoint import LoadedCheckpoint, Qwen3DSparkConfig, load_checkpoint
from farspark.worker.models.base import Arithmetic
from farspark.worker.models.heads import VanillaMarkov
from farspark.worker.models.qwen3 import Qwen3DSpark

FLOAT32 = Arithmetic(torch.float32, torch.float32)


def load(folder: Path) -> LoadedCheckpoint:
    return load_checkpoint(folder, place=lambda name, tensor, as_stored: tensor.float())


def build(loaded: LoadedCheckpoint, vocab_size: int = 97) -> Qwen3DSpark:
    assert isinstance(loaded.config, Qwen3DSparkConfig)
    return Qwen3DSpark(loaded.config, loaded.tensors, vocab_size, FLOAT32)


def make(folder: Path) -> Qwen3DSpark:
    return build(load(folder))


def test_the_weights_are_taken_so_that_none_is_held_twice(tmp_path: Path) -> None:
    loaded = load(write_tiny(tmp_path))
    build(loaded)
    assert not loaded.tensors


def test_a_weight_without_a_use_is_an_error(tmp_path: Path) -> None:
    loaded = load(write_tiny(tmp_path))
    loaded.tensors["extra.weight"] = torch.zeros(1)
    with pytest.raises(AssertionError, match=r"extra\.weight"):
        build(loaded)


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True}, {"is_neox_style": False}], ids=str)
@pytest.mark.parametrize("first", [0, 4000])
def test_ROPE_CFG_context_is_projected_layer_by_layer_at_absolute_positions(
    tmp_path: Path, changes: dict[str, Any], first: int
) -> None:
    folder = write_tiny(tmp_path, **changes)
    model, plain = make(folder), PlainDSpark.read(folder)
    rows, positions = torch.randn(6, 96), torch.arange(first, first + 6)
    projected = model.project_context(rows, positions)
    assert projected.shape == (2, 6, 2, 2, 8)
    combined = plain.norm(rows @ plain.weights["fc.weight"].T, "hidden_norm")
    for layer in range(2):
        name = f"layers.{layer}.self_attn."
        keys = plain.norm(plain.heads(plain.project(combined, name + "k_proj")), name + "k_norm")
        torch.testing.assert_close(projected[layer, :, 0], plain.rope(keys, positions), rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(projected[layer, :, 1], plain.heads(plain.project(combined, name + "v_proj")))


class NoContext:
    """A `BlockContext` without context: a block sees itself alone."""

    fused = None
    visible = 0
    bias = torch.zeros(2, 1, 1, 2)

    def gather(self, layer: int, own: Tensor) -> Tensor:
        return own


def test_the_hidden_state_is_normed_and_the_logits_are_scaled(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, logit_scale=0.5)
    model, plain = make(folder), PlainDSpark.read(folder)
    hidden = model.block(torch.tensor([[5, 96], [7, 96]]), torch.tensor([[3, 4], [9, 10]]), NoContext())
    assert hidden.shape == (2, 2, 32)
    norm = plain.weights["norm.weight"]
    torch.testing.assert_close((hidden / norm).square().mean(-1), torch.ones(2, 2), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(model.base_logits(hidden), 0.5 * hidden @ plain.weights["lm_head.weight"].T)


def test_logits_stop_at_the_true_vocabulary(tmp_path: Path) -> None:
    model = build(load(write_tiny(tmp_path)), vocab_size=90)
    assert model.base_logits(torch.randn(3, 32)).shape == (3, 90)
    assert isinstance(model.markov, VanillaMarkov)
    assert model.markov.bias(torch.randn(3, 6)).shape == (3, 90)
