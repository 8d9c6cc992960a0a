"""A recorded run, repeated under a policy, is the same work in the same order."""

from __future__ import annotations

from pathlib import Path

import pytest

from cells.simulation.compare import policy_for
from cells.simulation.engine import simulate
from cells.simulation.executions import Draws
from cells.simulation.replay import replayed, serving_speed
from tests.cells.simulation.test_recorded import MEMBERS, QUERIES, STEPS, call, record_run


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
