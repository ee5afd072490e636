"""The moment when vLLM's own steps are over and users' steps begin."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def after_warmup(action: Callable[[Any], None]) -> None:
    """Call `action` with the model runner when a worker's warm-up returns: some of the steps in it look like any other step.

    Every loaded worker class that has a warm-up of its own is wrapped, because one may call another's; the outermost
    return counts.
    """
    from vllm.v1.worker.worker_base import WorkerBase

    depth = 0

    def wrap(worker_class: Any) -> None:
        original = worker_class.__dict__["compile_or_warm_up_model"]

        @functools.wraps(original)
        def compile_or_warm_up_model(self: Any, *rest: Any, **more: Any) -> Any:
            nonlocal depth
            depth += 1
            try:
                result = original(self, *rest, **more)
            finally:
                depth -= 1
            if depth == 0:
                action(self.model_runner)
            return result

        worker_class.compile_or_warm_up_model = compile_or_warm_up_model

    for worker_class in with_subclasses(WorkerBase):
        if "compile_or_warm_up_model" in worker_class.__dict__:
            wrap(worker_class)


def with_subclasses(root: Any) -> list[Any]:
    """`root` and every class below it that is loaded."""
    return [root] + [found for child in root.__subclasses__() for found in with_subclasses(child)]
