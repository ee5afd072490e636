"""The stages against the formulas (tests/fakes/plain_deepseek.py), V4's also against transformers' own modules."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fakes.plain_deepseek import Behaviour, PlainDeepseek, behaviour_of, codes_of
from tests.fakes.tiny_deepseek import text_of, tiny_config, tiny_tensors, write_deepseek, write_tiny_deepseek
from torch import Tensor

from farspark.worker.checkpoint import load_checkpoint
from farspark.worker.checkpoint.deepseek import DeepseekV4Config
from farspark.worker.models.base import Arithmetic
from farspark.worker.models.deepseek_v4 import DeepseekV4, weight_bytes
from farspark.worker.models.latent_attention import attend_with_sink
from farspark.worker.models.streams import PlainStreams

pytestmark = pytest.mark.usefixtures("one_thread")

FLOAT32 = Arithmetic(torch.float32, torch.float32)
VERSIONS = ("v4", "v41")


def make_rows(count: int, width: int, seed: int = 0) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).bfloat16().float()


def make(folder: Path, *, is_reference: bool = False, arithmetic: Arithmetic = FLOAT32) -> DeepseekV4:
    loaded = load_checkpoint(folder)
    assert isinstance(loaded.config, DeepseekV4Config)
    return DeepseekV4(loaded.config, loaded.tensors, loaded.vocab_size, arithmetic, is_reference=is_reference)


class Held:
    """A `BlockContext` of given entries [layers, K, d], for one request."""

    fused = None

    def __init__(self, entries: Tensor, block: int) -> None:
        self.entries = entries
        self.visible = entries.shape[1]
        self.bias = torch.zeros(1, 1, 1, self.visible + block)

    def gather(self, layer: int, own: Tensor) -> Tensor:
        return torch.cat((self.entries[layer].unsqueeze(0), own), dim=1)


def block_of(model: DeepseekV4, text: Any, rows: Tensor, first_pos: int, anchor: int) -> Tensor:
    """[N, D]: what the heads read of a block behind `rows`."""
    positions = torch.arange(first_pos, first_pos + len(rows))
    count = text["dspark_block_size"]
    held = Held(model.project_context(rows, positions), count)
    tokens = torch.full((1, count), text["dspark_noise_token_id"])
    tokens[0, 0] = anchor
    return model.block(tokens, (first_pos + len(rows) + torch.arange(count)).unsqueeze(0), held)[0]


@pytest.fixture(scope="module", params=VERSIONS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_deepseek(tmp_path_factory.mktemp(request.param), request.param)


def config_of(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())


# The two versions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first_pos", [0, 4000])
def test_POS_OFF1_a_block_is_that_of_the_formulas(folder: Path, first_pos: int) -> None:
    model, plain = make(folder), PlainDeepseek.read(folder)
    text = text_of(config_of(folder))
    rows = make_rows(6, 3 * text["hidden_size"])
    hidden = block_of(model, text, rows, first_pos, 7)
    wanted = plain.draft(rows, first_pos, 7)
    # Angles of positions in the thousands are good to about 1e-4 in float32.
    tolerance = 1e-4 if first_pos == 0 else 2e-2
    torch.testing.assert_close(hidden, wanted.hidden, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(model.base_logits(wanted.hidden), wanted.base, rtol=1e-4, atol=1e-4)
    assert model.markov is not None
    assert model.confidence is not None
    embedded = model.markov.embed(torch.tensor([7]))
    logits, _ = model.markov.step(wanted.base[:1], wanted.hidden[:1], embedded, None)
    torch.testing.assert_close(logits, wanted.logits[:1])
    assert float(model.confidence(wanted.hidden[0], embedded[0])) == pytest.approx(wanted.confidences[0], abs=1e-5)


def planted(version: str) -> Iterator[Any]:
    """The other version's way of each thing, one at a time."""
    own, other = (behaviour_of(tiny_config(one)) for one in (version, "v4" if version == "v41" else "v41"))
    for name in ("eps", "normalises_query_heads", "delays_pre", "has_head_mix"):
        if name == "has_head_mix" and version == "v41":
            continue  # there are no weights for it: see below
        yield pytest.param(version, replace(own, **{name: getattr(other, name)}), id=f"{version}-{name}")


