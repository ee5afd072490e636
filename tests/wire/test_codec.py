from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farspark.errors import ProtocolError
from farspark.wire import codec, layout
from farspark.wire.layout import (
    SUPPORT_IDS,
    Dtype,
    EntryFlag,
    FrameStatus,
    HeaderFlag,
    HelloFlag,
    Operation,
    RequestStatus,
    StepFlag,
)
from farspark.wire.messages import (
    Entry,
    EntryReply,
    Freed,
    Header,
    Hello,
    Judge,
    Judgement,
    Proof,
    SampledDrafts,
    Sampling,
    StepReply,
    Welcome,
)

ID_A, ID_B = bytes(range(32)), bytes(range(32, 64))


def ints(*values: int) -> memoryview:
    return memoryview(struct.pack(f"<{len(values)}i", *values)).cast("i")


def floats(*values: float) -> memoryview:
    return cast(memoryview, memoryview(struct.pack(f"<{len(values)}f", *values)).cast("f"))


HEADER = Header(Operation.PING, 0x1122334455667788, 9, 3, HeaderFlag.REPLY, FrameStatus.BUSY)
HEADER_BYTES = bytes.fromhex("4653504b 0100 03 01 8877665544332211 0900000000000000 0700 0000 03000000")

HELLO = Hello(
    engine="spark-1",
    identity=ID_A,
    markov_identity=ID_B,
    row_bytes=24576,
    taps=3,
    hidden_size=4096,
    dtype=Dtype.BF16,
    ring=128,
    context=4096,
    num_drafts=5,
    slots=4,
    vocab_size=129280,
    flags=HelloFlag.MARGINS,
    instance=0x0807060504030201,
)
HELLO_BYTES = (
    ID_A
    + ID_B
    + bytes.fromhex("00600000 00100000 80000000 00100000 00f90100 0400 0500 0300 0100 0100 0700 0102030405060708")
    + b"spark-1"
)

WELCOME = Welcome(
    worker="w",
    kind="Qwen3",
    identity=ID_A,
    markov_identity=bytes(32),
    vocab_size=129280,
    context=128,
    window=127,
    slots=8,
    max_rows=4096,
    num_drafts=5,
    flags=HelloFlag.SAMPLED,
    message="no: é",
    lease_s=60.1,
)
WELCOME_BYTES = (
    ID_A
    + bytes(32)
    + bytes.fromhex("00f90100 80000000 7f000000 08000000 00100000 0500 0200 0500 0100 0600 5902")
    + b"Qwen3wno: \xc3\xa9"
)

ENTRIES = [
    Entry(1, 2, 10, 1, 7, 11, EntryFlag.NEED_DRAFT | EntryFlag.RESYNC, 5, 3),
    Entry(3, 0xFFFFFFFF, 0, 2, -1, 2, EntryFlag.NEW_GEN),
]
ROWS = b"\xaa\xbb" * 3  # three rows of two bytes
STEP_BYTES = (
    bytes.fromhex("0500000000000000 0200 0100 03000000")
    + bytes.fromhex("01000000 02000000 0a000000 01000000 07000000 0b000000 0500 0500 0300 0000")
    + bytes.fromhex("03000000 ffffffff 00000000 02000000 ffffffff 02000000 0200 0000 0000 0000")
    + ROWS
)

SAMPLING = [Sampling(-2, 0.5), Sampling(0x0102030405060708, 0.0)]
SAMPLED_STEP_BYTES = (
    bytes.fromhex("0500000000000000 0200 0200 03000000")
    + STEP_BYTES[16:80]
    + bytes.fromhex("feffffffffffffff 0000003f 00000000")
    + bytes.fromhex("0807060504030201 00000000 00000000")
    + ROWS
)

REPLY = StepReply(
    5,
    2,
    321,
    [EntryReply(1, 2, 11, RequestStatus.OK), EntryReply(3, 4, 0, RequestStatus.GAP)],
    ints(100, 200, 0, 0),
    floats(1.0, 0.5, 0.0, 0.0),
    floats(2.0, 0.25, 0.0, 0.0),
    StepFlag.MARGINS,
)
REPLY_BYTES = (
    bytes.fromhex("0500000000000000 0200 0200 0100 0000 41010000 00000000")
    + bytes.fromhex("01000000 02000000 0b000000 0000 0000")
    + bytes.fromhex("03000000 04000000 00000000 0500 0000")
    + bytes.fromhex("64000000 c8000000 00000000 00000000")
    + bytes.fromhex("0000803f 0000003f 00000000 00000000")
    + bytes.fromhex("00000040 0000803e 00000000 00000000")
)

FREED = (Freed(1, 2), Freed(3, 4))
FREE_BYTES = bytes.fromhex("02000000 01000000 02000000 03000000 04000000")


def same_reply(one: StepReply, other: StepReply) -> bool:
    return (
        (one.step_id, one.num_drafts, one.worker_us, one.flags)
        == (other.step_id, other.num_drafts, other.worker_us, other.flags)
        and list(one.entries) == list(other.entries)
        and one.tokens.tobytes() == other.tokens.tobytes()
        and one.confidences.tobytes() == other.confidences.tobytes()
        and (one.margins is None) == (other.margins is None)
        and (one.margins is None or other.margins is None or one.margins.tobytes() == other.margins.tobytes())
    )


