"""vLLM's /metrics page as numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

_SAMPLE: Final = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+-?\d+)?\s*")
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_CACHE: Final = "vllm:cache_config_info"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Counters since the engine's start, summed over its engines."""

    drafts: int = 0  # verify steps with drafts
    drafted: int = 0  # tokens
    accepted: int = 0
    generated: int = 0
    cached: int = 0  # prompt tokens that came from the prefix cache
    running: int = 0  # requests, at this moment
    kv_tokens: int | None = None  # of the KV cache; None: this vLLM does not say
    block_tokens: int | None = None  # of a block of it

    def since(self, before: Metrics) -> Metrics:
        """Counters of the time between the two; what is no counter is as it is now."""
        now, then = asdict(self), asdict(before)
        counters = ("drafts", "drafted", "accepted", "generated", "cached")
        return Metrics(**{name: now[name] - then[name] if name in counters else now[name] for name in now})


def parse_metrics(page: str) -> Metrics:
    sums: dict[str, float] = {}
    kv_tokens: int | None = None
    block_tokens: int | None = None
    for line in page.splitlines():
        sample = _SAMPLE.fullmatch(line)
        if sample is None or not sample["name"].startswith("vllm:"):
            continue
        if sample["name"] == _CACHE:
            labels = dict(_LABEL.findall(sample["labels"] or ""))
            found = _kv_tokens(labels)
            kv_tokens = found if kv_tokens is None else kv_tokens + (found or 0)
            block_tokens = _number(labels, "block_size")
            continue
        try:
            value = float(sample["value"])
        except ValueError:
            continue
        sums[sample["name"]] = sums.get(sample["name"], 0.0) + value

    def count(name: str) -> int:
        return int(sums.get(f"vllm:{name}", 0))

    return Metrics(
        drafts=count("spec_decode_num_drafts_total"),
        drafted=count("spec_decode_num_draft_tokens_total"),
        accepted=count("spec_decode_num_accepted_tokens_total"),
        generated=count("generation_tokens_total"),
        cached=count("prefix_cache_hits_total"),
        running=count("num_requests_running"),
        kv_tokens=kv_tokens,
        block_tokens=block_tokens,
    )


def _kv_tokens(labels: Mapping[str, str]) -> int | None:
    if (told := _number(labels, "kv_cache_size_tokens")) is not None:
        return told
    blocks, size = _number(labels, "num_gpu_blocks"), _number(labels, "block_size")
    return None if blocks is None or size is None else blocks * size


def _number(labels: Mapping[str, str], name: str) -> int | None:
    text = labels.get(name, "")
    return int(text) if text.isdigit() else None


@dataclass(frozen=True, slots=True)
class Memory:
    """What an engine's log says of its memory."""

    load_gib: dict[str, float]  # by process, as the log names it; weights and what came with them
    graph_gib: dict[str, float]
    is_of_cpu: bool = False  # the load size is then how much less of the machine's memory is free, whoever took it

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


_LOAD: Final = re.compile(r"Model loading took ([\d.]+) GiB")
_CPU: Final = "CPU KV cache size:"
_GRAPH: Final = re.compile(r"Graph capturing finished in .* took ([\d.]+) GiB")
# `(Worker_TP0 pid=123) INFO …`; without it there is one process only.
_PROCESS: Final = re.compile(r"\((\S+) pid=\d+\)")


def parse_memory(log: str) -> Memory:
    """The last start in `log`: a later line of a process replaces an earlier one."""
    memory = Memory({}, {}, _CPU in log)
    for line in log.splitlines():
        process = _PROCESS.search(line)
        name = process[1] if process else "engine"
        for pattern, place in ((_LOAD, memory.load_gib), (_GRAPH, memory.graph_gib)):
            if found := pattern.search(line):
                place[name] = float(found[1])
    return memory
