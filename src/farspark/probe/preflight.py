"""The questions of a pre-flight, in order; each answer is handed out as soon as it is there.

Without `hello` nothing of the worker's state is touched: PING and STATS need no session. With it a session of one slot is
opened, real STEPs are made and the session is ended.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from farspark.errors import ConfigError, FarsparkError, ProtocolError
from farspark.probe.metrics import check_idle
from farspark.probe.peer import Peer
from farspark.stats import Latency
from farspark.transport import Endpoint
from farspark.wire import layout
from farspark.wire.layout import Dtype, EntryFlag
from farspark.wire.messages import Entry, Hello, StepReply, Welcome

# What a decode step sends per request: the anchor and a few accepted drafts.
DEFAULT_ROWS: Final = 4
# A PING about as large as the head of a STEP with one request.
_PING_BYTES = 80
# One row that repeats in rotation is enough: what is measured does not depend on the values.
_ROTATION_BYTES = 2 * 97

_LAYER_KEYS = ("target_layer_ids", "dspark_target_layer_ids", "aux_hidden_state_layer_ids")


class CannotBeUsed(FarsparkError):
    """The worker answers, and an engine could not draft with it."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What an engine announces of its drafter."""

    num_drafts: int
    vocab_size: int
    hidden_size: int  # of the target
    taps: int

    @property
    def row_bytes(self) -> int:
        return 2 * self.taps * self.hidden_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """What to ask. Times in seconds."""

    endpoint: Endpoint
    token: bytes | None = field(default=None, repr=False)  # None: neither side proves itself
    timeout_s: float = 5.0  # of every wait
    pings: int = 100
    identity: bytes | None = None  # None: whatever the worker serves
    markov_identity: bytes | None = None  # None: not checked
    hello: bool = False
    shape: Shape | None = None  # None: what the worker says of itself
    num_drafts: int | None = None  # in place of the shape's
    slots: int = 1
    context: int | None = None  # None: the worker's
    rows: int = DEFAULT_ROWS  # per STEP
    rounds: int = 20
    metrics_url: str | None = None  # None: no look at the engine


