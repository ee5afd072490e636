"""A client of vLLM's OpenAI server with the standard library alone: the checks run where the engine runs."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from farspark.check.measurement import Answer
from farspark.check.metrics import Metrics, parse_metrics
from farspark.errors import ConfigError, FarsparkError

_MAX_BYTES: Final = 64 * 1024 * 1024
_LOGPROBS: Final = 2
# Quick questions: what takes longer is a server that hangs.
_SHORT_S: Final = 10.0


class ServerError(FarsparkError):
    """The server refused a request or did not answer; the message has its words."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Server:
    """Stateless but for what it has learnt of the server; may be used from several threads."""

    def __init__(self, url: str, timeout_s: float) -> None:
        """Raises ConfigError on a URL that is none. `timeout_s` is that of one answer."""
        try:
            parts = urlsplit(url)
            is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_good = False
        if not is_good:
            raise ConfigError(f"--url {url!r}: expected something like http://127.0.0.1:8000")
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        # Without proxies: the engine is on this host or beside it.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._tells_logprobs = True

    def model(self) -> tuple[str, int | None]:
        """The served model's name and its longest request. Raises ConfigError where nothing serves there."""
        try:
            models = self._ask("/v1/models", None, _SHORT_S)["data"]
        except (ServerError, KeyError, TypeError) as error:
            raise ConfigError(
                f"--url {self.url}: no vLLM answers there ({error}); start it, or give its address"
            ) from error
        if not models:
            raise ConfigError(f"--url {self.url}: it serves no model")
        return str(models[0]["id"]), models[0].get("max_model_len")

    def metrics(self) -> Metrics:
        return parse_metrics(self._fetch("/metrics", None, _SHORT_S).decode(errors="replace"))

    def tokenize(self, model: str, text: str) -> list[int]:
        """As the model's chat template has it, or plain where it has none."""
        chat = {"model": model, "messages": [{"role": "user", "content": text}]}
        try:
            found = self._ask("/tokenize", chat, _SHORT_S)
        except ServerError as error:
            if error.status is None or error.status == 404:
                raise
            found = self._ask("/tokenize", {"model": model, "prompt": text}, _SHORT_S)
        return [int(token) for token in found["tokens"]]

    def complete(self, model: str, prompt: Sequence[int], max_tokens: int) -> Answer:
        """Greedily. Raises ServerError."""
        body: dict[str, Any] = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "return_token_ids": True,
        }
        began = time.monotonic()
        if self._tells_logprobs:
            try:
                found = self._ask(
                    "/v1/completions",
                    body | {"logprobs": _LOGPROBS, "return_tokens_as_token_ids": True},
                    self._timeout_s,
                )
            except ServerError as error:
                if error.status != 400:
                    raise
                # A server that forbids logprobs; whatever else is wrong is said the second time too.
                self._tells_logprobs = False
                began = time.monotonic()
        if not self._tells_logprobs:
            found = self._ask("/v1/completions", body, self._timeout_s)
        seconds = time.monotonic() - began
        try:
            return _answer(found["choices"][0], seconds)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ServerError(f"{self.url}/v1/completions: the answer is not as vLLM gives it: {error!r}") from error

    def _ask(self, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> Any:
        data = self._fetch(path, None if body is None else json.dumps(body).encode(), timeout_s)
        try:
            return json.loads(data)
        except ValueError as error:
            raise ServerError(f"{self.url}{path}: not JSON: {error}") from error

    def _fetch(self, path: str, body: bytes | None, timeout_s: float) -> bytes:
        request = urllib.request.Request(self.url + path, body, {"Content-Type": "application/json"} if body else {})
        try:
            with self._opener.open(request, timeout=timeout_s) as response:
                return bytes(response.read(_MAX_BYTES))
        except urllib.error.HTTPError as error:
            with error:
                said = error.read(500).decode(errors="replace")
            raise ServerError(f"{path} answered {error.code}: {said}", error.code) from error
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{path}: {getattr(error, 'reason', None) or error or type(error).__name__}") from error


def _answer(choice: Mapping[str, Any], seconds: float) -> Answer:
    tokens = [int(token) for token in choice["token_ids"]]
    gaps: list[float | None] = []
    second_best: list[int | None] = []
    for top in (choice.get("logprobs") or {}).get("top_logprobs") or ():
        ordered = sorted(((one, key) for key, one in (top or {}).items()), reverse=True)
        if len(ordered) < _LOGPROBS:
            gaps.append(None)
            second_best.append(None)
        else:
            # Differences of logprobs are those of the logits.
            gaps.append(ordered[0][0] - ordered[1][0])
            second_best.append(int(ordered[1][1].removeprefix("token_id:")))
    return Answer(tokens, choice["text"], seconds, str(choice.get("finish_reason")), gaps, second_best)
