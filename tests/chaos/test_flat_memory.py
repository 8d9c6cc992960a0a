"""Memory after many executions is that after few: through the gateway, the tree and the samples."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import psutil
import pytest

from storage.layout import execution_id, query_id
from storage.records import (
    ExecutionOutcome,
    ExecutionResult,
    QueryPlan,
    Scored,
    Split,
    VerdictRecord,
)
from tasks.sampling.group import build_group
from tests.cells.gateway.conftest import MakeBench
from tests.conftest import make_run

TASK = [{"role": "user", "content": "file: a.py"}]
SPARE_BYTES = 24 << 20
"""What an allocator may keep: far less than the recordings of the executions would take."""


def resident() -> int:
    gc.collect()
    return psutil.Process(os.getpid()).memory_info().rss


def result_of(name: str, query: str) -> ExecutionResult:
    return ExecutionResult(
        execution_id=name,
        query_id=query,
        outcome=ExecutionOutcome.COMPLETED,
        started_at=1.0,
        ended_at=2.0,
        waited_s=0.0,
        exit_code=0,
        calls=2,
        workspace_key=None,
        detail="",
    )


def verdict_of(name: str, query: str, reward: float) -> VerdictRecord:
    verdict = Scored(reward=reward, timed_out=False, tests_passed=0, tests_total=1, log="")
    return VerdictRecord(
        execution_id=name,
        query_id=query,
        version=0,
        late=False,
        scored_at=1.0,
        seconds=0.1,
        verdict=verdict,
    )


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (100, 300),
        pytest.param(2000, 18_000, marks=[pytest.mark.long, pytest.mark.timeout(3 * 3600)]),
    ],
)
async def test_memory_does_not_grow_with_the_executions(
    make_bench: MakeBench, engine, script, say, tmp_path: Path, first: int, then: int
) -> None:
    """Groups of four executions of two calls; the recordings are deleted as a step goes on."""
    run = make_run(tmp_path / "samples", "rollout.group_size=4")
    reply = say("all done")
    async with make_bench() as bench:
        await bench.cell("a", engine, capacity=16)

        async def group(number: int) -> None:
            query = QueryPlan(
                query_id=query_id(0, number), problem_id="p", split=Split.TRAIN, group_size=4
            )
            results, verdicts = {}, {}
            for member in range(4):
                name = execution_id(query.query_id, member)
                execution = await bench.open(name)
                script.say(reply, reply)
                task = [{"role": "user", "content": f"file: {name}.py"}]
                answer = await execution.reply(task)
                await execution.reply([*task, answer, {"role": "user", "content": "more"}])
                await bench.admin("DELETE", f"/admin/executions/{name}")
                results[name] = result_of(name, query.query_id)
                verdicts[name] = verdict_of(name, query.query_id, float(member % 2))
            engine.requests.clear()
            script.forget()
            made = build_group(bench.store, bench.layout, run.config, query, 0, results, verdicts)
            assert len(made.samples) == 4
            for name in results:
                bench.store.delete(bench.layout.execution(name))
            bench.store.delete(bench.layout.group(query.query_id))

        for number in range(first // 4):
            await group(number)
        before = resident()
        for number in range(first // 4, (first + then) // 4):
            await group(number)
        grown = resident() - before
        assert (await bench.state())["live"] == 0
    print(f"{grown / 1e6:.1f} MB more after {then} executions, {before / 1e6:.0f} MB before")
    assert grown < SPARE_BYTES, f"{grown / 1e6:.1f} MB more after {then} executions"