@pytest.mark.parametrize(("version", "behaviour"), [*planted("v41"), *planted("v4")])
def test_WRONG_FAMILY_one_way_of_the_other_version_is_another_drafter(
    tmp_path: Path, version: str, behaviour: Behaviour
) -> None:
    """Each difference shows: a model that did this as the other version does would fail the parity above it."""
    config = tiny_config(version)
    tensors = tiny_tensors(config)
    for stage in range(3):
        # Latents so faint that 1e-6 is something beside their mean square.
        codes_of(tensors[f"mtp.{stage}.attn.wkv.scale"]).sub_(10)
    folder = write_deepseek(tmp_path, config, tensors)
    text = text_of(config)
    rows = make_rows(6, 3 * text["hidden_size"])
    hidden = block_of(make(folder), text, rows, 0, 7)
    right, wrong = (PlainDeepseek.read(folder, behaviour=one).draft(rows, 0, 7) for one in (None, behaviour))
    torch.testing.assert_close(hidden, right.hidden, rtol=1e-4, atol=1e-4)
    assert float((hidden - wrong.hidden).abs().max()) > 0.01


def test_V41_stages_have_as_many_experts_as_config_says_for_them(tmp_path: Path) -> None:
    """24 experts with 4 per token are the target's own numbers in this config."""
    loaded = load_checkpoint(write_tiny_deepseek(tmp_path, "v41"))
    assert isinstance(loaded.config, DeepseekV4Config)
    assert (loaded.config.experts, loaded.config.experts_per_token) == (8, 3)


@pytest.mark.parametrize(
    "arithmetic", [Arithmetic(torch.bfloat16, torch.bfloat16), Arithmetic(torch.bfloat16, torch.float32)]
)
def test_logits_are_not_rounded_whatever_the_dtype(folder: Path, arithmetic: Arithmetic) -> None:
    model = make(folder, arithmetic=arithmetic)
    assert model.markov is not None
    hidden = make_rows(2, model._config.hidden_size).to(arithmetic.carrier)
    base = model.base_logits(hidden)
    logits, _ = model.markov.step(base, hidden, model.markov.embed(torch.tensor([3, 4])), None)
    for one in (base, logits):
        assert one.dtype == torch.float32
        assert not torch.equal(one.bfloat16().float(), one)


# Quantisation ---------------------------------------------------------------------------------------------------------


def test_the_reference_mode_keeps_of_the_context_what_fp8_keeps(folder: Path) -> None:
    plain = PlainDeepseek.read(folder, quantises=True)
    rows = make_rows(5, 3 * plain.text["hidden_size"], seed=3)
    entries = make(folder, is_reference=True).project_context(rows, torch.arange(10, 15))
    wanted = torch.stack([torch.stack(stage) for stage in plain.contexts(rows, 10)])
    # The last bit of a float32 sum may put a value on the other side of a rounding.
    assert float((entries - wanted).abs().gt(1e-4).float().mean()) < 0.01
    exact = make(folder).project_context(rows, torch.arange(10, 15))
    assert float((entries - exact).abs().gt(1e-4).float().mean()) > 0.3


def with_outliers(version: str) -> tuple[Any, dict[str, Tensor]]:
    """A checkpoint in which the width of a group shows: fp8 loses what shares a scale with a value 100,000 times as large.

    The rows' outliers (see `outlying_rows`) meet zeros in main_proj, so that only what they do to their neighbours is left.
    """
    config = tiny_config(version)
    tensors = tiny_tensors(config)
    codes_of(tensors["mtp.0.main_proj.weight"])[:, ::128] = 0
    for stage in range(3):
        tensors[f"mtp.{stage}.attn.kv_norm.weight"][0] = 2.0**17
    return config, tensors


def outlying_rows(width: int) -> Tensor:
    rows = make_rows(5, width, seed=3)
    rows[:, ::128] = 2.0**17
    return rows


