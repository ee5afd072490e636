from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.fakes.plain_deepseek import PlainDeepseek
from tests.fakes.tiny_deepseek import tiny_config, tiny_tensors
from torch import Tensor

from farspark.worker.models.hyper_connections import (
    HyperConnection,
    HyperHead,
    Mixes,
    collapse,
    sinkhorn,
    spread,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def plain() -> PlainDeepseek:
    config = tiny_config("v4")
    return PlainDeepseek(config, tiny_tensors(config))


def connection(plain: PlainDeepseek, name: str, **changes: Any) -> HyperConnection:
    fn, base, scale = (plain.weights[f"{name}_{part}"] for part in ("fn", "base", "scale"))
    options: dict[str, Any] = {"copies": 4, "iterations": 20, "norm_eps": 1e-6, "eps": 1e-6, **changes}
    return HyperConnection(fn, base, scale, **options)


def make_stream(count: int = 3) -> Tensor:
    return torch.randn(2, count, 4, 128, generator=torch.Generator().manual_seed(count))


def test_the_mixes_are_those_of_the_formulas(plain: PlainDeepseek) -> None:
    stream = make_stream()
    mixes = connection(plain, "mtp.1.hc_ffn")(stream)
    assert (mixes.pre.shape, mixes.post.shape, mixes.comb.shape) == ((2, 3, 4), (2, 3, 4), (2, 3, 4, 4))
    for where in ((0, 0), (1, 2)):
        pre, post, comb = plain.mixes(stream[where], "mtp.1.hc_ffn")
        torch.testing.assert_close(mixes.pre[where], pre)
        torch.testing.assert_close(mixes.post[where], post)
        torch.testing.assert_close(mixes.comb[where], comb)


def test_the_statistic_is_one_over_all_copies(plain: PlainDeepseek) -> None:
    """A stream whose copies differ in size: norms of their own would give other mixes."""
    stream = make_stream() * torch.tensor([0.1, 1.0, 3.0, 10.0]).view(4, 1)
    mixes = connection(plain, "mtp.0.hc_attn")(stream)
    torch.testing.assert_close(mixes.comb[1, 1], plain.mixes(stream[1, 1], "mtp.0.hc_attn")[2])
    scaled = connection(plain, "mtp.0.hc_attn")(1000 * stream)
    torch.testing.assert_close(scaled.comb, mixes.comb, rtol=1e-4, atol=1e-5)


def test_sinkhorn_ends_with_the_columns_and_approaches_a_doubly_stochastic_matrix() -> None:
    logits = torch.randn(50, 4, 4, generator=torch.Generator().manual_seed(0))
    comb = sinkhorn(logits, 20, 1e-6)
    torch.testing.assert_close(comb.sum(dim=-2), torch.ones(50, 4), rtol=0, atol=1e-5)
    torch.testing.assert_close(comb.sum(dim=-1), torch.ones(50, 4), rtol=0, atol=1e-3)
    once = sinkhorn(logits, 1, 1e-6)
    torch.testing.assert_close(once.sum(dim=-2), torch.ones(50, 4), rtol=0, atol=1e-5)
    assert float((once.sum(dim=-1) - 1).abs().max()) > 0.05


@pytest.mark.parametrize("iterations", [1, 2, 3])
def test_sinkhorn_makes_as_many_passes_as_it_is_told(iterations: int) -> None:
    """20 and 19 hardly differ; 2 and 3 do."""
    logits = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))
    comb = logits.exp() / logits.exp().sum(1, keepdim=True) + 1e-6
    for turn in range(iterations):
        if turn:
            comb = comb / (comb.sum(1, keepdim=True) + 1e-6)
        comb = comb / (comb.sum(0, keepdim=True) + 1e-6)
    torch.testing.assert_close(sinkhorn(logits, iterations, 1e-6), comb)


def test_comb_mixes_from_its_first_index_to_its_second() -> None:
    comb = torch.zeros(4, 4)
    comb[0, 2] = 1.0  # copy 0 goes to copy 2
    stream = torch.arange(4.0).add(1).unsqueeze(1).expand(4, 8)
    mixes = Mixes(torch.zeros(4), torch.tensor([0.0, 5.0, 0.0, 0.0]), comb)
    assert spread(torch.full((8,), 2.0), stream, mixes)[:, 0].tolist() == [0.0, 10.0, 1.0, 0.0]


def test_collapsing_weighs_the_copies_in_float32() -> None:
    stream = torch.tensor([[256.0], [1.0], [1.0], [1.0]]).bfloat16()
    assert collapse(stream, torch.ones(4)).item() == 259.0  # bf16 has no 257


def test_V4_collapses_the_last_stream_with_weights_of_its_own(plain: PlainDeepseek) -> None:
    fn, base, scale = (plain.weights[f"mtp.2.hc_head_{part}"] for part in ("fn", "base", "scale"))
    stream = make_stream()
    weights = HyperHead(fn, base, scale, norm_eps=1e-6, eps=1e-6)(stream)
    torch.testing.assert_close(weights[1, 2], plain.head_mix(stream[1, 2], "mtp.2."))


@pytest.mark.parametrize("eps", [1e-6, 1e-20])
def test_the_norms_eps_is_the_models(plain: PlainDeepseek, eps: float) -> None:
    """Of a faint stream 1e-6 leaves little, and 1e-20 nothing at all."""
    stream = 1e-4 * make_stream()
    faint, strong = (connection(plain, "mtp.0.hc_attn", norm_eps=eps)(one).pre for one in (stream, 1e4 * stream))
    assert torch.allclose(faint, strong, atol=1e-4) == (eps == 1e-20)
