"""DeepSeek-V4 and V4.1 targets as checkpoints of their drafters: config, tensors, identity, and what is refused."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.fakes.tiny_checkpoint import write_target
from tests.fakes.tiny_deepseek import (
    V4,
    V41,
    text_of,
    tiny_config,
    tiny_tensors,
    write_deepseek,
    write_tiny_deepseek,
)

from farspark.errors import CheckpointError
from farspark.worker.checkpoint import identities, load_checkpoint
from farspark.worker.checkpoint.deepseek import DeepseekV4Config, parse
from farspark.worker.checkpoint.keys import ConfigKeys

VERSIONS = ("v4", "v41")

# As published: config.json of DeepSeek-V4-Flash-0731, V4-Pro-0813 and V4.1-Flash; the vision tower is left out.
FLASH: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0, 0, 0],
    "compress_rope_theta": 160000,
    "dspark_block_size": 5,
    "dspark_markov_rank": 256,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [40, 41, 42],
    "eos_token_id": 1,
    "expert_dtype": "fp4",
    "hc_eps": 1e-06,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 512,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "initializer_range": 0.02,
    "max_position_embeddings": 1048576,
    "model_type": "deepseek_v4",
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "num_hidden_layers": 43,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.1",
    "use_cache": True,
    "vocab_size": 129280,
}
PRO: dict[str, Any] = {
    **FLASH,
    "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0, 0, 0],
    "dspark_markov_rank": 512,
    "dspark_target_layer_ids": [58, 59, 60],
    "hidden_size": 7168,
    "index_topk": 1024,
    "moe_intermediate_size": 3072,
    "n_routed_experts": 384,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "o_groups": 16,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 2.5,
}
_NOT_41 = (
    "architectures",
    "expert_dtype",
    "quantization_config",
    "torch_dtype",
    "transformers_version",
    "num_hash_layers",
)
FLASH_41: dict[str, Any] = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "bos_token_id": 0,
    "dtype": "bfloat16",
    "eos_token_id": 1,
    "image_token_id": 129264,
    "model_type": "deepseek_v41",
    "pad_token_id": 2,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "expert_dtype": "fp4",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [32, 32],
    },
    "text_config": {
        **{key: value for key, value in FLASH.items() if key not in _NOT_41},
        "candidate_block_size": 8,
        "candidate_source_layer_id": 20,
        "candidate_topk_blocks": 2048,
        "compress_ratios": [0, 0, *[2] * 18, *[1] * 20, 0, 0, 0],
        "dspark_n_routed_experts": 128,
        "dspark_num_experts_per_tok": 3,
        "dspark_target_layer_ids": [37, 38, 39],
        "engram_head_dim": 256,
        "engram_layer_ids": [1, 14],
        "hidden_size": 5120,
        "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "kv_source_layer_ids": [2, 8, 14, 20],
        "model_type": "deepseek_v41_text",
        "moe_intermediate_size": 2304,
        "n_routed_experts": 384,
        "num_hidden_layers": 40,
        "num_nextn_predict_layers": 3,
        "q_lora_rank": 1280,
        "rms_norm_eps": 1e-20,
    },
    "vision_config": {"model_type": "deepseek_v41_vision", "num_hidden_layers": 32, "rope_theta": 10000},
}
THREE = frozenset(f"mtp.{stage}.attn_norm.weight" for stage in range(3))


def refused(folder: Path, *words: str) -> None:
    """Loading fails, and the message has all the words."""
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(folder)
    for word in words:
        assert word in str(caught.value)


@pytest.fixture(scope="module", params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def folder(version: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_deepseek(tmp_path_factory.mktemp(version), version)


# Config ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "row_bytes", "stage_tensors", "last"),
    [(FLASH, 24_576, 29, 7), (PRO, 43_008, 29, 7), (FLASH_41, 30_720, 29, 4)],
    ids=["V4-Flash", "V4-Pro", "V4.1-Flash"],
)
def test_the_published_configs_read_without_a_word(
    values: dict[str, Any], row_bytes: int, stage_tensors: int, last: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Row size and number of tensors are as published (29 of a stage beside its routed experts, 3 more of the first)."""
    config = parse(ConfigKeys(json.loads(json.dumps(values))), THREE)
    assert not caplog.records
    assert (config.stages, config.block_size, config.window, config.taps, config.row_bytes) == (3, 5, 128, 3, row_bytes)
    names = config.tensor_shapes().keys()
    per_stage = [sum(name.startswith(f"mtp.{stage}.") for name in names) for stage in range(3)]
    routed = 6 * config.experts
    assert per_stage == [routed + stage_tensors + 3, routed + stage_tensors, routed + stage_tensors + last]


