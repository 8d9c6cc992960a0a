"""The built-in agent works on a HumanEval problem, from the first call to the verdict."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.run import RunConfig
from storage.records import ExecutionOutcome, ExecutionSpec, Scored, Split
from storage.run import create_run
from tasks.problems.humaneval import FILE, tasks
from tasks.problems.source import make_source
from tasks.rollout.door import make_client
from tasks.rollout.execution import Surroundings, carry_out
from tasks.rollout.harnesses.launch import make_harness
from tasks.rollout.sandboxes.choose import make_sandbox
from tasks.rollout.sessions import GatewaySessions
from tasks.scoring.score import score
from tests.tasks.rollout.stub_gateway import Message, StubGateway, call, scripted

PROBLEM = "HumanEval/8"
SETTINGS = {
    "problems": {"source": "humaneval"},
    "rollout": {"sandbox": "bubblewrap", "retries": 0},
    "model": {"source": "hf_directory", "path": "/models/none", "context": 8192},
    "harness": {"context_budget": 6000},
    "cells": {"kv_tokens": 65536},
}


def solving() -> list[Message]:
    task = tasks()[PROBLEM]
    text = task.prompt + task.canonical_solution
    return [call("write", path=FILE, content=text), call("run", path=FILE), call("done")]


@pytest.mark.real
@pytest.mark.parametrize(("messages", "reward"), [(solving(), 1.0), ([call("done")], 0.0)])
async def test_an_execution_and_its_verdict(
    tmp_path: Path, messages: list[Message], reward: float
) -> None:
    run = create_run(str(tmp_path / "store"), "r", RunConfig.model_validate(SETTINGS))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    gateway = StubGateway()
    gateway.register(run.store, run.layout)
    gateway.policy = scripted(*messages)
    around = Surroundings(
        store=run.store,
        layout=run.layout,
        config=run.config.rollout,
        source=make_source(run.config.problems),
        sessions=GatewaySessions(run.store, run.layout, patience_s=5),
        doors=make_client(),
        sandbox=make_sandbox(run.config.rollout.sandbox),
        harness=make_harness(run.config.harness, 60, tmp_path),
        scratch=scratch,
    )
    spec = ExecutionSpec(
        execution_id="s00000-q0000-e000",
        query_id="s00000-q0000",
        member=0,
        problem_id=PROBLEM,
        split=Split.TRAIN,
        policy_version=0,
        temperature=1.0,
        seed=1,
    )
    try:
        result = await carry_out(spec, around)
    finally:
        await around.sessions.close_client()
        await around.doors.close()
        gateway.close()
    assert result.outcome is ExecutionOutcome.COMPLETED, result.detail
    assert result.calls == len(messages)
    assert "sum_product" in str(gateway.requests[0]["messages"])
    run.store.write_record(run.layout.execution_result(spec.execution_id), result)
    verdict = score(run.store, run.layout, run.config, spec.execution_id, PROBLEM).verdict
    assert isinstance(verdict, Scored)
    assert verdict.reward == reward
