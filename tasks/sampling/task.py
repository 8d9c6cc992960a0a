"""The Prefect task that seals a group."""

from __future__ import annotations

from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from storage.layout import execution_id
from storage.records import QueryPlan
from storage.run import open_run
from tasks.rollout.group import find_result
from tasks.sampling.group import build_group
from tasks.scoring.verdicts import newest_verdict
from tasks.training.feed import GroupFeed


@task(name="build_samples", task_run_name="samples {query.query_id}", cache_policy=NO_CACHE)
def build_samples(
    root: str, run_id: str, step: int, query: QueryPlan, feed: GroupFeed, settled: list[Any]
) -> str:
    """Seal a query's group from the results and verdicts in storage, and tell the training.

    Args:
        settled: the scores' futures; only waited for. What they left is read from storage, and
            an execution whose score failed for good has no verdict there: it is excluded.
    """
    run = open_run(root, run_id)
    names = [execution_id(query.query_id, member) for member in range(query.group_size)]
    results = {name: find_result(run, name) for name in names}
    verdicts = {name: newest_verdict(run.store, run.layout, name) for name in names}
    group = build_group(
        run.store,
        run.layout,
        run.config,
        query,
        step,
        {name: result for name, result in results.items() if result is not None},
        {name: verdict for name, verdict in verdicts.items() if verdict is not None},
    )
    feed.put(query.query_id)
    header = group.header
    get_run_logger().debug("sealed %s: %d samples", header.query_id, len(group.samples))
    return run.layout.group(query.query_id)
