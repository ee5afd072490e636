"""The numbers that are on the wire: they may only change together with the version."""

from __future__ import annotations

import pytest

from farspark.wire import layout
from farspark.wire.layout import (
    Dtype,
    EntryFlag,
    FrameStatus,
    HeaderFlag,
    HelloFlag,
    JudgementFlag,
    Operation,
    RequestStatus,
    StepFlag,
)


def test_the_sizes_are_those_of_version_1() -> None:
    sizes = {
        name: getattr(layout, name).size
        for name in (
            "HEADER",
            "HELLO",
            "WELCOME",
            "STEP",
            "ENTRY",
            "STEP_REPLY",
            "ENTRY_REPLY",
            "FREE",
            "FREE_ENTRY",
            "CHALLENGE",
            "CHALLENGE_REPLY",
            "PROVE",
        )
    }
    assert layout.VERSION == 1
    assert sizes == {
        "HEADER": 32,
        "HELLO": 104,
        "WELCOME": 96,
        "STEP": 16,
        "ENTRY": 32,
        "STEP_REPLY": 24,
        "ENTRY_REPLY": 16,
        "FREE": 4,
        "FREE_ENTRY": 8,
        "CHALLENGE": 32,
        "CHALLENGE_REPLY": 36,
        "PROVE": 96,
    }


def test_every_struct_is_little_endian_and_packed() -> None:
    for name in (
        "HEADER",
        "HELLO",
        "WELCOME",
        "STEP",
        "ENTRY",
        "STEP_REPLY",
        "ENTRY_REPLY",
        "FREE",
        "FREE_ENTRY",
        "CHALLENGE",
        "CHALLENGE_REPLY",
        "PROVE",
    ):
        assert getattr(layout, name).format.startswith("<")


def test_what_follows_a_header_is_aligned_for_its_arrays() -> None:
    # Drafts and confidences are read as int32 and float32 where they lie, rows as bf16.
    for struct in (layout.HEADER, layout.STEP, layout.ENTRY, layout.STEP_REPLY, layout.ENTRY_REPLY):
        assert struct.size % 4 == 0


@pytest.mark.parametrize(
    ("enumeration", "numbers"),
    [
        (
            Operation,
            {"HELLO": 1, "STEP": 2, "PING": 3, "STATS": 4, "FREE": 5, "BYE": 6, "JUDGE": 7, "CHALLENGE": 8, "PROVE": 9},
        ),
        (HeaderFlag, {"REPLY": 1, "DRAINING": 2}),
        (HelloFlag, {"MARGINS": 1, "SAMPLED": 2, "ROUTING": 4, "ROUTER": 8}),
        (JudgementFlag, {"ROUTING": 1}),
        (StepFlag, {"MARGINS": 1, "SAMPLED": 2}),
        (EntryFlag, {"NEED_DRAFT": 1, "NEW_GEN": 2, "RESYNC": 4}),
        (Dtype, {"BF16": 1}),
        (
            FrameStatus,
            {
                "OK": 0,
                "NO_SESSION": 1,
                "VERSION": 2,
                "IDENTITY": 3,
                "MARKOV_IDENTITY": 4,
                "CONFIG": 5,
                "AUTH": 6,
                "BUSY": 7,
                "INTERNAL": 8,
                "BAD_FRAME": 9,
            },
        ),
        (
            RequestStatus,
            {
                "OK": 0,
                "PARTIAL_WINDOW": 1,
                "NOT_NEEDED": 2,
                "STALE_GENERATION": 3,
                "NO_WINDOW": 4,
                "GAP": 5,
                "BAD_ENTRY": 6,
                "NO_CAPACITY": 7,
                "INTERNAL": 8,
            },
        ),
    ],
)
def test_the_numbers_of_every_enumeration(
    enumeration: type[Operation] | type[HeaderFlag], numbers: dict[str, int]
) -> None:
    assert {name: int(member) for name, member in enumeration.__members__.items()} == numbers


def test_which_frame_statuses_are_final() -> None:
    assert {status.name for status in FrameStatus if status.is_final} == {
        "VERSION",
        "IDENTITY",
        "MARKOV_IDENTITY",
        "CONFIG",
        "AUTH",
    }


def test_which_request_statuses_carry_drafts_and_which_are_usable() -> None:
    assert {status.name for status in RequestStatus if status.has_drafts} == {"OK", "PARTIAL_WINDOW"}
    assert {status.name for status in RequestStatus if status.is_usable} == {"OK", "PARTIAL_WINDOW", "NOT_NEEDED"}


def test_the_limits() -> None:
    assert {name: value for name, value in vars(layout).items() if name.startswith("MAX_")} == {
        "MAX_FRAME_BYTES": 256 << 20,
        "MAX_GREETING_BYTES": 64 << 10,
        "MAX_REPLY_BYTES": 4 << 20,
        "MAX_REQUESTS": 4096,
        "MAX_DRAFTS": 64,
        "MAX_NAME_BYTES": 256,
        "MAX_MESSAGE_BYTES": 4096,
        "MAX_POSITION": 2**31,
        "MAX_TOKEN": 2**31 - 1,
    }


def test_the_largest_full_resync_fits_a_frame() -> None:
    assert layout.MAX_FRAME_BYTES > 4 * 512 * 51_200
