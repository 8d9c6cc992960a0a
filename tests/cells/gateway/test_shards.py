"""Several processes of one gateway, killed while an official client works."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from cells.daemon import Registration
from cells.gateway.shards import add_metrics, process_names, share
from cells.process import end_group, spawn
from configs.load import dump_config
from configs.run import RunConfig
from storage.layout import RunLayout
from storage.objects import StorageError, Store
from storage.records import CallStatus
from tests.cells.gateway.conftest import LIMIT_S, Bench, Opened, prompts

START_S = 150.0
EXECUTIONS = [f"e{number}" for number in range(6)]


class Run:
    """A run whose gateway has two processes."""

    def __init__(self, folder: Path, tokenizer) -> None:
        self.store, self.layout = Store(folder / "root"), RunLayout("r1")
        cells = {"cells": [{"name": "a", "core": True}], "lease_s": 600}
        values = {"model": {"context": 700}, "cells": cells, "gateway": {"processes": 2}}
        config = RunConfig.model_validate(values)
        self.store.write(self.layout.config, dump_config(config).encode())
        tokenizer.save_pretrained(folder / "policy")
        self._folder = folder
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self) -> Registration:
        self.store.delete(self.layout.host("gateway"))
        argv = [sys.executable, "-m", "cells.gateway.server", "--root", self.store.url]
        argv += ["--run", "r1", "--policy", str(self._folder / "policy")]
        process = spawn(argv, env=os.environ, log=self._folder / "gateway.log")
        self._started.append(process)
        return self.found("gateway", process.pid)

    def found(self, name: str, pid: int | None = None, but: int | None = None) -> Registration:
        """The registration of a process as soon as it is there, and is of another than ``but``."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            try:
                found = self.store.read_record(self.layout.host(name), Registration)
                if pid in (None, found.pid) and found.pid != but:
                    return found
            except StorageError:
                pass
            time.sleep(0.05)
        raise AssertionError((self._folder / "gateway.log").read_text()[-2000:])

    def close(self) -> None:
        for process in self._started:
            end_group(process.pid, grace_s=5)


@pytest.fixture
def run(tmp_path: Path, tokenizer) -> Iterator[Run]:
    made = Run(tmp_path, tokenizer)
    yield made
    made.close()


async def talk(opened: Opened, turns: int, done: asyncio.Event) -> None:
    """A conversation by a client that tries again by itself."""
    http = httpx.AsyncClient(trust_env=False)
    async with openai.AsyncOpenAI(
        base_url=opened.base_url,
        api_key=opened.key,
        max_retries=60,
        timeout=LIMIT_S,
        http_client=http,
    ) as api:
        messages: list = [{"role": "user", "content": f"I am {opened.execution_id}"}]
        for number in range(turns):
            answer = await api.chat.completions.create(model="m", messages=messages)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
            messages.append({"role": "user", "content": f"turn {number}"})
            done.set()


async def test_killed_processes_lose_and_double_nothing(run, engine, script, say) -> None:
    script.rest = lambda prompt: say("fine")
    engine.delay_s = (0.05, 0.0)
    first = await asyncio.to_thread(run.start)
    second = run.found("gateway-1")
    bench = Bench(first.token, first.url, run.store, run.layout)
    told = await bench.cell("a", engine, capacity=9)
    assert told["capacity"] == 10  # rounded up in each process
    opened = [await bench.open(name) for name in EXECUTIONS]
    owners = {one.base_url.split("/e/")[0] for one in opened}
    assert owners == {first.url, second.url}
    begun = [asyncio.Event() for _ in opened]
    talks = [
        asyncio.create_task(talk(one, 4, event)) for one, event in zip(opened, begun, strict=True)
    ]
    await asyncio.gather(*(asyncio.wait_for(event.wait(), 60) for event in begun))
    psutil.Process(second.pid).kill()
    third = await asyncio.to_thread(run.found, "gateway-1", None, second.pid)
    assert third.url == second.url
    await asyncio.wait_for(asyncio.gather(*talks), 200)

    text = (await bench.http.get(f"{third.url}/metrics")).text  # any process answers
    counted = re.findall(r'calls_total\{kind="main",status="complete"\} (\d+)', text)
    assert len(counted) == 1 and int(counted[0]) > 6
    state = await bench.state()
    assert state["open"] == len(EXECUTIONS) and state["cells"]["a"]["live"] == len(EXECUTIONS)
    await bench.http.aclose()

    psutil.Process(first.pid).kill()  # the other dies with it
    fourth = await asyncio.to_thread(run.start)
    assert fourth.url == first.url
    bench = Bench(fourth.token, fourth.url, run.store, run.layout)
    await bench.cell("a", engine, capacity=9)
    for one in opened:
        again = await bench.open(one.execution_id)
        assert (again.key, again.base_url) == (one.key, one.base_url)
        messages = [{"role": "user", "content": f"I am {one.execution_id}"}]
        for number in range(4):
            messages.append({"role": "assistant", "content": "fine"})
            messages.append({"role": "user", "content": f"turn {number}"})
        await again.reply(messages, agent=None)
        calls = bench.calls(one.execution_id)
        complete = [call for call in calls if call.status is CallStatus.COMPLETE]
        assert len(complete) == 5
        assert all(call.fork_reason is None for call in complete)
        assert [call.parent for call in complete[1:]] == [call.call_id for call in complete[:4]]
        whole = prompts(calls)
        sent = [request["input_ids"] for request in engine.requests]
        assert all(whole[call.call_id] in sent for call in complete)
        closed = await bench.admin("DELETE", f"/admin/executions/{one.execution_id}")
        assert closed["calls"] == len(calls)
        assert (await again.chat(messages, agent=None)).status_code == 410
    await bench.stop()
    await bench.http.aclose()


def test_metrics_of_processes_are_added() -> None:
    one = '# TYPE a counter\na_total{k="x"} 2.0\n# TYPE b_lag_seconds gauge\nb_lag_seconds 0.5\n'
    two = '# TYPE a counter\na_total{k="x"} 3.0\na_total{k="y"} 1.0\n'
    two += "# TYPE b_lag_seconds gauge\nb_lag_seconds 0.2\n"
    text = add_metrics([one, two]).decode()
    assert 'a_total{k="x"} 5.0' in text and 'a_total{k="y"} 1.0' in text
    assert "b_lag_seconds 0.5" in text


def test_shares_and_names() -> None:
    assert process_names("gateway", 3) == ["gateway", "gateway-1", "gateway-2"]
    assert [share(capacity, 4) for capacity in (0, 1, 4, 5)] == [0, 1, 1, 2]
