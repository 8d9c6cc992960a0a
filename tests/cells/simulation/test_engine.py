"""A simulated run conserves work, obeys the rules and is reproducible, under every policy."""

from __future__ import annotations

from collections import defaultdict

import pytest
import simpy

from cells.scheduler import POLICY_NAMES, Adaptive, Move, Pace, Pipeline, Role, Snapshot
from cells.simulation.bounds import colocate_limit, lower_bounds
from cells.simulation.cell import Cell, Session
from cells.simulation.compare import compare, policy_for
from cells.simulation.engine import simulate
from cells.simulation.executions import Draws
from cells.simulation.outcome import Outcome
from cells.simulation.rollout import Rollout, SimulationError
from cells.simulation.workload import OverheadModel, Workload, load_workload
from configs.workloads import workload_path
from tests.cells.simulation.conftest import small_workload

EVERY = pytest.mark.parametrize("policy", POLICY_NAMES)


def run(workload: Workload, policy: str, seed: int = 0) -> Outcome:
    return simulate(workload, policy_for(workload, policy), seed)


@EVERY
def test_every_execution_ends_and_every_token_is_trained_once(small: Workload, policy: str) -> None:
    outcome = run(small, policy)
    drawn = [e for q in range(small.batch.queries) for e in Draws(small, 0).query(q)]
    assert len(outcome.executions) == len(drawn)
    assert outcome.tokens == pytest.approx(sum(execution.tokens for execution in drawn))
    assert len(outcome.updates) == small.batch.updates
    assert outcome.training_busy_s * small.training.tokens_per_s == pytest.approx(outcome.tokens)


@EVERY
def test_the_same_seed_gives_the_same_run(small: Workload, policy: str) -> None:
    assert run(small, policy) == run(small, policy)
    assert run(small, policy, 1) != run(small, policy)


@EVERY
def test_the_intervals_of_a_cell_cover_the_run_without_a_gap(small: Workload, policy: str) -> None:
    outcome = run(small, policy)
    by_cell = defaultdict(list)
    for interval in outcome.intervals:
        by_cell[interval.cell_id].append(interval)
    assert len(by_cell) == small.cells.count
    for intervals in by_cell.values():
        assert intervals[0].start == 0
        assert intervals[-1].end == outcome.seconds
        ends = [interval.end for interval in intervals]
        assert ends[:-1] == [interval.start for interval in intervals[1:]]


@EVERY
def test_no_policy_beats_its_bounds(small: Workload, policy: str) -> None:
    pipeline = policy_for(small, policy).pipeline
    for seed in range(3):
        bound = lower_bounds(small, seed)
        assert bound.of(pipeline) <= run(small, policy, seed).seconds
        assert bound.work_s <= bound.burst_s


def test_bursts_have_their_staleness_exactly_and_the_window_nearly() -> None:
    workload = small_workload(batch__updates=40)
    for policy in ("colocate", "elastic"):
        assert run(workload, policy).mean_staleness == 1.5
    for policy in ("async", "async_streaming"):
        assert run(workload, policy).mean_staleness == pytest.approx(1.5, abs=0.2)


def test_a_lag_of_a_whole_step_is_one_step_more_stale() -> None:
    workload = small_workload(batch__async_launch="steps", batch__updates=40)
    # The first step has nothing before it; streaming trains groups before their step has ended.
    assert run(workload, "async").mean_staleness == pytest.approx(5.5 - 4 / 10, abs=0.01)
    assert run(workload, "async_streaming").mean_staleness < 5.1


def test_without_overlap_async_is_as_stale_as_a_burst() -> None:
    workload = small_workload(batch__async_launch="bursts")
    assert run(workload, "async").mean_staleness == 1.5
    assert run(workload, "async").seconds > run(small_workload(), "async").seconds


@pytest.mark.parametrize("launch", ["window", "steps", "bursts"])
def test_what_streaming_saves_follows_from_how_long_the_training_cells_wait(launch: str) -> None:
    workload = small_workload(batch__async_launch=launch, batch__updates=24)
    slow, fast = run(workload, "async"), run(workload, "async_streaming")
    saved = 1 - (1 - slow.training_wait) / (1 - fast.training_wait)
    assert slow.training_wait > fast.training_wait > 0
    assert saved == pytest.approx(1 - fast.seconds / slow.seconds, abs=0.005)


