"""The Prefect task of the long-running cell manager."""

from __future__ import annotations

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from cells.board import Board
from cells.client import DaemonClient
from cells.decisions import Decision
from cells.manager import Manager
from cells.scheduler import Policy, make_policy
from configs.cells import PolicyName
from configs.run import RunConfig
from storage.run import open_run


@task(
    name="manage_cells",
    task_run_name="manage_cells",
    cache_policy=NO_CACHE,
    persist_result=False,
)
def manage_cells(
    root: str,
    run_id: str,
    step: int,
    epoch: int,
    board: Board,
    cells: dict[str, DaemonClient],
    gateway: DaemonClient,
) -> None:
    """Move cells as the policy decides until the board is stopped."""
    run = open_run(root, run_id)
    logger = get_run_logger()

    def report(decision: Decision) -> None:
        failed = f", failed: {decision.failed}" if decision.failed else ""
        logger.info(
            "%s to %s in %.2f s: %s%s",
            decision.cell,
            decision.to,
            decision.seconds,
            decision.reason,
            failed,
        )

    Manager(
        store=run.store,
        layout=run.layout,
        config=run.config,
        cells=cells,
        gateway=gateway,
        policy=policy_of(run.config),
        board=board,
        step=step,
        epoch=epoch,
        report=report,
    ).run()


def policy_of(config: RunConfig) -> Policy:
    """The policy of a run, with its settings."""
    cells = config.cells
    if cells.policy is PolicyName.ELASTIC:
        return make_policy(cells.policy, **cells.elastic.model_dump())
    if cells.policy is PolicyName.ADAPTIVE:
        return make_policy(
            cells.policy,
            max_staleness=config.staleness.max,
            dwell_s=cells.elastic.dwell_s,
            headroom=cells.elastic.headroom,
            **cells.adaptive.model_dump(),
        )
    if cells.policy is PolicyName.ASYNC:
        return make_policy("async_streaming", training_cells=cells.training_cells)
    return make_policy(cells.policy)