@pytest.mark.parametrize("name", ["kv_group", "quantises_rotated", "activation_group"])
@pytest.mark.parametrize("version", VERSIONS)
def test_each_group_of_the_other_version_is_another_context(tmp_path: Path, version: str, name: str) -> None:
    config, tensors = with_outliers(version)
    folder = write_deepseek(tmp_path, config, tensors)
    own, other = (behaviour_of(tiny_config(one)) for one in (version, "v4" if version == "v41" else "v41"))
    wrong_way = replace(own, **{name: getattr(other, name)})
    right, wrong = (PlainDeepseek(config, tensors, quantises=True, behaviour=one) for one in (own, wrong_way))
    rows = outlying_rows(3 * right.text["hidden_size"])
    entries = make(folder, is_reference=True).project_context(rows, torch.arange(10, 15))
    wanted, planted = (torch.stack([torch.stack(stage) for stage in one.contexts(rows, 10)]) for one in (right, wrong))
    assert float((entries - wanted).abs().gt(1e-3).float().mean()) < 0.01
    assert float((entries - planted).abs().gt(1e-3).float().mean()) > 0.1


# Attention ------------------------------------------------------------------------------------------------------------


def test_the_sink_takes_a_share_and_gives_nothing() -> None:
    query, entries = torch.zeros(1, 1, 2, 4), torch.ones(1, 3, 4)
    sink = torch.tensor([0.0, 2.0])
    attended = attend_with_sink(query, entries, torch.zeros(1, 1, 1, 3), sink, 0.5)
    shares = 3 / (3 + sink.exp())
    torch.testing.assert_close(attended[0, 0], shares.unsqueeze(1).expand(2, 4))


def test_what_is_not_visible_counts_nothing() -> None:
    query, entries = torch.randn(1, 2, 2, 4), torch.randn(1, 5, 4)
    bias = torch.zeros(1, 1, 1, 5)
    bias[..., :2] = float("-inf")
    sink = torch.randn(2)
    hidden = torch.cat((torch.zeros(1, 2, 4), entries[:, 2:]), dim=1)
    seen = attend_with_sink(query, entries[:, 2:], bias[..., 2:], sink, 0.5)
    torch.testing.assert_close(attend_with_sink(query, hidden, bias, sink, 0.5), seen)


# Memory ---------------------------------------------------------------------------------------------------------------


