from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.fakes.tiny_checkpoint import (
    TINY,
    tiny_config,
    tiny_shapes,
    tiny_tensors,
    write_checkpoint,
    write_target,
    write_tiny,
)

from farspark.errors import CheckpointError
from farspark.worker.checkpoint import Qwen3DSparkConfig, identities, load_checkpoint, read_config

PUBLISHED_4B = {
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "num_hidden_layers": 5,
    "num_target_layers": 36,
    "layer_types": ["full_attention"] * 5,
    "block_size": 7,
    "mask_token_id": 151669,
    "target_layer_ids": [1, 9, 17, 25, 33],
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "num_anchors": 512,
    "tie_word_embeddings": False,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "hidden_act": "silu",
    "vocab_size": 151936,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "sliding_window": None,
    "use_sliding_window": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "sample_from_anchor": True,
}


def config_file(folder: Path, **changes: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(tiny_config(**changes)))
    return folder


def read_qwen3(folder: Path) -> Qwen3DSparkConfig:
    config = read_config(folder)
    assert isinstance(config, Qwen3DSparkConfig)
    return config


def refused(folder: Path, *words: str, target: Path | None = None) -> None:
    """Loading fails, and the message has all the words."""
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(folder, target)
    for word in words:
        assert word in str(caught.value)


def test_the_published_config_reads_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED_4B))
    config = read_qwen3(tmp_path)
    assert (config.taps, config.row_bytes, config.rope_theta, config.block_size) == (5, 25_600, 1e6, 7)
    assert sum(torch.Size(shape).numel() for shape in config.tensor_shapes().values()) == pytest.approx(
        1.39e9, rel=0.01
    )
    assert not caplog.records


def test_the_tensors_of_the_format_are_the_ones_expected(tmp_path: Path) -> None:
    for changes in ({}, {"attention_bias": True}, {"markov_rank": 0, "enable_confidence_head": False}):
        config = read_config(config_file(tmp_path, **changes))
        assert config.tensor_shapes() == tiny_shapes(tiny_config(**changes))


def test_a_checkpoint_loads_with_every_tensor_as_in_the_file(tmp_path: Path) -> None:
    loaded = load_checkpoint(write_tiny(tmp_path))
    written = load_file(tmp_path / "model.safetensors")
    assert loaded.tensors.keys() == written.keys()
    assert all(torch.equal(loaded.tensors[name], written[name]) for name in written)
    assert loaded.vocab_size == 97


def test_loaded_weights_survive_the_file(tmp_path: Path) -> None:
    loaded = load_checkpoint(write_tiny(tmp_path))
    before = loaded.tensors["fc.weight"].clone()
    with open(tmp_path / "model.safetensors", "r+b") as file:
        file.seek(0)
        file.write(b"\0" * os.path.getsize(tmp_path / "model.safetensors"))
    assert torch.equal(loaded.tensors["fc.weight"], before)


# Identity ------------------------------------------------------------------------------------------------------------


def record(name: str, tensor: torch.Tensor) -> bytes:
    """One tensor of the digest's definition, written from its text."""
    raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    parts = struct.pack("<I", len(name)) + name.encode() + struct.pack("<I", 4) + b"BF16"
    parts += struct.pack(f"<I{tensor.dim()}Q", tensor.dim(), *tensor.shape)
    return parts + struct.pack("<Q", len(raw)) + raw


def test_the_identities_are_the_documented_digests(tmp_path: Path) -> None:
    loaded = load_checkpoint(write_tiny(tmp_path))
    values = json.dumps(loaded.config.identity_values(), sort_keys=True, separators=(",", ":")).encode()
    names = sorted(loaded.tensors)
    body = b"".join(record(name, loaded.tensors[name]) for name in names)
    head = b"farspark drafter identity 1\n" + struct.pack("<I", len(values)) + values
    assert loaded.identity == hashlib.sha256(head + body).digest()
    markov = b"".join(record(name, loaded.tensors[name]) for name in names if name.startswith("markov_head."))
    assert loaded.markov_identity == hashlib.sha256(b"farspark markov identity 1\n" + markov).digest()
    assert identities(tmp_path) == (loaded.identity, loaded.markov_identity)


