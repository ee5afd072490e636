"""One message to one payload and back.

Encoding checks its own side (a wrong value here is a bug of ours: ValueError); decoding trusts nothing (ProtocolError)
and checks every length against the payload before a byte is interpreted. Rows are never copied: a STEP is encoded as a
head that is sent in front of the caller's own row buffer, and decoded as a view into the received frame.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from farspark.errors import ProtocolError
from farspark.wire import layout
from farspark.wire.layout import (
    EntryFlag,
    FrameStatus,
    HeaderFlag,
    HelloFlag,
    Operation,
    RequestStatus,
    StepFlag,
)
from farspark.wire.messages import Entry, EntryReply, Freed, Header, Hello, Step, StepReply, Welcome

# Tables in place of the enums' constructors, which take microseconds.
_OPERATIONS: dict[int, Operation] = {int(operation): operation for operation in Operation}
_FRAME_STATUSES: dict[int, FrameStatus] = {int(status): status for status in FrameStatus}
_REQUEST_STATUSES = {int(status): status for status in RequestStatus}
_HEADER_FLAGS = tuple(HeaderFlag(bits) for bits in range(2))
_ENTRY_FLAGS = tuple(EntryFlag(bits) for bits in range(8))
_STEP_FLAGS = tuple(StepFlag(bits) for bits in range(4))
_MARGINS = int(StepFlag.MARGINS)


def encode_frame(header: Header, payload: bytes = b"") -> bytes:
    """A whole frame for everything but STEP: `header` with its `payload_bytes` replaced by the payload's length."""
    return _pack_header(header, len(payload)) + payload


def _pack_header(header: Header, payload_bytes: int) -> bytes:
    return layout.HEADER.pack(
        layout.MAGIC,
        header.version,
        header.operation,
        header.flags,
        header.session,
        header.sequence,
        header.status,
        0,
        payload_bytes,
    )


def decode_frame(frame: memoryview) -> tuple[Header, memoryview]:
    """Split a frame into header and payload.

    An operation, a status or a version that is not ours is returned as it came: the caller answers it with a frame
    status. Raises ProtocolError where not even that is possible: wrong magic, or a length that is not the frame's.
    """
    if len(frame) < layout.HEADER.size:
        raise ProtocolError(f"frame of {len(frame)} bytes, a header needs {layout.HEADER.size}")
    magic, version, operation, flags, session, sequence, status, _, payload_bytes = layout.HEADER.unpack_from(frame)
    if magic != layout.MAGIC:
        raise ProtocolError(f"magic {magic!r}, expected {layout.MAGIC!r}")
    payload = frame[layout.HEADER.size :]
    if payload_bytes != len(payload):
        raise ProtocolError(f"header announces {payload_bytes} payload bytes, the frame has {len(payload)}")
    header = Header(
        _OPERATIONS.get(operation, operation),
        session,
        sequence,
        payload_bytes,
        _HEADER_FLAGS[flags & 1],
        _FRAME_STATUSES.get(status, status),
        version,
    )
    return header, payload


def encode_hello(hello: Hello) -> bytes:
    name = _text(hello.engine, layout.MAX_NAME_BYTES)
    return (
        layout.HELLO.pack(
            _digest(hello.identity),
            _digest(hello.markov_identity),
            hello.row_bytes,
            hello.hidden_size,
            hello.ring,
            hello.context,
            hello.vocab_size,
            hello.slots,
            hello.num_drafts,
            hello.taps,
            hello.dtype,
            hello.flags,
            len(name),
            hello.instance,
        )
        + name
    )


def decode_hello(payload: memoryview) -> Hello:
    fields = _fixed(layout.HELLO, payload, "HELLO")
    identity, markov, row_bytes, hidden, ring, context, vocab, slots, num_drafts, taps, dtype, flags, *rest = fields
    name_bytes, instance = rest
    (name,) = _texts(payload, layout.HELLO.size, (name_bytes,), "HELLO")
    return Hello(
        engine=name,
        identity=identity,
        markov_identity=markov,
        row_bytes=row_bytes,
        taps=taps,
        hidden_size=hidden,
        dtype=dtype,
        ring=ring,
        context=context,
        num_drafts=num_drafts,
        slots=slots,
        vocab_size=vocab,
        flags=HelloFlag(flags & int(HelloFlag.MARGINS | HelloFlag.SAMPLED)),
        instance=instance,
    )


