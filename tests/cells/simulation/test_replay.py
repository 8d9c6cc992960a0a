"""A recorded run, repeated under a policy, is the same work in the same order."""

from __future__ import annotations

from pathlib import Path

import pytest

from cells.simulation.compare import policy_for
from cells.simulation.engine import simulate
from cells.simulation.executions import Draws
from cells.simulation.replay import replayed, serving_speed
from storage.journal import append_line, read_lines
from storage.layout import execution_id, query_id
from storage.records import ExecutionResult, UpdateMetrics, decode, encode
from tests.cells.simulation.test_recorded import (
    MEMBERS,
    QUERIES,
    STEPS,
    call,
    metrics,
    record_run,
)


def test_each_execution_is_there_with_its_calls_and_tools(tmp_path: Path) -> None:
    draws = Draws(replayed(record_run(tmp_path)), seed=0)
    groups = [draws.query(number) for number in range(QUERIES * STEPS)]
    # A host that failed is left out: its group has one execution less.
    assert [len(group) for group in groups] == [MEMBERS] * QUERIES + [3] + [MEMBERS] * 3
    for execution in (one for group in groups for one in group):
        assert [block.prompt_tokens for block in execution.blocks] == [0, 40, 10]
        assert [block.output_tokens for block in execution.blocks] == [0, 30, 30]
        # Both calls are recorded from 100 to 104, the execution until 112.
        assert [block.tool_s for block in execution.blocks] == [0, 0, 8]


def test_a_seed_changes_nothing_and_every_policy_trains_the_same(tmp_path: Path) -> None:
    workload = replayed(record_run(tmp_path))
    found = [
        simulate(workload, policy_for(workload, name), seed)
        for name in ("colocate", "elastic")
        for seed in (0, 1)
    ]
    assert found[0].seconds == found[1].seconds
    assert len({round(sum(u.tokens for u in outcome.updates)) for outcome in found}) == 1


def test_what_steps_take_beside_the_work_is_measured(tmp_path: Path) -> None:
    overhead = replayed(record_run(tmp_path)).overhead
    assert overhead is not None
    # The second step's executions start at 100 as well, before the first one's last update.
    assert (overhead.launch_s, overhead.start_s, overhead.seal_s) == (0, 0, 0)


def test_a_launch_after_an_update_is_no_start_beside_another(tmp_path: Path) -> None:
    run = record_run(tmp_path)
    # The first of three updates in a step, and a query that is launched after it.
    update = metrics(0, 0).model_copy(update={"ended_at": 105.0})
    append_line(run.store, run.layout.metrics, encode(update))
    query = query_id(0, QUERIES - 1)
    for member in range(MEMBERS):
        key = run.layout.execution_result(execution_id(query, member))
        late = run.store.read_record(key, ExecutionResult).model_copy(
            update={"started_at": 110.0 + member, "ended_at": 125.0}
        )
        run.store.write_record(key, late)
    overhead = replayed(run).overhead
    assert overhead is not None
    # All others start at once, in two launches; one of them failed and says nothing.
    others = (QUERIES - 1) * MEMBERS - 1 + QUERIES * MEMBERS - 2
    assert overhead.start_s == pytest.approx((MEMBERS - 1) / (MEMBERS - 1 + others))


@pytest.mark.parametrize(("policy", "beside_s"), [("colocate", 4.75), ("elastic", 0.5)])
def test_what_an_update_takes_beside_its_work_is_not_its_wait_for_groups(
    tmp_path: Path, policy: str, beside_s: float
) -> None:
    run = record_run(tmp_path, f"cells.policy={policy}")
    key = run.layout.metrics
    lines = [decode(line, UpdateMetrics) for line in read_lines(run.store, key)]
    run.store.delete(key)
    cells = 2 if policy == "colocate" else 1
    for line, wall_s in zip(lines, (2.5, 2.5, 11.0, 11.0), strict=True):
        changes = {"train_s": wall_s, "busy_s": 2.0 * cells}
        append_line(run.store, key, encode(line.model_copy(update=changes)))
    assert replayed(run).training.update_s == pytest.approx(beside_s)


def test_a_cells_speed_is_found_from_calls_that_overlap() -> None:
    alone_s, slower, prompt_s = 0.02, 0.25, 0.001
    """Seconds a token; each other call adds a quarter of that."""
    calls, begin = [], 0.0
    for together, prompt in ((1, 50), (2, 10), (4, 90), (8, 20), (3, 70)):
        seconds = 30 * alone_s * (1 + slower * (together - 1)) + prompt * prompt_s
        changes = {"started_at": begin, "waited_s": 0.0, "seconds": seconds}
        calls += [call("e", 0, prompt).model_copy(update=changes) for _ in range(together)]
        begin += seconds + 1
    alone, half, prefill = serving_speed(calls)
    assert alone == pytest.approx(1 / alone_s)
    assert half == pytest.approx(1 / slower)
    assert prefill == pytest.approx(1 / prompt_s)
