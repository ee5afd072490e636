"""Loaded into every worker of ranks in step under test (vLLM's `worker_extension_cls`): which steps it had, what was drafted
in them, and which collectives crossed processes.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.vllm.dp_rank_run import Watch
from tests.vllm.uneven_collectives import add_uneven_collectives

add_uneven_collectives()


class DpExtension:
    """Its methods become the worker's, for `collective_rpc`, which brings only the first engine's answers back: hence files."""

    def watch_steps(self) -> None:
        self.steps_watch = Watch(self.model_runner.speculator)  # type: ignore[attr-defined]

    def write_steps(self, folder: str) -> None:
        """All since `watch_steps`, as `dpD-tpT.json` for the D-th data-parallel and the T-th tensor-parallel rank."""
        from vllm.distributed.parallel_state import get_dp_group, get_tp_group

        name = f"dp{get_dp_group().rank_in_group}-tp{get_tp_group().rank_in_group}.json"
        Path(folder, name).write_text(json.dumps(self.steps_watch.so_far()))