def encode_welcome(welcome: Welcome) -> bytes:
    kind = _text(welcome.kind, layout.MAX_NAME_BYTES)
    name = _text(welcome.worker, layout.MAX_NAME_BYTES)
    message = _text(welcome.message, layout.MAX_MESSAGE_BYTES)
    fixed = layout.WELCOME.pack(
        _digest(welcome.identity),
        _digest(welcome.markov_identity),
        welcome.vocab_size,
        welcome.context,
        welcome.window,
        welcome.slots,
        welcome.max_rows,
        welcome.num_drafts,
        welcome.flags,
        len(kind),
        len(name),
        len(message),
        0,
    )
    return fixed + kind + name + message


def decode_welcome(payload: memoryview) -> Welcome:
    fields = _fixed(layout.WELCOME, payload, "HELLO reply")
    identity, markov, vocab, context, window, slots, max_rows, num_drafts, flags, kind_b, name_b, message_b, _ = fields
    kind, name, message = _texts(payload, layout.WELCOME.size, (kind_b, name_b, message_b), "HELLO reply")
    return Welcome(
        worker=name,
        kind=kind,
        identity=identity,
        markov_identity=markov,
        vocab_size=vocab,
        context=context,
        window=window,
        slots=slots,
        max_rows=max_rows,
        num_drafts=num_drafts,
        flags=HelloFlag(flags & int(HelloFlag.MARGINS | HelloFlag.SAMPLED)),
        message=message,
    )


def encode_step_head(
    session: int, sequence: int, step_id: int, entries: Sequence[Entry], rows_bytes: int, flags: StepFlag = StepFlag(0)
) -> bytes:
    """Everything of a STEP frame in front of its rows: application header, step header, entries.

    The frame is this head followed by `rows_bytes` bytes of rows, sent from wherever they lie.
    """
    try:
        packed = [layout.ENTRY.pack(*entry) for entry in entries]
    except struct.error as error:
        raise ValueError(f"STEP entry that does not fit its fields: {error}") from error
    step = layout.STEP.pack(step_id, len(entries), flags, sum([entry.n_rows for entry in entries]))
    payload_bytes = layout.STEP.size + layout.ENTRY.size * len(packed) + rows_bytes
    header = layout.HEADER.pack(
        layout.MAGIC, layout.VERSION, Operation.STEP, 0, session, sequence, FrameStatus.OK, 0, payload_bytes
    )
    return b"".join([header, step, *packed])


def decode_step(payload: memoryview, row_bytes: int) -> Step:
    """A STEP whose rows are `row_bytes` each, as the session agreed. `rows` is a view into `payload`."""
    step_id, n_requests, flags, n_rows = _fixed(layout.STEP, payload, "STEP")
    if n_requests > layout.MAX_REQUESTS:
        raise ProtocolError(f"STEP of {n_requests} requests, at most {layout.MAX_REQUESTS}")
    rows_at = layout.STEP.size + layout.ENTRY.size * n_requests
    expected = rows_at + n_rows * row_bytes
    if len(payload) != expected:
        raise ProtocolError(
            f"STEP of {len(payload)} bytes; {n_requests} requests and {n_rows} rows of {row_bytes} bytes make {expected}"
        )
    entries = [
        Entry(slot, generation, first_pos, rows, anchor, anchor_pos, _ENTRY_FLAGS[bits & 7], k_window, n_out)
        for slot, generation, first_pos, rows, anchor, anchor_pos, bits, k_window, n_out in layout.ENTRY.iter_unpack(
            payload[layout.STEP.size : rows_at]
        )
    ]
    counted = sum([entry.n_rows for entry in entries])
    if counted != n_rows:
        raise ProtocolError(f"STEP announces {n_rows} rows, its entries {counted}")
    return Step(step_id, entries, payload[rows_at:], _STEP_FLAGS[flags & 3])


def encode_step_reply(reply: StepReply) -> bytes:
    """The payload of a STEP reply. Raises ValueError where an array has not `entries * N` elements."""
    count = len(reply.entries) * reply.num_drafts
    parts: list[bytes | memoryview] = [
        layout.STEP_REPLY.pack(
            reply.step_id, len(reply.entries), reply.num_drafts, reply.flags, 0, min(reply.worker_us, 0xFFFFFFFF), 0
        )
    ]
    parts += [layout.ENTRY_REPLY.pack(*entry) for entry in reply.entries]
    arrays = [(reply.tokens, "i"), (reply.confidences, "f")]
    if int(reply.flags) & _MARGINS:
        if reply.margins is None:
            raise ValueError("a reply flagged MARGINS without margins")
        arrays.append((reply.margins, "f"))
    for array, kind in arrays:
        if array.format != kind or array.nbytes != 4 * count:
            raise ValueError(f"array of format {array.format!r}, {array.nbytes} bytes; expected {kind!r}, {4 * count}")
        parts.append(array)
    return b"".join(parts)


