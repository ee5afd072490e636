"""The Gemma 4 block against transformers' own decoder layers, rotary positions and embedding.

transformers has no drafter; its layers are given a cache that puts the context's keys and values in front of the block's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.fakes.tiny_checkpoint import gemma4_config, write_gemma4
from torch import Tensor

from farspark.worker.checkpoint import Gemma4DSparkConfig, load_checkpoint
from farspark.worker.models.base import Arithmetic
from farspark.worker.models.gemma4 import Gemma4DSpark

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]  # importing transformers alone takes seconds

POSITIONS = torch.arange(4000, 4005).unsqueeze(0)
TOKENS = torch.tensor([[7, 96, 96, 96, 96]])


class Context:
    """Both a `BlockContext` with everything visible and the cache that transformers' layers ask for theirs."""

    fused = None

    def __init__(self, entries: Tensor) -> None:
        self._entries = entries  # [layers, K, 2, kv heads, d]
        self.visible = entries.shape[1]
        self.bias = torch.zeros(1, 1, 1, self.visible + 5)

    def gather(self, layer: int, own: Tensor) -> Tensor:
        return torch.cat((self._entries[layer].unsqueeze(0), own), dim=1)

    def update(self, keys: Tensor, values: Tensor, layer: int, *rest: Any) -> tuple[Tensor, Tensor]:
        """keys and values [1, kv heads, Q, d]"""
        held = self._entries[layer].permute(1, 2, 0, 3).unsqueeze(1)  # [2, 1, kv heads, K, d]
        return torch.cat((held[0], keys), dim=2), torch.cat((held[1], values), dim=2)


@pytest.mark.parametrize("changes", [{}, {"attention_k_eq_v": False}, {"attention_bias": True}], ids=str)
def test_ROPE_CFG_block_and_context_equal_transformers_layers_at_position_4000(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    gemma4 = pytest.importorskip("transformers.models.gemma4.modeling_gemma4")
    text_config = pytest.importorskip("transformers.models.gemma4.configuration_gemma4").Gemma4TextConfig
    folder = write_gemma4(tmp_path, **changes)
    loaded = load_checkpoint(folder, place=lambda name, tensor, as_stored: tensor.float())
    assert isinstance(loaded.config, Gemma4DSparkConfig)
    ours = Gemma4DSpark(loaded.config, loaded.tensors, 97, Arithmetic(torch.float32, torch.float32))

    config = text_config(**{key: value for key, value in gemma4_config(**changes).items() if key != "architectures"})
    config._attn_implementation = "eager"
    weights = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    layers = [gemma4.Gemma4TextDecoderLayer(config, index).eval() for index in range(2)]
    for index, layer in enumerate(layers):
        prefix = f"layers.{index}."
        own = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
        layer.load_state_dict(own)
    rotary = gemma4.Gemma4TextRotaryEmbedding(config)
    with torch.no_grad():
        rows, positions = torch.randn(9, 96), torch.arange(3991, 4000)
        entries = ours.project_context(rows, positions)
        combined = rows @ weights["fc.weight"].T
        combined = torch.nn.functional.rms_norm(combined, (32,), weights["hidden_norm.weight"], 1e-6)
        cos, sin = rotary(combined, positions.unsqueeze(0), "full_attention")
        for index, layer in enumerate(layers):
            attention = layer.self_attn
            keys = attention.k_proj(combined).view(1, 9, -1, 16)
            values = keys if attention.v_proj is None else attention.v_proj(combined).view(1, 9, -1, 16)
            keys = gemma4.apply_rotary_pos_emb(attention.k_norm(keys), cos, sin, unsqueeze_dim=2)
            torch.testing.assert_close(entries[index, :, 0], keys[0], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(entries[index, :, 1], attention.v_norm(values)[0], rtol=1e-4, atol=1e-4)

        context = Context(entries)
        embed = gemma4.Gemma4TextScaledWordEmbedding(97, 32, 0, embed_scale=32**0.5)
        embed.load_state_dict({"weight": weights["embed_tokens.weight"]})
        hidden = embed(TOKENS)
        turned = rotary(hidden, POSITIONS, "full_attention")
        for layer in layers:
            hidden = layer(
                hidden, position_embeddings=turned, attention_mask=None, past_key_values=context, shared_kv_states={}
            )
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        hidden = torch.nn.functional.rms_norm(hidden, (32,), weights["norm.weight"], 1e-6)
        torch.testing.assert_close(ours.block(TOKENS, POSITIONS, context), hidden, rtol=1e-4, atol=1e-4)