def test_the_number_of_tensors_of_the_published_V4_flash() -> None:
    config = parse(ConfigKeys(FLASH), THREE)
    names = config.tensor_shapes().keys()
    assert [sum(name.startswith(f"mtp.{stage}.") for name in names) for stage in range(3)] == [1568, 1565, 1572]


def test_what_V41_says_of_its_stages_counts_for_them_and_falls_back_to_the_targets() -> None:
    config = parse(ConfigKeys(FLASH_41), THREE)
    assert (config.experts, config.experts_per_token, config.fp8_block, config.rms_norm_eps) == (128, 3, 32, 1e-20)
    text = {key: value for key, value in FLASH_41["text_config"].items() if not key.startswith("dspark_n")}
    text["dspark_noise_token_id"] = 128799
    config = parse(ConfigKeys({**FLASH_41, "text_config": text}), THREE)
    assert (config.experts, config.experts_per_token) == (384, 6)
    config = parse(ConfigKeys({**FLASH, "dspark_n_routed_experts": 128}), THREE)
    assert config.experts == 256


def test_ROPE_CFG_the_stages_rotate_without_yarn_and_by_the_base_of_uncompressed_layers() -> None:
    assert parse(ConfigKeys(FLASH), THREE).rope_theta == 10000.0
    rewritten = {
        key: value for key, value in FLASH.items() if key not in ("rope_theta", "rope_scaling", "qk_rope_head_dim")
    }
    rewritten |= {
        "partial_rotary_factor": 0.125,
        "rope_parameters": {"main": {"rope_theta": 20000.0}, "compress": {"rope_theta": 160000.0, "rope_type": "yarn"}},
    }
    config = parse(ConfigKeys(rewritten), THREE)
    assert (config.rope_theta, config.rope_head_dim) == (20000.0, 64)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_theta": None}, "rope_theta is missing"),
        ({"dspark_noise_token_id": None}, "dspark_noise_token_id is missing"),
        ({"dspark_noise_token_id": 97}, "dspark_noise_token_id is 97, outside the vocabulary of 97"),
        ({"dspark_block_size": None}, "dspark_block_size is missing"),
        ({"dspark_target_layer_ids": None}, "dspark_target_layer_ids is missing or empty"),
        ({"dspark_target_layer_ids": [3, 4, 6]}, "dspark_target_layer_ids is [3, 4, 6], but the target has 6 layers"),
        ({"dspark_target_layer_ids": [4, 3, 5]}, "expected strictly increasing layers"),
        ({"dspark_markov_rank": None}, "dspark_markov_rank is missing"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0.0; expected more than 0"),
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'; supported: 'sqrtsoftplus'"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'; supported: 'noaux_tc'"),
        ({"norm_topk_prob": False}, "norm_topk_prob is False; supported: True"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True; supported: False"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2; supported: 1"),
        ({"n_shared_experts": 2}, "n_shared_experts is 2; supported: 1"),
        ({"draft_vocab_size": 50}, "draft_vocab_size is 50: a reduced vocabulary is not served"),
        ({"compress_ratios": [0, 0, 4, 4, 4, 4, 0, 4, 0]}, "stages with compressed attention are not served"),
        ({"num_attention_heads": 3}, "num_attention_heads is 3, not a multiple of o_groups 2"),
        ({"q_lora_rank": 48}, "q_lora_rank is 48, not a multiple of"),
        ({"qk_rope_head_dim": 33}, "qk_rope_head_dim is 33"),
        (
            {"num_nextn_predict_layers": 2},
            "config.json says 2 stages, the checkpoint has tensors of mtp.0, mtp.1, mtp.2",
        ),
        ({"hidden_size": None}, "hidden_size is missing"),
    ],
    ids=lambda value: None if isinstance(value, str) else next(iter(value)),
)
def test_WRONG_FAMILY_a_config_that_is_not_served_is_named(version: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse(ConfigKeys(tiny_config(version, **changes)), THREE)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quant_method": "awq"}, "quantization_config.quant_method is 'awq'; supported: 'fp8'"),
        ({"weight_block_size": [128, 64]}, "quantization_config.weight_block_size is [128, 64]"),
        ({"weight_block_size": None}, "quantization_config.weight_block_size is None"),
        ({"expert_dtype": "fp8"}, "quantization_config.expert_dtype is 'fp8'; supported: 'fp4'"),
    ],
)
def test_another_quantisation_is_not_served(version: str, changes: dict[str, Any], words: str) -> None:
    config = tiny_config(version)
    config["quantization_config"].update(changes)
    with pytest.raises(CheckpointError) as caught:
        parse(ConfigKeys(config), THREE)
    assert words in str(caught.value)


