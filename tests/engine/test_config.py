"""Every setting: its rule and its error text."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from farspark.engine.config import EngineConfig, Policy, read_config
from farspark.errors import ConfigError

R = "VLLM_DSPARK_REMOTE"
BASE = {R: "tcp://10.0.0.2:18620", f"{R}_IDENTITY": "ab" * 32}


def read(**settings: str) -> EngineConfig:
    config = read_config(BASE | {f"{R}_{name}": value for name, value in settings.items()})
    assert config is not None
    return config


@pytest.mark.parametrize("value", ["", "   "])
def test_without_an_endpoint_farspark_is_inert_whatever_else_is_set(value: str) -> None:
    assert read_config({R: value, f"{R}_NONSENSE": "1"}) is None
    assert read_config({}) is None


def test_the_defaults_are_those_of_the_documentation() -> None:
    config = read()
    assert config.policy is Policy.SHADOW
    assert [str(one) for one in config.endpoints] == ["tcp://10.0.0.2:18620"]
    assert (config.timeout_s, config.connect_timeout_s) == (0.05, 1.0)
    assert (config.backoff_s, config.backoff_max_s) == (1.0, 30.0)
    assert config.markov_identity == bytes(32)
    assert config.want_margin
    assert not config.strict_start
    assert (config.trip, config.cooldown) == (3, 256)
    assert config.log_every == 1024
    assert not read(POLICY="capacity").want_margin


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("POLICY", "resilient", "shadow, resilience or capacity"),
        ("SHADOW_USE", "both", "local or remote"),
        ("ON_FAIL", "stop", "target_only or raise"),
        ("IDENTITY", "ab", "64 hex digits"),
        ("IDENTITY", "zz" * 32, "64 hex digits"),
        ("MARKOV_IDENTITY", "12", "64 hex digits"),
        ("TIMEOUT_MS", "0", "1 or more"),
        ("TIMEOUT_MS", "-1", "1 or more"),
        ("TIMEOUT_MS", "soon", "1 or more"),
        ("TIMEOUT_MS", "nan", "1 or more"),
        ("TIMEOUT_MS", "inf", "1 or more"),
        ("CONNECT_TIMEOUT_MS", "0", "1 or more"),
        ("BACKOFF_MS", "0", "1 or more"),
        ("TRIP", "-1", "0 = off"),
        ("COOLDOWN", "0", "1 or more"),
        ("STRICT_START", "maybe", "1/true/on/yes"),
        ("WANT_MARGIN", "2", "1/true/on/yes"),
        ("CONTEXT", "0", "1 or more"),
        ("RING", "1.5", "1 or more"),
        ("LOG_EVERY", "-1", "0 = off"),
    ],
)
def test_HALF_OPEN_a_bad_value_names_the_variable_the_value_and_what_was_expected(
    name: str, value: str, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(**{name: value})
    assert f"{R}_{name}=" in str(caught.value)
    assert value in str(caught.value)
    assert expected in str(caught.value)


def test_an_unknown_name_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=rf"{R}_TIMEOUT is not a setting.*nearest one is {R}_TIMEOUT_MS"):
        read(TIMEOUT="50")


def test_an_empty_value_means_unset() -> None:
    assert read(TIMEOUT_MS="", NONSENSE="").timeout_s == 0.05


def test_a_missing_identity_says_where_to_get_it() -> None:
    with pytest.raises(ConfigError, match="farspark identity CHECKPOINT"):
        read_config({R: "tcp://h:1"})


@pytest.mark.parametrize(
    ("settings", "policy"),
    [
        ({"SHADOW_USE": "remote", "POLICY": "capacity"}, "shadow"),
        ({"ON_FAIL": "raise", "POLICY": "resilience"}, "capacity"),
    ],
)
def test_a_setting_of_another_policy_is_refused(settings: dict[str, str], policy: str) -> None:
    with pytest.raises(ConfigError, match=rf"with {R}_POLICY={policy} only"):
        read(**settings)


def test_a_backoff_that_would_shrink_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"BACKOFF_MAX_MS=10 is below .*BACKOFF_MS=20"):
        read(BACKOFF_MS="20", BACKOFF_MAX_MS="10")


def test_a_ring_larger_than_the_context_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"RING=200 is above .*CONTEXT=100"):
        read(RING="200", CONTEXT="100")


def test_ADDR_a_bad_endpoint_names_the_variable() -> None:
    with pytest.raises(ConfigError, match=rf"^{R}='tcp://host'"):
        read_config(BASE | {R: "tcp://host"})


def test_bind_fills_in_and_may_not_contradict() -> None:
    assert read(BIND="10.0.0.1").endpoints[0].bind == "10.0.0.1"
    with pytest.raises(ConfigError, match="contradicts"):
        read_config(BASE | {R: "tcp://10.0.0.2:1?bind=10.0.0.3", f"{R}_BIND": "10.0.0.1"})


def test_several_endpoints_keep_their_order() -> None:
    config = read_config(BASE | {R: "tcp://a:1, tcp://b:2"})
    assert config is not None
    assert [one.host for one in config.endpoints] == ["a", "b"]


def test_the_markov_identity_defaults_to_the_digest_of_the_cache_file(tmp_path: Path) -> None:
    cache = tmp_path / "markov.bin"
    cache.write_bytes(b"bias")
    config = read_config(BASE | {"VLLM_DSPARK_MARKOV_CACHE": str(cache)})
    assert config is not None
    assert config.markov_identity == hashlib.sha256(b"bias").digest()
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(BASE | {"VLLM_DSPARK_MARKOV_CACHE": str(tmp_path / "absent")})


@pytest.mark.parametrize(
    ("settings", "window", "max_model_len", "expected"),
    [
        ({}, None, 32768, (4096, 512)),
        ({}, None, 1024, (1024, 512)),
        ({}, None, 256, (256, 256)),
        ({}, 128, 32768, (128, 128)),
        ({"CONTEXT": "64"}, 128, 32768, (64, 64)),
        ({"CONTEXT": "2048", "RING": "1024"}, None, 32768, (2048, 1024)),
    ],
)
def test_context_and_ring_follow_the_window_the_settings_and_the_model_length(
    settings: dict[str, str], window: int | None, max_model_len: int, expected: tuple[int, int]
) -> None:
    assert read(**settings).context_and_ring(window, max_model_len) == expected