def test_a_frame_is_these_bytes() -> None:
    frame = codec.encode_frame(HEADER, b"xyz")
    assert frame == HEADER_BYTES + b"xyz"
    header, payload = codec.decode_frame(memoryview(frame))
    assert header == HEADER
    assert header.is_reply
    assert isinstance(header.operation, Operation)
    assert isinstance(header.status, FrameStatus)
    assert bytes(payload) == b"xyz"


def test_the_payload_length_is_the_payloads_whatever_the_header_says() -> None:
    header, _ = codec.decode_frame(memoryview(codec.encode_frame(HEADER._replace(payload_bytes=99), b"1")))
    assert header.payload_bytes == 1


def test_an_operation_a_status_and_a_version_that_are_not_ours_come_as_numbers() -> None:
    frame = bytearray(HEADER_BYTES[:28] + bytes(4))
    frame[4:7] = b"\x07\x00\xc8"
    frame[7] = 0xFC
    frame[24:26] = b"\xe8\x03"
    header, _ = codec.decode_frame(memoryview(frame))
    assert (header.version, header.operation, header.status, header.flags) == (7, 200, 1000, 0)
    assert not header.is_reply


@pytest.mark.parametrize("size", range(32))
def test_a_frame_shorter_than_its_header_is_refused(size: int) -> None:
    with pytest.raises(ProtocolError, match=f"frame of {size} bytes, a header needs 32"):
        codec.decode_frame(memoryview(HEADER_BYTES[:size]))


def test_a_wrong_magic_and_a_wrong_length_are_refused() -> None:
    with pytest.raises(ProtocolError, match="magic b'HTTP'"):
        codec.decode_frame(memoryview(b"HTTP" + HEADER_BYTES[4:] + b"xyz"))
    for payload in (b"", b"xy", b"xyz0"):
        with pytest.raises(ProtocolError, match=f"announces 3 payload bytes, the frame has {len(payload)}"):
            codec.decode_frame(memoryview(HEADER_BYTES + payload))


def test_hello_is_these_bytes() -> None:
    assert codec.encode_hello(HELLO) == HELLO_BYTES
    assert codec.decode_hello(memoryview(HELLO_BYTES)) == HELLO


def test_welcome_is_these_bytes() -> None:
    assert codec.encode_welcome(WELCOME) == WELCOME_BYTES
    assert codec.decode_welcome(memoryview(WELCOME_BYTES)) == WELCOME


def test_a_step_is_these_bytes_and_its_rows_are_a_view() -> None:
    head = codec.encode_step_head(0x77, 4, 5, ENTRIES, len(ROWS), StepFlag.MARGINS)
    header, payload = codec.decode_frame(memoryview(head + ROWS))
    assert header == Header(Operation.STEP, 0x77, 4, len(STEP_BYTES))
    assert payload == STEP_BYTES
    step = codec.decode_step(payload, 2)
    assert (step.step_id, step.flags) == (5, StepFlag.MARGINS)
    assert list(step.entries) == ENTRIES
    assert step.rows == ROWS
    assert step.rows.obj is payload.obj
    assert [(one.needs_draft, one.is_new) for one in step.entries] == [(True, False), (False, True)]


def test_the_head_of_a_step_ends_where_its_rows_begin() -> None:
    header = Header(Operation.STEP, 7, 3, len(STEP_BYTES))
    frame = memoryview(codec.encode_frame(header, STEP_BYTES))
    assert codec.decode_frame(frame) == (header, frame[32:])
    peeked = codec.peek_step(frame, 7)
    assert peeked is not None
    assert peeked[0] == header
    assert frame[peeked[1] :] == ROWS
    # Rows and entries need not be there yet.
    hollow = memoryview(bytearray(frame[:48]) + bytes(len(frame) - 48))
    assert codec.peek_step(hollow, 7) == peeked


@pytest.mark.parametrize("length", [0, 31, 47])
def test_a_frame_too_short_to_be_a_step_or_its_answer_is_neither(length: int) -> None:
    frame = memoryview(codec.encode_frame(Header(Operation.STEP, 7, 3, 0), STEP_BYTES))[:length]
    assert codec.peek_step(frame, 7) is None
    assert codec.decode_answer(frame, 7, 3) is None


@pytest.mark.parametrize(
    "header",
    [
        Header(Operation.PING, 7, 3, 0),
        Header(Operation.STEP, 8, 3, 0),
        Header(Operation.STEP, 7, 3, 0, HeaderFlag.REPLY),
        Header(Operation.STEP, 7, 3, 0, version=2),
    ],
)
def test_what_is_no_plain_step_of_the_session_is_not_peeked_at(header: Header) -> None:
    assert codec.peek_step(memoryview(codec.encode_frame(header, STEP_BYTES)), 7) is None


def test_a_step_whose_length_is_not_the_frames_is_not_peeked_at() -> None:
    frame = codec.encode_frame(Header(Operation.STEP, 7, 3, 0), STEP_BYTES)
    assert codec.peek_step(memoryview(frame + b"x"), 7) is None
    assert codec.peek_step(memoryview(b"x" + frame[1:]), 7) is None


