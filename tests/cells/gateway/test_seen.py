"""Histories that were read before are not read again, and read no differently."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cells.gateway.forms import Message
from cells.gateway.seen import KEPT, Seen

ITEMS = st.lists(st.fixed_dictionaries({"content": st.sampled_from("abc")}), max_size=6)


def convert(item: Any, index: int) -> list[Message]:
    return [{"role": "user", "content": item["content"]}] * (index % 3)


@given(st.lists(ITEMS, max_size=8))
def test_what_was_seen_changes_nothing(histories) -> None:
    seen = Seen()
    for items in histories:
        copy = json.loads(json.dumps(items))
        assert seen.read(copy, convert) == Seen().read(items, convert)


def test_only_what_is_new_is_read() -> None:
    seen, read = Seen(), []

    def note(item: Any, index: int) -> list[Message]:
        read.append(index)
        return [{"role": "user", "content": item}]

    histories = [[f"agent {number}"] for number in range(KEPT)]
    for turn in range(3):
        for history in histories:
            before = seen.read([*history], note)
            history.append(f"turn {turn}")
            after = seen.read(json.loads(json.dumps(history)), note)
            assert all(one is other for one, other in zip(before, after, strict=False))
    assert read == [0, 1] * KEPT + [2] * KEPT + [3] * KEPT  # each once, whoever came between