def test_the_config_part_of_the_identity_is_pinned(tmp_path: Path) -> None:
    values = read_config(config_file(tmp_path)).identity_values()
    assert json.dumps(values, sort_keys=True) == (
        '{"architecture": "Qwen3DSparkModel", "attention_bias": false, "block_size": 5, "confidence_with_markov": true, '
        '"draft_vocab_size": 97, "has_confidence_head": true, "head_dim": 8, "hidden_size": 32, "intermediate_size": 48, '
        '"logit_scale": 1.0, "markov_rank": 6, "mask_token_id": 96, "max_position": 8192, "num_heads": 4, '
        '"num_kv_heads": 2, "num_layers": 2, "rms_norm_eps": 1e-06, "rope_is_neox": true, "rope_theta": 10000.0, '
        '"tap_size": 32, "target_layer_ids": [1, 3, 4], "vocab_size": 97}'
    )


def test_the_identity_is_the_same_for_shards_file_order_and_spelling(tmp_path: Path) -> None:
    whole = identities(write_tiny(tmp_path / "whole"))
    assert identities(write_tiny(tmp_path / "shards", shards=3)) == whole
    config, tensors = tiny_config(), tiny_tensors(tiny_config())
    turned = dict(reversed(tensors.items()))
    assert identities(write_checkpoint(tmp_path / "turned", config, turned, shards=2)) == whole
    legacy: dict[str, Any] = {"rope_parameters": None, "rope_theta": 10000, "dtype": None, "torch_dtype": "bfloat16"}
    nested: dict[str, Any] = {"mask_token_id": None, "dflash_config": {"mask_token_id": 96}}
    assert identities(write_tiny(tmp_path / "spelling", **legacy, **nested)) == whole


def test_one_flipped_bit_of_any_tensor_changes_the_identity(tmp_path: Path) -> None:
    config, tensors = tiny_config(), tiny_tensors(tiny_config())
    seen = {identities(write_checkpoint(tmp_path, config, tensors)).identity}
    markov = identities(tmp_path).markov_identity
    for name in tensors:
        changed = tensors[name].clone()
        changed.view(torch.int16).view(-1)[-1] ^= 1
        now = identities(write_checkpoint(tmp_path, config, {**tensors, name: changed}))
        assert now.identity not in seen
        assert (now.markov_identity != markov) == name.startswith("markov_head.")
        seen.add(now.identity)


@pytest.mark.parametrize(
    "change", [{"mask_token_id": 95}, {"rope_theta": 20000.0}, {"rms_norm_eps": 1e-5}, {"logit_scale": 2}]
)
def test_a_config_key_that_matters_changes_the_identity(tmp_path: Path, change: dict[str, Any]) -> None:
    spelled: dict[str, Any] = {"rope_parameters": None, "rope_theta": 10000.0}
    before = identities(write_tiny(tmp_path / "a", **spelled))
    after = identities(write_tiny(tmp_path / "b", **{**spelled, **change}))
    assert after.identity != before.identity
    assert after.markov_identity == before.markov_identity


def test_without_a_markov_head_its_identity_is_zeros(tmp_path: Path) -> None:
    found = identities(write_tiny(tmp_path, markov_rank=0, confidence_head_with_markov=False))
    assert found.markov_identity == bytes(32)
    assert found.identity != bytes(32)


