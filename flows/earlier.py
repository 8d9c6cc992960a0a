"""What earlier attempts at a run left in Prefect: runs that say they run, and nobody runs them."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterName,
    FlowRunFilterParentFlowRunId,
    FlowRunFilterState,
    FlowRunFilterStateType,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.runtime import flow_run
from prefect.states import Crashed

from storage.run import Run

_PAGE = 200
_ABANDONED = (StateType.RUNNING, StateType.PENDING, StateType.CANCELLING)


def close_earlier(run: Run) -> int:
    """Mark flow and task runs of earlier attempts that never ended as crashed; how many there were.

    To be called when this attempt has taken the run's daemons over and before it submits a task: a
    killed process can't say that it has ended, and its manager would seem to run for ever.
    """
    own = UUID(str(flow_run.id))
    with get_client(sync_client=True) as client:
        attempts = _attempts(client, run)
        ids = [own, *(found.id for found in attempts)]
        tasks = 0
        for first in range(0, len(ids), _PAGE):
            tasks += _close_tasks(client, ids[first : first + _PAGE])
        lost = [
            found
            for found in attempts
            if found.id != own and found.state is not None and found.state.type in _ABANDONED
        ]
        for found in lost:
            client.set_flow_run_state(found.id, _crashed(), force=True)
    return tasks + len(lost)


def close_children(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Hook of a flow that was killed, which its worker calls: see `close_below`."""
    with get_client(sync_client=True) as client:
        close_below(client, flow_run.id)


def close_below(client: SyncPrefectClient, parent: UUID) -> None:
    """Mark the runs that a flow had under way when it was killed as crashed.

    Each would keep its place in the work pool, where a retry of the flow waits for one.
    """
    which = FlowRunFilter(
        parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[parent]),
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=list(_ABANDONED))),
    )
    for found in client.read_flow_runs(flow_run_filter=which):
        client.set_flow_run_state(found.id, _crashed(), force=True)


def _attempts(client: SyncPrefectClient, run: Run) -> list[FlowRun]:
    """Flow runs of trainings of this very run, of its steps, and of evaluations within."""
    like = FlowRunFilter(name=FlowRunFilterName(like_=run.run_id))
    names = {f"train {run.run_id}"}
    names |= {f"{run.run_id} step {step}" for step in range(run.config.training.steps)}
    found: list[FlowRun] = []
    offset = 0
    while page := client.read_flow_runs(flow_run_filter=like, limit=_PAGE, offset=offset):
        offset += len(page)
        found += [one for one in page if one.name in names or _evaluates(one, run)]
    return [one for one in found if one.parameters.get("root", run.store.url) == run.store.url]


def _evaluates(found: FlowRun, run: Run) -> bool:
    return found.name.startswith(f"{run.run_id} evaluate v")


def _close_tasks(client: SyncPrefectClient, flow_runs: list[UUID]) -> int:
    states = TaskRunFilterState(type=TaskRunFilterStateType(any_=list(_ABANDONED)))
    closed: set[UUID] = set()
    while True:
        page = client.read_task_runs(
            flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=flow_runs)),
            task_run_filter=TaskRunFilter(state=states),
            limit=_PAGE,
        )
        left = [found for found in page if found.id not in closed]
        if not left:
            return len(closed)
        for found in left:
            client.set_task_run_state(found.id, _crashed(), force=True)
            closed.add(found.id)


def _crashed() -> State[Any]:
    return Crashed(message="the attempt that ran it has ended without a word")