ANSWER = Header(Operation.STEP, 7, 3, 0, HeaderFlag.REPLY)


def test_the_answer_to_a_step_is_decoded_in_one_go() -> None:
    answer = codec.decode_answer(memoryview(codec.encode_frame(ANSWER, REPLY_BYTES)), 7, 3)
    assert answer is not None
    assert same_reply(answer, codec.decode_step_reply(memoryview(REPLY_BYTES)))


def test_a_reply_says_that_its_worker_is_about_to_go() -> None:
    for flags, is_draining in ((HeaderFlag.REPLY, False), (HeaderFlag.REPLY | HeaderFlag.DRAINING, True)):
        header, _ = codec.decode_frame(memoryview(codec.encode_frame(ANSWER._replace(flags=flags), REPLY_BYTES)))
        assert (header.is_reply, header.is_draining) == (True, is_draining)


@pytest.mark.parametrize(
    "header",
    [
        ANSWER._replace(operation=Operation.PING),
        ANSWER._replace(session=8),
        ANSWER._replace(sequence=2),
        ANSWER._replace(flags=0),
        ANSWER._replace(flags=HeaderFlag.REPLY | HeaderFlag.DRAINING),
        ANSWER._replace(status=FrameStatus.BUSY),
        ANSWER._replace(version=2),
    ],
)
def test_any_other_frame_is_not_the_answer(header: Header) -> None:
    assert codec.decode_answer(memoryview(codec.encode_frame(header, REPLY_BYTES)), 7, 3) is None


def test_an_answer_whose_length_is_not_the_frames_is_none_and_a_wrong_payload_is_an_error() -> None:
    frame = codec.encode_frame(ANSWER, REPLY_BYTES)
    assert codec.decode_answer(memoryview(frame + b"x"), 7, 3) is None
    assert codec.decode_answer(memoryview(b"x" + frame[1:]), 7, 3) is None
    with pytest.raises(ProtocolError, match="STEP reply of"):
        codec.decode_answer(memoryview(codec.encode_frame(ANSWER, REPLY_BYTES + b"x")), 7, 3)


@pytest.mark.parametrize("margins", [False, True])
def test_a_reply_finished_from_a_head_is_the_reply_encoded_whole(margins: bool) -> None:
    reply = REPLY if margins else REPLY._replace(margins=None, flags=0)
    early = reply._replace(worker_us=0, tokens=memoryview(b""), confidences=memoryview(b""), margins=None)
    head = codec.encode_step_reply_head(7, 3, early)
    whole = b"".join(codec.finish_step_reply(head, reply))
    assert whole == codec.encode_frame(ANSWER, codec.encode_step_reply(reply))


def test_a_step_reply_is_these_bytes_and_its_arrays_are_views() -> None:
    assert codec.encode_step_reply(REPLY) == REPLY_BYTES
    payload = memoryview(REPLY_BYTES)
    reply = codec.decode_step_reply(payload)
    assert same_reply(reply, REPLY)
    assert reply.tokens.tolist() == [100, 200, 0, 0]
    assert reply.confidences.tolist() == [1.0, 0.5, 0.0, 0.0]
    assert reply.margins is not None
    assert reply.margins.tolist() == [2.0, 0.25, 0.0, 0.0]
    assert reply.tokens.obj is payload.obj


def test_a_sampled_step_is_these_bytes() -> None:
    head = codec.encode_step_head(7, 3, 5, ENTRIES, len(ROWS), StepFlag(0), SAMPLING)
    assert head[32:] + ROWS == SAMPLED_STEP_BYTES
    step = codec.decode_step(memoryview(SAMPLED_STEP_BYTES), 2)
    assert (step.flags, list(step.entries), list(step.sampling)) == (StepFlag.SAMPLED, ENTRIES, SAMPLING)
    assert bytes(step.rows) == ROWS
    with_margins = codec.encode_step_head(7, 3, 5, ENTRIES, len(ROWS), StepFlag.MARGINS, SAMPLING)
    assert with_margins[32 + 10] == 3


def test_a_peek_at_a_sampled_step_says_where_its_rows_begin() -> None:
    frame = codec.encode_step_head(7, 3, 5, ENTRIES, len(ROWS), 0, SAMPLING) + ROWS
    found = codec.peek_step(memoryview(frame), 7)
    assert found is not None
    assert bytes(frame[found[1] :]) == ROWS


def test_a_sampled_step_needs_one_sampling_for_each_entry() -> None:
    with pytest.raises(ValueError, match="2 entries, but how to sample 1"):
        codec.encode_step_head(7, 3, 5, ENTRIES, len(ROWS), 0, SAMPLING[:1])
    with pytest.raises(ValueError, match="does not fit its fields"):
        codec.encode_step_head(7, 3, 5, ENTRIES, len(ROWS), 0, [Sampling(2**63, 1.0), SAMPLING[1]])
    for size in range(len(SAMPLED_STEP_BYTES)):
        with pytest.raises(ProtocolError):
            codec.decode_step(memoryview(SAMPLED_STEP_BYTES[:size]), 2)