def decode_step_reply(payload: memoryview) -> StepReply:
    """A STEP reply; its arrays are views into `payload`. Values are not judged here, only lengths and known statuses."""
    step_id, n_requests, num_drafts, raw_flags, _, worker_us, _ = _fixed(layout.STEP_REPLY, payload, "STEP reply")
    if n_requests > layout.MAX_REQUESTS or num_drafts > layout.MAX_DRAFTS:
        raise ProtocolError(
            f"STEP reply of {n_requests} requests by {num_drafts} drafts, at most {layout.MAX_REQUESTS} "
            f"by {layout.MAX_DRAFTS}"
        )
    has_margins = raw_flags & _MARGINS
    arrays_at = layout.STEP_REPLY.size + layout.ENTRY_REPLY.size * n_requests
    array_bytes = 4 * n_requests * num_drafts
    arrays = 3 if has_margins else 2
    if len(payload) != arrays_at + arrays * array_bytes:
        raise ProtocolError(
            f"STEP reply of {len(payload)} bytes; {n_requests} requests by {num_drafts} drafts make "
            f"{arrays_at + arrays * array_bytes}"
        )
    try:
        entries = [
            EntryReply(slot, generation, window_rows, _REQUEST_STATUSES[status])
            for slot, generation, window_rows, status in layout.ENTRY_REPLY.iter_unpack(
                payload[layout.STEP_REPLY.size : arrays_at]
            )
        ]
    except KeyError as unknown:
        raise ProtocolError(f"request status {unknown} in a STEP reply, which is not one of ours") from None

    def array(index: int, kind: str) -> memoryview:
        at = arrays_at + index * array_bytes
        return payload[at : at + array_bytes].cast(kind)  # type: ignore[call-overload, no-any-return]

    return StepReply(
        step_id,
        num_drafts,
        worker_us,
        entries,
        array(0, "i"),
        array(1, "f"),
        array(2, "f") if has_margins else None,
        _STEP_FLAGS[raw_flags & 3],
    )


def encode_free(freed: Sequence[Freed]) -> bytes:
    return layout.FREE.pack(len(freed)) + b"".join(layout.FREE_ENTRY.pack(one.slot, one.generation) for one in freed)


def decode_free(payload: memoryview) -> tuple[Freed, ...]:
    (count,) = _fixed(layout.FREE, payload, "FREE")
    expected = layout.FREE.size + count * layout.FREE_ENTRY.size
    if len(payload) != expected:
        raise ProtocolError(f"FREE of {len(payload)} bytes; {count} slots make {expected}")
    return tuple(Freed(slot, gen) for slot, gen in layout.FREE_ENTRY.iter_unpack(payload[layout.FREE.size :]))


def encode_message(message: str) -> bytes:
    """The payload of a reply whose frame status is not OK: a sentence, cut at the limit."""
    # Cut between characters, not inside one.
    return message.encode()[: layout.MAX_MESSAGE_BYTES].decode(errors="ignore").encode()


def decode_message(payload: memoryview) -> str:
    return bytes(payload[: layout.MAX_MESSAGE_BYTES]).decode(errors="replace")


def decode_refusal(operation: Operation | int, payload: memoryview) -> str:
    """The sentence in a reply whose frame status is not OK.

    A refused HELLO is answered with a whole welcome, so that the worker's own identities are there too; a peer of
    another version may send anything.
    """
    if operation == Operation.HELLO:
        try:
            return decode_welcome(payload).message
        except ProtocolError:
            pass
    return decode_message(payload)


def _fixed(form: struct.Struct, payload: memoryview, what: str) -> tuple[Any, ...]:
    if len(payload) < form.size:
        raise ProtocolError(f"{what} of {len(payload)} bytes, its fixed part alone has {form.size}")
    return form.unpack_from(payload)


def _texts(payload: memoryview, at: int, lengths: Sequence[int], what: str) -> list[str]:
    """Consecutive UTF-8 texts that end exactly with the payload."""
    if len(payload) != at + sum(lengths):
        raise ProtocolError(f"{what} of {len(payload)} bytes, its lengths make {at + sum(lengths)}")
    texts = []
    for length in lengths:
        texts.append(bytes(payload[at : at + length]).decode(errors="replace"))
        at += length
    return texts


def _text(text: str, limit: int) -> bytes:
    raw = text.encode()
    if len(raw) > limit:
        raise ValueError(f"text of {len(raw)} bytes, at most {limit}")
    return raw


def _digest(digest: bytes) -> bytes:
    if len(digest) != layout.IDENTITY_BYTES:
        raise ValueError(f"identity of {len(digest)} bytes, expected {layout.IDENTITY_BYTES}")
    return digest
