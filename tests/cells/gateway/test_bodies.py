"""Bodies whose beginning is known are parsed as if it were not."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cells.gateway.bodies import KEPT, Bodies

TEXTS = st.sampled_from(
    ["", "a", 'say "messages": [', '\\"', "\\", "]}", "{[", "\n", "é\u2028", '"messages":[1]']
)
LEAVES = st.one_of(TEXTS, st.integers(-3, 3), st.none(), st.booleans())
ITEMS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.just("messages"), TEXTS), inner, max_size=3),
    ),
    max_leaves=6,
)
TURNS = st.lists(ITEMS, min_size=1, max_size=3)
SPELLINGS = st.sampled_from(
    [
        {"separators": (",", ":")},
        {"indent": 1},
        {"ensure_ascii": False},
        {"separators": (" , ", " : ")},
    ]
)


def outcome(parse: Any, body: bytes) -> Any:
    try:
        return parse(body)
    except orjson.JSONDecodeError:
        return "no JSON"


@given(
    turns=st.lists(TURNS, min_size=1, max_size=5),
    before=st.dictionaries(TEXTS, ITEMS, max_size=2),
    after=st.dictionaries(st.one_of(st.just("model"), TEXTS), ITEMS, max_size=2),
    spelling=SPELLINGS,
)
def test_a_growing_history_reads_as_ever(turns, before, after, spelling) -> None:
    bodies, messages = Bodies(), []
    for turn in turns:
        messages = [*messages, *turn]
        whole = {**before, "messages": messages, **after}
        body = json.dumps(whole, **spelling).encode()
        assert bodies.parse(body, "messages") == orjson.loads(body)


@given(
    messages=TURNS,
    cut=st.integers(0, 200),
    put=st.sampled_from(
        [
            *(b"", b",", b"]", b"}", b"]}", b',"x"', b',{"a":1}]}', b"],", b" ]}", b"\0", b'"'),
            *(b'],"messages":[7]}', b'],"mess\\u0061ges":[7]}', b'],"messages":{}}', b",1]}x"),
        ]
    ),
)
def test_any_end_behind_a_known_beginning_reads_as_ever(messages, cut, put) -> None:
    bodies = Bodies()
    body = orjson.dumps({"messages": messages, "model": "m"})
    bodies.parse(body, "messages")
    other = body[: min(cut, len(body))] + put
    assert outcome(lambda one: bodies.parse(one, "messages"), other) == outcome(orjson.loads, other)
    assert bodies.parse(body, "messages") == orjson.loads(body)


def test_what_is_known_comes_as_the_same_objects() -> None:
    bodies = Bodies()
    histories = [[{"content": f"agent {number}"}] for number in range(KEPT)]
    before: list[list[Any]] = [[] for _ in histories]
    for turn in range(3):
        for number, history in enumerate(histories):
            body = orjson.dumps({"model": "m", "messages": history, "tools": [{"messages": []}]})
            read = bodies.parse(body, "messages")["messages"]
            assert read == history
            assert all(one is other for one, other in zip(before[number], read, strict=False))
            before[number] = read
            history.append({"content": f"turn {turn}"})


@pytest.mark.parametrize("name", ["messages", "input"])
def test_a_history_of_another_name_is_not_taken(name: str) -> None:
    bodies = Bodies()
    body = b'{"messages":[{"a":1}],"input":[{"b":2}]}'
    for _ in range(2):
        assert bodies.parse(body, name) == orjson.loads(body)
        other = "input" if name == "messages" else "messages"
        assert bodies.parse(body, other) == orjson.loads(body)
