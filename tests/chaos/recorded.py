"""A small whole run in storage, made by the parts that make one, without a model or a server."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from cells.checkpoint import save_checkpoint
from cells.decisions import DecisionLog
from cells.epoch import take_epoch, take_ownership
from cells.gateway.recording import ExecutionLog, SessionRecord, Turn
from cells.levels import Level
from cells.scheduler import Move, Role
from configs.load import load_config
from storage.journal import Journal, append_line
from storage.layout import evaluation_query_id, execution_id, query_id
from storage.records import (
    Call,
    Evaluation,
    ExecutionOutcome,
    ExecutionResult,
    QueryPlan,
    Scored,
    Split,
    StepDone,
    StepPlan,
    VersionSpan,
    encode,
)
from storage.root import mark_root
from storage.run import Run, create_run
from tasks.rollout.snapshot import freeze
from tasks.sampling.group import build_group
from tasks.scoring.verdicts import add_verdict
from tasks.training.feed import GroupFeed
from tasks.training.metrics import Spent
from tasks.training.stream import train_stream
from tasks.warm_start.policies import keep_policy, remember_policy
from tests.tasks.sampling.executions import call
from tests.tasks.training.fakes import FakeReplica, World

QUERIES, MEMBERS, UPDATES = 2, 2, 2
SETTINGS = (
    "cells.cells=[{name: a, core: true}, {name: b}]",
    "training.steps=1",
    f"training.updates_per_step={UPDATES}",
    f"rollout.queries={QUERIES}",
    f"rollout.group_size={MEMBERS}",
    "training.micro_step_tokens=16",
    "model.context=1024",
)
RUN = "r"


class _Core:
    """A cell host whose replica writes two small files."""

    name = "cell-a"

    def __init__(self, version: int) -> None:
        self._version = version

    def call(self, method, path, body=None, *, limit_s=20.0):
        if path == "/status":
            return {"replica": {"version": self._version}}
        command, folder = path.rsplit("/", 1)[-1], Path(body["args"]["path"])
        folder.mkdir(parents=True)
        name = {"save": "state.safetensors", "export": "model.safetensors"}[command]
        save_file({"w": np.full(8, self._version, np.float32)}, folder / name)
        return {"version": self._version}


def record_run(root: Path) -> Run:
    """A finished run of one step, two groups of two executions, with an evaluation."""
    run = create_run(str(root), RUN, load_config("quickstart", SETTINGS, environment={}))
    mark_root(run.store)
    take_ownership(run.store, run.layout)
    epoch = take_epoch(run.store, run.layout)
    _policy(run, root)
    plan = StepPlan(
        step=0,
        policy_version=0,
        queries=tuple(
            QueryPlan(
                query_id=query_id(0, index),
                problem_id=f"specrepo-train-1-{index}",
                split=Split.TRAIN,
                group_size=MEMBERS,
            )
            for index in range(QUERIES)
        ),
    )
    run.store.write_record_once(run.layout.step_plan(0), plan)
    feed = GroupFeed()
    for query in plan.queries:
        results, verdicts = {}, {}
        for member in range(MEMBERS):
            name = execution_id(query.query_id, member)
            results[name] = _execute(run, name, query.query_id, member, root)
            verdicts[name] = _score(run, name, query.query_id, float(member))
        build_group(run.store, run.layout, run.config, query, 0, results, verdicts)
        feed.put(query.query_id)
    feed.close()
    _train(run, feed)
    save_checkpoint(run, _Core(UPDATES), epoch=epoch, step=0, update=UPDATES)
    done = StepDone(step=0, policy_version=UPDATES, seconds=1.0)
    run.store.write_record_once(run.layout.step_done(0), done)
    _evaluate(run, root)
    _tell(run)
    return run


def _policy(run: Run, root: Path) -> None:
    folder = root / "first"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    save_file({"w": np.zeros(8, np.float32)}, folder / "model.safetensors")
    keep_policy(run.store, "policies/first", folder, "a test")
    remember_policy(run, "policies/first")


def recorded_calls(name: str) -> list[Call]:
    """A turn, one that goes on from it, and one whose history was edited."""
    first = call(0, new=(1, 2, 3), output=(4, 5), execution=name)
    second = call(1, first, kept=5, new=(6,), output=(7, 8), execution=name)
    edited = call(2, first, kept=2, new=(9,), output=(10,), execution=name)
    return [_at_version_0(one) for one in (first, second, edited)]


def _at_version_0(one: Call) -> Call:
    span = VersionSpan(version=0, start=0, end=len(one.output_ids))
    return one.model_copy(update={"spans": (span,)})


def _execute(run: Run, name: str, query: str, member: int, root: Path) -> ExecutionResult:
    log = ExecutionLog(run.store, run.layout, name)
    session = SessionRecord(
        execution_id=name, api_key=f"key-{name}", temperature=1.0, policy_version=0, closed=True
    )
    log.write_session(session)
    calls = recorded_calls(name)
    for one in calls:
        turn = Turn(
            call_id=one.call_id,
            messages=({"role": "user", "content": "x"},),
            reply={"role": "assistant", "content": "y"},
            tools="",
        )
        log.append(encode(one), encode(turn))
    log.close()
    workspace = root / "workspace" / name
    workspace.mkdir(parents=True)
    (workspace / "a.py").write_text(f"x = {member}\n")
    frozen = freeze(workspace, 1 << 20)
    key = run.layout.frozen_workspace(frozen.digest)
    run.store.write_once(key, frozen.data)
    result = ExecutionResult(
        execution_id=name,
        query_id=query,
        outcome=ExecutionOutcome.COMPLETED,
        started_at=1.0,
        ended_at=2.0,
        waited_s=0.0,
        exit_code=0,
        calls=len(calls),
        workspace_key=key,
        detail="",
    )
    run.store.write_record_once(run.layout.execution_result(name), result)
    return result


def _score(run: Run, name: str, query: str, reward: float):
    verdict = Scored(
        reward=reward, timed_out=False, tests_passed=int(reward), tests_total=1, log=""
    )
    return add_verdict(run.store, run.layout, name, query, verdict, 0.1)


def _train(run: Run, feed: GroupFeed) -> None:
    world = World(run.store, checkpoint=(0, np.arange(1, 5, dtype=np.int64), None))
    replicas = [FakeReplica(world, name, core=name == "a") for name in "ab"]
    for metrics in train_stream(
        store=run.store,
        layout=run.layout,
        config=run.config,
        step=0,
        groups=QUERIES,
        feed=feed,
        members=lambda: replicas,
        spent=lambda: Spent(1.0, 0.5),
    ):
        append_line(run.store, run.layout.metrics, encode(metrics))


def _evaluate(run: Run, root: Path) -> None:
    query = evaluation_query_id(UPDATES, 0)
    name = execution_id(query, 0)
    _execute(run, name, query, 0, root)
    _score(run, name, query, 1.0)
    evaluation = Evaluation(
        version=UPDATES,
        problems=1,
        executions=1,
        excluded=0,
        timed_out=0,
        pass_rate=1.0,
        standard_error=0.0,
        rates={"specrepo-held_out-1-0": 1.0},
        samples=1,
        seed=1,
        rewards={"specrepo-held_out-1-0": (1.0,)},
    )
    run.store.write_record(run.layout.evaluation(UPDATES), evaluation)


def _tell(run: Run) -> None:
    """What is kept to be told, and what a flow leaves beside."""
    log = DecisionLog(run.store, run.layout, 0, lambda _: None)
    log.write(Move("a", Role.TRAINING, "a test"), 1.0, "", 3)
    log.close()
    level = Level(
        at=1.0,
        step=0,
        version=0,
        queued=1,
        running=2,
        capacity=3,
        roles={"a": Role.ROLLOUT},
        expected=1,
        sealed=0,
        claimed=0,
        tokens_out=5,
    )
    levels = Journal(run.store, run.layout.levels)
    levels.append([encode(level)])
    levels.close()
    run.store.write(run.layout.manifest, json.dumps({"format": 1}).encode())
