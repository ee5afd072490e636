"""One message to one payload and back.

Encoding checks its own side (a wrong value here is a bug of ours: ValueError); decoding trusts nothing (ProtocolError)
and checks every length against the payload before a byte is interpreted. Rows are never copied: a STEP is encoded as a
head that is sent in front of the caller's own row buffer, and decoded as a view into the received frame.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from itertools import chain
from typing import Any

from farspark.errors import ProtocolError
from farspark.wire import layout
from farspark.wire.layout import (
    FrameStatus,
    HeaderFlag,
    HelloFlag,
    JudgementFlag,
    Operation,
    RequestStatus,
    StepFlag,
)
from farspark.wire.messages import (
    Entry,
    Freed,
    Header,
    Hello,
    Judge,
    Judgement,
    Proof,
    SampledDrafts,
    Sampling,
    Step,
    StepReply,
    Welcome,
    make_entry,
    make_entry_reply,
    make_header,
    make_sampling,
    make_step_reply,
)

# Tables in place of the enums' constructors, which take microseconds.
_OPERATIONS: dict[int, Operation] = {int(operation): operation for operation in Operation}
_FRAME_STATUSES: dict[int, FrameStatus] = {int(status): status for status in FrameStatus}
_REQUEST_STATUSES = {int(status): status for status in RequestStatus}
# Plain integers, as in `messages`: what is known of the flags of a header, of an entry and of a step.
_HEADER_FLAGS, _ENTRY_FLAGS, _STEP_FLAGS = 0b11, 0b111, 0b11
_MARGINS, _SAMPLED = int(StepFlag.MARGINS), int(StepFlag.SAMPLED)
_ROUTING = int(JudgementFlag.ROUTING)
# ROUTER is the worker's to say, so it is nothing in a HELLO.
_WANTED = int(HelloFlag.MARGINS | HelloFlag.SAMPLED | HelloFlag.ROUTING)
_GRANTED = _WANTED | int(HelloFlag.ROUTER)
_STEP, _REPLY, _OK = int(Operation.STEP), int(HeaderFlag.REPLY), int(FrameStatus.OK)


def _joined(*forms: struct.Struct) -> struct.Struct:
    return struct.Struct("<" + "".join([form.format.removeprefix("<") for form in forms]))


_STEP_FRAME, _STEP_REPLY_FRAME = _joined(layout.HEADER, layout.STEP), _joined(layout.HEADER, layout.STEP_REPLY)
_WORKER_US, _WORKER_US_AT = struct.Struct("<I"), layout.HEADER.size + 16
_MAX_U32 = 0xFFFFFFFF


# One struct for all entries: a call for each would take three times as long. Rounds have few different sizes.
@functools.lru_cache(maxsize=64)
def _step_head(n_entries: int) -> struct.Struct:
    return _joined(layout.HEADER, layout.STEP, *[layout.ENTRY] * n_entries)


@functools.lru_cache(maxsize=64)
def _step_reply_head(n_entries: int) -> struct.Struct:
    return _joined(layout.HEADER, layout.STEP_REPLY, *[layout.ENTRY_REPLY] * n_entries)


def encode_frame(header: Header, payload: bytes = b"") -> bytes:
    """A whole frame for everything but STEP: `header` with its `payload_bytes` replaced by the payload's length."""
    operation, session, sequence, _, flags, status, version = header
    return (
        layout.HEADER.pack(layout.MAGIC, version, operation, flags, session, sequence, status, 0, len(payload))
        + payload
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
    return make_header(
        (
            _OPERATIONS.get(operation, operation),
            session,
            sequence,
            payload_bytes,
            flags & _HEADER_FLAGS,
            _FRAME_STATUSES.get(status, status),
            version,
        )
    ), payload


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
    (name,) = _texts(payload, layout.HELLO.size, (name_bytes,), (layout.MAX_NAME_BYTES,), "HELLO")
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
        flags=HelloFlag(flags & _WANTED),
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
        round(10 * welcome.lease_s),
    )
    return fixed + kind + name + message


def decode_welcome(payload: memoryview) -> Welcome:
    fields = _fixed(layout.WELCOME, payload, "HELLO reply")
    identity, markov, vocab, context, window, slots, max_rows, num_drafts, flags, kind_b, name_b, *rest = fields
    message_b, lease_tenths = rest
    limits = layout.MAX_NAME_BYTES, layout.MAX_NAME_BYTES, layout.MAX_MESSAGE_BYTES
    kind, name, message = _texts(payload, layout.WELCOME.size, (kind_b, name_b, message_b), limits, "HELLO reply")
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
        flags=HelloFlag(flags & _GRANTED),
        message=message,
        lease_s=lease_tenths / 10,
    )


