"""What the demo says at its end, as text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Measured in this run; microseconds where the name says so."""

    engine: str
    dtype: str
    prompts: int
    tokens: int
    text_equal: bool
    near_ties: int
    differences: Sequence[str]
    drafts: float  # verify steps with drafts
    accepted: float
    accepted_by_position: Sequence[float]  # share of the drafts whose position k was accepted
    remote_tokens_per_s: float
    alone_tokens_per_s: float
    stats: Mapping[str, Any]  # the engine's stats file
    not_allocated: Mapping[str, int | None]  # what capacity did not take here, as the stats file names it

    @property
    def tokens_per_round(self) -> float:
        """Accepted + 1: what one forward pass of the target yields."""
        return round(1 + self.accepted / self.drafts, 3) if self.drafts else 1.0

    def _counter(self, name: str) -> int:
        return int(self.stats.get("counters", {}).get(name, 0))

    def _p50(self, name: str) -> float:
        return float(self.stats.get("latency", {}).get(name, {}).get("p50", 0.0))

    def as_json(self) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "dtype": self.dtype,
            "text_equal": self.text_equal,
            "near_ties": self.near_ties,
            "differences": list(self.differences),
            "tokens_per_round": self.tokens_per_round,
            "accepted_by_position": [round(share, 4) for share in self.accepted_by_position],
            "rounds": self._counter("rounds_decode") + self._counter("rounds_prefill"),
            "rounds_ok": self._counter("rounds_ok"),
            "rtt_us_p50": self._p50("rtt_us_decode"),
            "worker_us_p50": self._p50("worker_us"),
            "prompts": self.prompts,
            "tokens": self.tokens,
            "tokens_per_s": round(self.remote_tokens_per_s, 2),
            "tokens_per_s_alone": round(self.alone_tokens_per_s, 2),
            "not_allocated": dict(self.not_allocated),
        }

    def as_text(self) -> str:
        data = self.as_json()
        positions = "  ".join(f"{k + 1}: {share:.0%}" for k, share in enumerate(self.accepted_by_position))
        alone = f"the target alone, asked for its logits too, {data['tokens_per_s_alone']:.1f}"
        weights = self.not_allocated.get("draft_weight_bytes_all_ranks")
        kv = self.not_allocated.get("draft_kv_bytes_per_token_per_rank")
        saved = [f"draft weights {weights / 2**20:.1f} MiB"] if weights else []
        saved += [f"draft KV cache {kv / 2**10:.1f} KiB for every token of the target's"] if kv else []
        if self.text_equal:
            ties = f", {self.near_ties} near ties within the target's own rounding" if self.near_ties else ""
            proof = f"yes: all {self.tokens} tokens are what the target alone says{ties}"
        else:
            proof = "NO: " + "; ".join(self.differences)
        rows = [
            ("engine", f"{self.engine}, {self.dtype}"),
            ("tokens per round", f"{self.tokens_per_round:.2f} (accepted + 1)"),
            ("accepted, by position", positions or "none"),
            ("rounds", f"{data['rounds']}, of which {data['rounds_ok']} answered by the worker"),
            (
                "round trip, p50",
                f"{data['rtt_us_p50'] / 1000:.2f} ms, of which the worker {data['worker_us_p50'] / 1000:.2f} ms",
            ),
            (
                "tokens per second",
                f"{data['tokens_per_s']:.1f}; {alone}",
            ),
            ("not allocated here", ", ".join(saved) or "not known"),
            ("text is the target's", proof),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)