def sampled_reply(flags: StepFlag) -> StepReply:
    """Two entries of two drafts; the first is drawn."""
    size = 2 * 2 * SUPPORT_IDS
    drawn = SampledDrafts(ints(1, 0), ints(*range(size)), floats(*[one / 256 for one in range(size)]))
    margins = REPLY.margins if flags & StepFlag.MARGINS else None
    return REPLY._replace(sampled=drawn, margins=margins, flags=int(flags))


@pytest.mark.parametrize("flags", [StepFlag.SAMPLED, StepFlag.SAMPLED | StepFlag.MARGINS])
def test_a_sampled_reply_has_mask_support_and_q_behind_the_other_arrays(flags: StepFlag) -> None:
    reply = sampled_reply(flags)
    encoded = codec.encode_step_reply(reply)
    plain = REPLY_BYTES if flags & StepFlag.MARGINS else REPLY_BYTES[:-16]
    size = 2 * 2 * SUPPORT_IDS
    tail = struct.pack("<2i", 1, 0) + struct.pack(f"<{size}i", *range(size))
    tail += struct.pack(f"<{size}f", *[one / 256 for one in range(size)])
    assert encoded == plain[:12] + struct.pack("<H", flags) + plain[14:] + tail
    decoded = codec.decode_step_reply(memoryview(encoded))
    assert same_reply(decoded, reply)
    assert decoded.sampled is not None
    assert reply.sampled is not None
    assert [one.tolist() for one in decoded.sampled] == [one.tolist() for one in reply.sampled]
    assert len(encoded) + 32 == codec.step_reply_bytes(2, 2, int(flags))
    head = codec.encode_step_reply_head(7, 3, reply._replace(sampled=None, margins=None, worker_us=0))
    assert b"".join(codec.finish_step_reply(head, reply)) == codec.encode_frame(ANSWER, encoded)
    for size in range(0, len(encoded), 7):
        with pytest.raises(ProtocolError):
            codec.decode_step_reply(memoryview(encoded[:size]))


def test_a_sampled_reply_with_arrays_of_another_size_is_an_error_of_ours() -> None:
    reply = sampled_reply(StepFlag.SAMPLED)
    assert reply.sampled is not None
    with pytest.raises(ValueError, match="without what was sampled"):
        codec.encode_step_reply(reply._replace(sampled=None))
    for wrong in (
        reply.sampled._replace(mask=ints(1)),
        reply.sampled._replace(support=ints(1)),
        reply.sampled._replace(q=reply.sampled.support),
    ):
        with pytest.raises(ValueError, match="expected"):
            codec.encode_step_reply(reply._replace(sampled=wrong))


def test_a_step_reply_without_margins_has_two_arrays() -> None:
    plain = StepReply(1, 2, 0, REPLY.entries, REPLY.tokens, REPLY.confidences)
    encoded = codec.encode_step_reply(plain)
    assert encoded == struct.pack("<QHHHHII", 1, 2, 2, 0, 0, 0, 0) + REPLY_BYTES[24:-16]
    assert codec.decode_step_reply(memoryview(encoded)).margins is None


def test_free_is_these_bytes() -> None:
    assert codec.encode_free(FREED) == FREE_BYTES
    assert codec.decode_free(memoryview(FREE_BYTES)) == FREED
    assert codec.decode_free(memoryview(codec.encode_free(()))) == ()


DECODERS: list[tuple[str, Callable[[memoryview], Any], bytes]] = [
    ("HELLO", codec.decode_hello, HELLO_BYTES),
    ("WELCOME", codec.decode_welcome, WELCOME_BYTES),
    ("STEP", lambda payload: codec.decode_step(payload, 2), STEP_BYTES),
    ("STEP reply", codec.decode_step_reply, REPLY_BYTES),
    ("FREE", codec.decode_free, FREE_BYTES),
]


@pytest.mark.parametrize(("what", "decode", "whole"), DECODERS, ids=[what for what, _, _ in DECODERS])
def test_every_truncation_and_every_tail_is_refused(
    what: str, decode: Callable[[memoryview], Any], whole: bytes
) -> None:
    decode(memoryview(whole))
    for size in range(len(whole)):
        with pytest.raises(ProtocolError):
            decode(memoryview(whole[:size]))
    for tail in (b"\0", b"tail"):
        with pytest.raises(ProtocolError):
            decode(memoryview(whole + tail))


@pytest.mark.parametrize(("what", "decode", "whole"), DECODERS, ids=[what for what, _, _ in DECODERS])
@given(data=st.data())
def test_any_bytes_are_a_message_or_a_protocol_error(
    what: str, decode: Callable[[memoryview], Any], whole: bytes, data: st.DataObject
) -> None:
    mutated = bytearray(whole)
    for at, value in data.draw(st.lists(st.tuples(st.integers(0, len(whole) - 1), st.integers(0, 255)), max_size=4)):
        mutated[at] = value
    for payload in (bytes(mutated), data.draw(st.binary(max_size=200))):
        try:
            decode(memoryview(payload))
        except ProtocolError:
            pass


