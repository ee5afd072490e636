"""The plugin without a vLLM around it: inert when unset, loud where it cannot work."""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from farspark.engine.config import EngineConfig, Policy, read_config
from farspark.engine.depth import parse_policy
from farspark.engine.vllm import plugin
from farspark.engine.vllm.plugin import refuse_unsupported
from farspark.engine.vllm.versions import record_for
from farspark.errors import ConfigError


def run(program: str, **environment: str) -> str:
    """What `program` prints in an interpreter of its own."""
    completed = subprocess.run(
        [sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True, timeout=60
    )
    return completed.stdout.strip()


@pytest.mark.parametrize("value", [None, "", "   "])
def test_unset_the_plugin_imports_nothing_and_changes_nothing(value: str | None) -> None:
    program = (
        "import sys; before = set(sys.modules)\n"
        "from farspark.engine.vllm.plugin import register; register()\n"
        "print(sorted(name for name in set(sys.modules) - before if name.split('.')[0] in"
        " ('torch', 'numpy', 'vllm') or name.startswith('farspark')))"
    )
    loaded = run(program, **({} if value is None else {"VLLM_DSPARK_REMOTE": value}))
    assert loaded == "['farspark', 'farspark.engine', 'farspark.engine.vllm', 'farspark.engine.vllm.plugin']"


def test_plugin_load_importing_the_plugin_needs_nothing_that_may_be_missing() -> None:
    # vLLM swallows an import that fails, so nothing but the standard library may be needed for it, whatever is set.
    program = (
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'numpy', 'vllm'): raise ImportError(name)\n"
        "sys.meta_path.insert(0, Missing())\n"
        "import farspark.engine.vllm.plugin; print('imported')"
    )
    assert run(program, VLLM_DSPARK_REMOTE="tcp://127.0.0.1:1") == "imported"


def test_plugin_load_a_failure_raises_in_the_function_that_vllm_does_not_guard() -> None:
    program = (
        "from farspark.engine.vllm.plugin import register\n"
        "from farspark.errors import ConfigError\n"
        "try: register()\n"
        "except ConfigError as error: print(error)"
    )
    said = run(program, VLLM_DSPARK_REMOTE="tcp://127.0.0.1:1", VLLM_DSPARK_REMOTE_IDENTITY="12")
    assert said.startswith("VLLM_DSPARK_REMOTE_IDENTITY='12'")


def test_gates_the_v1_runner_is_refused_before_it_is_built() -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("no vLLM is installed here")
    program = (
        "from farspark.engine.vllm.plugin import register\n"
        "from farspark.errors import ConfigError\n"
        "try: register()\n"
        "except ConfigError as error: print(error)"
    )
    said = run(
        program,
        VLLM_DSPARK_REMOTE="tcp://127.0.0.1:1",
        VLLM_DSPARK_REMOTE_IDENTITY="11" * 32,
        VLLM_USE_V2_MODEL_RUNNER="0",
    )
    assert said.startswith("VLLM_USE_V2_MODEL_RUNNER=0 selects the V1 model runner")


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    found = read_config(
        {
            "VLLM_DSPARK_REMOTE": "tcp://127.0.0.1:1",
            "VLLM_DSPARK_REMOTE_IDENTITY": "11" * 32,
            "VLLM_DSPARK_REMOTE_POLICY": "capacity",
        }
    )
    assert found is not None
    return found


def vllm_config(**changes: Any) -> SimpleNamespace:
    """A supported engine, with `section__name` replaced."""
    built = SimpleNamespace(
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            data_parallel_size=1,
            pipeline_parallel_size=1,
        ),
        speculative_config=SimpleNamespace(
            num_speculative_tokens=5,
            draft_sample_method="greedy",
            dspark_draft_topk=None,
            draft_model_config=SimpleNamespace(hf_config=SimpleNamespace()),
        ),
        watermark_config=None,
        use_v2_model_runner=True,
        num_lookahead_tokens=5,
    )
    for path, value in changes.items():
        *sections, name = path.split("__")
        place = built
        for section in sections:
            place = getattr(place, section)
        setattr(place, name, value)
    return built