def tensors_in(thing: object, seen: set[int]) -> Iterator[Tensor]:
    """Every tensor that an object of ours holds, each memory once."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, list | tuple):
        for one in thing:
            yield from tensors_in(one, seen)
    elif type(thing).__module__.startswith("farspark."):
        slots = [getattr(thing, name) for name in getattr(type(thing), "__slots__", ())]
        for one in [*getattr(thing, "__dict__", {}).values(), *slots]:
            yield from tensors_in(one, seen)


def test_a_stream_of_other_than_four_copies_is_not_the_kernels(tmp_path: Path) -> None:
    made: list[Any] = []

    def streams(arithmetic: Arithmetic, eps: float) -> PlainStreams:
        made.append(eps)
        return PlainStreams(arithmetic, eps)

    kind = type("Fusing", (Arithmetic,), {"fused_streams": staticmethod(streams)})
    arithmetic = kind(torch.float32, torch.float32)
    for copies in (4, 2):
        folder = write_tiny_deepseek(tmp_path / str(copies), "v41", hc_mult=copies)
        text = text_of(config_of(folder))
        rows = make_rows(6, 3 * text["hidden_size"])
        torch.testing.assert_close(
            block_of(make(folder, arithmetic=arithmetic), text, rows, 0, 7), block_of(make(folder), text, rows, 0, 7)
        )
    assert len(made) == 1


@pytest.mark.parametrize(
    "arithmetic", [FLOAT32, Arithmetic(torch.bfloat16, torch.bfloat16)], ids=["float32", "bfloat16"]
)
def test_the_memory_of_the_weights_is_what_is_held(folder: Path, arithmetic: Arithmetic) -> None:
    model = make(folder, arithmetic=arithmetic)
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors_in(model, set())}
    not_weights = model._inverse_frequency.nbytes + model._latent_norms.nbytes + model._first_copy.nbytes
    assert sum(storages.values()) - not_weights == model.weight_bytes


def published(**changes: Any) -> DeepseekV4Config:
    """V4.1-Flash, and what V4-Flash and V4-Pro differ in."""
    config = DeepseekV4Config(
        kind="DeepseekV41ForCausalLM",
        stages=3,
        hidden_size=5120,
        moe_intermediate_size=2304,
        num_heads=64,
        head_dim=512,
        rope_head_dim=64,
        q_lora_rank=1280,
        o_lora_rank=1024,
        o_groups=8,
        experts=128,
        experts_per_token=3,
        routed_scaling_factor=1.5,
        swiglu_limit=10.0,
        rms_norm_eps=1e-20,
        rope_theta=10000.0,
        window=128,
        hc_mult=4,
        hc_sinkhorn_iters=20,
        hc_eps=1e-6,
        fp8_block=32,
        vocab_size=129280,
        max_position=1048576,
        block_size=5,
        mask_token_id=128799,
        target_layer_ids=(37, 38, 39),
        markov_rank=256,
    )
    return replace(config, **changes)


FLASH = {
    "kind": "DeepseekV4ForCausalLM",
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "q_lora_rank": 1024,
    "experts": 256,
    "fp8_block": 128,
}
PRO = {
    **FLASH,
    "hidden_size": 7168,
    "moe_intermediate_size": 3072,
    "num_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "experts": 384,
    "markov_rank": 512,
}


@pytest.mark.parametrize(
    ("changes", "gigabytes"), [({}, 31.1), (FLASH, 41.8), (PRO, 158.7)], ids=["V4.1-Flash", "V4-Flash", "V4-Pro"]
)
def test_the_memory_of_the_published_drafters_follows_from_their_configs(changes: Any, gigabytes: float) -> None:
    """In bf16, embedding and head included; on a CPU the projections to the vocabulary are float32."""
    arithmetic = Arithmetic(torch.bfloat16, torch.bfloat16)
    assert weight_bytes(published(**changes), arithmetic, on_cpu=False) / 1e9 == pytest.approx(gigabytes, rel=0.005)
    on_cpu = weight_bytes(published(**changes), arithmetic, on_cpu=True)
    config = published(**changes)
    extra = config.vocab_size * (config.hidden_size + config.markov_rank) * 2
    assert on_cpu - weight_bytes(config, arithmetic, on_cpu=False) == extra


def test_the_weights_are_taken_so_that_none_is_held_twice(folder: Path) -> None:
    loaded = load_checkpoint(folder)
    assert isinstance(loaded.config, DeepseekV4Config)
    DeepseekV4(loaded.config, loaded.tensors, loaded.vocab_size, FLOAT32)
    assert not loaded.tensors


def test_a_weight_without_a_use_is_an_error(folder: Path) -> None:
    loaded = load_checkpoint(folder)
    assert isinstance(loaded.config, DeepseekV4Config)
    loaded.tensors["mtp.0.extra"] = torch.zeros(1)
    with pytest.raises(AssertionError, match=r"mtp\.0\.extra"):
        DeepseekV4(loaded.config, loaded.tensors, loaded.vocab_size, FLOAT32)


# transformers ---------------------------------------------------------------------------------------------------------


class ContextFirst:
    """What transformers' attention takes for a cache: the held entries of each layer in front of the block's."""

    def __init__(self, entries: list[Tensor]) -> None:
        self.entries = entries  # [1, 1, K, d] each

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        return torch.cat((self.entries[layer], keys), dim=2), torch.cat((self.entries[layer], values), dim=2)


def test_V4_a_block_is_that_of_transformers_own_modules(tmp_path: Path) -> None:
    """Its decoder layer and hyper-connections know no DSpark stages; with the context for a cache they are one."""
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    transformers = pytest.importorskip("transformers")
    config = tiny_config("v4")
    tensors = tiny_tensors(config)
    weights = PlainDeepseek(config, tensors).weights  # decoded; the rest is transformers'
    keys = ("quantization_config", "architectures", "compress_ratios", "num_hash_layers", "rope_scaling")
    theirs = transformers.DeepseekV4Config(
        **{key: value for key, value in config.items() if key not in keys and not key.startswith("dspark_")}
        | {"num_hidden_layers": 3, "layer_types": ["sliding_attention"] * 3, "mlp_layer_types": ["moe"] * 3}
    )
    theirs._attn_implementation = "eager"
    layers = [modeling.DeepseekV4DecoderLayer(theirs, index).eval() for index in range(3)]
    for index, layer in enumerate(layers):
        layer.load_state_dict(layer_state(weights, index, config["n_routed_experts"]))
    head = modeling.DeepseekV4HyperHead(theirs)
    head.load_state_dict({f"hc_{part}": weights[f"mtp.2.hc_head_{part}"] for part in ("fn", "base", "scale")})
    rotary = modeling.DeepseekV4RotaryEmbedding(theirs)

    first_pos, anchor, rows = 11, 7, make_rows(9, 3 * 128, seed=5)
    with torch.inference_mode():
        context_pos = torch.arange(first_pos, first_pos + 9).unsqueeze(0)
        block_pos = first_pos + 9 + torch.arange(5).unsqueeze(0)
        norm = modeling.DeepseekV4RMSNorm(128, 1e-6)
        norm.load_state_dict({"weight": weights["mtp.0.main_norm.weight"]})
        combined = norm(rows @ weights["mtp.0.main_proj.weight"].T).unsqueeze(0)
        cos, sin = rotary(combined, context_pos, layer_type="main")
        held = []
        for layer in layers:
            kv = layer.self_attn.kv_norm(layer.self_attn.kv_proj(combined)).unsqueeze(1)
            held.append(modeling.apply_rotary_pos_emb(kv, cos, sin))
        stream = weights["embed.weight"][[anchor, 96, 96, 96, 96]].view(1, 5, 1, 128).repeat(1, 1, 4, 1)
        rotation = {"main": rotary(stream, block_pos, layer_type="main")}
        for layer in layers:
            stream = layer(
                stream,
                position_embeddings=rotation,
                position_ids=block_pos,
                attention_mask=None,
                past_key_values=ContextFirst(held),
            )
        wanted = head(stream)[0]
    folder = write_tiny_deepseek(tmp_path, "v4")
    hidden = block_of(make(folder), config, rows, first_pos, anchor)
    torch.testing.assert_close(hidden, wanted, rtol=1e-4, atol=1e-4)


def layer_state(weights: dict[str, Tensor], stage: int, experts: int) -> dict[str, Tensor]:
    """The published names of a stage, as transformers' decoder layer has them."""
    at = f"mtp.{stage}."
    state = {
        "self_attn.sinks": weights[at + "attn.attn_sink"],
        "input_layernorm.weight": weights[at + "attn_norm.weight"],
        "post_attention_layernorm.weight": weights[at + "ffn_norm.weight"],
        "mlp.gate.weight": weights[at + "ffn.gate.weight"],
        "mlp.gate.e_score_correction_bias": weights[at + "ffn.gate.bias"],
    }
    for ours, theirs in (
        ("wq_a", "q_a_proj"),
        ("q_norm", "q_a_norm"),
        ("wq_b", "q_b_proj"),
        ("wkv", "kv_proj"),
        ("kv_norm", "kv_norm"),
        ("wo_a", "o_a_proj"),
        ("wo_b", "o_b_proj"),
    ):
        state[f"self_attn.{theirs}.weight"] = weights[f"{at}attn.{ours}.weight"]
    for part in ("attn", "ffn"):
        for name in ("fn", "base", "scale"):
            state[f"{part}_hc.{name}"] = weights[f"{at}hc_{part}_{name}"]
    for ours, theirs in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
        state[f"mlp.shared_experts.{theirs}.weight"] = weights[f"{at}ffn.shared_experts.{ours}.weight"]
    every = [
        {name: weights[f"{at}ffn.experts.{e}.{name}.weight"] for name in ("w1", "w2", "w3")} for e in range(experts)
    ]
    state["mlp.experts.gate_up_proj"] = torch.stack([torch.cat((one["w1"], one["w3"])) for one in every])
    state["mlp.experts.down_proj"] = torch.stack([one["w2"] for one in every])
    return state