def encode_step_head(
    session: int,
    sequence: int,
    step_id: int,
    entries: Sequence[Entry],
    rows_bytes: int,
    flags: int = 0,
    sampling: Sequence[Sampling] = (),
) -> bytes:
    """Everything of a STEP frame in front of its rows: application header, step header, entries, how each is sampled.

    The frame is this head followed by `rows_bytes` bytes of rows, sent from wherever they lie. `sampling` [entries] makes the
    STEP a sampled one, whatever `flags` says of that.
    """
    if sampling:
        if len(sampling) != len(entries):
            raise ValueError(f"{len(entries)} entries, but how to sample {len(sampling)}")
        try:
            how = b"".join([layout.SAMPLING.pack(*one) for one in sampling])
        except (struct.error, OverflowError) as error:
            raise ValueError(f"how to sample an entry does not fit its fields: {error}") from error
        rest = rows_bytes + len(how)
        return encode_step_head(session, sequence, step_id, entries, rest, int(flags) | _SAMPLED) + how
    form = _step_head(len(entries))
    try:
        return form.pack(
            layout.MAGIC,
            layout.VERSION,
            _STEP,
            0,
            session,
            sequence,
            0,
            0,
            form.size - layout.HEADER.size + rows_bytes,
            step_id,
            len(entries),
            flags,
            sum([entry.n_rows for entry in entries]),
            *chain.from_iterable(entries),
        )
    except struct.error as error:
        raise ValueError(f"STEP entry that does not fit its fields: {error}") from error


def peek_step(frame: memoryview, session: int) -> tuple[Header, int] | None:
    """The header of a STEP of `session`, and how many bytes of the frame stand in front of its rows.

    The two headers of the frame must be there, and nothing else is looked at. None for any other frame, and for one of which
    the plain way (`decode_frame`) must tell what is wrong with it.
    """
    if len(frame) < _STEP_FRAME.size:
        return None
    fields = _STEP_FRAME.unpack_from(frame)
    sequence, payload_bytes, n_requests, flags = fields[5], fields[8], fields[10], fields[11]
    if (
        fields[:5] != (layout.MAGIC, layout.VERSION, _STEP, 0, session)
        or fields[6] != _OK
        or payload_bytes != len(frame) - layout.HEADER.size
    ):
        return None
    header = make_header((Operation.STEP, session, sequence, payload_bytes, 0, FrameStatus.OK, layout.VERSION))
    entry_bytes = layout.ENTRY.size + layout.SAMPLING.size if flags & _SAMPLED else layout.ENTRY.size
    return header, _STEP_FRAME.size + entry_bytes * n_requests


def decode_step(payload: memoryview, row_bytes: int) -> Step:
    """A STEP whose rows are `row_bytes` each, as the session agreed. `rows` is a view into `payload`, and not looked at."""
    step_id, n_requests, flags, n_rows = _fixed(layout.STEP, payload, "STEP")
    if n_requests > layout.MAX_REQUESTS:
        raise ProtocolError(f"STEP of {n_requests} requests, at most {layout.MAX_REQUESTS}")
    entries_end = layout.STEP.size + layout.ENTRY.size * n_requests
    rows_at = entries_end + layout.SAMPLING.size * n_requests if flags & _SAMPLED else entries_end
    expected = rows_at + n_rows * row_bytes
    if len(payload) != expected:
        raise ProtocolError(
            f"STEP of {len(payload)} bytes; {n_requests} requests and {n_rows} rows of {row_bytes} bytes make {expected}"
        )
    entries = list(map(make_entry, layout.ENTRY.iter_unpack(payload[layout.STEP.size : entries_end])))
    if max([entry.flags for entry in entries], default=0) > _ENTRY_FLAGS:
        entries = [entry._replace(flags=entry.flags & _ENTRY_FLAGS) for entry in entries]
    counted = sum([entry.n_rows for entry in entries])
    if counted != n_rows:
        raise ProtocolError(f"STEP announces {n_rows} rows, its entries {counted}")
    sampling: Sequence[Sampling] = ()
    if flags & _SAMPLED:
        sampling = list(map(make_sampling, layout.SAMPLING.iter_unpack(payload[entries_end:rows_at])))
    return Step(step_id, entries, payload[rows_at:], flags & _STEP_FLAGS, sampling)


