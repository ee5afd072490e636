"""Undoing the cached-block drop, on stand-ins for the vLLM classes that hold the rules."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from farspark.engine.vllm.kv_groups import keep_cached_blocks
from farspark.engine.vllm.versions import CachedBlockDrop


def engine(method: str | None) -> SimpleNamespace:
    return SimpleNamespace(speculative_config=None if method is None else SimpleNamespace(method=method))


def module(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> ModuleType:
    """`name` with `contents`, for this test; its parents become importable too."""
    parts = name.split(".")
    for depth in range(1, len(parts)):
        parent = ".".join(parts[:depth])
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    one = ModuleType(name)
    for key, value in contents.items():
        setattr(one, key, value)
    monkeypatch.setitem(sys.modules, name, one)
    return one


@pytest.mark.parametrize(("method", "drops"), [("dspark", False), ("eagle3", True)])
def test_apc_loss_a_config_that_is_asked_says_no_for_dspark_only(
    method: str, drops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SpeculativeConfig:
        def __init__(self, method: str) -> None:
            self.method = method

        def use_eagle_block_drop(self) -> bool:
            return True

    module(monkeypatch, "vllm.config.speculative", SpeculativeConfig=SpeculativeConfig)
    keep_cached_blocks(CachedBlockDrop.BY_CONFIG)
    assert SpeculativeConfig(method).use_eagle_block_drop() is drops


@pytest.mark.parametrize(("method", "drops"), [("dspark", False), ("eagle3", True), (None, False)])
def test_apc_loss_a_scheduler_that_tells_the_cache_manager_tells_it_nothing_for_dspark(
    method: str | None, drops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    annotated = []

    def annotate(vllm_config: Any, spec: object, groups: object) -> None:
        annotated.append(vllm_config)

    class KVCacheManager:
        def __init__(self, kv_cache_config: object, use_eagle: bool = False) -> None:
            self.use_eagle = use_eagle

    class Scheduler:
        def __init__(self, vllm_config: Any) -> None:
            self.manager = KVCacheManager(None, use_eagle=vllm_config.speculative_config is not None)

    utils = module(monkeypatch, "vllm.v1.core.kv_cache_utils", _annotate_eagle_groups_deepseek_v4=annotate)
    module(monkeypatch, "vllm.v1.core.kv_cache_manager", KVCacheManager=KVCacheManager)
    module(monkeypatch, "vllm.v1.core.sched.scheduler", Scheduler=Scheduler)
    sys.modules["vllm.v1.core"].kv_cache_utils = utils  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.v1.core.kv_cache_utils", utils)
    monkeypatch.setitem(sys.modules, "vllm.v1.core.kv_cache_manager", ModuleWith(KVCacheManager=KVCacheManager))
    keep_cached_blocks(CachedBlockDrop.BY_SCHEDULER)
    assert Scheduler(vllm_config=engine(method)).manager.use_eagle is drops
    utils._annotate_eagle_groups_deepseek_v4(engine(method), None, None)
    assert len(annotated) == (0 if method == "dspark" else 1)


class ModuleWith(ModuleType):
    """A module that consists of what it is given."""

    def __init__(self, **contents: Any) -> None:
        super().__init__("stand_in")
        for name, value in contents.items():
            setattr(self, name, value)


def test_a_version_without_the_drop_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(sys.modules)
    keep_cached_blocks(CachedBlockDrop.NONE)
    assert set(sys.modules) == before