@given(st.binary(max_size=80))
def test_any_bytes_are_a_frame_or_a_protocol_error(raw: bytes) -> None:
    for frame in (raw, HEADER_BYTES[:4] + raw, HEADER_BYTES[:28] + struct.pack("<I", len(raw)) + raw):
        try:
            codec.decode_frame(memoryview(frame))
        except ProtocolError:
            pass


@pytest.mark.parametrize("requests", [3, 4097, 0xFFFF])
def test_an_absurd_count_of_requests_reserves_no_memory(requests: int) -> None:
    with pytest.raises(ProtocolError, match="requests"):
        codec.decode_step(memoryview(struct.pack("<QHHI", 1, requests, 0, 0)), 2)
    with pytest.raises(ProtocolError, match="requests"):
        codec.decode_step_reply(memoryview(struct.pack("<QHHHHII", 1, requests, 5, 0, 0, 0, 0)))


@pytest.mark.parametrize(("requests", "is_refused"), [(4096, False), (4097, True)])
def test_more_requests_than_the_limit_are_refused_even_where_all_of_them_are_there(
    requests: int, is_refused: bool
) -> None:
    step = struct.pack("<QHHI", 1, requests, 0, 0) + bytes(layout.ENTRY.size * requests)
    reply = struct.pack("<QHHHHII", 1, requests, 0, 0, 0, 0, 0) + bytes(layout.ENTRY_REPLY.size * requests)
    for decode, payload in ((lambda one: codec.decode_step(one, 2), step), (codec.decode_step_reply, reply)):
        if is_refused:
            with pytest.raises(ProtocolError, match=f"of {requests} requests.* at most 4096"):
                decode(memoryview(payload))
        else:
            assert len(decode(memoryview(payload)).entries) == requests


def test_absurd_counts_of_rows_drafts_and_slots_are_refused() -> None:
    with pytest.raises(ProtocolError, match="4294967295 rows of 24576 bytes"):
        codec.decode_step(memoryview(struct.pack("<QHHI", 1, 0, 0, 0xFFFFFFFF)), 24576)
    with pytest.raises(ProtocolError, match="by 65 drafts"):
        codec.decode_step_reply(memoryview(struct.pack("<QHHHHII", 1, 0, 65, 0, 0, 0, 0)))
    with pytest.raises(ProtocolError, match="4294967295 slots"):
        codec.decode_free(memoryview(b"\xff\xff\xff\xff"))


def test_entries_that_do_not_add_up_to_the_rows_are_refused() -> None:
    wrong = bytearray(STEP_BYTES)
    wrong[16 + 12] = 2
    with pytest.raises(ProtocolError, match="announces 3 rows, its entries 4"):
        codec.decode_step(memoryview(wrong), 2)


def test_a_request_status_that_is_not_ours_is_refused() -> None:
    wrong = bytearray(REPLY_BYTES)
    wrong[24 + 12] = 99
    with pytest.raises(ProtocolError, match="request status 99 in a STEP reply"):
        codec.decode_step_reply(memoryview(wrong))


def test_unknown_flags_are_ignored() -> None:
    step = bytearray(SAMPLED_STEP_BYTES)
    step[10:12] = b"\xff\xff"
    step[16 + 24 : 16 + 26] = b"\xff\xff"
    decoded = codec.decode_step(memoryview(step), 2)
    assert decoded.flags == StepFlag.MARGINS | StepFlag.SAMPLED
    assert decoded.entries[0].flags == EntryFlag.NEED_DRAFT | EntryFlag.NEW_GEN | EntryFlag.RESYNC
    hello = bytearray(HELLO_BYTES)
    hello[92:94] = b"\xff\xff"
    assert codec.decode_hello(memoryview(hello)).flags == HelloFlag.MARGINS | HelloFlag.SAMPLED | HelloFlag.ROUTING
    welcome = bytearray(WELCOME_BYTES)
    welcome[86:88] = b"\xff\xff"
    assert codec.decode_welcome(memoryview(welcome)).flags == HelloFlag(15)
    judgement = bytearray(JUDGEMENT_BYTES)
    judgement[12:16] = b"\xfe\xff\xff\xff"
    assert codec.decode_judgement(memoryview(judgement)).routing is None


def test_encoding_a_value_of_ours_that_cannot_be_is_an_error() -> None:
    with pytest.raises(ValueError, match="identity of 31 bytes"):
        codec.encode_hello(replace(HELLO, identity=bytes(31)))
    with pytest.raises(ValueError, match="text of 257 bytes, at most 256"):
        codec.encode_hello(replace(HELLO, engine="n" * 257))
    with pytest.raises(ValueError, match="text of 4097 bytes"):
        codec.encode_welcome(replace(WELCOME, message="n" * 4097))
    with pytest.raises(ValueError, match="format 'f', 16 bytes; expected 'i', 16"):
        codec.encode_step_reply(REPLY._replace(tokens=REPLY.confidences))
    with pytest.raises(ValueError, match="12 bytes; expected 'f', 16"):
        codec.encode_step_reply(REPLY._replace(margins=floats(1, 2, 3)))
    with pytest.raises(ValueError, match="without margins"):
        codec.encode_step_reply(REPLY._replace(margins=None))
    with pytest.raises(ValueError, match="STEP entry"):
        codec.encode_step_head(1, 1, 1, [ENTRIES[0]._replace(first_pos=-1)], 0)


