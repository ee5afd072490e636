"""A small vLLM seen from outside: an HTTP server whose completions run rounds of the real engine side over a real worker.

What a check reads is made by the real code (the stats file) or has vLLM's own form (/metrics, /v1). The text is a function of the
prompt alone, as a target's is; faults are planted by attributes.
"""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from tests.fakes.recorded_engine import CONTEXT, SLOTS, VOCAB, RecordedEngine, Turn

BLOCK = 16
_PAGE = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="tiny"}} {drafts}.0
vllm:spec_decode_num_drafts_created{{engine="0",model_name="tiny"}} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="tiny"}} {drafted}.0
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="tiny"}} {accepted}.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="tiny",position="0"}} 5.0
vllm:generation_tokens_total{{engine="0",model_name="tiny"}} {generated}.0
vllm:prefix_cache_hits_total{{engine="0",model_name="tiny"}} {cached}.0
vllm:num_requests_running{{engine="0",model_name="tiny"}} {running}.0
vllm:cache_config_info{{block_size="16",enable_prefix_caching="True",engine="0",num_gpu_blocks="{blocks}"}} 1.0
"""


@dataclass
class HttpEngine:
    """`with HttpEngine(engine) as server: server.url`. `engine` None: a vLLM without Farspark."""

    engine: RecordedEngine | None = None
    accepts: int = 2  # of five drafts, in every round
    blocks: int = 640
    max_model_len: int = 2048
    loses_blocks: int = 0  # of every prefix-cache hit
    wrong_from: int | None = None  # tokens from here on are others
    gap: float = 3.0  # the target's largest logit less the second
    knows_chat: bool = True
    tells_logprobs: bool = True
    fails: bool = False
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("drafts", "drafted", "accepted", "generated", "cached", "running"), 0)
    )
    pause_s: float = 0.0  # between rounds

    def __enter__(self) -> HttpEngine:
        self._lock = threading.Lock()  # the engine's thread is whoever holds it
        self._free = list(range(SLOTS))
        self._slots = threading.Semaphore(SLOTS)
        self._seen: set[tuple[int, ...]] = set()
        self._ending = threading.Event()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,))
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ending.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(10)

    def get(self, path: str) -> tuple[int, str]:
        if path == "/v1/models":
            return 200, json.dumps({"data": [{"id": "tiny", "max_model_len": self.max_model_len}]})
        if path == "/metrics":
            with self._lock:
                return 200, _PAGE.format(**self.counts, blocks=self.blocks)
        return 404, "no such page"

    def post(self, path: str, body: Mapping[str, Any]) -> tuple[int, str]:
        if path == "/tokenize":
            if "messages" in body and not self.knows_chat:
                return 400, "no chat template"
            text = body["messages"][0]["content"] if "messages" in body else body["prompt"]
            return 200, json.dumps({"tokens": [3 + ord(letter) % 90 for letter in text]})
        if path != "/v1/completions":
            return 404, "no such page"
        if self.fails:
            return 500, "out of order"
        if "logprobs" in body and not self.tells_logprobs:
            return 400, "logprobs are forbidden"
        return 200, json.dumps({"choices": [self._complete(body)]})

    def _complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        prompt = [int(token) for token in body["prompt"]]
        tokens = self._tokens(prompt, int(body["max_tokens"]))
        self._serve(prompt, len(tokens))
        choice: dict[str, Any] = {
            "token_ids": tokens,
            "text": "".join(chr(97 + token % 26) for token in tokens),
            "finish_reason": "length",
            "logprobs": None,
        }
        if "logprobs" in body:
            choice["logprobs"] = {
                "top_logprobs": [
                    {f"token_id:{one}": -0.5, f"token_id:{_second(one)}": -0.5 - self.gap} for one in tokens
                ]
            }
        return choice

    def _tokens(self, prompt: Sequence[int], count: int) -> list[int]:
        start = zlib.crc32(bytes(prompt))
        tokens = [(start + 7 * at * at) % (VOCAB - 2) for at in range(count)]
        if self.wrong_from is not None:
            tokens[self.wrong_from :] = [_second(token) for token in tokens[self.wrong_from :]]
        return tokens

    def _serve(self, prompt: Sequence[int], count: int) -> None:
        """The rounds of one request, between those of others."""
        with self._slots:
            with self._lock:
                slot = self._free.pop()
                self.counts["running"] += 1
                if tuple(prompt) in self._seen:
                    hit = (len(prompt) - 1) // BLOCK - self.loses_blocks
                    self.counts["cached"] += BLOCK * max(0, hit)
                self._seen.add(tuple(prompt))
                request = None if self.engine is None else self.engine.admit(slot)
                if self.engine is not None and request is not None:
                    self.engine.step(Turn(request, min(len(prompt), 3 * CONTEXT)))
            made = 1
            while made < count:
                self._ending.wait(self.pause_s)
                with self._lock:
                    if self.engine is not None and request is not None:
                        self.engine.step(Turn(request, 6, rejected=5 - self.accepts))
                    self.counts["drafts"] += 1
                    self.counts["drafted"] += 5
                    self.counts["accepted"] += self.accepts
                    self.counts["generated"] += 1 + self.accepts
                made += 1 + self.accepts
            with self._lock:
                self._free.append(slot)
                self.counts["running"] -= 1


def _second(token: int) -> int:
    return (token + 1) % (VOCAB - 2)


def _handler(engine: HttpEngine) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply(*engine.get(self.path))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self._reply(*engine.post(self.path, json.loads(body)))

        def _reply(self, status: int, text: str) -> None:
            data = text.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    return Handler