def encode_step_reply_head(session: int, sequence: int, reply: StepReply) -> bytearray:
    """Everything of a STEP reply's frame in front of its arrays, which are not looked at: they may not be there yet."""
    step_id, num_drafts, worker_us, entries, _, _, _, flags, _ = reply
    form = _step_reply_head(len(entries))
    array_bytes = _array_bytes(len(entries), num_drafts, int(flags))
    return bytearray(
        form.pack(
            layout.MAGIC,
            layout.VERSION,
            _STEP,
            _REPLY,
            session,
            sequence,
            _OK,
            0,
            form.size - layout.HEADER.size + array_bytes,
            step_id,
            len(entries),
            num_drafts,
            flags,
            0,
            min(worker_us, _MAX_U32),
            0,
            *chain.from_iterable(entries),
        )
    )


def finish_step_reply(head: bytearray, reply: StepReply) -> list[bytearray | memoryview]:
    """The frame of a STEP reply: a head that was encoded before its arrays and the worker's time were known, and these.

    Raises ValueError where an array has not `entries * N` elements.
    """
    _, num_drafts, worker_us, entries, tokens, confidences, margins, flags, sampled = reply
    n_values = len(entries) * num_drafts
    frame: list[bytearray | memoryview] = [head, _array(tokens, "i", n_values), _array(confidences, "f", n_values)]
    if int(flags) & _MARGINS:
        if margins is None:
            raise ValueError("a reply flagged MARGINS without margins")
        frame.append(_array(margins, "f", n_values))
    if int(flags) & _SAMPLED:
        if sampled is None:
            raise ValueError("a reply flagged SAMPLED without what was sampled")
        frame.append(_array(sampled.mask, "i", len(entries)))
        frame.append(_array(sampled.support, "i", n_values * layout.SUPPORT_IDS))
        frame.append(_array(sampled.q, "f", n_values * layout.SUPPORT_IDS))
    _WORKER_US.pack_into(head, _WORKER_US_AT, min(worker_us, _MAX_U32))
    return frame


def encode_step_reply(reply: StepReply) -> bytes:
    """The payload of a STEP reply. Raises ValueError where an array has not `entries * N` elements."""
    return b"".join(finish_step_reply(encode_step_reply_head(0, 0, reply), reply))[layout.HEADER.size :]


def decode_step_reply(payload: memoryview) -> StepReply:
    """A STEP reply; its arrays are views into `payload`. Values are not judged here, only lengths and known statuses."""
    return _step_reply(payload, _fixed(layout.STEP_REPLY, payload, "STEP reply"))


def decode_answer(frame: memoryview, session: int, sequence: int) -> StepReply | None:
    """The reply in the frame that answers the STEP `sequence` of `session` with OK, as `decode_step_reply`.

    None for any other frame: then `decode_frame` tells what it is.
    """
    if len(frame) < _STEP_REPLY_FRAME.size:
        return None
    fields = _STEP_REPLY_FRAME.unpack_from(frame)
    if (
        fields[:7] != (layout.MAGIC, layout.VERSION, _STEP, _REPLY, session, sequence, _OK)
        or fields[8] != len(frame) - layout.HEADER.size
    ):
        return None
    return _step_reply(frame[layout.HEADER.size :], fields[9:])


def _step_reply(payload: memoryview, fixed: tuple[Any, ...]) -> StepReply:
    step_id, n_requests, num_drafts, raw_flags, _, worker_us, _ = fixed
    if n_requests > layout.MAX_REQUESTS or num_drafts > layout.MAX_DRAFTS:
        raise ProtocolError(
            f"STEP reply of {n_requests} requests by {num_drafts} drafts, at most {layout.MAX_REQUESTS} "
            f"by {layout.MAX_DRAFTS}"
        )
    has_margins = raw_flags & _MARGINS
    tokens_at = layout.STEP_REPLY.size + layout.ENTRY_REPLY.size * n_requests
    array_bytes = 4 * n_requests * num_drafts
    confidences_at = tokens_at + array_bytes
    margins_at = confidences_at + array_bytes
    sampled_at = margins_at + array_bytes if has_margins else margins_at
    expected = tokens_at + _array_bytes(n_requests, num_drafts, raw_flags)
    if len(payload) != expected:
        raise ProtocolError(
            f"STEP reply of {len(payload)} bytes; {n_requests} requests by {num_drafts} drafts make {expected}"
        )
    try:
        entries = [
            make_entry_reply((slot, generation, window_rows, _REQUEST_STATUSES[status]))
            for slot, generation, window_rows, status in layout.ENTRY_REPLY.iter_unpack(
                payload[layout.STEP_REPLY.size : tokens_at]
            )
        ]
    except KeyError as unknown:
        raise ProtocolError(f"request status {unknown} in a STEP reply, which is not one of ours") from None
    return make_step_reply(
        (
            step_id,
            num_drafts,
            worker_us,
            entries,
            payload[tokens_at:confidences_at].cast("i"),
            payload[confidences_at:margins_at].cast("f"),
            payload[margins_at:sampled_at].cast("f") if has_margins else None,
            raw_flags & _STEP_FLAGS,
            _sampled(payload[sampled_at:], n_requests, n_requests * num_drafts) if raw_flags & _SAMPLED else None,
        )
    )


