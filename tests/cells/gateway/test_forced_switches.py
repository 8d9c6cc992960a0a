"""Cells that leave and come back all the time, under executions that must not notice."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from storage.records import CallStatus
from tests.cells.gateway.conftest import LIMIT_S, Bench, MakeBench, Opened, deltas, prompts
from tests.engines.scripted import Script, ScriptedEngine, logprob

CELLS = ("a", "b", "c")
LONGEST_REPLY = 24
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}


class Chatter(Script):
    """A reply that depends on the prompt; a prompt that goes on with a part of its reply gets the
    rest of it, on whichever engine."""

    def __init__(self, end: int, plain: range) -> None:
        super().__init__()
        self._end = end
        self._plain = plain
        self.replies: dict[tuple[int, ...], list[int]] = {}

    def rest(self, prompt: list[int]) -> list[int]:
        for done in range(min(len(prompt), LONGEST_REPLY)):
            whole = self.replies.get(tuple(prompt[: len(prompt) - done]))
            if whole is not None and whole[:done] == prompt[len(prompt) - done :]:
                return whole[done:]
        drawn = random.Random(str(prompt))
        length = drawn.randint(8, LONGEST_REPLY - 1)
        reply = [*drawn.choices(self._plain, k=length), self._end]
        self.replies[tuple(prompt)] = reply
        return reply


@dataclass
class Rig:
    """A gateway, three engines, and what the executions saw."""

    bench: Bench
    script: Chatter
    engines: dict[str, ScriptedEngine]
    over: asyncio.Event = field(default_factory=asyncio.Event)
    errors: list[str] = field(default_factory=list)
    switches: int = 0

    async def execution(self, opened: Opened, number: int) -> None:
        """Turn after turn until the switches are over."""
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"task {number}"}]
        turn = 0
        while turn < 2 or not self.over.is_set():
            answer = await self._turn(opened, messages, stream=(turn + number) % 2 == 0)
            messages += [answer, {"role": "user", "content": f"go on, {turn}"}]
            if turn % 6 == 5:
                messages = messages[:1]  # a fresh history, as after a compaction
            turn += 1

    async def _turn(
        self, opened: Opened, messages: list[dict[str, Any]], *, stream: bool
    ) -> dict[str, Any]:
        more: dict[str, Any] = {"stream": stream}
        if not stream and random.Random(len(messages)).random() < 0.3:
            schema = {"name": "x", "schema": SCHEMA}
            more["response_format"] = {"type": "json_schema", "json_schema": schema}
        response = await opened.chat(messages, max_tokens=64, **more)
        if response.status_code != 200 or "error" in response.text:
            self.errors.append(f"{opened.execution_id}: {response.status_code} {response.text}")
            self.over.set()
        if stream:
            return {"role": "assistant", "content": deltas(response.text).get("content", "")}
        return dict(response.json()["choices"][0]["message"])

    async def switch(self, count: int) -> None:
        """A cell with generations under way leaves, another time and again; two always stay."""
        order = random.Random(1)
        for name in [order.choice(CELLS) for _ in range(count)]:
            if self.over.is_set():
                return
            # Sessions come back with their next calls, on a busy machine after a while.
            await self.bench.until(
                lambda state, name=name: state["cells"][name]["in_flight"] > 0, 10 * LIMIT_S
            )
            left = await self.bench.cell(name, self.engines[name], state="leaving", capacity=1000)
            assert (left["live"], left["in_flight"]) == (0, 0)
            await self.bench.cell(name, self.engines[name], capacity=1000)
            self.switches += 1
        self.over.set()

    def check(self, executions: int) -> int:
        """Every recorded token is the script's, once, in order; returns the calls."""
        calls = 0
        for number in range(executions):
            recorded = self.bench.calls(f"e{number}")
            whole = prompts(recorded)
            for call in recorded:
                assert call.status is CallStatus.COMPLETE
                prompt = whole[call.call_id]
                assert list(call.output_ids) == self.script.replies[tuple(prompt)]
                assert list(call.output_logprobs) == [
                    logprob(len(prompt) + at, token) for at, token in enumerate(call.output_ids)
                ]
                ends = [(span.start, span.end) for span in call.spans]
                assert ends == [(0, len(call.output_ids))]
            calls += len(recorded)
        return calls


@asynccontextmanager
async def rigged(
    make_bench: MakeBench, script: Chatter, chunk_s: float = 0.002
) -> AsyncIterator[Rig]:
    """
    Args:
        chunk_s: between two tokens; many executions at once need more, all runs in one process.
    """
    engines = {name: ScriptedEngine(script, incremental=True) for name in CELLS}
    async with make_bench(call_limit_s=600) as bench:
        for name, engine in engines.items():
            await engine.start()
            engine.delay_s = (chunk_s, chunk_s)
            await bench.cell(name, engine, capacity=1000)
        bench.http.timeout = httpx.Timeout(10 * LIMIT_S)
        yield Rig(bench, script, engines)
        for engine in engines.values():
            await engine.stop()


@pytest.mark.parametrize(
    ("executions", "switches", "chunk_s"),
    [
        (12, 30, 0.002),
        pytest.param(200, 60, 0.1, marks=[pytest.mark.long, pytest.mark.timeout(1800)]),
    ],
)
async def test_no_execution_notices_a_switch(
    make_bench: MakeBench,
    say: Callable[..., list[int]],
    executions: int,
    switches: int,
    chunk_s: float,
) -> None:
    (end,) = say("")
    script = Chatter(end, range(20, 200))
    async with rigged(make_bench, script, chunk_s) as rig:
        opened = [await rig.bench.open(f"e{number}") for number in range(executions)]
        async with asyncio.TaskGroup() as group:
            for number, one in enumerate(opened):
                group.create_task(rig.execution(one, number))
            group.create_task(rig.switch(switches))
        assert rig.errors == []
        assert rig.switches == switches
        calls = rig.check(executions)
        issued = sum(len(engine.requests) for engine in rig.engines.values())
        assert issued - calls >= switches, "each switch took a generation from its cell"