def test_worker_time_saturates() -> None:
    encoded = codec.encode_step_reply(REPLY._replace(worker_us=1 << 40))
    assert codec.decode_step_reply(memoryview(encoded)).worker_us == 0xFFFFFFFF


def test_a_message_is_cut_at_its_limit_and_read_whatever_it_holds() -> None:
    assert codec.decode_message(memoryview(codec.encode_message("no, because é"))) == "no, because é"
    assert len(codec.encode_message("é" * 5000)) <= layout.MAX_MESSAGE_BYTES
    assert codec.decode_message(memoryview(codec.encode_message("é" * 5000))) == "é" * 2048
    assert codec.decode_message(memoryview(codec.encode_message("x" + "é" * 5000))) == "x" + "é" * 2047
    assert "\ufffd" in codec.decode_message(memoryview(b"\xff\xfe"))


def test_a_text_that_grows_when_it_is_made_readable_stays_within_its_limit() -> None:
    payload = bytearray(codec.encode_welcome(replace(WELCOME, worker="x" * 200 + "y" * 56)))
    at = payload.index(b"y" * 56)
    payload[at : at + 56] = b"\x00" * 40 + b"\xff" * 16
    heard = codec.decode_welcome(memoryview(payload))
    assert heard.worker == "x" * 200 + "\ufffd" * 18
    assert codec.decode_welcome(memoryview(codec.encode_welcome(heard))) == heard


def test_what_a_peer_says_forges_no_line_of_a_log_and_steers_no_terminal() -> None:
    said = "no\n2026-11-29 ERROR forged\r\x1b[2J\u2028\u202e é"
    read = "no\ufffd2026-11-29 ERROR forged\ufffd\ufffd[2J\ufffd\ufffd é"
    assert codec.decode_message(memoryview(said.encode())) == read
    assert codec.decode_hello(memoryview(codec.encode_hello(replace(HELLO, engine=said)))).engine == read
    welcome = codec.decode_welcome(
        memoryview(codec.encode_welcome(replace(WELCOME, kind=said, worker=said, message=said)))
    )
    assert (welcome.kind, welcome.worker, welcome.message) == (read, read, read)


def test_texts_above_their_limits_are_refused_FRAMING() -> None:
    """The longest that fit their u16 would otherwise be kept, shown and logged for whoever connects."""
    for limit, at, fixed in (
        (layout.MAX_NAME_BYTES, 94, HELLO_BYTES[: layout.HELLO.size]),
        (layout.MAX_NAME_BYTES, 88, WELCOME_BYTES[: layout.WELCOME.size]),
        (layout.MAX_NAME_BYTES, 90, WELCOME_BYTES[: layout.WELCOME.size]),
        (layout.MAX_MESSAGE_BYTES, 92, WELCOME_BYTES[: layout.WELCOME.size]),
    ):
        decode = codec.decode_hello if len(fixed) == layout.HELLO.size else codec.decode_welcome
        lengths = 94 if len(fixed) == layout.HELLO.size else 88
        bare = bytearray(fixed)
        bare[lengths : lengths + (2 if lengths == 94 else 6)] = bytes(2 if lengths == 94 else 6)
        for size in (limit, limit + 1):
            bare[at : at + 2] = struct.pack("<H", size)
            payload = memoryview(bytes(bare) + b"x" * size)
            if size == limit:
                decode(payload)
            else:
                with pytest.raises(ProtocolError, match=f"text of {size} bytes, at most {limit}"):
                    decode(payload)


def test_a_refusal_is_read_from_a_welcome_and_from_a_sentence() -> None:
    assert codec.decode_refusal(Operation.HELLO, memoryview(WELCOME_BYTES)) == "no: é"
    assert codec.decode_refusal(Operation.HELLO, memoryview(b"a sentence")) == "a sentence"
    assert codec.decode_refusal(Operation.STEP, memoryview(WELCOME_BYTES)).startswith("\ufffd" * 8)


u16, u32, u64 = st.integers(0, 0xFFFF), st.integers(0, 0xFFFFFFFF), st.integers(0, 2**64 - 1)
i64 = st.integers(-(2**63), 2**63 - 1)
digests = st.binary(min_size=32, max_size=32)
printable = st.characters(codec="utf-8").filter(str.isprintable)
names = st.text(printable, max_size=60)
hello_flags = st.sampled_from([HelloFlag(bits) for bits in range(8)])
welcome_flags = st.sampled_from([HelloFlag(bits) for bits in range(16)])


@given(
    st.builds(
        Hello,
        engine=names,
        identity=digests,
        markov_identity=digests,
        row_bytes=u32,
        taps=u16,
        hidden_size=u32,
        dtype=u16,
        ring=u32,
        context=u32,
        num_drafts=u16,
        slots=u16,
        vocab_size=u32,
        flags=hello_flags,
        instance=st.integers(0, 2**64 - 1),
    )
)
def test_hello_round_trips(hello: Hello) -> None:
    assert codec.decode_hello(memoryview(codec.encode_hello(hello))) == hello