def test_progress_counts_every_byte_once(tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    load_checkpoint(write_tiny(tmp_path), progress=lambda *call: calls.append(call))
    total = sum(tensor.nbytes for tensor in load_file(tmp_path / "model.safetensors").values())
    assert calls[0] == ("reading the drafter", 0, total)
    assert calls[-1] == ("reading the drafter", total, total)
    assert [done for _, done, _ in calls] == sorted({done for _, done, _ in calls})


# Tensors that are not as they should be -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(tiny_shapes(TINY)))
def test_HEAD_SILENT_each_tensor_missing_renamed_retyped_or_reshaped_is_named(tmp_path: Path, name: str) -> None:
    config, tensors = tiny_config(), tiny_tensors(tiny_config())
    rest = {other: tensor for other, tensor in tensors.items() if other != name}
    shared = name in ("embed_tokens.weight", "lm_head.weight")
    refused(write_checkpoint(tmp_path, config, rest), name, "--target" if shared else "missing")
    renamed = f"{name}_"
    refused(write_checkpoint(tmp_path, config, {**rest, renamed: tensors[name]}), renamed, "not part of")
    for dtype in (torch.float16, torch.int32, torch.float64, torch.float8_e4m3fn):
        refused(write_checkpoint(tmp_path, config, {**rest, name: tensors[name].to(dtype)}), name)
    for wrong in (tensors[name].repeat(*[2] * tensors[name].dim()), tensors[name].flatten()[:-1].contiguous()):
        refused(write_checkpoint(tmp_path, config, {**rest, name: wrong}), name, "shape")


def test_HEAD_SILENT_an_unclaimed_tensor_is_named(tmp_path: Path) -> None:
    config, tensors = tiny_config(), tiny_tensors(tiny_config())
    for name in (
        "markov_head.gate_proj.weight",
        "layers.2.mlp.up_proj.weight",
        "d2t",
        "layers.0.self_attn.q_proj.bias",
    ):
        refused(write_checkpoint(tmp_path, config, {**tensors, name: torch.zeros(6).bfloat16()}), name, "not part of")


def test_the_placeholder_that_vllm_ignores_is_ignored(tmp_path: Path) -> None:
    config, tensors = tiny_config(), tiny_tensors(tiny_config())
    expected = identities(write_checkpoint(tmp_path, config, tensors))
    write_checkpoint(tmp_path, config, {**tensors, "mask_embedding": torch.zeros(32)})
    assert identities(tmp_path) == expected


def test_a_float32_confidence_head_is_fine_beside_bf16(tmp_path: Path) -> None:
    config, tensors = tiny_config(), tiny_tensors(tiny_config())
    for name in ("confidence_head.proj.weight", "confidence_head.proj.bias"):
        tensors[name] = tensors[name].float()
    loaded = load_checkpoint(write_checkpoint(tmp_path, config, tensors))
    assert loaded.tensors["confidence_head.proj.weight"].dtype == torch.float32


def heads(**changes: object) -> dict[str, object]:
    return {"markov_head_type": None, "enable_confidence_head": None, "confidence_head_with_markov": None, **changes}


@pytest.mark.parametrize("rank", [0, 6])
@pytest.mark.parametrize("head_type", [None, "vanilla", "gated", "rnn"])
@pytest.mark.parametrize("confidence", [None, False, True])
@pytest.mark.parametrize("with_markov", [None, False, True])
@pytest.mark.parametrize("place", ["flat", "nested"])
def test_HEAD_FLAGS_every_cell_has_the_right_width_or_a_refusal(
    tmp_path: Path, rank: int, head_type: str | None, confidence: bool | None, with_markov: bool | None, place: str
) -> None:
    flags = {
        "markov_rank": rank,
        "markov_head_type": head_type,
        "enable_confidence_head": confidence,
        "confidence_head_with_markov": with_markov,
    }
    if place == "nested":
        nested = {key: value for key, value in flags.items() if value is not None}
        # What is said in dflash_config alone would be overlooked by vLLM; what is said twice must be the same.
        config_file(tmp_path, **heads(markov_rank=rank), dflash_config=nested)
        if set(nested) - {"markov_rank"}:
            with pytest.raises(
                CheckpointError, match=r"dflash_config\.\w+ is .*, but \w+, which is what counts, is None"
            ):
                read_config(tmp_path)
        else:
            assert ("markov_head.markov_w2.weight" in read_config(tmp_path).tensor_shapes()) == bool(rank)
        return
    config_file(tmp_path, **heads(**flags))
    if confidence and with_markov and not rank:
        with pytest.raises(CheckpointError, match="confidence_head_with_markov is true, but markov_rank is 0"):
            read_config(tmp_path)
    else:
        shapes = read_config(tmp_path).tensor_shapes()
        width = (32 + (rank if with_markov else 0)) if confidence else None
        assert shapes.get("confidence_head.proj.weight") == (None if width is None else (1, width))
        assert ("markov_head.markov_w2.weight" in shapes) == bool(rank)
        gate = (6, 38) if rank and head_type == "gated" else None
        joint = (18, 44) if rank and head_type == "rnn" else None
        assert (shapes.get("markov_head.gate_proj.weight"), shapes.get("markov_head.joint_proj.weight")) == (
            gate,
            joint,
        )


# Config keys ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "theta"),
    [
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, 5e5),
        ({"rope_parameters": {"rope_theta": 5e5}}, 5e5),
        ({"rope_parameters": None, "rope_theta": 5e5}, 5e5),
        ({"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": {"type": "default"}}, 5e5),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, "rope_theta": 5e5}, 5e5),
        ({"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 1.0}}, 5e5),
    ],
)
def test_ROPE_CFG_both_spellings_give_theta(tmp_path: Path, changes: dict[str, object], theta: float) -> None:
    assert read_qwen3(config_file(tmp_path, **changes)).rope_theta == theta


