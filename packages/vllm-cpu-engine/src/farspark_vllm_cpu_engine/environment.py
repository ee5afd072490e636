"""The environment variables of a process that runs vLLM on a CPU: one source for tests, demo and users."""

import os


def environment(threads: int | None = None, *, ranks: int = 1) -> dict[str, str]:
    """Variables to set before torch and vLLM are imported, as a new dict to merge into ``os.environ`` or a child's.

    ``threads``: OpenMP threads of each rank; by default half of the processor cores that this process may use, shared
    out over the ``ranks`` (tensor parallel), at least one each. The other half is for what runs beside the engine. Where
    the cores are shared with other busy processes, fewer threads are faster: every matrix product ends in a barrier, and
    a thread without a core lets the others wait for a time slice of several milliseconds.
    """
    cores = sorted(os.sched_getaffinity(0))
    if threads is None:
        threads = max(1, len(cores) // (2 * ranks))
    if threads < 1 or ranks < 1:
        raise ValueError(f"{threads} threads for each of {ranks} ranks: both must be at least 1")
    return {
        # The runner that has the DSpark speculator; on a CPU vLLM would choose the other one.
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        # Triton has no compiler for the CPU: kernels run in its interpreter, or natively by this package's plugin.
        "TRITON_INTERPRET": "1",
        # This backend, should another one be installed too: vLLM and Triton want exactly one.
        "TRITON_DEFAULT_BACKEND": "cpu",
        # Which cores each rank's threads sit on, one part per rank. vLLM's own choice wants a NUMA node for every rank and
        # keeps cores back for its scheduler. Ranks share cores if there are too few.
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(_share(cores, rank, threads) for rank in range(ranks)),
        # The same number for what is not bound by vLLM: an engine in one process, and torch before the binding.
        "OMP_NUM_THREADS": str(threads),
        # No model hub: checkpoints are folders.
        "HF_HUB_OFFLINE": "1",
        # No report to vLLM's makers when an engine starts.
        "VLLM_NO_USAGE_STATS": "1",
    }


# With VLLM_CPU_KVCACHE_SPACE set, in whole GiB, vLLM ignores the engine argument kv_cache_memory_bytes; with neither it
# takes most of the memory. So environment() leaves the variable alone and engines are given this argument.
KV_CACHE_MEMORY_BYTES = 1 << 28


def _share(cores: list[int], rank: int, threads: int) -> str:
    """The cores of one rank, as vLLM writes them: ``0,1``. Starts over from the first core when there are no more."""
    return ",".join(str(cores[(rank * threads + thread) % len(cores)]) for thread in range(min(threads, len(cores))))
