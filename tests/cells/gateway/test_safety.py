"""Limits, and what one execution or a log must never learn."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import httpx
import pytest

from cells.daemon import Registration
from cells.gateway.admin import BODY_LIMIT_BYTES
from cells.gateway.recording import ExecutionLog
from cells.gateway.routing import Places
from cells.gateway.sessions import Sessions
from cells.process import end_group, spawn
from configs.load import dump_config
from configs.run import RunConfig
from storage.layout import RunLayout
from storage.objects import Store
from tests.cells.gateway.conftest import LIMIT_S, Bench

USER = [{"role": "user", "content": "hello"}]
PATHS = ["chat/completions", "responses", "responses/input_tokens", "messages"]
PATHS += ["messages/count_tokens"]
WORD = "zebra-in-a-message"


@pytest.mark.parametrize("path", PATHS)
async def test_each_route_has_its_limits(make_bench, path) -> None:
    anthropics = path.startswith("messages")
    async with make_bench(body_limit_mb=0.01, header_limit_kb=2) as bench:
        execution = await bench.open()
        url, good = f"{execution.base_url}/{path}", {"x-api-key": execution.key}

        async def refused(status: int, **sent: Any) -> None:
            headers = good | sent.pop("headers", {})
            answer = await bench.http.post(url, headers=headers, **sent)
            assert answer.status_code == status, answer.text
            body = answer.json()
            assert (body.get("type") == "error") is anthropics
            assert body["error"]["message"]

        await refused(413, content=b"x" * 20_000)
        await refused(431, json={}, headers={"x-long": "y" * 4000})
        await refused(401, json={}, headers={"x-api-key": "wrong"})
        await refused(400, content=b"[" * 5000)
        await refused(400, content=b"\xff\xfe")
        await refused(400, json={})
        deep = b'{"a":' * 300 + b"1" + b"}" * 300
        tool = b'{"name": "f", "input_schema": %b, "parameters": %b, "type": "%b"}' % (
            deep,
            deep,
            b"custom" if anthropics else b"function",
        )
        if path == "chat/completions":
            tool = b'{"type": "function", "function": %b}' % tool
        body = b'{"messages": [{"role": "user", "content": "x"}], "input": "x", "tools": [%b]}'
        await refused(400, content=body % tool)


async def test_the_manager_s_bodies_are_limited_too(bench) -> None:
    headers = bench.headers
    url = f"{bench.url}/admin/executions/e1"
    large = await bench.http.put(url, content=b"x" * (BODY_LIMIT_BYTES + 1), headers=headers)
    assert large.status_code == 413
    no_json = await bench.http.put(url, content=b"x", headers=headers)
    assert no_json.status_code == 400


async def test_calls_are_limited_in_all(make_bench, engine, script, say) -> None:
    async with make_bench(calls=1) as bench:
        await bench.cell("a", engine)
        one, two = await bench.open("e1"), await bench.open("e2")
        script.say(say("a long answer"))
        engine.hold_after = 1
        running = asyncio.create_task(one.chat(USER))
        await asyncio.wait_for(engine.reached.wait(), LIMIT_S)
        busy = await two.chat(USER)
        assert busy.status_code == 503 and busy.headers["retry-after"]
        engine.release.set()
        assert (await running).status_code == 200


async def test_executions_see_nothing_of_one_another(bench, engine, script, say) -> None:
    """Another's key opens nothing, and another's history or tool calls are nobody's here."""
    await bench.cell("a", engine)
    one, two = await bench.open("e1"), await bench.open("e2")
    script.say(say("", {"name": "write", "arguments": {}}), say("mine"))
    reply = await one.reply(USER)
    result = {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": "ok"}
    await two.reply([*USER, reply, result])
    (call,) = bench.calls("e2")
    assert call.parent is None and call.kept == 0
    for path in PATHS:
        url = f"{one.base_url}/{path}"
        answer = await bench.http.post(url, headers={"x-api-key": two.key}, json={})
        unknown = await bench.http.post(
            url.replace("/e1/", "/e9/"), headers={"x-api-key": two.key}, json={}
        )
        assert answer.status_code == unknown.status_code == 401
        assert answer.text == unknown.text  # it does not even say which executions there are
    await bench.admin("DELETE", "/admin/executions/e1")
    dead = await bench.http.get(f"{one.base_url}/models", headers={"x-api-key": one.key})
    assert dead.status_code == 410


async def test_a_key_expires(make_bench) -> None:
    async with make_bench(key_life_s=1e-6) as bench:
        one = await bench.open("e1")
        for path in PATHS:
            url = f"{one.base_url}/{path}"
            answer = await bench.http.post(url, headers={"x-api-key": one.key}, json={})
            assert answer.status_code == 401 and "expired" in answer.text
            wrong = await bench.http.post(url, headers={"x-api-key": "other"}, json={})
            assert wrong.status_code == 401 and "expired" not in wrong.text


async def test_only_who_opens_an_execution_again_renews_its_key(tmp_path) -> None:
    """Its client does not, not even where it makes a later gateway take it up."""
    store, layout = Store(tmp_path), RunLayout("r1")
    first = Sessions(store, layout, Places(), key_life_s=1000)
    await first.start("e1", 1.0, 0)
    await first.close()
    record = ExecutionLog(store, layout, "e1").session()
    assert record is not None and record.expires_at is not None
    old = record.model_copy(update={"expires_at": record.expires_at - 995})
    ExecutionLog(store, layout, "e1").write_session(old)

    second = Sessions(store, layout, Places(), key_life_s=1000)
    await second.recover("e1")
    assert 0 < second.open["e1"].life_s < 10
    await second.start("e1", 1.0, 0)
    assert second.open["e1"].life_s > 990
    await second.close()
    third = Sessions(store, layout, Places(), key_life_s=1000)
    await third.recover("e1")
    assert third.open["e1"].life_s > 900
    await third.close()


async def test_logs_hold_no_secrets_and_no_messages(tmp_path, tokenizer, engine, script, say):
    """A gateway process through calls, refusals, broken requests and a failing engine."""
    store, layout = Store(tmp_path / "root"), RunLayout("r1")
    cells = {"cells": [{"name": "a", "core": True}]}
    config = RunConfig.model_validate({"model": {"context": 400}, "cells": cells})
    store.write(layout.config, dump_config(config).encode())
    policy = tmp_path / "policy"
    tokenizer.save_pretrained(policy)
    script.say(*[say("answer")] * 20)
    argv = [sys.executable, "-m", "cells.gateway.server", "--root", store.url, "--run", "r1"]
    process = spawn([*argv, "--policy", str(policy)], env=os.environ, log=tmp_path / "log")
    try:
        async with asyncio.timeout(120):
            while not store.exists(layout.host("gateway")):
                assert process.poll() is None
                await asyncio.sleep(0.05)
        found = store.read_record(layout.host("gateway"), Registration)
        bench = Bench(found.token, found.url, store, layout)
        engine_key = "engine-key-1234567"
        body = {"epoch": 1, "url": engine.url, "capacity": 4, "version": 0, "state": "serving"}
        await bench.admin("PUT", "/admin/cells/a", {**body, "token": engine_key})
        execution = await bench.open()
        said = [{"role": "user", "content": WORD}]
        engine.fail.extend(["500", "500"])
        assert (await execution.chat(said)).status_code == 200
        engine.fail.append("400")
        assert (await execution.chat([*said, *said])).status_code == 400
        wrong = {"authorization": f"Bearer {execution.key}-{WORD}"}
        for path in PATHS:
            url = f"{execution.base_url}/{path}?api_key={execution.key}"
            assert (await bench.http.post(url, headers=wrong, json={})).status_code == 401
            answer = await bench.http.post(
                url, headers={"x-api-key": execution.key}, content=b"{" + WORD.encode()
            )
            assert answer.status_code == 400
        engine.hold_after = 1
        with pytest.raises(httpx.ReadTimeout):
            await bench.http.post(
                f"{execution.base_url}/chat/completions",
                headers={"x-api-key": execution.key},
                json={"messages": [*said, *said, *said]},
                timeout=1,
            )
        await bench.stop()
        await bench.http.aclose()
        assert await asyncio.to_thread(process.wait, 30) == 0
    finally:
        end_group(process.pid, grace_s=1)
    log = (tmp_path / "log").read_text()
    assert "after 0 ids" in log  # it does log
    for secret in (execution.key, found.token, engine_key, WORD):
        assert secret not in log
