"""The transport's settings, their other names, and what contradicts itself."""

from __future__ import annotations

import pytest

from farspark.engine.config import PpConfig, read_config, read_pp_config
from farspark.errors import ConfigError


def config(*, transport: bool = False, cap: bool = False, on_cpu: bool = False, eager_draft: bool = False) -> PpConfig:
    return PpConfig(transport=transport, cap=cap, on_cpu=on_cpu, eager_draft=eager_draft)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"VLLM_DSPARK_PP_TRANSPORT": ""}, None),
        ({"VLLM_DSPARK_PP_TRANSPORT": "0", "VLLM_WEDGE_AB_CAP_CONCURRENT": "0"}, None),
        ({"VLLM_DSPARK_PP_TRANSPORT": "1"}, config(transport=True)),
        ({"VLLM_DSPARK_PP_CAP": "on"}, config(cap=True)),
        ({"VLLM_DSPARK_PP_CPU": "1"}, config(transport=True, on_cpu=True)),
        ({"VLLM_DSPARK_PP_EAGER_DRAFT": "true"}, config(eager_draft=True)),
        ({"VLLM_WEDGE_AB_CAP_CONCURRENT": "1"}, config(cap=True)),
        ({"VLLM_WEDGE_AB_PP_BROADCAST_CPU": "1"}, config(transport=True, on_cpu=True)),
        ({"VLLM_WEDGE_AB_DSPARK_EAGER": "1"}, config(eager_draft=True)),
        ({"VLLM_WEDGE_AB_DSPARK_EAGER": "1", "VLLM_DSPARK_PP_EAGER_DRAFT": "yes"}, config(eager_draft=True)),
        ({"VLLM_WEDGE_AB_SOMETHING_ELSE": "1"}, None),
    ],
)
def test_what_is_switched_on(environ: dict[str, str], expected: PpConfig | None) -> None:
    assert read_pp_config(environ) == expected


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"VLLM_DSPARK_PP_CAP": "2"}, r"VLLM_DSPARK_PP_CAP='2': expected 1/true/on/yes or 0/false/off/no"),
        ({"VLLM_WEDGE_AB_DSPARK_EAGER": "maybe"}, r"VLLM_WEDGE_AB_DSPARK_EAGER='maybe': expected 1/true"),
        (
            {"VLLM_DSPARK_PP_CAP": "0", "VLLM_WEDGE_AB_CAP_CONCURRENT": "1"},
            "VLLM_DSPARK_PP_CAP=0 contradicts VLLM_WEDGE_AB_CAP_CONCURRENT=1, which is another name for it",
        ),
        ({"VLLM_DSPARK_PP_TRANSPORT": "0", "VLLM_DSPARK_PP_CPU": "1"}, "VLLM_DSPARK_PP_TRANSPORT=0 switches off"),
        (
            {"VLLM_DSPARK_PP_TRANSPORTS": "1"},
            "VLLM_DSPARK_PP_TRANSPORTS is not a setting of this version; the nearest one is VLLM_DSPARK_PP_TRANSPORT$",
        ),
    ],
)
def test_a_bad_setting_is_refused_with_its_name_and_value(environ: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read_pp_config(environ)


def test_the_remote_drafters_settings_know_nothing_of_them() -> None:
    assert read_config({"VLLM_DSPARK_PP_TRANSPORT": "1"}) is None
