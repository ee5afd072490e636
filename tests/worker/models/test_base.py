from __future__ import annotations

import pytest
import torch

from farspark.worker.models.base import VOCABULARY_BLOCK, Arithmetic

FLOAT32 = Arithmetic(torch.float32, torch.float32)
NATIVE = Arithmetic(torch.bfloat16, torch.bfloat16)
CARRIED = Arithmetic(torch.bfloat16, torch.float32)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    """Values that bf16 holds exactly."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().float()


@pytest.mark.parametrize("vocabulary", [1, 97, VOCABULARY_BLOCK, 3 * VOCABULARY_BLOCK + 17])
@pytest.mark.parametrize("shape", [(4,), (5, 4), (2, 3, 4)])
def test_logits_in_blocks_are_the_logits(vocabulary: int, shape: tuple[int, ...]) -> None:
    x, weight = draw(*shape), draw(vocabulary, 4, seed=1)
    torch.testing.assert_close(FLOAT32.vocabulary_linear(x, weight), x @ weight.T)
    rounded = (x.double() @ weight.double().T).bfloat16()
    torch.testing.assert_close(CARRIED.vocabulary_linear(x, weight), rounded.float(), rtol=0.01, atol=0.01)
    native = NATIVE.vocabulary_linear(x.bfloat16(), weight.bfloat16())
    torch.testing.assert_close(native, rounded, rtol=0.01, atol=0.01)


def test_the_norm_rounds_before_its_weight_and_after() -> None:
    """Normalised in float32, rounded to bf16, times a bf16 weight, rounded again."""
    x, weight = draw(6, 64), draw(64, seed=1)
    normed = (x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()).float().bfloat16()
    expected = normed * weight.bfloat16()
    assert torch.equal(NATIVE.rms_norm(x.bfloat16(), weight.bfloat16(), 1e-6), expected)
    assert torch.equal(CARRIED.rms_norm(x, weight, 1e-6), expected.float())
    torch.testing.assert_close(FLOAT32.rms_norm(x, weight, 1e-6), torch.nn.functional.rms_norm(x, (64,), weight, 1e-6))


def test_the_norm_after_an_addition_sees_the_sum_before_it_is_rounded() -> None:
    x, residual, weight = draw(6, 64), 0.01 * draw(6, 64, seed=1), draw(64, seed=2)
    residual = residual.bfloat16().float()
    normed, total = CARRIED.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, (x + residual).bfloat16().float())
    assert torch.equal(normed, CARRIED.rms_norm(x + residual, weight, 1e-6))
    assert not torch.equal(normed, CARRIED.rms_norm(total, weight, 1e-6))
    native = NATIVE.add_rms_norm(x.bfloat16(), residual.bfloat16(), weight.bfloat16(), 1e-6)
    assert torch.equal(native[0].float(), normed)
    assert torch.equal(native[1].float(), total)


@pytest.mark.parametrize("is_neox", [True, False])
def test_rotation_turns_each_pair_by_its_angle(is_neox: bool) -> None:
    x = draw(3, 2, 4)
    angles = torch.tensor([[[0.0, 0.0]], [[1.0, 0.1]], [[2.0, 0.2]]])
    turned = FLOAT32.rotate(x, angles.cos(), angles.sin(), is_neox=is_neox)
    pairs = ((0, 2), (1, 3)) if is_neox else ((0, 1), (2, 3))
    for pair, (first, second) in enumerate(pairs):
        rotated = torch.complex(x[..., first], x[..., second]) * torch.polar(torch.ones(3, 1), angles[..., pair])
        torch.testing.assert_close(turned[..., first], rotated.real)
        torch.testing.assert_close(turned[..., second], rotated.imag)
    for arithmetic, given in ((NATIVE, x.bfloat16()), (CARRIED, x)):
        in_bf16 = arithmetic.rotate(given, angles.cos(), angles.sin(), is_neox=is_neox)
        assert torch.equal(in_bf16.float(), turned.bfloat16().float())


def test_the_gate_is_rounded_before_it_multiplies() -> None:
    gate, up = draw(5, 8), draw(5, 8, seed=1)
    expected = torch.nn.functional.silu(gate).bfloat16() * up.bfloat16()
    assert torch.equal(NATIVE.silu_times(gate.bfloat16(), up.bfloat16()), expected)
    assert torch.equal(CARRIED.silu_times(gate, up), expected.float())
