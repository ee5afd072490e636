"""A client of vLLM's own OpenAI server, over a Unix socket: token ids in, token ids and text out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from farspark.demo.verify import TargetToken
from farspark.errors import FarsparkError

# A CPU engine answers its first token within seconds; a minute without a byte means that it is stuck.
_READ_TIMEOUT_S = 120.0


class ServerError(FarsparkError):
    """The server refused a request; the message has its words."""


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a streamed completion."""

    tokens: tuple[int, ...]
    text: str


class Completions:
    """Owned by one thread."""

    def __init__(self, socket: Path, model: str) -> None:
        self._model = model
        self._http = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(socket)), base_url="http://vllm", timeout=_READ_TIMEOUT_S
        )

    def __enter__(self) -> Completions:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._http.close()

    def is_ready(self) -> bool:
        try:
            return self._http.get("/health", timeout=2).status_code == 200
        except httpx.TransportError:
            return False

    def stream(self, prompt: Sequence[int], max_tokens: int) -> Iterator[Delta]:
        """Greedy completion of `prompt`, as it is made."""
        body = self._body(prompt, max_tokens) | {"stream": True}
        with self._http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                response.read()
                raise ServerError(f"/v1/completions answered {response.status_code}: {response.text[:500]}")
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise ServerError(f"/v1/completions failed while streaming: {event['error']}")
                for choice in event["choices"]:
                    yield Delta(tuple(choice.get("token_ids") or ()), choice["text"])

    def with_logits(self, prompt: Sequence[int], max_tokens: int) -> list[TargetToken]:
        """Greedy completion with the two largest logits of each position. Needs `--logprobs-mode raw_logits`."""
        body = self._body(prompt, max_tokens) | {"logprobs": 2, "return_tokens_as_token_ids": True}
        response = self._http.post("/v1/completions", json=body)
        if response.status_code != 200:
            raise ServerError(f"/v1/completions answered {response.status_code}: {response.text[:500]}")
        choice = response.json()["choices"][0]
        return [
            TargetToken(token, _two_largest(top))
            for token, top in zip(choice["token_ids"], choice["logprobs"]["top_logprobs"], strict=True)
        ]

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics, summed over labels but `position`: `{"name": value, "name{position=0}": value}`."""
        samples: dict[str, float] = {}
        for line in self._http.get("/metrics").text.splitlines():
            match = re.fullmatch(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)", line)
            if match is None:
                continue
            name, labels, value = match.groups()
            position = re.search(r'position="(\d+)"', labels or "")
            key = f"{name}{{position={position[1]}}}" if position else name
            samples[key] = samples.get(key, 0.0) + float(value)
        return samples

    def _body(self, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "return_token_ids": True,
        }


def _two_largest(top: dict[str, float]) -> tuple[tuple[int, float], tuple[int, float]]:
    """`{"token_id:17": 12.5, …}`, two entries or three: the sampled token comes on top of the two."""
    ordered = sorted(
        ((int(key.removeprefix("token_id:")), logit) for key, logit in top.items()), key=lambda one: -one[1]
    )
    return ordered[0], ordered[1]