def test_a_fixed_split_never_switches_and_colocate_twice_a_burst(small: Workload) -> None:
    assert run(small, "async").switches == small.cells.async_training_cells
    bursts = small.batch.updates // small.batch.updates_per_burst
    assert run(small, "colocate").switches == 2 * bursts * small.cells.count
    assert run(small, "elastic").switches <= 2 * bursts * small.cells.count


def test_elastic_reroutes_without_losing_work_and_pays_for_a_cold_prefix() -> None:
    warm = run(small_workload(serving__kv_kept_on_reroute=1.0), "elastic")
    cold_workload = small_workload(
        serving__kv_kept_on_reroute=0.0, serving__prefill_tokens_per_s=50.0
    )
    warm_workload = small_workload(
        serving__kv_kept_on_reroute=1.0, serving__prefill_tokens_per_s=50.0
    )
    assert any(ended.reroutes for ended in warm.executions)
    cold, warm = run(cold_workload, "elastic"), run(warm_workload, "elastic")
    assert cold.tokens == pytest.approx(warm.tokens)
    assert sum(e.active_s for e in cold.executions) > sum(e.active_s for e in warm.executions)


def test_timeouts_cut_the_same_work_whatever_the_load() -> None:
    ample = small_workload(durations__hung_share=0.2)
    tight = small_workload(durations__hung_share=0.2, cells__capacity=2)
    first, second = run(ample, "colocate"), run(tight, "colocate")
    assert first.tokens == pytest.approx(second.tokens)
    count = sum(e.timed_out for e in first.executions)
    assert count == sum(e.timed_out for e in second.executions) > 0
    assert sum(e.waited_s for e in second.executions) > sum(e.waited_s for e in first.executions)


def test_elastic_gains_at_most_what_the_bound_allows() -> None:
    for count in (2, 4, 6):
        for speed in (100.0, 300.0, 900.0):
            workload = small_workload(
                cells__count=count, cells__capacity=12, training__tokens_per_s=speed
            )
            comparison = compare(workload, (0, 1), ("colocate", "elastic"))
            assert comparison.ratio("colocate", "elastic").high <= colocate_limit(count)


def test_short_tasks_have_little_to_gain() -> None:
    workload = small_workload(
        durations__median_s=30.0, execution__block_s=30.0, training__tokens_per_s=2000.0
    )
    gain = compare(workload, (0, 1, 2), ("colocate", "elastic")).ratio("colocate", "elastic")
    assert gain.median < 1.25


def test_one_cell_serves_and_trains_in_turn() -> None:
    workload = small_workload(cells__count=1, cells__capacity=32)
    comparison = compare(workload, (0,))
    assert set(comparison.outcomes) == {"colocate", "elastic", "adaptive"}
    elastic, colocate = comparison.outcomes["elastic"][0], comparison.outcomes["colocate"][0]
    assert elastic.seconds == pytest.approx(colocate.seconds)


def test_events_grow_in_proportion_to_the_executions() -> None:
    counts = {}
    for executions in (4, 8, 16, 32):
        workload = small_workload(
            batch__executions_per_query=executions, cells__capacity=2 * executions
        )
        outcome = run(workload, "elastic")
        counts[executions] = outcome.events / len(outcome.executions)
    assert max(counts.values()) < 1.5 * min(counts.values())


class _Careless:
    """Sends every cell to training while executions run."""

    name = "careless"
    pipeline = Pipeline(lag=0, streaming=True)

    def decide(self, snapshot: Snapshot) -> tuple[Move, ...]:
        leaving = snapshot.serving() if snapshot.running else ()
        return tuple(Move(cell.cell_id, Role.TRAINING, "") for cell in leaving)


class _Idle(_Careless):
    """Never moves anything, so that nothing is ever trained."""

    def decide(self, snapshot: Snapshot) -> tuple[Move, ...]:
        return ()


def test_a_policy_that_abandons_live_work_is_found_out(small: Workload) -> None:
    with pytest.raises(SimulationError, match="nobody serves"):
        simulate(small, _Careless())


