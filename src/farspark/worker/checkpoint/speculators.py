"""config.json of a drafter in the format of the speculators library (`speculators_model_type: "dspark"`).

The transformer's keys lie in `transformer_layer_config`, DSpark's at the top level; the model is a Qwen3 DSpark drafter.
Tapped layers are counted as vLLM counts them. Such checkpoints lack what they share with their target: the embedding
always, the head unless the drafted vocabulary is a part of the target's.
"""

from __future__ import annotations

import logging
from typing import Final

from farspark.errors import CheckpointError
from farspark.worker.checkpoint.dense import (
    HARMLESS_KEYS,
    read_block_size,
    read_layout,
    read_mask_token_id,
    read_target_layer_ids,
    refuse_other_drafting,
    refuse_quantised,
    warn_of_unknown,
)
from farspark.worker.checkpoint.keys import ConfigKeys
from farspark.worker.checkpoint.qwen3 import Qwen3DSparkConfig, read_drafter

logger = logging.getLogger(__name__)

MODEL_TYPE: Final = "dspark"
# The model whose weights these are, as written by several versions of the library.
ARCHITECTURES: Final = frozenset({"DSparkSpeculator", "DSparkDraftModel", "Qwen3DSparkModel"})
_TRAINING_KEYS: Final = frozenset(
    {
        "ce_loss_alpha",
        "confidence_head_alpha",
        "has_no_defaults_at_init",
        "l1_loss_alpha",
        "loss_decay_gamma",
        "max_anchors",
        "speculators_model_type",
        "speculators_version",
    }
)


def parse(keys: ConfigKeys, names: frozenset[str]) -> Qwen3DSparkConfig:
    """Raises CheckpointError, naming the key, for what is missing, contradictory or not served."""
    architectures = keys.texts("architectures") or ()
    keys.skip(HARMLESS_KEYS | _TRAINING_KEYS)
    if not ARCHITECTURES.issuperset(architectures):
        raise CheckpointError(
            f"{keys.name('architectures')} is {list(architectures)}; supported: {', '.join(sorted(ARCHITECTURES))}"
        )
    if not keys.has("transformer_layer_config"):
        raise CheckpointError(f"{keys.name('transformer_layer_config')} is missing")
    backbone = keys.nested("transformer_layer_config")
    backbone.skip(HARMLESS_KEYS)
    model_type = backbone.text("model_type")
    if model_type not in (None, "qwen3"):
        raise CheckpointError(f"{backbone.name('model_type')} is {model_type!r}; supported: 'qwen3'")
    dflash = backbone.nested("dflash_config")
    refuse_quantised(keys, backbone)
    refuse_other_drafting(keys, backbone, dflash)
    block_size = read_block_size(keys, dflash)
    vocab_size = backbone.integer("vocab_size", at_least=2)
    config = read_drafter(
        backbone=backbone,
        own=keys,
        dflash=dflash,
        vocab_size=vocab_size,
        block_size=block_size,
        anchor_predicts=read_layout(keys, block_size),
        mask_token_id=read_mask_token_id(keys, dflash, vocab_size),
        target_layer_ids=read_target_layer_ids(keys, dflash, entering_key="aux_hidden_state_layer_ids"),
        sliding_non_causal=bool(keys.flag("sliding_window_non_causal")),
    )
    _say_what_vllm_makes_of_it(keys.nested("speculators_config"), config)
    warn_of_unknown(keys, backbone, dflash)
    return config


def _say_what_vllm_makes_of_it(proposal: ConfigKeys, config: Qwen3DSparkConfig) -> None:
    """An engine asks for as many drafts as the config proposes, unless it is told another number."""
    proposal.skip({"algorithm", "default_proposal_method"})
    verifier = proposal.nested("verifier").text("name_or_path")
    if verifier:
        logger.info("trained for %s", verifier)
    methods = proposal.objects("proposal_methods") or ()
    proposed = methods[0].optional_integer("speculative_tokens", at_least=1) if methods else None
    if proposed is not None and proposed > config.max_drafts:
        logger.warning(
            "config.json proposes %d speculative tokens, but a block has %d; give the engine num_speculative_tokens=%d",
            proposed,
            config.max_drafts,
            config.max_drafts,
        )
    if proposed is not None and proposed < config.max_drafts:
        logger.warning(
            "config.json proposes %d speculative tokens of a block's %d: an engine that is not told num_speculative_tokens "
            "asks for that many, and the worker must be started with --drafts %d",
            proposed,
            config.max_drafts,
            proposed,
        )