def test_ROPE_CFG_a_null_rope_scaling_is_none(tmp_path: Path) -> None:
    config = {**tiny_config(rope_parameters=None), "rope_theta": 5e5, "rope_scaling": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_qwen3(tmp_path).rope_theta == 5e5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_parameters": None}, "rope_theta is missing"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_theta is missing"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4}}, "rope_type is 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling.type is 'linear'"),
        ({"rope_scaling": {"mrope_section": [1, 2]}}, "rope_scaling.mrope_section"),
        ({"rope_theta": 5e5}, "different values"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"rope_theta": "big"}}, "expected a number"),
        ({"rope_parameters": {"rope_theta": 0}}, "expected more than 0"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters.full_attention"),
        ({"rope_parameters": [1]}, "expected an object"),
        ({"mask_token_id": None}, "no mask token id"),
        ({"mask_token_id": 97}, "outside the vocabulary of 97"),
        ({"mask_token_id": -1}, "expected 0 or more"),
        ({"mask_token_id": "96"}, "expected an integer"),
        ({"dflash_config": {"mask_token_id": 1000}}, "dflash_config.mask_token_id is 1000"),
        ({"block_size": None}, "neither block_size nor dspark_block_size"),
        ({"block_size": 0}, "block_size is 0"),
        ({"block_size": True}, "expected an integer"),
        ({"dspark_block_size": 6}, "block_size is 5, but dspark_block_size is 6"),
        ({"target_layer_ids": None}, "target_layer_ids is missing"),
        ({"target_layer_ids": []}, "target_layer_ids is missing"),
        ({"target_layer_ids": [1, 1, 2]}, "strictly increasing"),
        ({"target_layer_ids": [3, 1, 4]}, "strictly increasing"),
        ({"target_layer_ids": [-2, 1, 4]}, "the lowest layer is -1"),
        ({"target_layer_ids": [1, 3, 5]}, "the target has 6 layers"),
        ({"target_layer_ids": "1,3"}, "expected a list of integers"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}, "different tapped layers"),
        ({"markov_rank": None}, "markov_rank is missing"),
        ({"markov_rank": -1}, "markov_rank is -1"),
        ({"markov_head_type": "lstm"}, "markov_head_type is 'lstm'; supported: 'vanilla', 'gated', 'rnn'"),
        ({"enable_confidence_head": "yes"}, "expected true or false"),
        ({"sample_from_anchor": False, "block_size": 1}, "sample_from_anchor is false and block_size is 1"),
        ({"dspark_draft_topk": 8}, "dspark_draft_topk is 8"),
        ({"dflash_config": {"use_swa": True}}, "sliding_window is missing, and so is dflash_config.swa_window_size"),
        ({"dflash_config": {"attention_sink_bias": True}}, "attention_sink_bias is true"),
        ({"dflash_config": {"attention_value_scale": 0.5}}, "attention_value_scale is 0.5"),
        ({"add_swa_attention_sink_bias": True}, "add_swa_attention_sink_bias is true"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "eagle_config.use_aux_hidden_state is false"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window is missing"),
        ({"layer_types": ["full_attention", "chunked"]}, "layer_types[1] is 'chunked'"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ({"layer_types": None, "use_sliding_window": True}, "use_sliding_window is true"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"transformer_layer_config": {}}, "speculators format, but speculators_model_type is missing"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"head_dim": None}, "head_dim is missing"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"max_position_embeddings": None}, "max_position_embeddings is missing"),
        ({"logit_scale": float("nan")}, "expected a finite number"),
        ({"logit_scale": 10**400}, "expected a finite number"),
        ({"head_dim": 10**400}, f"expected {2**62} or less"),
    ],
)
def test_a_config_that_is_not_served_is_refused_with_the_key(
    tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    with pytest.raises(CheckpointError, match=re.escape(words)):
        read_config(config_file(tmp_path, **changes))


def test_MASK_ID_the_keys_have_one_order(tmp_path: Path) -> None:
    keys = ["dflash_config", "mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id"]
    values: list[object] = [{"mask_token_id": 10}, 11, 12, 13, 14]
    for first in range(len(keys)):
        given = {"mask_token_id": None, **dict(zip(keys[first:], values[first:], strict=True))}
        assert read_config(config_file(tmp_path, **given)).mask_token_id == 10 + first


def test_AUX_LAST_the_last_layer_is_not_tapped_because_its_output_exists_normed_and_un_normed(tmp_path: Path) -> None:
    taps = {"num_target_layers": 6, "target_layer_ids": [0, 4]}
    assert read_qwen3(config_file(tmp_path, **taps)).target_layer_ids == (0, 4)
    with pytest.raises(CheckpointError, match="target_layer_ids"):
        read_config(config_file(tmp_path, **(taps | {"target_layer_ids": [0, 5]})))


def test_AUX_INDEX_the_tapped_layers_have_four_spellings(tmp_path: Path) -> None:
    for given in (
        {"target_layer_ids": [-1, 3]},
        {"dspark_target_layer_ids": [-1, 3]},
        {"dflash_config": {"target_layer_ids": [-1, 3]}},
        {"eagle_aux_hidden_state_layer_ids": [0, 4]},
    ):
        config = read_qwen3(config_file(tmp_path, **{"target_layer_ids": None, **given}))
        assert config.target_layer_ids == (-1, 3)


def test_LAYOUT_1N_an_unstated_layout_is_read_as_anchor_first_with_a_loud_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    read_config(config_file(tmp_path, sample_from_anchor=True))
    assert not caplog.records
    read_config(config_file(tmp_path))
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "sample_from_anchor" in caplog.text


def test_unknown_keys_are_logged_and_not_fatal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    read_config(config_file(tmp_path, sample_from_anchor=True, shiny=1, dflash_config={"glow": 2}))
    assert "dflash_config.glow" in caplog.text
    assert "shiny" in caplog.text


@pytest.mark.parametrize(
    "architectures", [None, [], ["LlamaForCausalLM"], ["K3DSparkModel"], ["Qwen3DSparkModel", "Other"], "Qwen3"]
)
def test_WRONG_FAMILY_the_refusal_says_what_is_supported(tmp_path: Path, architectures: object) -> None:
    with pytest.raises(CheckpointError, match=r"supported: Qwen3DSparkModel|expected a list of strings"):
        read_config(config_file(tmp_path, architectures=architectures))


def test_WRONG_FAMILY_other_tensors_under_our_name_are_listed_and_stop(tmp_path: Path) -> None:
    tensors = {f"mtp.{stage}.attn.wq_a.weight": torch.zeros(4, 4) for stage in range(12)}
    refused(write_checkpoint(tmp_path, tiny_config(), tensors), "fc.weight", "mtp.0.attn.wq_a.weight", "and 4 more")


# Weights of the target -------------------------------------------------------------------------------------------------


def without(*names: str, **changes: object) -> tuple[dict[str, object], dict[str, torch.Tensor]]:
    config = tiny_config(**changes)
    return config, {name: tensor for name, tensor in tiny_tensors(config).items() if name not in names}


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("rows", [97, 128])
def test_SHARED_W_embedding_and_head_come_from_the_target(tmp_path: Path, shards: int, rows: int) -> None:
    drafter = write_checkpoint(tmp_path / "d", *without("embed_tokens.weight", "lm_head.weight"))
    target = write_target(tmp_path / "t", rows=rows, shards=shards)
    loaded = load_checkpoint(drafter, target)
    whole = write_target(tmp_path / "whole", rows=rows)
    theirs = load_file(whole / "model.safetensors")
    assert torch.equal(loaded.tensors["embed_tokens.weight"], theirs["model.embed_tokens.weight"][:97])
    assert torch.equal(loaded.tensors["lm_head.weight"], theirs["lm_head.weight"][:97])
    # The same weights, shipped by the drafter itself, are the same drafter.
    config, tensors = without()
    tensors["embed_tokens.weight"] = theirs["model.embed_tokens.weight"][:97].clone()
    tensors["lm_head.weight"] = theirs["lm_head.weight"][:97].clone()
    assert identities(write_checkpoint(tmp_path / "own", config, tensors)).identity == loaded.identity


def test_SHARED_W_a_tied_target_lends_its_embedding_for_both(tmp_path: Path) -> None:
    drafter = write_checkpoint(tmp_path / "d", *without("embed_tokens.weight", "lm_head.weight"))
    loaded = load_checkpoint(drafter, write_target(tmp_path / "t", tied=True, shards=2))
    assert torch.equal(loaded.tensors["embed_tokens.weight"], loaded.tensors["lm_head.weight"])


def test_SHARED_W_own_weights_win_over_the_target(tmp_path: Path) -> None:
    drafter = write_checkpoint(tmp_path / "d", *without("lm_head.weight"))
    loaded = load_checkpoint(drafter, write_target(tmp_path / "t"))
    assert torch.equal(loaded.tensors["embed_tokens.weight"], tiny_tensors(tiny_config())["embed_tokens.weight"])


def test_SHARED_W_only_the_shards_that_hold_the_two_are_opened(tmp_path: Path) -> None:
    drafter = write_checkpoint(tmp_path / "d", *without("lm_head.weight"))
    target = write_target(tmp_path / "t", shards=3)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    for name, file in index["weight_map"].items():
        if name != "lm_head.weight":
            (target / file).unlink()
    assert load_checkpoint(drafter, target).tensors["lm_head.weight"].shape == (97, 32)


def test_SHARED_W_what_the_target_cannot_lend_is_said(tmp_path: Path) -> None:
    both = write_checkpoint(tmp_path / "d", *without("embed_tokens.weight", "lm_head.weight"))
    refused(both, "embed_tokens.weight", "lm_head.weight", "--target DIR")
    refused(both, "vocab_size is 97", "is 64", target=write_target(tmp_path / "small", vocab=64))
    refused(both, "equal vocabularies", target=write_target(tmp_path / "large", vocab=128))
    refused(both, "shape [97, 16]", target=write_target(tmp_path / "narrow", hidden=16))
    refused(both, "shape [90, 32]", target=write_target(tmp_path / "short", rows=90))
    headless = write_target(tmp_path / "headless", tied=True)
    values = json.loads((headless / "config.json").read_text())
    (headless / "config.json").write_text(json.dumps({**values, "tie_word_embeddings": False}))
    refused(both, "has no lm_head.weight", target=headless)
    refused(both, "is not a folder", target=tmp_path / "nowhere")
    for text, words in (
        ("{}", "vocab_size is missing"),
        ('{"text_config": 3}', "text_config is 3"),
        ('{"vocab_size": 97, "tie_word_embeddings": "yes"}', "tie_word_embeddings is 'yes'"),
    ):
        (headless / "config.json").write_text(text)
        refused(both, f"target {headless}: config.json: {words}", target=headless)


def test_SHARED_W_an_embedding_may_be_lent_by_a_larger_vocabulary(tmp_path: Path) -> None:
    drafter = write_checkpoint(tmp_path / "d", *without("embed_tokens.weight"))
    assert load_checkpoint(drafter, write_target(tmp_path / "t", vocab=128)).vocab_size == 97


def test_SHARED_W_a_multimodal_targets_text_config_counts(tmp_path: Path) -> None:
    drafter = write_checkpoint(tmp_path / "d", *without("lm_head.weight"))
    target = write_target(tmp_path / "t", tied=True)
    (target / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 97, "tie_word_embeddings": True}}))
    assert load_checkpoint(drafter, target).tensors["lm_head.weight"].shape == (97, 32)


