"""What is said before the first STEP: both sides prove themselves where there is a token, HELLO, and whether the WELCOME fits."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from farspark.errors import Refused
from farspark.wire import codec
from farspark.wire.auth import EngineSide, authenticate, token_missing
from farspark.wire.layout import NONCE_BYTES, FrameStatus, HelloFlag, Operation
from farspark.wire.messages import Hello, Welcome

Ask = Callable[[Operation, bytes], memoryview]
"""Sends a request and returns the payload of its reply."""


def greet(ask: Ask, hello: Hello, *, token: bytes | None, token_setting: str, lost: Hello | None = None) -> Welcome:
    """The worker's WELCOME to `hello`. Where `lost` leads to the same worker, the session that was begun with it ends.

    With a `token`, only a worker that holds it too is talked to; `token_setting` is what a person would set it with. Raises
    Refused, with a final status where the two can never agree; and what `ask` raises.
    """
    if token is None:
        welcome = _say_hello(ask, hello, token_setting)
    else:
        welcome = _prove_and_say_hello(ask, hello, token, token_setting)
    if lost is not None:
        _hello(ask, lost)
        welcome = _hello(ask, hello)
    _check(hello, welcome)
    return welcome


def _hello(ask: Ask, hello: Hello) -> Welcome:
    return codec.decode_welcome(ask(Operation.HELLO, codec.encode_hello(hello)))


def _say_hello(ask: Ask, hello: Hello, token_setting: str) -> Welcome:
    """Without a proof."""
    try:
        return _hello(ask, hello)
    except Refused as refused:
        if refused.status == FrameStatus.AUTH:
            raise token_missing(str(refused), token_setting) from refused
        raise


def _prove_and_say_hello(ask: Ask, hello: Hello, token: bytes, token_setting: str) -> Welcome:
    side = EngineSide(
        token,
        identity=hello.identity,
        markov_identity=hello.markov_identity,
        nonce=secrets.token_bytes(NONCE_BYTES),
        setting=token_setting,
    )
    authenticate(side, ask)
    welcome = _hello(ask, hello)
    side.check_welcome(welcome.identity, welcome.markov_identity)
    return welcome


def _check(hello: Hello, welcome: Welcome) -> None:
    """The worker said OK; believe it only where its own numbers agree. Raises Refused with a final status."""
    needed_rows = hello.slots * (hello.num_drafts + 1)
    has_no_markov = not any(hello.markov_identity)
    grants_sampling = not hello.flags & HelloFlag.SAMPLED or bool(welcome.flags & HelloFlag.SAMPLED)
    same_markov = has_no_markov or welcome.markov_identity == hello.markov_identity
    config = FrameStatus.CONFIG
    checks: tuple[tuple[FrameStatus, bool, str, object, object], ...] = (
        (
            FrameStatus.IDENTITY,
            welcome.identity == hello.identity,
            "drafter identity",
            hello.identity,
            welcome.identity,
        ),
        (FrameStatus.MARKOV_IDENTITY, same_markov, "Markov identity", hello.markov_identity, welcome.markov_identity),
        (config, welcome.num_drafts == hello.num_drafts, "N", hello.num_drafts, welcome.num_drafts),
        (config, welcome.vocab_size == hello.vocab_size, "vocabulary", hello.vocab_size, welcome.vocab_size),
        (config, 1 <= welcome.context <= hello.context, "context", hello.context, welcome.context),
        (config, welcome.max_rows >= needed_rows, "rows per STEP", needed_rows, welcome.max_rows),
        (config, grants_sampling, "sampled drafts", "wants them", "does not grant them"),
    )
    for status, holds, what, ours, theirs in checks:
        if not holds:
            raise Refused(status, f"{what}: engine {_show(ours)}, worker {_show(theirs)}")


def _show(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