def test_a_policy_that_never_ends_is_found_out() -> None:
    workload = small_workload(batch__updates=4, batch__executions_per_query=1)
    with pytest.raises(SimulationError, match="does not end"):
        simulate(workload, _Idle())


def heavy_tailed() -> Workload:
    """Bursts wait here for hung executions, which carrying over does not."""
    return small_workload(
        durations__hung_share=0.03, training__tokens_per_s=150.0, batch__updates=24
    )


def test_carrying_over_saves_time_at_no_more_staleness_and_says_why() -> None:
    workload = load_workload(workload_path("published_122b_deepswe"))
    elastic, adaptive = run(workload, "elastic"), run(workload, "adaptive")
    assert elastic.seconds / adaptive.seconds > 1.04
    assert adaptive.tokens == pytest.approx(elastic.tokens)
    assert adaptive.mean_staleness <= elastic.mean_staleness
    assert [choice.pace for choice in adaptive.choices] == [Pace.BURST, Pace.CARRY]
    assert "carry over within" in adaptive.choices[1].reason


def test_tokens_of_what_is_carried_over_are_of_the_versions_that_served_them() -> None:
    outcome = run(heavy_tailed(), "adaptive")
    carried = [update.staleness for update in outcome.updates[4:]]
    assert any(staleness % 0.5 for staleness in carried)  # two groups an update: mixed inside one
    assert all(update.oldest >= update.staleness for update in outcome.updates)


@pytest.mark.parametrize("most", [4, 6, 8])
def test_no_token_is_trained_that_is_older_than_allowed(most: int) -> None:
    workload = heavy_tailed()
    for seed in range(3):
        outcome = simulate(workload, Adaptive(max_staleness=most), seed)
        assert {choice.pace for choice in outcome.choices} == {Pace.BURST, Pace.CARRY}
        assert outcome.max_staleness <= most
        assert len(outcome.updates) == workload.batch.updates


def test_what_waits_for_a_cell_goes_on_where_it_was() -> None:
    workload = small_workload()
    env, ended = simpy.Environment(), list[Session]()
    cell = Cell(env, workload, 0)
    rollout = Rollout(env, (cell,), workload.serving, ended.append)
    rollout.launch(Draws(workload, 0).query(0), version=0)
    started = tuple(cell.sessions)
    env.run(until=50.0)
    cell.become(Role.SWITCHING, Role.TRAINING)
    with pytest.raises(SimulationError, match="nobody serves"):
        rollout.leave(cell)
    rollout.leave(cell, may_wait=True)
    assert (rollout.running, rollout.queued) == (0, len(started))
    env.run(until=10_000.0)  # tools that were under way end, calls wait
    assert not ended
    rollout.launch(Draws(workload, 0).query(1), version=0)
    cell.become(Role.ROLLOUT)
    rollout.admit()
    assert tuple(cell.sessions)[: len(started)] == started  # before what was launched later
    env.run()
    assert len(ended) == len(rollout.executions) == 2 * len(started)
    for session in started:
        assert session.parked_s == 9950.0
        assert session.ended_at - session.started_at - session.parked_s < 2 * 4000.0
        output = sum(block.output_tokens for block in session.execution.blocks)
        assert session.sampled.total() == pytest.approx(output, abs=len(session.execution.blocks))


def test_work_near_the_time_limit_is_not_carried_over() -> None:
    workload = small_workload(
        durations__median_s=3900.0, training__tokens_per_s=2000.0, batch__updates=16
    )
    elastic, adaptive = run(workload, "elastic"), run(workload, "adaptive")
    assert {choice.pace for choice in adaptive.choices} == {Pace.BURST}
    assert adaptive.seconds == elastic.seconds


def test_an_update_that_is_published_while_groups_are_launched_is_not_missed() -> None:
    overhead = OverheadModel(launch_s=0.0, start_s=400.0, seal_s=0.0)
    small = small_workload(training__tokens_per_s=1e6, batch__updates=16)
    workload = small.model_copy(update={"overhead": overhead})
    outcome = simulate(workload, Adaptive(always=True))
    assert len(outcome.updates) == workload.batch.updates
