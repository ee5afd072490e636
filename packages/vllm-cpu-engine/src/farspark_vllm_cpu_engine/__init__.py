"""vLLM's V2 model runner on a CPU: a Triton backend that interprets, native kernels for what is hot, a small real model."""

from .environment import KV_CACHE_MEMORY_BYTES, environment

__all__ = ["KV_CACHE_MEMORY_BYTES", "environment"]