def step_reply_bytes(n_requests: int, num_drafts: int, flags: int) -> int:
    """Of the whole frame of a STEP reply."""
    return _step_reply_head(n_requests).size + _array_bytes(n_requests, num_drafts, flags)


def _array_bytes(n_requests: int, num_drafts: int, flags: int) -> int:
    """Of the arrays of a STEP reply."""
    array_bytes = 4 * n_requests * num_drafts
    size = array_bytes * (3 if flags & _MARGINS else 2)
    return size + 4 * n_requests + 2 * layout.SUPPORT_IDS * array_bytes if flags & _SAMPLED else size


def _sampled(arrays: memoryview, n_requests: int, n_values: int) -> SampledDrafts:
    support_at = 4 * n_requests
    q_at = support_at + 4 * layout.SUPPORT_IDS * n_values
    return SampledDrafts(arrays[:support_at].cast("i"), arrays[support_at:q_at].cast("i"), arrays[q_at:].cast("f"))


def encode_free(freed: Sequence[Freed]) -> bytes:
    return layout.FREE.pack(len(freed)) + b"".join(layout.FREE_ENTRY.pack(one.slot, one.generation) for one in freed)


def decode_free(payload: memoryview) -> tuple[Freed, ...]:
    (count,) = _fixed(layout.FREE, payload, "FREE")
    expected = layout.FREE.size + count * layout.FREE_ENTRY.size
    if len(payload) != expected:
        raise ProtocolError(f"FREE of {len(payload)} bytes; {count} slots make {expected}")
    return tuple(Freed(slot, gen) for slot, gen in layout.FREE_ENTRY.iter_unpack(payload[layout.FREE.size :]))


def encode_judge(judge: Judge) -> bytes:
    """Raises ValueError where the tokens are not `chains * N` int32."""
    n_chains = len(judge.places)
    tokens = _array(judge.tokens, "i", n_chains * judge.num_drafts)
    return (
        layout.JUDGE.pack(judge.step_id, n_chains, judge.num_drafts, 0)
        + struct.pack(f"<{n_chains}I", *judge.places)
        + tokens
    )


def decode_judge(payload: memoryview) -> Judge:
    """`tokens` is a view into `payload`; places and tokens are not judged here."""
    step_id, n_chains, num_drafts, _ = _fixed(layout.JUDGE, payload, "JUDGE")
    tokens_at = layout.JUDGE.size + 4 * n_chains
    _exactly(payload, tokens_at + 4 * n_chains * num_drafts, f"JUDGE of {n_chains} chains of {num_drafts}")
    places = struct.unpack_from(f"<{n_chains}I", payload, layout.JUDGE.size)
    return Judge(step_id, num_drafts, places, payload[tokens_at:].cast("i"))


def encode_judgement(judgement: Judgement) -> bytes:
    """Raises ValueError where the arrays are not `chains * N` elements each, routing margins `chains`."""
    step_id, num_drafts, best, gaps, peaks, confidences, routing = judgement
    n_chains = len(routing) if routing is not None else len(best) // num_drafts if num_drafts else 0
    head = layout.JUDGE_REPLY.pack(step_id, n_chains, num_drafts, 0 if routing is None else _ROUTING)
    floats = [_array(one, "f", n_chains * num_drafts) for one in (gaps, peaks, confidences)]
    if routing is not None:
        floats.append(_array(routing, "f", n_chains))
    return b"".join([head, _array(best, "i", n_chains * num_drafts), *floats])


def decode_judgement(payload: memoryview) -> Judgement:
    """Arrays are views into `payload`. Values are not judged here, only lengths."""
    step_id, n_chains, num_drafts, flags = _fixed(layout.JUDGE_REPLY, payload, "JUDGE reply")
    size = 4 * n_chains * num_drafts
    start = layout.JUDGE_REPLY.size
    end = start + 4 * size
    says_routing = bool(flags & _ROUTING)
    what = f"JUDGE reply of {n_chains} chains of {num_drafts}{' with routing margins' if says_routing else ''}"
    _exactly(payload, end + 4 * n_chains if says_routing else end, what)
    best, gaps, peaks, confidences = (payload[start + i * size : start + (i + 1) * size] for i in range(4))
    return Judgement(
        step_id,
        num_drafts,
        best.cast("i"),
        gaps.cast("f"),
        peaks.cast("f"),
        confidences.cast("f"),
        payload[end:].cast("f") if says_routing else None,
    )


