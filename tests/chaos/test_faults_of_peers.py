"""Faults that users of such systems have reported, each as a test that is named after its kind.

``docs/faults.md`` lists them with the tests of the parts, which go further into each.
"""

from __future__ import annotations

import copy
import json
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
from pydantic import ValidationError

from cells.checkpoint import latest_checkpoint
from cells.host.roles import HostRole, RoleMachine, WrongRoleError
from cells.scheduler import Role, TrainingWork
from configs.training import ExecutionMean, HealthConfig, TrajectoryConfig, UpdateMean
from storage.objects import Store
from storage.records import Excluded, QueryPlan, Scored, Split
from storage.samples import read_group
from tasks.sampling.advantages import group_advantages, trajectory_weights
from tasks.sampling.group import build_group
from tasks.sampling.selection import select
from tasks.sampling.tree import build_tree
from tasks.training import round as round_module
from tasks.training.feed import GroupFeed
from tasks.training.health import alarms
from tasks.training.ledger import Ledger
from tasks.training.metrics import Spent
from tasks.training.objectives import objective_path
from tasks.training.plan import divisor, group_facts
from tasks.training.round import NoReplicaError
from tasks.training.stream import train_stream
from tests.cells.gateway.test_places import Sitting, cell
from tests.cells.gateway.test_splice import WRITE, assert_exact, tool
from tests.cells.test_manager import LIMIT_S, FakeCell, Rig
from tests.chaos.recorded import record_run
from tests.conftest import make_run
from tests.tasks.sampling.executions import call
from tests.tasks.training.fakes import (
    LAYOUT,
    START,
    STEP,
    FakeReplica,
    FlowKilledError,
    World,
    config,
    make_group,
    one_shot,
)
from tests.tasks.training.test_health import metrics

TURNS = 4
TASK = [{"role": "system", "content": "Write."}, {"role": "user", "content": "file: a.py"}]
OBJECTIVE = config().training.objective


async def converse(bench, engine, script, say, *, turns=TURNS, spaced=False):
    """An execution of some turns; the client may write its tool calls with other spaces."""
    await bench.cell("a", engine)
    execution = await bench.open()
    script.say(*[say("", WRITE)] * turns)
    messages = list(TASK)
    for _ in range(turns):
        reply = await execution.reply(messages)
        echo = copy.deepcopy(reply)
        if spaced:
            function = echo["tool_calls"][0]["function"]
            function["arguments"] = json.dumps(json.loads(function["arguments"]), indent=2)
        messages += [echo, tool(reply)]
    return execution, messages


def train(world, replicas, names, *, feed=None, updates=2):
    filled = GroupFeed()
    for name in names:
        filled.put(name)
    filled.close()

    def save(_):
        core = replicas[0]
        world.checkpoint = (core.version, core.weights.copy(), copy.deepcopy(core.last_step))

    return train_stream(
        store=world.store,
        layout=LAYOUT,
        config=config(updates=updates),
        step=STEP,
        groups=len(names),
        feed=feed or filled,
        members=lambda: replicas,
        spent=lambda: Spent(1.0, 0.5),
        on_update=save,
    )


def replicas(world, names="abc"):
    return [FakeReplica(world, name, core=name == "a") for name in names]


@pytest.fixture
def world(tmp_path):
    return World(Store(tmp_path))


# Trajectories.


async def test_ids_of_a_continued_call_differ_from_what_was_sampled(bench, engine, script, say):
    await converse(bench, engine, script, say)
    assert_exact(bench, engine)
    assert [recorded.fork_reason for recorded in bench.calls()] == [None] * TURNS


async def test_re_rendering_makes_false_branches(bench, engine, script, say):
    await converse(bench, engine, script, say, spaced=True)
    tree = build_tree(bench.calls())
    assert select(tree, TrajectoryConfig(), 2000).paths == 1


def test_a_small_edit_destroys_the_training_of_a_whole_history():
    """A token of the middle is changed: what was sampled before stays a target, once."""
    first = call(0, new=(1, 2), output=(5,) * 40)
    second = call(1, first, kept=42, new=(3,), output=(6,) * 40)
    edited = call(2, second, kept=50, new=(9,), output=(7,) * 10)
    selection = select(build_tree([first, second, edited]), TrajectoryConfig(), 1000)
    assert selection.target_tokens == 90 and selection.dropped_tokens == 0
    assert len(selection.trajectories) == 2


async def test_each_call_costs_as_much_as_the_whole_history(bench, engine, script, say):
    """What is rendered and stored of a call is what it adds, whatever came before."""
    await converse(bench, engine, script, say)
    first, *later = bench.calls()
    assert {len(one.new_ids) for one in later} == {len(later[0].new_ids)}
    assert len(later[0].new_ids) < len(first.new_ids) + len(first.output_ids)


