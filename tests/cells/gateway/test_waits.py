"""Calls that wait: signs of life in each dialect's own form, and failures that clients retry."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from cells.gateway import answers
from tests.cells.gateway.conftest import LIMIT_S

USER = [{"role": "user", "content": "hello"}]
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("chat/completions", {"messages": USER}),
    "responses": ("responses", {"input": "hello"}),
    "messages": ("messages", {"messages": USER, "max_tokens": 100}),
}
SIGNS = {
    "chat": b": waiting\n\n",
    "responses": b"event: response.in_progress\n",
    "messages": b"event: ping\n",
}


@pytest.fixture
def quick(monkeypatch) -> None:
    monkeypatch.setattr(answers, "HOLD_STREAM_S", 0.05)
    monkeypatch.setattr(answers, "HOLD_WHOLE_S", 0.05)
    monkeypatch.setattr(answers, "KEEP_ALIVE_EVERY_S", 0.05)


def request(bench, execution, dialect: str, **more: Any) -> httpx.Request:
    path, body = CALLS[dialect]
    headers = {"x-api-key": execution.key}
    url = f"{execution.base_url}/{path}"
    return bench.http.build_request("POST", url, json={**body, **more}, headers=headers)


async def read_until(stream: Any, seen: bytes, ready: Any) -> bytes:
    async with asyncio.timeout(LIMIT_S):
        while not ready(seen):
            seen += await anext(stream)
    return seen


@pytest.mark.parametrize("dialect", CALLS)
async def test_a_stream_that_waits_for_a_cell_shows_signs_of_life(
    bench, engine, script, say, quick, dialect
) -> None:
    execution = await bench.open()
    script.say(say("Z"))
    sent = request(bench, execution, dialect, stream=True)
    answer = await bench.http.send(sent, stream=True)
    assert answer.status_code == 200
    stream = answer.aiter_raw()
    seen = await read_until(stream, b"", lambda data: data.count(SIGNS[dialect]) >= 3)
    await bench.cell("a", engine)
    rest = b"".join([part async for part in stream])
    assert b'"Z"' in seen + rest
    assert bench.calls()[0].waited_s > 0


@pytest.mark.parametrize("dialect", CALLS)
async def test_a_whole_answer_begins_with_white_space_while_it_waits(
    bench, engine, script, say, quick, dialect
) -> None:
    execution = await bench.open()
    script.say(say("at last"))
    answer = await bench.http.send(request(bench, execution, dialect), stream=True)
    assert answer.status_code == 200
    stream = answer.aiter_raw()
    seen = await read_until(stream, b"", lambda data: len(data) >= 3)
    assert not seen.strip()
    await bench.cell("a", engine)
    whole = json.loads(seen + b"".join([part async for part in stream]))
    assert "at last" in json.dumps(whole)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", CALLS)
async def test_what_fails_before_the_headers_has_a_status(make_bench, dialect, stream) -> None:
    """No cell within the limit: 503, 529 in Anthropic's words, with when to try again."""
    async with make_bench(call_limit_s=1) as bench:
        execution = await bench.open()
        answers_held = answers.HOLD_STREAM_S
        answers.HOLD_STREAM_S = LIMIT_S
        try:
            answer = await bench.http.send(request(bench, execution, dialect, stream=stream))
        finally:
            answers.HOLD_STREAM_S = answers_held
    assert answer.status_code == (529 if dialect == "messages" else 503)
    assert answer.headers["retry-after"] == "5"
    assert answer.headers["x-should-retry"] == "true"
    error = answer.json()["error"]
    assert error["type"] == ("overloaded_error" if dialect == "messages" else "server_error")


@pytest.mark.parametrize("dialect", CALLS)
async def test_what_fails_behind_the_headers_is_an_event_or_a_cut(
    make_bench, quick, dialect
) -> None:
    async with make_bench(call_limit_s=1) as bench:
        execution = await bench.open()
        streamed = await bench.http.send(request(bench, execution, dialect, stream=True))
        last = [line for line in streamed.text.split("\n") if line.startswith("data: ")][-1]
        event = json.loads(last[6:])
        assert streamed.status_code == 200
        if dialect == "responses":
            assert event["type"] == "response.failed"
            assert event["response"]["error"]["code"] == "server_error"
        else:
            assert "weights 0" in event["error"]["message"]
        with pytest.raises(httpx.RemoteProtocolError):
            await bench.http.send(request(bench, execution, dialect))