def test_a_plain_engine_is_taken(config: EngineConfig) -> None:
    refuse_unsupported(config, vllm_config())
    refuse_unsupported(config, vllm_config(parallel_config__data_parallel_size=2))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"parallel_config__decode_context_parallel_size": 2}, "context parallelism .* start with"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "context parallelism .* start with"),
        (
            {"parallel_config__pipeline_parallel_size": 2},
            "set VLLM_DSPARK_PP_TRANSPORT=1 and use the plugin .* or use tensor parallelism",
        ),
        ({"watermark_config": object()}, "watermarking .* without a watermark config"),
        ({"speculative_config__dspark_draft_topk": 64}, "dspark_draft_topk .* leave it out"),
        (
            {"speculative_config__draft_model_config__hf_config__dspark_draft_topk": 64},
            "dspark_draft_topk .* leave it out",
        ),
        (
            {"speculative_config__draft_sample_method": "probabilistic"},
            "'probabilistic' .*SAMPLED_TOP32=1.* use 'greedy'",
        ),
        ({"use_v2_model_runner": False}, "V1 model runner, which has no DSpark"),
        ({"num_lookahead_tokens": 0}, "reserves 0 lookahead tokens for 5 drafts"),
    ],
)
def test_gates_what_is_not_supported_is_refused_with_a_remedy(
    changes: dict[str, Any], sentence: str, config: EngineConfig
) -> None:
    with pytest.raises(
        ConfigError, match=rf"^VLLM_DSPARK_REMOTE: .*{sentence}.*, or start without VLLM_DSPARK_REMOTE$"
    ):
        refuse_unsupported(config, vllm_config(**changes))


def test_with_sampled_drafts_either_sampling_method_is_taken_and_adaptive_verification_is_not(
    config: EngineConfig,
) -> None:
    sampled = dataclasses.replace(config, sampled=True)
    for method in ("greedy", "probabilistic"):
        refuse_unsupported(sampled, vllm_config(speculative_config__draft_sample_method=method))
    adaptive = vllm_config(speculative_config__enable_adaptive_verification=True)
    refuse_unsupported(config, adaptive)
    with pytest.raises(
        ConfigError, match=r"SAMPLED_TOP32=1 needs .* enable_adaptive_verification .* leave one of them out"
    ):
        refuse_unsupported(sampled, adaptive)


def test_a_local_drafter_that_draws_by_the_targets_noise_does_not_stand_in_for_sampled_drafts(
    config: EngineConfig,
) -> None:
    sampled = dataclasses.replace(config, sampled=True)
    resilience = dataclasses.replace(sampled, policy=Policy.RESILIENCE)
    for version in ("0.25.1", "0.32.0", "0.33.0"):
        plugin._refuse_shared_noise(sampled, record_for(version))
    for version in ("0.32.0", "0.33.0"):
        plugin._refuse_shared_noise(resilience, record_for(version))
    with pytest.raises(ConfigError, match=r"of vLLM 0.25.1 draws by the very noise .*POLICY=capacity, or a newer vLLM"):
        plugin._refuse_shared_noise(resilience, record_for("0.25.1"))


def test_an_older_vllm_that_lacks_the_newer_settings_is_taken(config: EngineConfig) -> None:
    older = vllm_config()
    del older.watermark_config, older.num_lookahead_tokens, older.parallel_config.prefill_context_parallel_size
    del older.speculative_config.dspark_draft_topk
    refuse_unsupported(config, older)


def test_a_pipeline_with_the_token_transport_is_taken_in_capacity(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "_carries_tokens", True)
    pipeline = vllm_config(parallel_config__pipeline_parallel_size=2)
    refuse_unsupported(config, pipeline)
    with pytest.raises(ConfigError, match=r"POLICY=shadow keeps a local drafter.*POLICY=capacity"):
        refuse_unsupported(dataclasses.replace(config, policy=Policy.SHADOW), pipeline)
    with pytest.raises(ConfigError, match="VLLM_DSPARK_DEPTH_POLICY=fixed:2 leaves drafts out on the last stage alone"):
        refuse_unsupported(dataclasses.replace(config, depth_policy=parse_policy("fixed:2")), pipeline)
