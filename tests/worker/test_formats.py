"""What the config.json and the tensors of Gemma 4 and speculators checkpoints mean, and what is refused."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.fakes.tiny_checkpoint import (
    GEMMA4,
    gemma4_config,
    speculators_config,
    tiny_config,
    tiny_shapes,
    tiny_tensors,
    write_checkpoint,
    write_gemma4,
    write_speculators,
    write_target,
    write_tiny,
)

from farspark.errors import CheckpointError, ConfigError
from farspark.worker import config as worker_config
from farspark.worker.batch import DraftBatch, DraftEntry, DraftResult
from farspark.worker.checkpoint import (
    FAMILIES,
    DrafterConfig,
    Gemma4DSparkConfig,
    Qwen3DSparkConfig,
    identities,
    load_checkpoint,
    read_config,
)
from farspark.worker.drafter import open_drafter
from farspark.worker.models import families
from farspark.worker.models.families import MODELS, ModelOptions

pytestmark = pytest.mark.usefixtures("one_thread")


def read(folder: Path, config: dict[str, object]) -> DrafterConfig:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return read_config(folder)


def read_speculators(folder: Path, **changes: object) -> Qwen3DSparkConfig:
    config = read(folder, speculators_config(**changes))
    assert isinstance(config, Qwen3DSparkConfig)
    return config


def refused(folder: Path, *words: str, target: Path | None = None) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(folder, target)
    for word in words:
        assert word in str(caught.value)


def with_backbone(**changes: object) -> dict[str, object]:
    """A speculators config with changed keys of the transformer; None takes one out."""
    config = speculators_config()
    backbone = config["transformer_layer_config"]
    assert isinstance(backbone, dict)
    changed = {key: value for key, value in {**backbone, **changes}.items() if value is not None}
    return {**config, "transformer_layer_config": changed}


@pytest.mark.parametrize(
    "config",
    [
        speculators_config(),
        speculators_config(sample_from_anchor=False, draft_vocab_size=32, markov_head_type="rnn"),
        speculators_config(layer_types=["sliding_attention"] * 2, sliding_window=2048),
        gemma4_config(),
        gemma4_config(attention_k_eq_v=False, markov_head_type="gated", final_logit_softcapping=None),
    ],
)
def test_the_formats_read_without_a_word_and_name_the_expected_tensors(
    tmp_path: Path, config: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    parsed = read(tmp_path, config)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert parsed.tensor_shapes() == tiny_shapes(config)
    assert type(parsed) in MODELS


def test_a_published_gemma4_config_has_the_published_facts(tmp_path: Path) -> None:
    """The sizes that both versions of transformers write, and the facts of the published 12B drafter."""
    sizes: dict[str, object] = {
        "block_size": 7,
        "target_layer_ids": [5, 17, 29, 41, 46],
        "num_target_layers": 48,
        "mask_token_id": 4,
        "num_hidden_layers": 5,
        "layer_types": ["full_attention"] * 5,
        "final_logit_softcapping": 30.0,
    }
    old = read(tmp_path, gemma4_config(**sizes))
    layers = {str(layer): {"head_dim": 16, "num_key_value_heads": 2} for layer in range(5)}
    new = read(
        tmp_path,
        gemma4_config(**sizes, global_head_dim=None, num_global_key_value_heads=None, per_layer_config=layers),
    )
    assert isinstance(old, Gemma4DSparkConfig)
    assert old == new
    assert (old.head_dim, old.num_kv_heads, old.rotated, old.soft_cap, old.taps) == (16, 2, 4, 30.0, 5)


def test_a_specforge_config_is_a_qwen3_drafter_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """SpecForge's architecture, and its repetition of DSpark's keys."""
    repeated = {
        "block_size": 5,
        "mask_token_id": 96,
        "target_layer_ids": [1, 3, 4],
        "markov_rank": 6,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "projector_type": "dspark",
    }
    plain = tiny_config(sample_from_anchor=True)
    config = {
        **plain,
        "architectures": ["DSparkDraftModel"],
        "projector_type": "dspark",
        "attention_mode": "gqa",
        "dflash_config": repeated,
    }
    assert read(tmp_path, config) == read(tmp_path, plain)
    assert not caplog.records
    for changes, words in (
        ({"model_type": "llama"}, "DSparkDraftModel with model_type 'llama'"),
        ({"projector_type": "dflash"}, "projector_type is 'dflash'; supported: 'dspark'"),
        ({"attention_mode": "mla"}, "attention_mode is 'mla'"),
        ({"dflash_config": {**repeated, "block_size": 7}}, "dflash_config.block_size is 7, but block_size"),
        ({"dflash_config": {**repeated, "markov_rank": 7}}, "dflash_config.markov_rank is 7, but markov_rank"),
    ):
        with pytest.raises(CheckpointError, match=re.escape(words)):
            read(tmp_path, {**config, **changes})


# Tensors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(tiny_shapes(GEMMA4)))
def test_HEAD_SILENT_each_gemma4_tensor_missing_renamed_retyped_or_reshaped_is_named(tmp_path: Path, name: str) -> None:
    config = gemma4_config()
    tensors = tiny_tensors(config)
    rest = {other: tensor for other, tensor in tensors.items() if other != name}
    refused(write_checkpoint(tmp_path, config, rest), name)
    refused(write_checkpoint(tmp_path, config, {**rest, name + "_": tensors[name]}), name + "_", "not part of")
    refused(write_checkpoint(tmp_path, config, {**rest, name: tensors[name].half()}), name)
    refused(write_checkpoint(tmp_path, config, {**rest, name: tensors[name].repeat(*[2] * tensors[name].dim())}), name)


SPECIAL = speculators_config(draft_vocab_size=32, markov_head_type="rnn")


@pytest.mark.parametrize("name", sorted(tiny_shapes(SPECIAL)))
def test_HEAD_SILENT_each_speculators_tensor_missing_renamed_retyped_or_reshaped_is_named(
    tmp_path: Path, name: str
) -> None:
    tensors = tiny_tensors(SPECIAL)
    rest = {other: tensor for other, tensor in tensors.items() if other != name}
    refused(write_checkpoint(tmp_path, SPECIAL, rest), name)
    refused(write_checkpoint(tmp_path, SPECIAL, {**rest, name + "_": tensors[name]}), name + "_", "not part of")
    refused(write_checkpoint(tmp_path, SPECIAL, {**rest, name: tensors[name].half()}), name)
    refused(write_checkpoint(tmp_path, SPECIAL, {**rest, name: tensors[name].repeat(*[2] * tensors[name].dim())}), name)


def test_HEAD_SILENT_tensors_of_another_head_or_family_are_named(tmp_path: Path) -> None:
    for write, name in (
        (write_tiny, "markov_head.joint_proj.weight"),
        (write_tiny, "layers.0.layer_scalar"),
        (write_gemma4, "layers.0.self_attn.v_proj.weight"),
        (write_gemma4, "d2t"),
        (write_speculators, "d2t"),
    ):
        folder = write(tmp_path / "drafter")
        tensors = load_file(folder / "model.safetensors")
        save_file({**tensors, name: torch.zeros(6).bfloat16()}, folder / "model.safetensors")
        refused(folder, name, "not part of", target=write_target(tmp_path / "target"))


@pytest.mark.parametrize("write", [write_gemma4, write_speculators])
def test_shards_are_the_same_drafter(tmp_path: Path, write: Callable[..., Path]) -> None:
    target = write_target(tmp_path / "t")
    assert identities(write(tmp_path / "a", shards=3), target) == identities(write(tmp_path / "b"), target)


# Who lends what --------------------------------------------------------------------------------------------------------


def test_SHARED_W_a_speculators_checkpoint_needs_its_target(tmp_path: Path) -> None:
    whole, reduced = write_speculators(tmp_path / "d"), write_speculators(tmp_path / "r", draft_vocab_size=32)
    refused(whole, "embed_tokens.weight", "lm_head.weight", "--target DIR")
    refused(reduced, "no embed_tokens.weight:", "--target DIR")
    target = write_target(tmp_path / "t", shards=3)
    assert load_checkpoint(whole, target).tensors["lm_head.weight"].shape == (97, 32)
    assert load_checkpoint(reduced, target).tensors["lm_head.weight"].shape == (32, 32)


def test_SHARED_W_a_reduced_vocabulary_must_bring_its_head(tmp_path: Path) -> None:
    folder = write_speculators(tmp_path / "d", draft_vocab_size=32)
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    refused(folder, "lm_head.weight missing", target=write_target(tmp_path / "t"))


def test_SHARED_W_a_gemma4_checkpoint_is_lent_nothing(tmp_path: Path) -> None:
    config = gemma4_config()
    tensors = tiny_tensors(config)
    del tensors["lm_head.weight"]
    refused(
        write_checkpoint(tmp_path / "d", config, tensors), "lm_head.weight missing", target=write_target(tmp_path / "t")
    )


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_SHARED_W_a_multimodal_target_keeps_its_embedding_deeper(tmp_path: Path, prefix: str) -> None:
    target = write_target(tmp_path / "t", tied=True)
    tensors = load_file(target / "model.safetensors")
    embedding = tensors.pop("model.embed_tokens.weight")
    save_file({**tensors, f"{prefix}embed_tokens.weight": embedding}, target / "model.safetensors")
    loaded = load_checkpoint(write_speculators(tmp_path / "d"), target)
    assert torch.equal(loaded.tensors["embed_tokens.weight"], embedding)
    assert torch.equal(loaded.tensors["lm_head.weight"], embedding)


def test_the_same_drafter_has_one_identity_in_either_format(tmp_path: Path) -> None:
    target = write_target(tmp_path / "t")
    theirs = load_file(target / "model.safetensors")
    config = tiny_config(sample_from_anchor=True)
    tensors = tiny_tensors(speculators_config())
    tensors["embed_tokens.weight"] = theirs["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = theirs["lm_head.weight"]
    whole = write_checkpoint(tmp_path / "whole", config, tensors)
    assert identities(write_speculators(tmp_path / "d"), target) == identities(whole)


# Keys --------------------------------------------------------------------------------------------------------------------


def test_AUX_INDEX_speculators_counts_tapped_layers_as_vllm_does(tmp_path: Path) -> None:
    assert read_speculators(tmp_path).target_layer_ids == (1, 3, 4)
    assert read_speculators(tmp_path, aux_hidden_state_layer_ids=[0, 7]).target_layer_ids == (-1, 6)


@pytest.mark.parametrize(("says", "drafts"), [(True, 5), (False, 4)])
def test_LAYOUT_1N_the_layout_is_what_the_checkpoint_says(tmp_path: Path, says: bool, drafts: int) -> None:
    for config in (
        read_speculators(tmp_path, sample_from_anchor=says),
        read(tmp_path, tiny_config(sample_from_anchor=says)),
    ):
        assert (config.anchor_predicts, config.max_drafts) == (says, drafts)


def test_LAYOUT_1N_speculators_checkpoints_that_do_not_say_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"sample_from_anchor is missing.*trains with true.*vLLM reads .* as false"
    ):
        read(tmp_path, {key: value for key, value in speculators_config().items() if key != "sample_from_anchor"})


def test_LAYOUT_1N_the_two_readings_of_one_checkpoint_draft_otherwise(tmp_path: Path) -> None:
    target = write_target(tmp_path / "t")
    drafts = []
    for says in (True, False):
        folder = write_speculators(tmp_path / str(says), sample_from_anchor=says)
        result = draft(folder, target, anchor=7)
        drafts.append(list(result.tokens))
    assert drafts[0][:4] != drafts[1]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (speculators_config(mask_token_id=None), "no mask token id"),
        (speculators_config(mask_token_id=97), "outside the vocabulary of 97"),
        (speculators_config(markov_rank=None), "markov_rank is missing"),
        (speculators_config(markov_head_type="lstm"), "markov_head_type is 'lstm'"),
        ({**speculators_config(), "aux_hidden_state_layer_ids": None}, "target_layer_ids is missing or empty"),
        (speculators_config(aux_hidden_state_layer_ids=[4, 2]), "strictly increasing"),
        (speculators_config(block_size=1, sample_from_anchor=False), "nothing is left to be drafted"),
        (speculators_config(quantization_config={"bits": 4}), "quantization_config"),
        ({**speculators_config(), "architectures": ["Eagle3Speculator"]}, "architectures is ['Eagle3Speculator']"),
        ({**speculators_config(), "speculators_model_type": "eagle3"}, "speculators_model_type 'eagle3'; supported"),
        ({**speculators_config(), "transformer_layer_config": None}, "transformer_layer_config is missing"),
        ({**speculators_config(), "speculators_config": {"proposal_methods": 1}}, "expected a list of objects"),
        (with_backbone(model_type="llama"), "transformer_layer_config.model_type is 'llama'"),
        (with_backbone(rope_parameters=None), "transformer_layer_config.rope_theta is missing"),
        (with_backbone(layer_types=["sliding_attention"] * 2), "transformer_layer_config.sliding_window is missing"),
        (
            with_backbone(markov_rank=7),
            "transformer_layer_config.markov_rank is 7, but markov_rank, which is what counts, is 6",
        ),
        (with_backbone(vocab_size=None), "transformer_layer_config.vocab_size is missing"),
        (gemma4_config(global_head_dim=None), "global_head_dim is missing"),
        (gemma4_config(per_layer_config={"0": {"head_dim": 8}}), "different values for the same thing"),
        (gemma4_config(layer_types=None), "only full, non-causal attention"),
        (gemma4_config(layer_types=["full_attention", "sliding_attention"]), "only full, non-causal attention"),
        (gemma4_config(is_causal=True), "is_causal is true"),
        (gemma4_config(enable_moe_block=True), "enable_moe_block is true"),
        (gemma4_config(attn_logit_softcapping=50.0), "attn_logit_softcapping is 50.0"),
        (gemma4_config(final_logit_softcapping=0), "final_logit_softcapping is 0"),
        (gemma4_config(hidden_activation="silu"), "hidden_activation is 'silu'"),
        (gemma4_config(draft_vocab_size=32), "drafts the whole vocabulary"),
        (gemma4_config(num_global_key_value_heads=3), "not a multiple"),
        (gemma4_config(rope_parameters={}), "rope_theta is None"),
        (gemma4_config(rope_parameters={"rope_theta": 1e4, "rope_type": "yarn"}), "rope_type is 'yarn'"),
        (
            gemma4_config(rope_parameters={"rope_theta": 1e4, "rope_type": "proportional", "factor": 8}),
            "factor changes",
        ),
        (
            gemma4_config(rope_parameters={"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.25}),
            "partial_rotary_factor is 0.25 with rope_type 'default'",
        ),
    ],
)
def test_a_config_that_is_not_served_is_refused_with_the_key(
    tmp_path: Path, config: dict[str, object], words: str
) -> None:
    with pytest.raises(CheckpointError, match=re.escape(words)):
        read(tmp_path, config)


@pytest.mark.parametrize(("proposed", "words"), [(3, "--drafts 3"), (9, "num_speculative_tokens=5"), (5, None)])
def test_K_VS_BLOCK_what_an_engine_will_ask_for_is_said(
    tmp_path: Path, proposed: int, words: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    methods = {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": proposed}]}
    read(tmp_path, {**speculators_config(), "speculators_config": methods})
    assert (words in caplog.text) if words else not caplog.records


def test_a_window_of_all_layers_bounds_the_context(tmp_path: Path) -> None:
    target = write_target(tmp_path / "t")
    sliding: dict[str, Any] = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6}
    info = open_drafter(write_speculators(tmp_path / "a", **sliding), target=target, slots=1, context=24).info
    assert (info.window, info.context) == (6, 6)
    mixed = {**sliding, "layer_types": ["sliding_attention", "full_attention"]}
    info = open_drafter(write_speculators(tmp_path / "b", **mixed), target=target, slots=1, context=24).info
    assert (info.window, info.context) == (0, 24)


# A reduced vocabulary -------------------------------------------------------------------------------------------------


def draft(folder: Path, target: Path | None, anchor: int = 7, **options: Any) -> DraftResult:
    """One draft after nine rows."""
    drafter = open_drafter(folder, target=target, **{"dtype": "float32", "slots": 1, "context": 24, **options})
    rows = torch.randn(9, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    entry = DraftEntry(0, True, 0, 9, 0, anchor, True, drafter.info.num_drafts)
    return drafter.draft(DraftBatch([entry], memoryview(rows.view(torch.uint8).numpy().tobytes()), want_margins=True))


@pytest.fixture
def reduced(tmp_path: Path) -> Path:
    write_target(tmp_path / "t")
    return write_speculators(tmp_path / "d", draft_vocab_size=32)


def test_D2T_what_is_drafted_are_ids_of_the_target(tmp_path: Path, reduced: Path) -> None:
    offsets = load_file(reduced / "model.safetensors")["d2t"]
    ids = set((torch.arange(32) + offsets).tolist())
    drawn: set[int] = set()
    for anchor in range(0, 97, 6):
        drawn.update(draft(reduced, tmp_path / "t", anchor).tokens)
    assert drawn <= ids
    assert len(drawn) > 5
    assert max(drawn) >= 32, "rows of the head would not be told from ids"


def test_D2T_a_judged_token_outside_the_drafted_vocabulary_is_as_far_away_as_can_be(
    tmp_path: Path, reduced: Path
) -> None:
    offsets = load_file(reduced / "model.safetensors")["d2t"]
    ids = set((torch.arange(32) + offsets).tolist())
    outside = next(one for one in range(97) if one not in ids)
    result = draft(reduced, tmp_path / "t")
    assert result.judge is not None
    chain = torch.tensor([result.tokens[0], outside, *result.tokens[2:]], dtype=torch.int32)
    judged = result.judge([0], memoryview(chain.numpy().tobytes()).cast("i"))
    assert judged.gaps[0] == 0
    assert judged.gaps[1] == torch.finfo(torch.float32).max
    assert all(torch.isfinite(torch.tensor(judged.gaps.tolist())))


@pytest.mark.parametrize("row", [0, 31])
@pytest.mark.parametrize(
    ("id_of_row", "words"),
    [
        (lambda ids: 97, "id 97, outside the target's vocabulary of 97"),
        (lambda ids: -1, "id -1, outside the target's vocabulary of 97"),
        (lambda ids: ids[5], "several rows of the head to one id"),
    ],
)
def test_D2T_a_table_that_cannot_be_is_refused(
    tmp_path: Path, reduced: Path, row: int, id_of_row: Callable[[list[int]], int], words: str
) -> None:
    tensors = load_file(reduced / "model.safetensors")
    ids = (torch.arange(32) + tensors["d2t"]).tolist()
    tensors["d2t"][row] = id_of_row(ids) - row
    save_file(tensors, reduced / "model.safetensors")
    with pytest.raises(CheckpointError, match=words):
        draft(reduced, tmp_path / "t")


def test_D2T_a_target_with_fewer_ids_than_the_table_names_is_refused(tmp_path: Path, reduced: Path) -> None:
    tensors = load_file(reduced / "model.safetensors")
    tensors["embed_tokens.weight"] = torch.zeros(97, 32).bfloat16()
    save_file(tensors, reduced / "model.safetensors")
    with pytest.raises(CheckpointError, match="outside the target's vocabulary of 40"):
        draft(reduced, write_target(tmp_path / "small", vocab=40))


def test_D2T_a_padded_head_needs_no_table(tmp_path: Path) -> None:
    config = speculators_config(draft_vocab_size=128)
    tensors = tiny_tensors(config)
    tensors["lm_head.weight"][97:] *= 100
    folder = write_checkpoint(tmp_path / "d", config, tensors)
    for anchor in range(0, 97, 12):
        assert all(0 <= token < 97 for token in draft(folder, None, anchor).tokens)


# Where vLLM and training differ ---------------------------------------------------------------------------------------


def test_the_readings_of_gemma4s_soft_cap_are_two(tmp_path: Path) -> None:
    folder = write_gemma4(tmp_path)
    vllm, training = (draft(folder, None, options=ModelOptions(follow=follow)) for follow in ("vllm", "training"))
    assert list(vllm.confidences)[:1] == pytest.approx(list(training.confidences)[:1])
    assert vllm.margins is not None
    assert training.margins is not None
    assert list(vllm.margins) != list(training.margins)


def test_the_readings_that_can_be_asked_for_are_those_that_there_are() -> None:
    assert worker_config.FOLLOW == families.FOLLOW


def test_a_reading_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="'deepspec'; supported: 'vllm', 'training'"):
        ModelOptions(follow="deepspec")


def test_every_family_has_a_model_and_every_model_a_family() -> None:
    assert {Qwen3DSparkConfig, Gemma4DSparkConfig} <= set(MODELS)
    assert {Qwen3DSparkConfig.kind, Gemma4DSparkConfig.kind, "dspark"} <= set(FAMILIES)
