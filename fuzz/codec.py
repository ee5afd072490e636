"""Any payload into every decoder: a value that encodes again, to bytes that mean the same, or ProtocolError.

The first byte chooses the decoder, the rest is the payload.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from typing import Any, Final

from farspark.errors import ProtocolError
from farspark.wire import codec, layout
from farspark.wire.messages import Header, Step
from fuzz.driver import MAX_INPUT_BYTES, reproduce

ROW_BYTES: Final = 16


class Form:
    """One message: how it is decoded and encoded again, and of one with texts the longest payload. Texts may change on the way:
    what cannot be printed becomes U+FFFD, and is cut where that makes it too long."""

    def __init__(
        self, decode: Callable[[memoryview], Any], encode: Callable[[Any], bytes], *, longest: int | None = None
    ) -> None:
        self.decode = decode
        self.encode = encode
        self.longest = longest

    def run(self, payload: bytes) -> None:
        try:
            value = self.decode(memoryview(payload))
        except ProtocolError:
            return
        encoded = self.encode(value)
        assert self.longest is None or len(payload) <= self.longest, "decoded a text that is too long"
        # What a peer of ours ignores (unknown flags, reserved fields, bytes that are no UTF-8) need not come back as it was.
        assert self.longest is not None or len(encoded) == len(payload)
        again = self.decode(memoryview(encoded))
        assert self.encode(again) == encoded
        assert _plain(again) == _plain(value)


def _plain(value: Any) -> Any:
    """Views and NaN compare by their bytes."""
    if isinstance(value, memoryview):
        return value.tobytes()
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    return struct.pack("<d", value) if isinstance(value, float) else value


def _decode_frame(frame: memoryview) -> tuple[Header, memoryview]:
    """Both ways to read a header agree."""
    peeked = codec.peek_step(frame, int.from_bytes(frame[8:16], "little"))
    try:
        header, payload = codec.decode_frame(frame)
    except ProtocolError:
        assert peeked is None, "peeked at what is no frame"
        raise
    is_step = (header.operation, header.version, header.is_reply) == (layout.Operation.STEP, layout.VERSION, False)
    if peeked is None:
        is_plain = not frame[7] and not any(frame[24:26])  # no flag, no status: neither means anything in a request
        assert not is_step or len(payload) < layout.STEP.size or not is_plain, "a STEP that cannot be peeked at"
    else:
        _, n_requests, flags, _ = layout.STEP.unpack_from(payload)
        assert is_step
        assert peeked == (header, layout.HEADER.size + layout.STEP.size + n_requests * _entry_bytes(flags))
    return header, payload


def _entry_bytes(flags: int) -> int:
    return layout.ENTRY.size + (layout.SAMPLING.size if flags & layout.StepFlag.SAMPLED else 0)


def _encode_frame(parts: tuple[Header, memoryview]) -> bytes:
    header, payload = parts
    assert header.payload_bytes == len(payload)
    return codec.encode_frame(header, bytes(payload))


def _decode_step(payload: memoryview) -> Step:
    step = codec.decode_step(payload, ROW_BYTES)
    assert layout.STEP.size + len(step.entries) * _entry_bytes(step.flags) + len(step.rows) == len(payload)
    assert len(step.sampling) == (len(step.entries) if step.flags & layout.StepFlag.SAMPLED else 0)
    return step


def _encode_step(step: Step) -> bytes:
    head = codec.encode_step_head(1, 2, step.step_id, step.entries, len(step.rows), step.flags, step.sampling)
    return head[layout.HEADER.size :] + bytes(step.rows)


def _refusals(payload: memoryview) -> str:
    for operation in (layout.Operation.HELLO, layout.Operation.STEP, 255):
        assert len(codec.decode_refusal(operation, payload)) <= max(layout.MAX_MESSAGE_BYTES, len(payload))
    return codec.decode_message(payload)


FORMS: Final = (
    Form(_decode_frame, _encode_frame),
    Form(_decode_step, _encode_step),
    Form(codec.decode_step_reply, codec.encode_step_reply),
    Form(codec.decode_hello, codec.encode_hello, longest=layout.HELLO.size + layout.MAX_NAME_BYTES),
    Form(
        codec.decode_welcome,
        codec.encode_welcome,
        longest=layout.WELCOME.size + 2 * layout.MAX_NAME_BYTES + layout.MAX_MESSAGE_BYTES,
    ),
    Form(codec.decode_judge, codec.encode_judge),
    Form(codec.decode_judgement, codec.encode_judgement),
    Form(codec.decode_free, codec.encode_free),
    Form(codec.decode_challenge, codec.encode_challenge),
    Form(
        codec.decode_challenge_reply,
        lambda value: codec.encode_challenge_reply(value[0], demands_proof=value[1]),
    ),
    Form(codec.decode_proof, codec.encode_proof),
    Form(_refusals, codec.encode_message, longest=MAX_INPUT_BYTES),
)


def run(data: bytes) -> None:
    if data:
        FORMS[data[0] % len(FORMS)].run(data[1:])


if __name__ == "__main__":
    sys.exit(reproduce(run))
