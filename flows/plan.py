"""What a step launches, fixed in storage before its first execution."""

from __future__ import annotations

from storage.layout import query_id
from storage.records import QueryPlan, Split, StepPlan
from storage.run import Run
from tasks.problems.source import make_source, step_problems


def step_plan(run: Run, step: int, policy_version: int) -> StepPlan:
    """The plan of ``step``: made once, with the version that serves it, then always the same."""
    key = run.layout.step_plan(step)
    if not run.store.exists(key):
        source = make_source(run.config.problems)
        count = run.config.rollout.queries
        problems = step_problems(source, step, count, run.config.seed)
        queries = tuple(
            QueryPlan(
                query_id=query_id(step, index),
                problem_id=problem,
                split=Split.TRAIN,
                group_size=run.config.rollout.group_size,
            )
            for index, problem in enumerate(problems)
        )
        plan = StepPlan(step=step, policy_version=policy_version, queries=queries)
        run.store.write_record_once(key, plan)
    return run.store.read_record(key, StepPlan)
