"""Capacity keeps the whole of a prefix-cache hit.

vLLM drops the last block of every hit, in the KV group that it takes for the drafter's, because a local drafter's KV there
depends on what follows. In capacity no group is the drafter's: the drop protects nothing and costs target tokens, and where the
group is found by position it is a target's.
"""

from __future__ import annotations

import functools
from typing import Any, Final

from farspark.engine.vllm.versions import CachedBlockDrop

_METHOD: Final = "dspark"


def keep_cached_blocks(drop: CachedBlockDrop) -> None:
    """Undo `drop` in this process, for engines that draft with DSpark and for no others."""
    if drop is CachedBlockDrop.BY_CONFIG:
        _answer_no()
    elif drop is CachedBlockDrop.BY_SCHEDULER:
        _tell_cache_manager()


def _answer_no() -> None:
    """Whoever drops a block asks the speculative config first."""
    from vllm.config.speculative import SpeculativeConfig

    original = SpeculativeConfig.use_eagle_block_drop

    @functools.wraps(original)
    def use_eagle_block_drop(self: Any) -> bool:
        return self.method != _METHOD and bool(original(self))

    SpeculativeConfig.use_eagle_block_drop = use_eagle_block_drop


def _tell_cache_manager() -> None:
    """The scheduler tells the cache manager, and DeepSeek-V4's groups are flagged by position before that."""
    import vllm.v1.core.kv_cache_utils as kv_cache_utils
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler

    annotate, manager_init, scheduler_init = (
        kv_cache_utils._annotate_eagle_groups_deepseek_v4,
        KVCacheManager.__init__,
        Scheduler.__init__,
    )
    is_ours = False

    @functools.wraps(annotate)
    def _annotate(vllm_config: Any, *rest: Any) -> None:
        if not _drafts_with_dspark(vllm_config):
            annotate(vllm_config, *rest)

    @functools.wraps(scheduler_init)
    def _init_scheduler(self: Any, vllm_config: Any, *rest: Any, **more: Any) -> None:
        nonlocal is_ours
        is_ours = _drafts_with_dspark(vllm_config)
        scheduler_init(self, vllm_config, *rest, **more)

    @functools.wraps(manager_init)
    def _init_manager(self: Any, *rest: Any, use_eagle: bool = False, **more: Any) -> None:
        manager_init(self, *rest, use_eagle=use_eagle and not is_ours, **more)

    kv_cache_utils._annotate_eagle_groups_deepseek_v4 = _annotate
    Scheduler.__init__ = _init_scheduler
    KVCacheManager.__init__ = _init_manager


def _drafts_with_dspark(vllm_config: Any) -> bool:
    return vllm_config.speculative_config is not None and vllm_config.speculative_config.method == _METHOD