def read_shape(path: Path) -> Shape:
    """The shape of a drafter from its config.json (or its folder). Raises ConfigError naming the file and the key."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--checkpoint-config {file}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"--checkpoint-config {file}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"--checkpoint-config {file}: expected a JSON object")
    # Some formats keep the transformer's keys, or all of them, one level down.
    nested = (config.get(key) for key in ("dflash_config", "transformer_layer_config", "text_config"))
    scopes = [config, *(one for one in nested if isinstance(one, dict))]
    layers = next((scope[key] for key in _LAYER_KEYS for scope in scopes if scope.get(key) is not None), None)
    if not isinstance(layers, list) or not layers:
        raise ConfigError(f"--checkpoint-config {file}: no list of target layers ({', '.join(_LAYER_KEYS)})")

    def number(*keys: str) -> int:
        value = next((scope[key] for key in keys for scope in scopes if scope.get(key) is not None), None)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"--checkpoint-config {file}: {' or '.join(keys)} is {value!r}, expected a whole number")
        return value

    # In a block that only fills in masks the anchor drafts nothing.
    anchor = 1 if config.get("sample_from_anchor") is False else 0
    return Shape(
        num_drafts=number("block_size", "dspark_block_size") - anchor,
        vocab_size=number("vocab_size"),
        hidden_size=number("target_hidden_size", "hidden_size"),
        taps=len(layers),
    )


def preflight(questions: Questions) -> Iterator[tuple[str, dict[str, Any]]]:
    """Ask, and yield (section, values) one by one: connection, ping, worker, and with `hello` session and step.

    Raises FarsparkError or TimeoutError with the reason why the worker cannot be used; what was yielded before stays true.
    """
    if questions.hello and questions.metrics_url is not None:
        check_idle(questions.metrics_url, questions.timeout_s)
    with Peer(questions.endpoint, questions.timeout_s, token=questions.token) as peer:
        yield "connection", {"lane": peer.lane}
        yield "ping", _ping(peer, questions.pings)
        stats = peer.stats()
        drafter = _drafter_of(stats)
        yield "worker", _worker(stats, drafter)
        if not questions.hello:
            _check_identities(questions, drafter)
            return
        shape = questions.shape or Shape(**{name: _number(drafter, name) for name in Shape.__slots__})
        hello = _hello(questions, shape, drafter)
        welcome = peer.hello(hello)
        yield "session", _session(peer, questions, hello, welcome)
        _check_welcome(hello, welcome)
        yield "step", _steps(peer, questions, hello, welcome, _number(drafter, "max_position"))
        peer.bye()


def _ping(peer: Peer, count: int) -> dict[str, Any]:
    latency = Latency()
    payload = bytes(range(_PING_BYTES))
    for _ in range(count):
        peer.ping(payload)
        latency.record(peer.last_us)
    return _microseconds(latency)


def _microseconds(latency: Latency) -> dict[str, Any]:
    snapshot = latency.snapshot()
    return {"count": snapshot["count"], **{f"{name}_us": snapshot[name] for name in ("p50", "p99", "max")}}


def _drafter_of(stats: Mapping[str, Any]) -> Mapping[str, Any]:
    drafter = stats.get("drafter")
    if not isinstance(drafter, dict):
        raise ProtocolError("the worker's STATS say nothing of its drafter")
    return drafter


def _number(drafter: Mapping[str, Any], name: str) -> int:
    value = drafter.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 0xFFFFFFFF:
        raise ProtocolError(f"the worker's STATS give drafter.{name} as {value!r}, expected a number")
    return value


def _worker(stats: Mapping[str, Any], drafter: Mapping[str, Any]) -> dict[str, Any]:
    slots = stats.get("slots")
    names = ("identity", "markov_identity", "kind", "num_drafts", "vocab_size", "hidden_size", "taps", "row_bytes")
    more = ("context", "window", "device", "dtype", "context_bytes")
    return {
        "name": stats.get("worker"),
        "uptime_s": stats.get("uptime_s"),
        **{name: drafter.get(name) for name in names + more},
        "max_rows": stats.get("max_rows"),
        "slots": drafter.get("slots"),
        "slots_in_use": slots.get("in_use") if isinstance(slots, dict) else None,
        "sessions": _sessions(stats.get("sessions")),
    }


def _sessions(sessions: object) -> list[dict[str, Any]]:
    """Of each engine in a session: its name, its slots, its rounds and their times."""
    names = ("engine", "slots_in_use", "rounds", "silent_s", "worker_us_p50", "worker_us_p99")
    found = sessions.values() if isinstance(sessions, dict) else ()
    return [{name: one.get(name) for name in names} for one in found if isinstance(one, dict)]


def _check_identities(questions: Questions, drafter: Mapping[str, Any]) -> None:
    """What HELLO would refuse for, without a HELLO."""
    for what, ours, theirs in (
        ("drafter identity", questions.identity, drafter.get("identity")),
        ("Markov identity", questions.markov_identity, drafter.get("markov_identity")),
    ):
        if ours is not None and ours.hex() != theirs:
            raise CannotBeUsed(f"{what}: engine {ours.hex()}, worker {theirs}; the worker serves another drafter")


def _hello(questions: Questions, shape: Shape, drafter: Mapping[str, Any]) -> Hello:
    identity = questions.identity
    if identity is None:
        try:
            identity = bytes.fromhex(str(drafter.get("identity")))
        except ValueError:
            identity = b""
        if len(identity) != layout.IDENTITY_BYTES:
            raise ProtocolError(f"the worker's STATS give its identity as {drafter.get('identity')!r}")
    context = questions.context or _number(drafter, "context")
    return Hello(
        engine="farspark probe",
        identity=identity,
        markov_identity=questions.markov_identity or bytes(layout.IDENTITY_BYTES),
        row_bytes=shape.row_bytes,
        taps=shape.taps,
        hidden_size=shape.hidden_size,
        dtype=Dtype.BF16,
        ring=context,
        context=context,
        num_drafts=questions.num_drafts or shape.num_drafts,
        slots=questions.slots,
        vocab_size=shape.vocab_size,
    )


def _session(peer: Peer, questions: Questions, hello: Hello, welcome: Welcome) -> dict[str, Any]:
    return {
        "hello": "OK",
        "identity": "equal" if questions.identity is not None else "the worker's own, not compared (no --identity)",
        "markov_identity": "equal" if questions.markov_identity is not None else "not compared (no --markov-identity)",
        "hello_us": round(peer.last_us, 1),
        "context": welcome.context,
        "num_drafts": welcome.num_drafts,
        "slots": hello.slots,
        "max_rows": welcome.max_rows,
        "message": welcome.message,
    }


def _check_welcome(hello: Hello, welcome: Welcome) -> None:
    """The worker said OK; an engine believes it only where its own numbers agree."""
    for what, ours, theirs in (
        ("drafter identity", hello.identity.hex(), welcome.identity.hex()),
        ("N", hello.num_drafts, welcome.num_drafts),
        ("vocabulary", hello.vocab_size, welcome.vocab_size),
    ):
        if ours != theirs:
            raise CannotBeUsed(f"HELLO was answered with OK, and yet {what}: engine {ours}, worker {theirs}")
    needed = hello.slots * (hello.num_drafts + 1)
    if welcome.max_rows < needed:
        raise CannotBeUsed(
            f"rows per STEP: engine {needed}, worker {welcome.max_rows} (start it with --max-rows {needed})"
        )


def _steps(peer: Peer, questions: Questions, hello: Hello, welcome: Welcome, max_position: int) -> dict[str, Any]:
    """`rounds` STEPs of `rows` rows for one slot, as a decoding request would send them."""
    most = min(welcome.max_rows, max_position - 1)
    if questions.rows > most:
        raise CannotBeUsed(f"--rows {questions.rows}: this worker takes at most {most} in a STEP")
    rows = _random_rows(hello.row_bytes, questions.rows)
    rtt, worker, rest = Latency(), Latency(), Latency()
    statuses: dict[str, int] = {}
    generation, position = 1, 0
    for step_id in range(1, questions.rounds + 1):
        # A request ends where positions end, and the slot's next one begins.
        if position + questions.rows >= max_position:
            generation, position = generation + 1, 0
        flags = EntryFlag.NEED_DRAFT if position else EntryFlag.NEED_DRAFT | EntryFlag.NEW_GEN
        anchor = position + questions.rows
        entry = Entry(0, generation, position, questions.rows, step_id % hello.vocab_size, anchor, flags)
        reply = peer.step(step_id, [entry], rows)
        position = anchor
        why = find_fault(reply, entry, step_id, hello)
        if why is not None:
            raise CannotBeUsed(f"STEP {step_id} of {questions.rows} rows: {why}")
        name = reply.entries[0].status.name
        statuses[name] = statuses.get(name, 0) + 1
        rtt.record(peer.last_us)
        worker.record(reply.worker_us)
        rest.record(max(0.0, peer.last_us - reply.worker_us))
    return {
        "rounds": questions.rounds,
        "rows": questions.rows,
        "bytes": len(rows),
        "status": statuses,
        "round_trip": _microseconds(rtt),
        "worker": _microseconds(worker),
        "on_the_way": _microseconds(rest),
    }


def find_fault(reply: StepReply, entry: Entry, step_id: int, hello: Hello) -> str | None:
    """Why an engine could not use `reply` to a STEP of one entry, as a sentence; None if it could."""
    if (reply.step_id, reply.num_drafts, len(reply.entries)) != (step_id, hello.num_drafts, 1):
        return (
            f"the reply is to step {reply.step_id}, {len(reply.entries)} entries by {reply.num_drafts} drafts; asked was "
            f"step {step_id}, 1 by {hello.num_drafts}"
        )
    answer = reply.entries[0]
    if (answer.slot, answer.generation) != (entry.slot, entry.generation):
        return f"the reply is for slot {answer.slot} generation {answer.generation}, asked was {entry.slot}, {entry.generation}"
    if not answer.status.has_drafts:
        return f"status {answer.status.name}, no drafts"
    if answer.window_rows > hello.context:
        return f"a window of {answer.window_rows} rows, the context is {hello.context}"
    for token in reply.tokens.tolist():
        if not 0 <= token < hello.vocab_size:
            return f"draft id {token}, the vocabulary has {hello.vocab_size}"
    for confidence in reply.confidences.tolist():
        # Written so that NaN fails it.
        if not 0 <= confidence <= 1:
            return f"confidence {confidence}, expected 0 to 1"
    return None


def _random_rows(row_bytes: int, count: int) -> bytes:
    """bf16 values as hidden states have them, of about unit size: the upper half of each float32."""
    source = random.Random(0)
    values = b"".join(struct.pack("<f", source.gauss(0, 1))[2:] for _ in range(row_bytes // 2))
    turns = (index * _ROTATION_BYTES % row_bytes for index in range(count))
    return b"".join(values[turn:] + values[:turn] for turn in turns)
