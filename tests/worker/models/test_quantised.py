"""Decoding against tables written from the formats' definitions (tests/fakes/plain_deepseek.py), bit for bit."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tests.fakes.plain_deepseek import E2M1, E4M3, E8M0, PlainDeepseek, codes_of
from tests.fakes.tiny_deepseek import tiny_config, tiny_tensors, write_deepseek
from torch import Tensor

from farspark.errors import CheckpointError
from farspark.worker.drafter import open_drafter
from farspark.worker.models.base import Arithmetic
from farspark.worker.models.quantised import (
    QuantisedLinear,
    decode_fp4,
    decode_fp8,
    power_of_two_above,
    through_fp8,
)

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = (torch.bfloat16, torch.float32)


def bits(x: Tensor) -> list[int]:
    """So that -0 is not 0, and NaN equals itself."""
    return x.contiguous().view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32).flatten().tolist()


def exactly(values: list[float], dtype: torch.dtype) -> list[int]:
    """The bits of `values`, which `dtype` must be able to hold."""
    held = torch.tensor(values, dtype=torch.float64).to(dtype)
    assert all(a == b or math.isnan(a) for a, b in zip(values, held.double().tolist(), strict=True))
    return bits(held)


def test_the_tables_are_those_of_the_formats() -> None:
    """A few values that everybody knows, so that the tables are not only what the code is."""
    assert (E4M3[0x38], E4M3[0x7E], E4M3[0x01], E4M3[0x08], E4M3[0xB8]) == (1.0, 448.0, 2.0**-9, 2.0**-6, -1.0)
    assert math.isnan(E4M3[0x7F])
    assert E2M1[:8] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert E2M1[9:] == [-0.5, -1, -1.5, -2, -3, -4, -6]
    assert (E8M0[127], E8M0[128], E8M0[0], E8M0[254]) == (1.0, 2.0, 2.0**-127, 2.0**127)
    assert math.isnan(E8M0[255])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponent", [3, 60, 115, 127, 133, 245])
def test_every_e4m3_code_decodes_exactly(dtype: torch.dtype, exponent: int) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(16, 16)
    scale = torch.full((1, 1), exponent, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    wanted = [value * E8M0[exponent] for value in E4M3]
    numbers = [code for code in range(256) if not math.isnan(E4M3[code])]
    decoded = decode_fp8(codes, scale, 16, dtype).flatten()
    assert bits(decoded[numbers]) == exactly([wanted[code] for code in numbers], dtype)
    assert bool(decoded[[0x7F, 0xFF]].isnan().all())


@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("shape", [(256, 256), (130, 33), (1, 40)])
def test_a_block_of_fp8_has_its_own_scale_the_last_ones_cut_off(block: int, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 127, shape, generator=generator).to(torch.uint8)
    scales = torch.randint(110, 140, (-(-shape[0] // block), -(-shape[1] // block)), generator=generator).to(
        torch.uint8
    )
    decoded = decode_fp8(codes.view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu), block, torch.bfloat16)
    for row, column in ((0, 0), (shape[0] - 1, shape[1] - 1), (shape[0] // 2, shape[1] // 3), (0, shape[1] - 1)):
        value = E4M3[codes[row, column]] * E8M0[scales[row // block, column // block]]
        assert bits(decoded[row, column]) == exactly([value], torch.bfloat16)


def test_float32_scales_are_multiplied_in_float32() -> None:
    codes = torch.arange(127, dtype=torch.uint8).view(1, 127)
    scale = torch.tensor([[0.1]])
    wanted = torch.tensor(E4M3[:127], dtype=torch.float32) * scale
    decoded = decode_fp8(codes.view(torch.float8_e4m3fn), scale, 128, torch.float32)
    assert torch.equal(decoded, wanted)
    assert torch.equal(decode_fp8(codes.view(torch.float8_e4m3fn), scale, 128, torch.bfloat16), wanted.bfloat16())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponent", [0, 100, 127, 130, 250])
def test_every_byte_of_packed_fp4_decodes_exactly_the_low_nibble_first(dtype: torch.dtype, exponent: int) -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(torch.int8).view(4, 64)
    scale = torch.full((4, 4), exponent, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    wanted = [E2M1[nibble] * E8M0[exponent] for byte in range(256) for nibble in (byte & 15, byte >> 4)]
    assert bits(decode_fp4(packed, scale, 32, dtype)) == exactly(wanted, dtype)


def test_every_group_of_32_fp4_values_has_its_own_scale() -> None:
    packed = torch.full((2, 48), 0x2A, dtype=torch.uint8).view(torch.int8)  # -1 and then 1
    scale = torch.tensor([[126, 127, 128], [129, 130, 131]], dtype=torch.uint8)
    decoded = decode_fp4(packed, scale.view(torch.float8_e8m0fnu), 32, torch.float32)
    assert decoded[:, 0::2].tolist() == [
        [-(2.0 ** (int(one) - 127)) for one in row for _ in range(16)] for row in scale
    ]
    assert torch.equal(decoded[:, 0::2], -decoded[:, 1::2])


@pytest.mark.parametrize("version", ["v4", "v41"])
def test_every_weight_of_a_checkpoint_decodes_as_the_formats_say(version: str) -> None:
    config = tiny_config(version)
    tensors = tiny_tensors(config)
    plain = PlainDeepseek(config, tensors)
    block = config["quantization_config"]["weight_block_size"][0]
    kinds = set()
    for name in tensors:
        if not name.endswith(".scale"):
            continue
        weight, scale = tensors[name.removesuffix("scale") + "weight"], tensors[name]
        is_packed = weight.dtype == torch.int8
        kinds.add(is_packed)
        decoded = (
            decode_fp4(weight, scale, 32, torch.bfloat16)
            if is_packed
            else decode_fp8(weight, scale, block, torch.bfloat16)
        )
        assert torch.equal(decoded.float(), plain.weights[name.removesuffix("scale") + "weight"]), name
    assert kinds == {True, False}


# Activations ----------------------------------------------------------------------------------------------------------


def oracle(x: Tensor, group: int) -> Tensor:
    plain = object.__new__(PlainDeepseek)
    return torch.stack([PlainDeepseek.quantise(plain, row, group) for row in x.reshape(-1, x.shape[-1])]).view(x.shape)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_activations_come_back_as_the_formats_say(group: int) -> None:
    generator = torch.Generator().manual_seed(group)
    sizes = torch.tensor([1e-6, 1e-3, 0.03, 1.0, 50.0, 3e4]).unsqueeze(1)
    x = sizes * torch.randn(6, 2 * group, generator=generator)
    assert torch.equal(through_fp8(x, group), oracle(x, group))
    x = x.bfloat16()
    assert torch.equal(through_fp8(x, group), oracle(x.float(), group))


def test_ties_go_to_even_and_the_range_ends_at_448() -> None:
    # The scale is 1 as long as the greatest magnitude is within 224 and 448.
    x = torch.tensor([448.0, 17.0, 19.0, 18.0, -17.0, 0.0009765625, 440.0, 432.0] + [0.0] * 24)
    assert through_fp8(x, 32)[:8].tolist() == [448.0, 16.0, 20.0, 18.0, -16.0, 0.0, 448.0, 448.0]
    assert through_fp8(x * 1.01, 32)[0].item() == 448.0  # with a scale of 2: 226.24 is nearest to 224


def test_what_went_through_once_goes_through_unchanged() -> None:
    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(1))
    once = through_fp8(x, 32)
    assert torch.equal(through_fp8(once, 32), once)
    assert torch.equal(once.bfloat16().float(), once)
    assert not torch.equal(once, x)


def test_an_all_zero_group_stays_zero_and_a_nan_spoils_its_group_visibly() -> None:
    x = torch.zeros(64)
    assert torch.equal(through_fp8(x, 32), x)
    x[3] = math.nan
    assert through_fp8(x, 32)[3].isnan()


@pytest.mark.parametrize("exponent", [-100, -22, -1, 0, 1, 7, 100])
def test_the_scale_is_the_least_power_of_two_that_is_enough(exponent: int) -> None:
    exact = 2.0**exponent
    # The nearest float32 values above and below.
    given = torch.tensor([exact, exact * (1 + 2**-23), exact * (1 - 2**-24), exact * 1.5])
    assert power_of_two_above(given).tolist() == [exact, 2 * exact, exact, 2 * exact]


def test_only_the_reference_mode_rounds_what_goes_into_a_product() -> None:
    arithmetic = Arithmetic(torch.float32, torch.float32)
    weight, x = torch.randn(4, 64), torch.randn(3, 64)
    assert torch.equal(QuantisedLinear(weight, None, arithmetic)(x), x @ weight.T)
    rounded = QuantisedLinear(weight, 32, arithmetic)(x)
    torch.testing.assert_close(rounded, oracle(x, 32) @ weight.T)
    assert not torch.allclose(rounded, x @ weight.T)
    torch.testing.assert_close(QuantisedLinear(weight, 32, arithmetic).part(slice(1, 3))(x), rounded[:, 1:3])


def test_a_checkpoint_with_a_nan_scale_is_not_served(tmp_path: Path) -> None:
    config = tiny_config("v41")
    tensors = tiny_tensors(config)
    codes_of(tensors["mtp.1.ffn.experts.2.w2.scale"])[3, 1] = 255
    with pytest.raises(CheckpointError, match=r"mtp\.1\.ffn\.experts\.2\.w2: a NaN"):
        open_drafter(write_deepseek(tmp_path, config, tensors))
