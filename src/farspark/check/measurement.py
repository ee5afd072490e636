"""What a check measures on a server with its own prompts; saved, it is the baseline of a later one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from farspark.check.metrics import Memory, Metrics
from farspark.errors import ConfigError

KIND: Final = "farspark-check"
VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Answer:
    """One greedy completion. `gaps[i]`: the target's largest logit less the second at token i; None where it was not told."""

    tokens: list[int]
    text: str
    seconds: float
    finished: str  # vLLM's finish reason
    gaps: list[float | None] = field(default_factory=list)
    second_best: list[int | None] = field(default_factory=list)  # the target's second choice at token i


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    model: str
    max_model_len: int | None
    questions: str  # a digest of prompts and limits: only like is compared with like
    answers: list[Answer]
    seconds: float  # for all answers
    metrics: Metrics  # of that time
    long_prompt_tokens: int | None = None  # of a prompt that was asked twice; None: none was
    cached_tokens: int | None = None  # of its second time
    memory: Memory | None = None

    @property
    def tokens_per_s(self) -> float:
        return sum(len(answer.tokens) for answer in self.answers) / self.seconds if self.seconds else 0.0

    @property
    def concurrency(self) -> float | None:
        """Requests of full length that the KV cache holds at once."""
        if self.metrics.kv_tokens is None or not self.max_model_len:
            return None
        return self.metrics.kv_tokens / self.max_model_len

    def save(self, path: Path) -> None:
        """Raises ConfigError."""
        data = {"kind": KIND, "version": VERSION, **asdict(self)}
        try:
            path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--save {path}: {error.strerror}") from error


def read_measurement(path: Path) -> Measurement:
    """Raises ConfigError where the file is not one that `save` wrote."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"--baseline {path}: {error.strerror}; `farspark check baseline --save {path}` makes one"
        ) from error
    except ValueError as error:
        raise ConfigError(f"--baseline {path}: not JSON: {error}") from error
    if not isinstance(data, dict) or data.get("kind") != KIND or data.get("version") != VERSION:
        raise ConfigError(f"--baseline {path}: not one that this version of `farspark check` saved")
    try:
        return _from_json(data)
    except (KeyError, TypeError) as error:
        raise ConfigError(f"--baseline {path}: {error!r} in it is not as `farspark check` saved it") from error


def _from_json(data: Mapping[str, Any]) -> Measurement:
    fields = {name: value for name, value in data.items() if name not in ("kind", "version")}
    fields["answers"] = [Answer(**one) for one in fields["answers"]]
    fields["metrics"] = Metrics(**fields["metrics"])
    fields["memory"] = None if fields["memory"] is None else Memory(**fields["memory"])
    return Measurement(**fields)
