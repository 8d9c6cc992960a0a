"""Ten executions of Claude Code at once, while cells leave and come back under them."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from storage.records import CallStatus, ExecutionOutcome
from tasks.rollout.execution import carry_out
from tests.harnesses.conftest import MakeStage
from tests.harnesses.stage import Part, Play, Stage, call, has

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

EXECUTIONS = 10
CHUNK_S = 0.02


async def switch(stage: Stage, ended: asyncio.Event) -> int:
    """One cell after the other leaves with its generations under way, and comes back."""
    for switches in itertools.count():
        number = switches % len(stage.engines)
        name, engine = f"cell-{number}", stage.engines[number]
        while not (await stage.bench.state())["cells"][name]["in_flight"]:
            if ended.is_set():
                return switches
            await asyncio.sleep(CHUNK_S)
        left = await stage.bench.cell(name, engine, state="leaving", capacity=1000)
        assert left["in_flight"] == 0
        await stage.bench.cell(name, engine, capacity=1000)
    raise AssertionError


async def test_ten_executions_and_cells_that_switch(make_stage: MakeStage) -> None:
    numbers = range(EXECUTIONS)
    play = Play(
        *(
            Part(
                has(f"SCENE-{number}:"),
                [
                    f"I write number {number}.\n"
                    + call("Write", file_path="/workspace/a.py", content=f"print({number})\n"),
                    call("Bash", command="python3 a.py | tee out.txt", description="Run it"),
                    "All done, and there is nothing more to say about it.",
                ],
            )
            for number in numbers
        ),
        Part(lambda prompt: True, ["A title"]),
    )
    async with make_stage(play, harness={"name": "claude-code"}, engines=3) as stage:
        for engine in stage.engines:
            engine.delay_s = (CHUNK_S, CHUNK_S)
        for number in numbers:
            stage.tasks.instructions[f"p{number}"] = f"SCENE-{number}: write a.py and run it."
        ended = asyncio.Event()
        switching = asyncio.create_task(switch(stage, ended))
        try:
            results = await asyncio.gather(
                *(carry_out(stage.spec(n, f"p{n}"), stage.around) for n in numbers)
            )
        finally:
            ended.set()
        switches = await switching
        performed = [stage.performed(result) for result in results]
        for done in performed:
            stage.check(done)
    assert switches >= EXECUTIONS
    for number, done in enumerate(performed):
        assert done.result.outcome is ExecutionOutcome.COMPLETED, done.result.detail
        assert done.result.exit_code == 0
        assert done.files["out.txt"] == f"{number}\n"
        assert {one.status for one in done.calls} == {CallStatus.COMPLETE}
        assert {one.fork_reason for one in done.of("main")} == {None}
