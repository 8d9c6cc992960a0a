"""Blocks: what is signed is found, what is opened is not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from cells.transfer.block import HEADER_BYTES, Block, Descriptor, Header, checksum

ID = "0123456789abcdef"


@given(st.binary(min_size=1, max_size=200), st.integers(0, 199), st.integers(1, 255))
def test_any_changed_byte_changes_the_checksum(data: bytes, at: int, change: int) -> None:
    payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    before = checksum(payload)
    payload[at % len(data)] ^= change
    assert checksum(payload) != before


def test_the_header_is_there_from_seal_to_open() -> None:
    block = Block(40)
    block.floats().fill_(1.5)
    header = block.seal(ID, version=7)
    assert bytes(block.memory[:HEADER_BYTES].numpy()) == header.pack()
    assert header == Header(ID, 7, 40, checksum(block.payload))
    assert block.floats().tolist() == [1.5] * 10, "signing does not touch the payload"
    block.open()
    assert not block.memory[:HEADER_BYTES].any()
    assert block.header is None


@given(st.integers(0, 2**40), st.integers(0, 2**40), st.integers(0, 2**32 - 1))
def test_headers_differ_when_anything_differs(version: int, nbytes: int, found: int) -> None:
    header = Header(ID, version, nbytes, found)
    assert len(header.pack()) == HEADER_BYTES
    others = (
        Header(ID[::-1], version, nbytes, found),
        Header(ID, version + 1, nbytes, found),
        Header(ID, version, nbytes + 1, found),
        Header(ID, version, nbytes, found ^ 1),
    )
    assert all(other.pack() != header.pack() for other in others)


@pytest.mark.parametrize(
    "change",
    [{"address": 0}, {"nbytes": -1}, {"incarnation": "x"}, {"checksum": 1 << 32}, {"extra": 1}],
)
def test_descriptors_are_checked(change: dict[str, object]) -> None:
    good = {
        "peer": "127.0.0.1:1",
        "address": 64,
        "nbytes": 8,
        "checksum": 1,
        "incarnation": ID,
        "version": 0,
    }
    Descriptor.model_validate(good)
    with pytest.raises(ValidationError):
        Descriptor.model_validate({**good, **change})