@given(
    st.builds(
        Welcome,
        worker=names,
        kind=names,
        identity=digests,
        markov_identity=digests,
        vocab_size=u32,
        context=u32,
        window=u32,
        slots=u32,
        max_rows=u32,
        num_drafts=u16,
        flags=welcome_flags,
        message=st.text(printable, max_size=300),
        lease_s=u16.map(lambda tenths: tenths / 10),
    )
)
def test_welcome_round_trips(welcome: Welcome) -> None:
    assert codec.decode_welcome(memoryview(codec.encode_welcome(welcome))) == welcome


@given(st.lists(st.builds(Freed, u32, u32), max_size=20))
def test_free_round_trips(freed: list[Freed]) -> None:
    assert codec.decode_free(memoryview(codec.encode_free(freed))) == tuple(freed)


entries = st.builds(
    Entry,
    u32,
    u32,
    u32,
    st.integers(0, 5),
    st.integers(-(2**31), 2**31 - 1),
    u32,
    st.sampled_from([EntryFlag(bits) for bits in range(8)]),
    u16,
    u16,
)


@given(
    st.lists(entries, max_size=12),
    u64,
    u64,
    u64,
    st.sampled_from([StepFlag(0), StepFlag.MARGINS]),
    st.integers(1, 9),
    st.booleans(),
    st.data(),
)
def test_a_step_round_trips(
    sent: list[Entry],
    session: int,
    sequence: int,
    step_id: int,
    flags: StepFlag,
    row_bytes: int,
    is_sampled: bool,
    data: st.DataObject,
) -> None:
    rows = bytes(row_bytes * sum(entry.n_rows for entry in sent))
    sampling = [Sampling(data.draw(i64), data.draw(st.floats(width=32, allow_nan=False))) for _ in sent if is_sampled]
    head = codec.encode_step_head(session, sequence, step_id, sent, len(rows), flags, sampling)
    flags |= StepFlag.SAMPLED if sampling else StepFlag(0)
    header, payload = codec.decode_frame(memoryview(head + rows))
    assert (header.operation, header.session, header.sequence) == (Operation.STEP, session, sequence)
    step = codec.decode_step(payload, row_bytes)
    assert (step.step_id, step.flags, list(step.entries), bytes(step.rows)) == (step_id, flags, sent, rows)
    assert list(step.sampling) == sampling


@given(st.data(), st.integers(0, 12), st.integers(0, 8), st.booleans())
def test_a_step_reply_round_trips(data: st.DataObject, requests: int, num_drafts: int, has_margins: bool) -> None:
    count = requests * num_drafts

    def array(kind: str) -> memoryview:
        raw = data.draw(st.binary(min_size=4 * count, max_size=4 * count))
        return cast(memoryview, memoryview(raw).cast(kind))  # type: ignore[call-overload]

    reply = StepReply(
        data.draw(u64),
        num_drafts,
        data.draw(u32),
        [
            EntryReply(data.draw(u32), data.draw(u32), data.draw(u32), data.draw(st.sampled_from(RequestStatus)))
            for _ in range(requests)
        ],
        array("i"),
        array("f"),
        array("f") if has_margins else None,
        StepFlag.MARGINS if has_margins else StepFlag(0),
    )
    assert same_reply(codec.decode_step_reply(memoryview(codec.encode_step_reply(reply))), reply)


# JUDGE -----------------------------------------------------------------------------------------------------------------

JUDGE = Judge(step_id=9, num_drafts=2, places=[3, 0], tokens=ints(5, 6, 7, 8))
JUDGE_BYTES = bytes.fromhex("0900000000000000 0200 0200 00000000 03000000 00000000 05000000 06000000 07000000 08000000")
JUDGEMENT = Judgement(9, 2, ints(5, 9), floats(0.0, 0.5), floats(16.0, 8.0), floats(1.0, 0.25))
JUDGEMENT_BYTES = bytes.fromhex(
    "0900000000000000 0100 0200 00000000 05000000 09000000 00000000 0000003f 00008041 00000041 0000803f 0000803e"
)
ROUTED = Judgement(
    9,
    2,
    ints(5, 9, 7, 8),
    floats(0.0, 0.5, 1.0, 2.0),
    floats(4.0, 4.0, 4.0, 4.0),
    floats(1.0, 1.0, 1.0, 1.0),
    floats(0.0078125, 0.25),
)
ROUTED_BYTES = bytes.fromhex(
    "0900000000000000 0200 0200 01000000"
    "05000000 09000000 07000000 08000000"
    "00000000 0000003f 0000803f 00000040"
    "00008040 00008040 00008040 00008040"
    "0000803f 0000803f 0000803f 0000803f"
    "0000003c 0000803e"
)