def test_a_key_that_nobody_knows_is_said(version: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        parse(ConfigKeys(tiny_config(version, attention_temperature=2.0)), THREE)
    assert "attention_temperature" in caplog.text


def test_an_architecture_of_one_version_with_the_type_of_the_other_is_refused() -> None:
    for config, other in ((V4, "deepseek_v41"), (V41, "deepseek_v4")):
        with pytest.raises(CheckpointError, match="supported: DeepseekV4ForCausalLM with 'deepseek_v4'"):
            parse(ConfigKeys({**config, "model_type": other}), THREE)


# Tensors --------------------------------------------------------------------------------------------------------------


def test_a_target_loads_as_its_drafter_with_every_tensor_as_stored(folder: Path, version: str) -> None:
    loaded = load_checkpoint(folder)
    wanted = tiny_tensors(tiny_config(version))
    ignored = {name for name in wanted if name.endswith("bias_vl")}
    assert loaded.tensors.keys() == wanted.keys() - ignored
    assert all(loaded.tensors[name].dtype == wanted[name].dtype for name in loaded.tensors)
    assert all(
        torch.equal(loaded.tensors[name].view(torch.uint8), wanted[name].view(torch.uint8)) for name in loaded.tensors
    )
    assert bool(ignored) == (version == "v41")


def one_file(folder: Path, version: str, tensors: dict[str, torch.Tensor]) -> Path:
    """An export-like folder with the drafter's tensors alone."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(tiny_config(version)))
    save_file(tensors, folder / "model.safetensors")
    return folder


def kinds(names: list[str]) -> list[str]:
    """One name for each part: of the routed experts those of one, of the stages the last where there is a choice."""
    found: dict[str, str] = {}
    for name in names:
        found[re.sub(r"experts\.\d+", "experts.*", re.sub(r"mtp\.\d+", "mtp.*", name))] = name
    return sorted(found.values())


def test_HEAD_SILENT_a_missing_renamed_or_reshaped_tensor_is_named(version: str, tmp_path: Path) -> None:
    tensors = {name: one for name, one in tiny_tensors(tiny_config(version)).items() if not name.endswith("bias_vl")}
    for name in kinds(list(tensors)):
        rest = {other: tensor for other, tensor in tensors.items() if other != name}
        refused(one_file(tmp_path, version, rest), f"{name} missing")
        renamed = name + "_old" if not name.startswith(("embed", "head")) else "mtp.0." + name
        refused(
            one_file(tmp_path, version, {**rest, renamed: tensors[name]}), f"{name} missing", f"{renamed} not part of"
        )
        longer = torch.cat((tensors[name].view(torch.uint8), tensors[name].view(torch.uint8))).view(tensors[name].dtype)
        refused(one_file(tmp_path, version, {**rest, name: longer}), name, "has shape", "config.json makes it")


def test_HEAD_SILENT_a_tensor_of_another_dtype_is_named(version: str, tmp_path: Path) -> None:
    """Also where its bytes would fit: e8m0 for e4m3, one byte for another."""
    tensors = {name: one for name, one in tiny_tensors(tiny_config(version)).items() if not name.endswith("bias_vl")}
    for name in kinds(list(tensors)):
        tensor = tensors[name]
        if tensor.dtype.itemsize > 1:
            others = [tensor.half()]
        else:
            one_byte = (torch.int8, torch.float8_e4m3fn, torch.float8_e8m0fnu)
            others = [tensor.view(dtype) for dtype in one_byte if dtype != tensor.dtype]
        for other in others:
            refused(one_file(tmp_path, version, {**tensors, name: other}), f"{name} is ", "supported: ")


@pytest.mark.parametrize(
    "name", ["mtp.0.attn.extra.weight", "mtp.2.ffn.experts.99.w1.weight", "mtp.1.markov_head.embed.weight"]
)
def test_HEAD_SILENT_an_unclaimed_tensor_of_a_stage_is_named(version: str, tmp_path: Path, name: str) -> None:
    tensors = {**tiny_tensors(tiny_config(version)), name: torch.zeros(4)}
    refused(write_deepseek(tmp_path, tiny_config(version), tensors), f"{name} not part of a Deepseek")


@pytest.mark.parametrize("lost", [(0,), (1,), (2,), (1, 2)])
def test_WRONG_FAMILY_a_checkpoint_that_lost_stages_says_what_is_missing(
    version: str, tmp_path: Path, lost: tuple[int, ...]
) -> None:
    tensors = {
        name: tensor
        for name, tensor in tiny_tensors(tiny_config(version)).items()
        if not any(name.startswith(f"mtp.{stage}.") for stage in lost)
    }
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(write_deepseek(tmp_path, tiny_config(version), tensors))
    # V4's config does not say how many stages there are, V4.1's does.
    said = str(caught.value)
    assert f"mtp.{lost[0]}." in said or f"mtp.{lost[0] - 1}.norm.weight" in said or "config.json says 3 stages" in said


def test_WRONG_FAMILY_the_tensors_of_one_version_under_the_config_of_the_other(tmp_path: Path) -> None:
    """The sizes of V4.1's tiny config, the names of V4's tensors."""
    config = tiny_config("v41")
    flat = {**text_of(config), "model_type": "deepseek_v4", "quantization_config": config["quantization_config"]}
    flat |= {"n_routed_experts": 8, "head_dim": 80, "architectures": ["DeepseekV4ForCausalLM"]}
    tensors = tiny_tensors(flat)
    refused(
        write_deepseek(tmp_path, config, tensors), "markov_head.embed.weight", "missing", "hc_head_fn", "not part of"
    )
    refused(
        write_deepseek(tmp_path, flat, tiny_tensors(config)), "markov_head.markov_w1.weight", "hc_head_fn", "missing"
    )


def test_more_or_fewer_stages_than_three_are_a_drafter_too(tmp_path: Path) -> None:
    for stages in (1, 2, 4):
        folder = write_tiny_deepseek(tmp_path / str(stages), "v4", stages=stages)
        loaded = load_checkpoint(folder)
        assert isinstance(loaded.config, DeepseekV4Config)
        assert loaded.config.stages == stages


# Identity -------------------------------------------------------------------------------------------------------------


def test_the_identity_is_the_same_for_other_shards_and_whatever_else_the_target_holds(
    folder: Path, version: str, tmp_path: Path
) -> None:
    config = tiny_config(version)
    tensors = tiny_tensors(config)
    wanted = identities(folder)
    assert identities(write_deepseek(tmp_path / "shards", config, dict(reversed(tensors.items())), shards=7)) == wanted
    assert identities(one_file(tmp_path / "one", version, tensors)) == wanted
    without = {name: tensor for name, tensor in tensors.items() if not name.endswith("bias_vl")}
    assert identities(one_file(tmp_path / "text", version, without)) == wanted
    assert wanted.identity != wanted.markov_identity != bytes(32)


def test_one_flipped_bit_of_any_part_changes_the_identity(version: str, tmp_path: Path) -> None:
    tensors = tiny_tensors(tiny_config(version))
    seen = {identities(one_file(tmp_path, version, tensors)).identity}
    markov = identities(tmp_path).markov_identity
    for name in kinds([name for name in tensors if not name.endswith("bias_vl")]):
        changed = tensors[name].clone()
        changed.view(torch.uint8).view(-1)[-1] ^= 1
        now = identities(one_file(tmp_path, version, {**tensors, name: changed}))
        assert now.identity not in seen
        assert (now.markov_identity != markov) == (".markov_head." in name)
        seen.add(now.identity)


@pytest.mark.parametrize(
    "change", [{"rope_theta": 20000}, {"swiglu_limit": 9.0}, {"hc_eps": 1e-5}, {"sliding_window": 64}]
)
def test_a_config_key_that_matters_changes_the_identity(
    folder: Path, version: str, tmp_path: Path, change: dict[str, Any]
) -> None:
    now = identities(write_tiny_deepseek(tmp_path, version, **change))
    before = identities(folder)
    assert now.identity != before.identity
    assert now.markov_identity == before.markov_identity


def test_a_key_of_the_target_alone_does_not_change_the_identity(folder: Path, version: str, tmp_path: Path) -> None:
    assert identities(write_tiny_deepseek(tmp_path, version, index_topk=99, compress_rope_theta=1)) == identities(
        folder
    )


# The target's own vocabulary ------------------------------------------------------------------------------------------


def test_ID_RANGE_a_smaller_target_bounds_the_ids(folder: Path, tmp_path: Path) -> None:
    assert load_checkpoint(folder).vocab_size == 97
    assert load_checkpoint(folder, write_target(tmp_path, vocab=90)).vocab_size == 90


def test_the_shards_of_the_fake_are_those_of_a_target(folder: Path) -> None:
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) == 4
    assert not any(name.startswith("mtp.") for name in load_file(files[-1]))
    assert any(name.startswith("layers.") for name in load_file(files[0]))
