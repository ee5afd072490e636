"""The header's arithmetic: what fits, what differs, what is told apart."""

from __future__ import annotations

import dataclasses
import zlib

import numpy as np
import pytest

from farspark.engine.vllm.pp.header import Header, mask_hash

HEADER = Header(sequence=7, mask_hash=0x9ABCDEF0, num_reqs=3)


def test_the_words_are_sequence_hash_number_of_requests_and_the_seal_in_this_order() -> None:
    assert HEADER.words() == (7, 0x9ABCDEF0, 3, HEADER.seal)


def test_the_seal_is_32_bits_over_every_field_in_little_endian_int64() -> None:
    fields = b"\x07" + bytes(7) + b"\xf0\xde\xbc\x9a" + bytes(4) + b"\x03" + bytes(7)
    assert HEADER.seal == zlib.crc32(fields)
    assert len({HEADER.seal, Header(8, 0x9ABCDEF0, 3).seal, Header(7, 1, 3).seal, Header(7, 0x9ABCDEF0, 4).seal}) == 4


def test_a_hash_with_its_high_bit_set_survives_int64_and_would_not_survive_int32() -> None:
    masks = (np.array([bit == "1" for bit in f"{n:08b}"]) for n in range(256))
    high = [crc for crc in map(mask_hash, masks) if crc >= 2**31]
    assert 64 < len(high) < 192  # about half of all masks
    words = np.array(Header(1, high[0], 8).words(), dtype=np.int64)
    assert Header(1, high[0], 8).difference(words.tolist()) is None
    with pytest.raises(OverflowError):
        np.array(Header(1, high[0], 8).words(), dtype=np.int32)


@pytest.mark.parametrize(
    ("field", "name"), [("sequence", "sequence"), ("mask_hash", "mask hash"), ("num_reqs", "num_reqs")]
)
def test_a_difference_names_the_field_and_both_values(field: str, name: str) -> None:
    other = dataclasses.replace(HEADER, **{field: 99})
    assert HEADER.difference(other.words()) == f"{name} expected {getattr(HEADER, field)}, got 99"


def test_equal_headers_do_not_differ() -> None:
    assert HEADER.difference(HEADER.words()) is None


def test_a_seal_that_differs_alone_is_told() -> None:
    assert HEADER.difference((7, 0x9ABCDEF0, 3, 1)) == f"seal expected {HEADER.seal}, got 1"


def test_every_difference_is_told() -> None:
    assert HEADER.difference(Header(8, 1, 2).words()) == (
        f"sequence expected 7, got 8; mask hash expected {0x9ABCDEF0}, got 1; num_reqs expected 3, got 2"
    )


def test_the_hash_without_columns_is_the_masks_crc_32() -> None:
    assert mask_hash(np.array([True, False, True])) == zlib.crc32(b"\x01\x00\x01")


def test_masks_that_look_alike_are_told_apart_by_what_decides_them() -> None:
    mask = np.ones(2, dtype=np.bool_)
    computed, scheduled = np.array([10, 20], dtype=np.int32), np.array([6, 6], dtype=np.int32)
    assert mask_hash(mask, computed, scheduled) == mask_hash(mask, computed.astype(np.int64), scheduled)
    assert mask_hash(mask, computed, scheduled) != mask_hash(mask, computed + 1, scheduled)
    assert mask_hash(mask, computed, scheduled) != mask_hash(mask, scheduled, computed)