def test_judge_both_ways_byte_for_byte() -> None:
    assert codec.encode_judge(JUDGE) == JUDGE_BYTES
    decoded = codec.decode_judge(memoryview(JUDGE_BYTES))
    assert (decoded.step_id, decoded.num_drafts, list(decoded.places), decoded.tokens.tolist()) == (
        9,
        2,
        [3, 0],
        [5, 6, 7, 8],
    )
    assert codec.encode_judgement(JUDGEMENT) == JUDGEMENT_BYTES
    answer = codec.decode_judgement(memoryview(JUDGEMENT_BYTES))
    assert (answer.step_id, answer.num_drafts) == (9, 2)
    assert [plane.tolist() for plane in answer[2:6]] == [[5, 9], [0.0, 0.5], [16.0, 8.0], [1.0, 0.25]]
    assert answer.routing is None


def test_a_judgement_of_a_drafter_with_a_router_both_ways_byte_for_byte() -> None:
    assert codec.encode_judgement(ROUTED) == ROUTED_BYTES
    answer = codec.decode_judgement(memoryview(ROUTED_BYTES))
    assert [plane.tolist() for plane in answer[2:6]] == [[5, 9, 7, 8], [0.0, 0.5, 1.0, 2.0], [4.0] * 4, [1.0] * 4]
    assert answer.routing is not None
    assert answer.routing.tolist() == [0.0078125, 0.25]


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_routing_margins_are_carried_as_they_are(value: float) -> None:
    """Whether they can be is the engine's to say, with the value."""
    answer = codec.decode_judgement(memoryview(codec.encode_judgement(ROUTED._replace(routing=floats(value, 0.25)))))
    assert answer.routing is not None
    assert answer.routing.tolist() == pytest.approx([value, 0.25], nan_ok=True)


@pytest.mark.parametrize(
    ("decode", "whole"),
    [
        (codec.decode_judge, JUDGE_BYTES),
        (codec.decode_judgement, JUDGEMENT_BYTES),
        (codec.decode_judgement, ROUTED_BYTES),
    ],
)
def test_FRAMING_judge_of_another_length_is_refused_at_every_cut(
    decode: Callable[[memoryview], object], whole: bytes
) -> None:
    for length in [*range(len(whole)), len(whole) + 1]:
        with pytest.raises(ProtocolError):
            decode(memoryview((whole + b"x")[:length]))


def test_a_judge_whose_arrays_do_not_fit_is_not_encoded() -> None:
    with pytest.raises(ValueError, match="expected 'i', 12"):
        codec.encode_judge(Judge(9, 3, [1], ints(1, 2)))
    with pytest.raises(ValueError, match="expected 'f', 8"):
        codec.encode_judgement(JUDGEMENT._replace(peaks=floats(1.0)))
    with pytest.raises(ValueError, match="expected 'f', 16"):
        codec.encode_judgement(JUDGEMENT._replace(routing=floats(1.0, 1.0)))
    with pytest.raises(ValueError, match="expected 'f', 4"):
        codec.encode_judgement(JUDGEMENT._replace(routing=ints(1)))


PROOF = Proof(identity=ID_A, markov_identity=ID_B, proof=b"p" * 32)
CHALLENGES: list[tuple[Callable[[memoryview], Any], Any, bytes]] = [
    (codec.decode_challenge, ID_A, ID_A),
    (codec.decode_challenge_reply, (ID_A, True), ID_A + bytes.fromhex("0100 0000")),
    (codec.decode_challenge_reply, (ID_A, False), ID_A + bytes.fromhex("0000 0000")),
    (codec.decode_proof, PROOF, ID_A + ID_B + b"p" * 32),
]


def test_challenge_and_proof_are_these_bytes() -> None:
    assert codec.encode_challenge(ID_A) == ID_A
    assert codec.encode_challenge_reply(ID_A, demands_proof=True) == CHALLENGES[1][2]
    assert codec.encode_challenge_reply(ID_A, demands_proof=False) == CHALLENGES[2][2]
    assert codec.encode_proof(PROOF) == CHALLENGES[3][2]
    for decode, value, raw in CHALLENGES:
        assert decode(memoryview(raw)) == value


@pytest.mark.parametrize(("decode", "value", "raw"), CHALLENGES)
def test_FRAMING_challenge_and_proof_of_another_length_are_refused_at_every_cut(
    decode: Callable[[memoryview], Any], value: object, raw: bytes
) -> None:
    for cut in range(len(raw)):
        with pytest.raises(ProtocolError):
            decode(memoryview(raw[:cut]))
    with pytest.raises(ProtocolError):
        decode(memoryview(raw + b"x"))


def test_a_demand_that_is_neither_yes_nor_no_is_refused() -> None:
    with pytest.raises(ProtocolError, match="demands 2"):
        codec.decode_challenge_reply(memoryview(ID_A + bytes.fromhex("0200 0000")))


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_nonce_or_a_proof_of_another_length_is_not_encoded(size: int) -> None:
    # struct would fill it up with zeros, or cut it.
    for encode in (
        codec.encode_challenge,
        lambda value: codec.encode_challenge_reply(value, demands_proof=True),
        lambda value: codec.encode_proof(replace(PROOF, proof=value)),
        lambda value: codec.encode_proof(replace(PROOF, identity=value)),
    ):
        with pytest.raises(ValueError, match=f"of {size} bytes, expected 32"):
            encode(bytes(size))