def test_ID_RANGE_a_target_with_fewer_ids_bounds_what_is_drafted(tmp_path: Path) -> None:
    drafter = write_tiny(tmp_path / "d")
    loaded = load_checkpoint(drafter, write_target(tmp_path / "t", vocab=90))
    assert loaded.vocab_size == 90
    assert loaded.identity == identities(drafter).identity


# Files -----------------------------------------------------------------------------------------------------------------


def test_a_missing_folder_or_file_is_named(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "nowhere is not a folder")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "has no config.json")
    refused(config_file(tmp_path / "bare"), "neither model.safetensors nor model.safetensors.index.json")
    file = tmp_path / "file"
    file.touch()
    refused(file, "is not a folder")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[1]", "is not a JSON object"),
        ("", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"head_dim": ' + "1" * 5000 + "}", "is not JSON"),
    ],
)
def test_a_broken_config_is_named(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "config.json").write_text(text)
    refused(tmp_path, "config.json", words)


def test_bytes_that_are_not_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    refused(tmp_path, "config.json cannot be read")


def test_what_the_system_refuses_to_open_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    refused(tmp_path, "config.json cannot be read")
    write_tiny(tmp_path / "d")
    (tmp_path / "d" / "model.safetensors").unlink()
    (tmp_path / "d" / "model.safetensors").mkdir()
    refused(tmp_path / "d", "model.safetensors cannot be read")