async def test_an_assertion_on_prefixes_ends_a_run(bench, engine, script, say):
    """A history that was edited is a branch with its reason, and is counted; the client goes on."""
    execution, messages = await converse(bench, engine, script, say, turns=3)
    messages[2]["tool_calls"][0]["function"]["arguments"] = '{"path": "b.py"}'
    script.say(say("end"))
    await execution.reply(messages)
    assert "history edited" in (bench.calls()[-1].fork_reason or "")
    figures = (await bench.http.get(f"{bench.url}/metrics")).text
    assert sum(line.startswith("gyre_gateway_forks_total{") for line in figures.splitlines())


# Samples and gradients.


@pytest.mark.parametrize("mean", ExecutionMean)
def test_rows_are_the_unit_of_the_loss(mean, world):
    """An execution of three rows weighs as much as one of one row, and is divided by as one."""
    assert sum(trajectory_weights((10, 20, 30), mean)) == pytest.approx(1.0)
    assert trajectory_weights((60,), mean) == (1.0,)
    many = make_group(world.store, 0, lengths=(8, 8, 8))
    few = make_group(world.store, 1, lengths=(8,))
    for name in (many, few):
        facts = group_facts(read_group(world.store, LAYOUT.group(name)))
        assert divisor([facts], UpdateMean.WITH_SPREAD, 2) == 2


def test_groups_are_told_apart_by_position(world):
    """Of groups of unequal sizes each is normalised by itself, in whatever order they come."""
    sizes = ((0.0, 1.0), (0.0, 0.5, 1.0, 1.0), (0.0, 0.0, 1.0))
    for rewards in sizes:
        assert sum(one or 0.0 for one in group_advantages(rewards, OBJECTIVE)) == pytest.approx(0)
    names = [make_group(world.store, number, rewards) for number, rewards in enumerate(sizes)]
    first = world.checkpoint[1].copy()
    trained = replicas(world)
    train(world, trained, names[::-1], updates=1)
    expected = one_shot(world.store, dict.fromkeys(names, 0), 1, first)
    assert trained[0].weights.tolist() == expected.tolist()


def test_masked_values_leak_into_statistics():
    rewards = [0.25, 0.75, 1.0]
    plain = group_advantages(rewards, OBJECTIVE)
    with_gaps = group_advantages([0.25, None, 0.75, None, 1.0], OBJECTIVE)
    assert tuple(one for one in with_gaps if one is not None) == plain
    assert [one is None for one in with_gaps] == [False, True, False, True, False]


def test_a_failure_costs_its_group(world):
    """One execution of four failed on our side: the three others train as if there were three."""
    name = make_group(world.store, 0, (0.0, None, 1.0, 1.0))
    group = read_group(world.store, LAYOUT.group(name))
    assert {sample.execution_id[-4:] for sample in group.samples} == {"e000", "e002", "e003"}
    facts = group_facts(group)
    assert (facts.excluded, facts.voters) == (1, 3)


def test_a_missing_reward_is_a_number(tmp_path):
    run = make_run(tmp_path)
    query = QueryPlan(query_id="s00000-q0000", problem_id="p", split=Split.TRAIN, group_size=2)
    group = build_group(run.store, run.layout, run.config, query, 0, {}, {})
    for member in group.header.members:
        assert isinstance(member.verdict, Excluded) and member.verdict.reason == "no_result"
        assert member.advantage is None
    with pytest.raises(ValidationError):
        Scored(reward=float("nan"), timed_out=False, tests_passed=0, tests_total=1, log="")


# Versions, cells and recovery.


def test_counters_start_again_after_a_recovery(world):
    """What the next attempt knows of updates, groups and ages comes from storage alone."""
    names = [make_group(world.store, number) for number in range(4)]
    world.deaths.append([None, "step", "after", 0])
    with pytest.raises(FlowKilledError):
        train(world, replicas(world), names)
    again = World(Store(world.store.url), checkpoint=world.checkpoint)
    records = train(again, replicas(again), names)
    assert [(one.policy_version, one.staleness_max) for one in records] == [
        (START + 1, 0),
        (START + 2, 1),
    ]


async def test_admission_has_two_owners():
    """Told of a cell's capacity again and again, the gateway has it once; all get a place."""
    sitting = Sitting()
    for _ in range(3):
        sitting.places.put(cell("a", capacity=2))
    for number in range(3):
        await sitting.sit(f"e{number}")
    assert (sitting.places.live(), sitting.places.waiting()) == (2, 1)
    await sitting.close()


def test_a_new_version_waits_for_every_rollout(tmp_path):
    """Each cell takes the version by itself; the executions that live stop none of them."""
    cells = {name: FakeCell(name, role="training") for name in "ab"}
    cells["a"].replica = 4
    rig = Rig(tmp_path, live=3, version=4, **cells)
    rig.wait_roles(Role.ROLLOUT, 2)
    assert rig.board.live == 3
    rig.end()
    assert {one.engine for one in cells.values()} == {4}


def test_asynchronous_differs_from_synchronous(world):
    """Groups one by one, on replicas that come and go, or all at once on one: the same weights."""
    names = [make_group(world.store, number) for number in range(6)]
    first = world.checkpoint[1].copy()
    streamed = replicas(world)
    train(world, streamed, names)
    ledger = Ledger(world.store, LAYOUT, STEP)
    expected = one_shot(world.store, dict(ledger.groups()), 2, first)
    ledger.close()
    assert streamed[0].weights.tolist() == expected.tolist()


