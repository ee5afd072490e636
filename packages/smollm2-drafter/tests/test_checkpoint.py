"""The files are complete and fit one another."""

from __future__ import annotations

import json
import struct

from farspark_smollm2_drafter import path

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 576, 9, 3, 64, 49152


def header() -> dict[str, dict[str, object]]:
    """The table of tensors, read without a library."""
    with (path() / "model.safetensors").open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        tensors = json.loads(file.read(length))
    tensors.pop("__metadata__", None)
    return tensors


def test_every_tensor_has_the_shape_that_the_config_asks_for() -> None:
    config = json.loads((path() / "config.json").read_text())
    wide, rank, taps = config["intermediate_size"], config["markov_rank"], len(config["target_layer_ids"])
    expected = {
        "fc.weight": [HIDDEN, taps * HIDDEN],
        "hidden_norm.weight": [HIDDEN],
        "norm.weight": [HIDDEN],
        "markov_head.markov_w1.weight": [VOCAB, rank],
        "markov_head.markov_w2.weight": [VOCAB, rank],
        "confidence_head.proj.weight": [1, HIDDEN + rank],
        "confidence_head.proj.bias": [1],
    }
    for index in range(config["num_hidden_layers"]):
        layer = f"layers.{index}."
        expected |= {
            layer + "input_layernorm.weight": [HIDDEN],
            layer + "post_attention_layernorm.weight": [HIDDEN],
            layer + "self_attn.q_proj.weight": [HEADS * HEAD_DIM, HIDDEN],
            layer + "self_attn.k_proj.weight": [KV_HEADS * HEAD_DIM, HIDDEN],
            layer + "self_attn.v_proj.weight": [KV_HEADS * HEAD_DIM, HIDDEN],
            layer + "self_attn.o_proj.weight": [HIDDEN, HEADS * HEAD_DIM],
            layer + "self_attn.q_norm.weight": [HEAD_DIM],
            layer + "self_attn.k_norm.weight": [HEAD_DIM],
            layer + "mlp.gate_proj.weight": [wide, HIDDEN],
            layer + "mlp.up_proj.weight": [wide, HIDDEN],
            layer + "mlp.down_proj.weight": [HIDDEN, wide],
        }
    found = header()
    assert {name: tensor["shape"] for name, tensor in found.items()} == expected
    assert {tensor["dtype"] for tensor in found.values()} == {"BF16"}


def test_embedding_and_head_are_left_to_the_target() -> None:
    assert not {name for name in header() if "embed_tokens" in name or "lm_head" in name}


def test_the_file_is_small_enough_for_a_repository() -> None:
    assert (path() / "model.safetensors").stat().st_size <= 24 * 2**20
