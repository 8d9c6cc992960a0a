"""A step with its daemons whose only storage is s3, without Prefect: what is served, recorded,
scored, sealed, trained and saved is there, and a machine that has none of it can go on from it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from cells.board import Board
from cells.checkpoint import save_checkpoint
from cells.epoch import take_epoch
from cells.manager import Manager
from cells.task import policy_of
from configs.load import load_config
from flows.attempt import starting_point
from flows.history import updates_of
from flows.hosts import Hosts, hosts_of
from flows.plan import step_plan
from flows.rollouts import living
from storage.copies import local_copy
from storage.journal import read_journal
from storage.layout import execution_id
from storage.records import QueryPlan, Scored, StepDone
from storage.run import Run, create_run
from storage.samples import read_group
from tasks.rollout.group import find_result, run_groups
from tasks.sampling.group import build_group
from tasks.scoring.score import score
from tasks.training.feed import GroupFeed
from tasks.training.metrics import Spent
from tasks.training.replica import HostReplica
from tasks.training.stream import train_stream
from tasks.training.task import keep_metrics
from tasks.warm_start.policies import import_policy, remember_policy
from tests.flows.orchestrated import environment, marked_processes

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

SETTINGS = (
    "model.source=hf_directory",
    "model.context=1024",
    "cells.cells=[{name: a, core: true}]",
    "harness.turns=2",
    "harness.sub_agents=0",
    "rollout.queries=2",
    "rollout.group_size=2",
    "training.steps=2",
    "training.updates_per_step=1",
    "problems.reward=tests.flows.evaluators:reward",
)


@dataclass(frozen=True)
class Stepped:
    """A run after its first step, and the policy that it began with."""

    run: Run
    policy: str
    left: tuple[str, ...]


@pytest.fixture(scope="module")
def stepped(
    s3: str, tiny_policy: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stepped]:
    here = tmp_path_factory.mktemp("here")
    (here / "evaluators").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(here).items():
            patch.setenv(name, value)
        patch.setenv("XDG_CACHE_HOME", str(here / "cache"))
        root = f"{s3}/step"
        settings = (*SETTINGS, f"model.path={tiny_policy}", f"storage.root={root}")
        run = create_run(root, "far", load_config("smoke", settings, environment={}))
        policy = import_policy(run.store, run.config)
        remember_policy(run, policy)
        lines: list[str] = []
        with hosts_of(run, policy, 0, lines.append) as hosts:
            do_step(run, hosts)
        left = tuple(line for _, line in marked_processes(here) if "pytest" not in line)
        shutil.rmtree(here / "cache" / "gyre")
        yield Stepped(run, policy, left)


def do_step(run: Run, hosts: Hosts) -> None:
    """What the flow `rl_step` does, one part after the other."""
    plan, epoch = step_plan(run, 0, 0), take_epoch(run.store, run.layout)
    board = Board(live=living(run, plan.queries), serve_version=0, expected=len(plan.queries))
    feed, core = GroupFeed(), hosts.cells[hosts.core]
    replica = HostReplica(core, name=hosts.core, core=True, epoch=epoch)
    manager = Manager(
        store=run.store,
        layout=run.layout,
        config=run.config,
        cells=hosts.cells,
        gateway=hosts.gateway,
        policy=policy_of(run.config),
        board=board,
        step=0,
        epoch=epoch,
        report=lambda _: None,
    )
    with ThreadPoolExecutor(2) as pool:
        managing = pool.submit(manager.run)
        training = pool.submit(
            train_stream,
            store=run.store,
            layout=run.layout,
            config=run.config,
            step=0,
            groups=len(plan.queries),
            feed=feed,
            members=lambda: [replica for _ in board.trainers()],
            spent=lambda: Spent(0.0, 0.0),
            report=lambda work: board.set_work(work) if work.expected else None,
            held=board.set_held,
        )
        try:
            board.wait_serving(60)
            run_groups(
                run,
                hosts.executions,
                plan.queries,
                0,
                1.0,
                ended=board.execution_ended,
                stopped=lambda: board.stopped,
            )
            for query in plan.queries:
                seal(run, query)
                feed.put(query.query_id)
            feed.close()
            updates = training.result(120)
            keep_metrics(run, 0, len(updates))
            save_checkpoint(run, core, epoch=epoch, step=0, update=1)
        except BaseException as error:
            feed.fail(error)
            raise
        finally:
            board.stop()
            managing.result(60)
    done = StepDone(step=0, policy_version=updates[-1].policy_version, seconds=1.0)
    run.store.write_record_once(run.layout.step_done(0), done)


def seal(run: Run, query: QueryPlan) -> None:
    names = [execution_id(query.query_id, member) for member in range(query.group_size)]
    verdicts = {
        name: score(run.store, run.layout, run.config, name, query.problem_id) for name in names
    }
    results = {name: result for name in names if (result := find_result(run, name))}
    build_group(run.store, run.layout, run.config, query, 0, results, verdicts)


def test_calls_verdicts_groups_and_updates_are_on_s3(stepped: Stepped) -> None:
    run = stepped.run
    assert stepped.left == ()
    for query in step_plan(run, 0, 0).queries:
        group = read_group(run.store, run.layout.group(query.query_id))
        assert group.samples
        for member in group.header.members:
            assert isinstance(member.verdict, Scored)
            assert len(read_journal(run.store, run.layout.calls(member.execution_id))) == 2
    (update,) = updates_of(run)
    assert update.policy_version == 1 and update.valid == 4
    assert read_journal(run.store, run.layout.decisions)
    assert read_journal(run.store, run.layout.ledger(0))
    assert run.store.children(run.layout.hosts) == [], "the daemons have gone in order"


def test_a_machine_without_copies_starts_from_its_checkpoint(stepped: Stepped) -> None:
    run = stepped.run
    start = starting_point(run, stepped.policy)
    assert start.version == 1 and start.checkpoint is not None
    folder = local_copy(run.store, start.policy_key)
    assert (folder / "config.json").is_file() and (folder / "model.safetensors").is_file()
    assert (local_copy(run.store, start.checkpoint.state_key) / "state.json").read_bytes() == b"1"
    other = create_run(run.store.url, "other", run.config)
    assert starting_point(other, stepped.policy).policy_key == stepped.policy
