"""The RMS norm of several layers in one call."""

import pytest
import torch
import vllm._custom_ops as ops

from farspark_vllm_cpu_engine import plugin

EPS = 1e-5


@pytest.fixture(params=plugin.KERNEL_CHOICES, autouse=True)
def registered(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's operator as the plugin leaves it, whatever runs the kernels."""
    monkeypatch.setattr(ops, "rms_norm", getattr(ops.rms_norm, "__wrapped__", ops.rms_norm))
    monkeypatch.setenv(plugin.KERNELS_VARIABLE, request.param)
    plugin.register()
    # A second time, as in a process that loads plugins twice.
    plugin.register()


def expected(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    exact = x.double()
    return exact / (exact.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def found(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out = torch.full(x.shape, torch.nan, dtype=x.dtype)
    ops.rms_norm(out, x, weight, EPS)
    return out.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_layer_of_the_context_keys_is_normed_with_its_own_weight(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    keys, weight = torch.randn(4, 10, 3, 64).to(dtype), (0.5 + torch.rand(4, 64)).to(dtype)
    # The kernel rounds to bfloat16's 8 bits twice, half a unit in the last each.
    torch.testing.assert_close(found(keys, weight), expected(keys, weight[:, None, None]), rtol=2**-7, atol=1e-6)


def test_layers_may_share_their_input() -> None:
    torch.manual_seed(0)
    rows, weight = torch.randn(5, 64), 0.5 + torch.rand(4, 64)
    shared = rows.unsqueeze(0).expand(4, -1, -1)
    torch.testing.assert_close(found(shared, weight), expected(shared, weight[:, None]), rtol=1e-5, atol=1e-6)


def test_one_weight_serves_all_rows() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(4, 10, 64), 0.5 + torch.rand(64)
    torch.testing.assert_close(found(x, weight), expected(x, weight), rtol=1e-5, atol=1e-6)


def test_a_weight_for_another_number_of_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        found(torch.randn(4, 10, 64), torch.rand(3, 64))
