"""The environment of an engine on the GPU machine, where vLLM and Farspark are folders, not installed distributions."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def with_plugin(environment: dict[str, str], folder: Path, *, hangs_after_s: float | None = None) -> dict[str, str]:
    """`environment`, in which vLLM finds Farspark's entry point in `folder`, which is made, ahead of what PYTHONPATH has.

    A process that lives longer than `hangs_after_s` writes the stacks of its threads to stderr.
    """
    info = folder / "site" / "farspark-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: farspark\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nfarspark = farspark.engine.vllm.plugin:register\n")
    if hangs_after_s is not None:
        (info.parent / "sitecustomize.py").write_text(
            f"import faulthandler\nfaulthandler.dump_traceback_later({hangs_after_s})\n"
        )
    path = [str(info.parent), str(ROOT), str(ROOT / "src"), environment.get("PYTHONPATH", "")]
    return environment | {
        "PYTHONPATH": os.pathsep.join(path),
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
