"""Whatever comes in at a border is taken or refused by its type, and nothing else happens.

`pytest -m long -s tests/chaos/test_hostile_input.py` tries 120,000 inputs and prints how many each
border got. One that never returns is ended by the limit of the test.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import orjson
import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from cells.daemon import Daemon
from cells.gateway.dialects.chat import ChatDialect
from cells.gateway.dialects.messages import MessagesDialect
from cells.gateway.dialects.responses import ResponsesDialect
from cells.gateway.forms import RefusedError
from cells.host.api import HostApi
from configs.load import dump_config
from configs.run import RunConfig
from configs.text import parse
from storage.objects import Store
from storage.records import Call, CallKind, GroupHeader, RecordError, decode, encode
from storage.samples import Sample, SealedGroup, read_group, seal
from tasks.rollout.snapshot import SnapshotError, freeze, thaw
from tests.cells.host.fakes import FakeCell
from tests.chaos.recorded import recorded_calls

SHORT, LONG = 150, 15_000
"""Inputs of each border: there are eight."""
ITS_OWN = 10
"""Inputs of an example: what hypothesis draws, and what random changes make of that and of a valid
input. To draw costs more than a border does."""
_QUIET = (HealthCheck.too_slow, HealthCheck.function_scoped_fixture)

KEYS = st.sampled_from(
    [
        "messages",
        "role",
        "content",
        "type",
        "text",
        "function",
        "name",
        "arguments",
        "id",
        "tools",
        "input",
        "tool_calls",
        "model",
        "stream",
        "max_tokens",
        "temperature",
        "epoch",
        "args",
        "version",
        "to",
        "record",
        "format",
        "cells",
        "training",
        "preset",
        "system",
        "tool_choice",
        "response_format",
        "steps",
    ]
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["user", "assistant", "tool", "function", "text", "rollout", "training"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=16,
)
TREES = VALUES.map(lambda value: _json(value))


def _json(value: object) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:  # an integer of more than 64 bits
        return repr(value).encode("utf-8", "surrogatepass")


def mutated(whole: bytes) -> st.SearchStrategy[bytes]:
    """A valid input with a few bytes changed, cut out or put in."""
    edits = st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 3), st.binary(max_size=4)),
        min_size=1,
        max_size=4,
    )

    def apply(drawn: list[tuple[float, int, bytes]]) -> bytes:
        data = bytearray(whole)
        for where, removed, added in drawn:
            at = int(where * len(data))
            data[at : at + removed] = added
        return bytes(data)

    return edits.map(apply)


FRAGMENTS = [b'"', b"{", b"}", b"[", b"]", b",", b":", b"null", b"-1", b"1e999", b"\\u0000"]
FRAGMENTS += [b"\xff", b"\x00", b"\n", b"[" * 3000, b'{"a":' * 3000, b"9" * 400, b"../", b"&a *a"]


def changed(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """One to four random changes: a byte, a cut, a part twice, a fragment, a part of another."""
    made = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at, end = sorted(rng.randrange(len(made) + 1) for _ in range(2))
        match rng.randrange(5):
            case 0:
                made[at : at + 1] = rng.randbytes(1)
            case 1:
                del made[at : min(end, at + 64)]
            case 2:
                made[at:at] = made[at : min(end, at + 64)]
            case 3:
                made[at:at] = rng.choice(FRAGMENTS)
            case _:
                start = rng.randrange(len(other) + 1)
                made[at : at + rng.randrange(32)] = other[start : start + rng.randrange(64)]
    return bytes(made)


def hostile(whole: bytes) -> st.SearchStrategy[bytes]:
    return st.binary(max_size=200) | TREES | mutated(whole)


def tries(attempt: Callable[[bytes], object], whole: bytes, count: int) -> None:
    """Give a border so many inputs; what it does not refuse by type fails the test."""
    attempt(whole)
    given_s: list[float] = []

    @settings(
        max_examples=count // ITS_OWN,
        deadline=None,
        suppress_health_check=_QUIET,
        phases=(Phase.generate, Phase.shrink),
    )
    @given(data=hostile(whole), seed=st.integers(0, 2**32 - 1))
    def run(data: bytes, seed: int) -> None:
        rng = random.Random(seed)
        for number in range(ITS_OWN):
            start = time.perf_counter()
            attempt(data)
            given_s.append(time.perf_counter() - start)
            data = changed(whole if number % 3 else data, data, rng)

    run()
    print(f"{len(given_s)} inputs, {len(whole)} bytes whole, slowest {max(given_s):.3f} s")
    assert len(given_s) >= count


COUNTS = [SHORT, pytest.param(LONG, marks=[pytest.mark.long, pytest.mark.timeout(3600)])]
CHAT = orjson.dumps(
    {
        "model": "m",
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                ],
            },
            {"role": "tool", "tool_call_id": "1", "content": "y"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    }
)
MESSAGES = orjson.dumps(
    {
        "model": "m",
        "max_tokens": 5,
        "system": "s",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    }
)
RESPONSES = orjson.dumps(
    {
        "model": "m",
        "input": [{"type": "message", "role": "user", "content": "x"}],
        "tools": [{"type": "function", "name": "f", "parameters": {}}],
    }
)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(
    ("dialect", "whole"),
    [(ChatDialect, CHAT), (MessagesDialect, MESSAGES), (ResponsesDialect, RESPONSES)],
    ids=["chat", "messages", "responses"],
)
def test_a_dialect_of_the_gateway(dialect: type, whole: bytes, count: int) -> None:
    def attempt(data: bytes) -> None:
        try:
            dialect().read(data)
        except RefusedError as error:
            assert 400 <= error.status < 500 and str(error)

    tries(attempt, whole, count)


@pytest.mark.parametrize("count", COUNTS)
def test_a_stored_record(count: int) -> None:
    def attempt(data: bytes) -> None:
        try:
            decode(data, Call, where="key")
        except RecordError as error:
            assert str(error).startswith("key: ")

    tries(attempt, encode(recorded_calls("s00000-q0000-e000")[1]), count)


@pytest.mark.parametrize("count", COUNTS)
def test_a_stored_group(count: int) -> None:
    store = Store(f"memory://hostile-{os.getpid()}")
    header = GroupHeader(
        query_id="q", step=0, problem_id="p", sealed_at=0.0, members=(), spread=False
    )
    sample = Sample(
        execution_id="e",
        kind=CallKind.MAIN,
        ids=np.arange(5, dtype=np.int32),
        targets=np.arange(5) > 2,
        logprobs=np.zeros(5, np.float32),
        versions=np.zeros(5, np.int32),
        advantage=1.0,
        weight=1.0,
    )
    store.delete("group")
    seal(store, "group", SealedGroup(header, (sample,)))

    def attempt(data: bytes) -> None:
        store.write("damaged", data)
        try:
            read_group(store, "damaged")
        except RecordError as error:
            assert str(error).startswith("damaged: ")

    tries(attempt, store.read("group"), count)


@pytest.mark.parametrize("count", COUNTS)
def test_a_configuration(count: int) -> None:
    def attempt(data: bytes) -> None:
        try:
            RunConfig.model_validate(parse(data.decode("utf-8", "replace")))
        except (ValueError, yaml.YAMLError) as error:
            assert str(error)

    short = dump_config(RunConfig()).split("problems:")[0].encode()
    tries(attempt, short, count)


@pytest.mark.parametrize("count", COUNTS)
def test_an_archive_of_a_workspace(tmp_path: Path, count: int) -> None:
    workspace, inside = tmp_path / "workspace", tmp_path / "room" / "inside"
    (workspace / "a").mkdir(parents=True)
    (workspace / "a" / "x.py").write_text("x = 1\n")
    (workspace / "link").symlink_to("a/x.py")
    inside.parent.mkdir()
    limit = 1 << 16

    def attempt(data: bytes) -> None:
        shutil.rmtree(inside, ignore_errors=True)
        try:
            thaw(data, inside, limit)
        except SnapshotError as error:
            assert str(error)
        assert [path.name for path in inside.parent.iterdir()] in ([], ["inside"])
        assert sorted(path.name for path in tmp_path.iterdir()) == ["room", "workspace"]

    tries(attempt, freeze(workspace, limit).data, count)


@pytest.mark.parametrize("count", COUNTS)
def test_the_calls_of_a_cell_host(tmp_path: Path, count: int) -> None:
    with asyncio.Runner() as runner:
        fake = FakeCell(tmp_path)
        runner.run(fake.cell.start())
        api = HostApi(fake.cell)
        daemon = Daemon(
            name="cell-a", kind="cell", lease_s=60, routes=api.routes(), close=fake.cell.close
        )
        api.serve_for(daemon)
        http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=daemon.app),
            base_url="http://host",
            headers={"authorization": f"Bearer {daemon.token}"},
        )

        async def send(data: bytes) -> None:
            for path in ("/role", "/engine/version", "/replica/micro_step"):
                answer = await http.post(path, content=data)
                assert answer.status_code < 500 or answer.status_code in (503, 504), answer.text
                assert isinstance(answer.json(), dict)

        whole = orjson.dumps({"epoch": 1, "role": "training", "version": 0, "args": {}})
        tries(lambda data: runner.run(send(data)), whole, count)
        runner.run(http.aclose())