@contextmanager
def as_nobody() -> Iterator[None]:
    """Root may read everything; nobody may not."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)


@pytest.mark.parametrize("closed", ["config.json", "model.safetensors", "."])
def test_files_without_permission_are_named(closed: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = write_tiny(Path(name) / "drafter")
        Path(name).chmod(0o755)
        (folder / closed).chmod(0)
        with as_nobody():
            refused(folder, closed.strip("."), "cannot be read")
        (folder / closed).chmod(0o755)


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 3000, -1])
def test_a_truncated_file_is_named_at_every_length(tmp_path: Path, keep: int) -> None:
    path = write_tiny(tmp_path) / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:keep])
    refused(tmp_path, "model.safetensors", "cannot be read as safetensors")


def test_a_broken_index_is_named(tmp_path: Path) -> None:
    write_tiny(tmp_path, shards=2)
    index = tmp_path / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    names = list(good["weight_map"])

    def refuse(weight_map: object, *words: str) -> None:
        index.write_text(json.dumps({"weight_map": weight_map}))
        refused(tmp_path, *words)

    refuse(None, "weight_map is not an object")
    refuse({names[0]: 3}, "weight_map is not an object")
    refuse({**good["weight_map"], names[0]: "model-9.safetensors"}, "names model-9.safetensors, which is not in")
    refuse({**good["weight_map"], names[0]: "../model.safetensors"}, "is not a plain file name")
    refuse({**good["weight_map"], "ghost": good["weight_map"][names[0]]}, "lacks ghost")
    refuse({name: good["weight_map"][name] for name in names[1:]}, f"holds {names[0]}, not in the index")
    index.write_text("nope")
    refused(tmp_path, "is not JSON")


def test_a_second_tensor_of_the_same_name_cannot_hide_in_a_shard(tmp_path: Path) -> None:
    write_tiny(tmp_path, shards=2)
    first = tmp_path / "model-00001-of-00002.safetensors"
    second = load_file(tmp_path / "model-00002-of-00002.safetensors")
    name = next(iter(second))
    save_file({**load_file(first), name: second[name]}, first)
    refused(tmp_path, name, "not in the index")