def test_the_loss_of_one_node_ends_the_run(world):
    names = [make_group(world.store, number) for number in range(6)]
    first = world.checkpoint[1].copy()
    world.deaths += [["b", "micro_step", "after", 0], ["c", "freeze", "before", 0]]
    trained = replicas(world)
    train(world, trained, names)
    ledger = Ledger(world.store, LAYOUT, STEP)
    expected = one_shot(world.store, dict(ledger.groups()), 2, first)
    ledger.close()
    assert trained[0].weights.tolist() == expected.tolist()


def test_nobody_says_what_it_waits_for(world, monkeypatch):
    """Groups are sealed and no replica comes: said, with what is waited for, when time is over."""
    names = [make_group(world.store, number) for number in range(2)]
    hours = iter(range(0, 10**9, 100))
    monkeypatch.setattr(round_module.time, "monotonic", lambda: float(next(hours)))
    monkeypatch.setattr(GroupFeed, "wait", lambda self, limit_s: None)
    with pytest.raises(NoReplicaError, match="waits for a core"):
        train(world, [], names)


def test_somebody_waits_for_a_push_that_never_comes(world):
    """The weights were published to nobody: a satellite that comes later pulls them."""
    names = [make_group(world.store, number) for number in range(4)]
    world.deaths.append([None, "pull", "before", 0])
    with pytest.raises(FlowKilledError):
        train(world, replicas(world), names)
    again = World(Store(world.store.url), checkpoint=world.checkpoint)
    assert len(train(again, replicas(again), names)) == 2
    roles = RoleMachine()
    with pytest.raises(WrongRoleError):
        roles.begin(HostRole.TRAINING)
    roles.started()
    roles.begin(HostRole.TRAINING)
    with pytest.raises(WrongRoleError):
        roles.begin(HostRole.ROLLOUT)


def test_a_half_written_checkpoint_is_taken(tmp_path):
    run = record_run(tmp_path / "root")
    whole = latest_checkpoint(run)
    assert whole is not None
    run.store.delete(f"{whole.key}/manifest.json")
    assert latest_checkpoint(run) is None


def test_state_is_not_restored(world):
    """An attempt from an older checkpoint comes to the weights of one that never stopped."""
    names = [make_group(world.store, number) for number in range(4)]
    first = world.checkpoint
    untouched = replicas(world)
    train(world, untouched, names)
    again = World(Store(world.store.url), checkpoint=first)
    restored = replicas(again)
    train(again, restored, names)
    assert restored[0].weights.tolist() == untouched[0].weights.tolist()


def test_membership_is_never_healed(tmp_path):
    rig = Rig(tmp_path, live=1)
    rig.board.wait_serving(LIMIT_S)
    rig.gateway.cells.clear()  # it was started again
    rig.until(lambda: rig.gateway.cells == {"a": "serving", "b": "serving"})
    rig.board.set_work(TrainingWork())
    rig.end()


async def test_a_stale_cache_is_used(bench, engine, script, say):
    """What an engine may keep of a prompt is keyed by the version that computed it."""
    await bench.cell("a", engine)
    execution = await bench.open()
    script.say(say("one"), say("one"))
    await execution.reply(TASK)
    engine.version = 1
    await bench.cell("a", engine)
    later = await bench.open("e2", version=1)
    await later.reply(TASK)  # the same prompt
    assert [request["extra_key"] for request in engine.requests] == ["0", "1"]


def test_an_objective_has_no_alarms():
    bounds = {"warn": 0.5, "stop": None}
    health = HealthConfig(clip_fraction=bounds, logprob_gap=bounds)
    found = alarms(metrics(clip_fraction=0.9, logprob_gap=0.9), health)
    assert {alarm.text.split(": ")[1].split(" ")[0] for alarm in found} == {
        "clip_fraction",
        "logprob_gap",
    }
    paths = {objective_path(name) for name in ("gspo", "grpo", "gspo_token", "dapo")}
    assert len(paths) == 4


def test_siblings_share_something_that_changes(world, tmp_path):
    name = make_group(world.store, 0)
    first, second, *_ = read_group(world.store, LAYOUT.group(name)).samples
    with pytest.raises(ValueError, match="read-only"):
        first.ids[0] = 1
    with pytest.raises(FrozenInstanceError):
        first.advantage = 2.0
    assert first.ids.base is not second.ids
    record = call(0, new=(1,), output=(2,))
    with pytest.raises(ValidationError):
        record.kept = 1


KINDS = [name for name in dict(globals()) if name.startswith("test_")]


def test_every_kind_that_was_reported_is_here():
    table = Path(__file__).parents[2] / "docs" / "faults.md"
    text = table.read_text(encoding="utf-8")
    assert len(KINDS) == 23
    missing = [name for name in KINDS if f"`{name}`" not in text]
    assert not missing, f"{table} does not name {missing}"