def encode_challenge(nonce: bytes) -> bytes:
    return layout.CHALLENGE.pack(_whole(nonce, layout.NONCE_BYTES, "nonce"))


def decode_challenge(payload: memoryview) -> bytes:
    """The engine's nonce."""
    _exactly(payload, layout.CHALLENGE.size, "CHALLENGE")
    (nonce,) = layout.CHALLENGE.unpack(payload)
    return bytes(nonce)


def encode_challenge_reply(nonce: bytes, *, demands_proof: bool) -> bytes:
    return layout.CHALLENGE_REPLY.pack(_whole(nonce, layout.NONCE_BYTES, "nonce"), demands_proof, 0)


def decode_challenge_reply(payload: memoryview) -> tuple[bytes, bool]:
    """The worker's nonce, and whether it demands a proof."""
    _exactly(payload, layout.CHALLENGE_REPLY.size, "CHALLENGE reply")
    nonce, demands_proof, _ = layout.CHALLENGE_REPLY.unpack(payload)
    if demands_proof > 1:
        raise ProtocolError(f"CHALLENGE reply demands {demands_proof}, expected 0 or 1")
    return nonce, bool(demands_proof)


def encode_proof(proof: Proof) -> bytes:
    """The payload of PROVE and of its reply."""
    return layout.PROVE.pack(
        _digest(proof.identity),
        _digest(proof.markov_identity),
        _whole(proof.proof, layout.PROOF_BYTES, "proof"),
    )


def decode_proof(payload: memoryview) -> Proof:
    """Whether it is right is not judged here."""
    _exactly(payload, layout.PROVE.size, "PROVE")
    identity, markov_identity, proof = layout.PROVE.unpack(payload)
    return Proof(identity=identity, markov_identity=markov_identity, proof=proof)


def encode_message(message: str) -> bytes:
    """The payload of a reply whose frame status is not OK: a sentence, cut at the limit."""
    return _cut(message, layout.MAX_MESSAGE_BYTES).encode()


def decode_message(payload: memoryview) -> str:
    return _readable(bytes(payload[: layout.MAX_MESSAGE_BYTES]), layout.MAX_MESSAGE_BYTES)


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


def _exactly(payload: memoryview, expected: int, what: str) -> None:
    if len(payload) != expected:
        raise ProtocolError(f"{what} in {len(payload)} bytes, which makes {expected}")


def _array(array: memoryview, kind: str, length: int) -> memoryview:
    if array.format != kind or array.nbytes != 4 * length:
        raise ValueError(f"array of format {array.format!r}, {array.nbytes} bytes; expected {kind!r}, {4 * length}")
    return array


def _texts(payload: memoryview, at: int, lengths: Sequence[int], limits: Sequence[int], what: str) -> list[str]:
    """Consecutive UTF-8 texts that end exactly with the payload, each of `limits` bytes at most."""
    if len(payload) != at + sum(lengths):
        raise ProtocolError(f"{what} of {len(payload)} bytes, its lengths make {at + sum(lengths)}")
    texts = []
    for length, limit in zip(lengths, limits, strict=True):
        if length > limit:
            raise ProtocolError(f"{what} with a text of {length} bytes, at most {limit}")
        texts.append(_readable(bytes(payload[at : at + length]), limit))
        at += length
    return texts


def _readable(raw: bytes, limit: int) -> str:
    """What a peer says, for logs and terminals: it must not be able to forge a line or steer the screen.

    At most `limit` bytes, as it was sent: what stands for a byte that is no text takes three.
    """
    text = raw.decode(errors="replace")
    text = text if text.isprintable() else "".join([one if one.isprintable() else "\ufffd" for one in text])
    return _cut(text, limit)


def _cut(text: str, limit: int) -> str:
    """Between characters, not inside one."""
    return text.encode()[:limit].decode(errors="ignore")


def _text(text: str, limit: int) -> bytes:
    raw = text.encode()
    if len(raw) > limit:
        raise ValueError(f"text of {len(raw)} bytes, at most {limit}")
    return raw


def _digest(digest: bytes) -> bytes:
    return _whole(digest, layout.IDENTITY_BYTES, "identity")


def _whole(value: bytes, size: int, what: str) -> bytes:
    # struct would pad or cut it without a word.
    if len(value) != size:
        raise ValueError(f"{what} of {len(value)} bytes, expected {size}")
    return value
