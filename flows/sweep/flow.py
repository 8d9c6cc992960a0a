"""Flow ``sweep``: a training for each point and seed, a few at a time, and their comparison."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated, Any, cast
from uuid import UUID

from httpx import HTTPError
from prefect import flow, get_run_logger
from prefect.artifacts import create_markdown_artifact
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import FlowRun, State
from prefect.deployments import run_deployment
from prefect.exceptions import PrefectException
from prefect.runtime import flow_run
from prefect.states import AwaitingRetry, Cancelled, Cancelling
from pydantic import Field

from configs.run import RunConfig
from flows.form import EMPTY, QUICKSTART, Preset, Settings, overrides_of
from flows.history import evaluations_of
from flows.roots import absolute_root
from flows.sweep.page import difference_table, point_columns, point_rows, render
from flows.sweep.plan import Axis, PointRun, SweepPlan, keep_plan, make_plan, page_key
from flows.sweep.results import Results, is_done, read_results, verdict_line
from flows.sweep.share import check_source, share_first_step
from storage.objects import Store
from storage.run import Run, create_run, open_run

DEPLOYMENT = "train/train"
_POLL_S = 3.0
_SILENCE_S = 120.0
_DELETED: State[Any] = Cancelled(name="Deleted", message="the flow run is not there any more")


class SweepError(RuntimeError):
    """Runs of the sweep have not completed; the others are compared."""


@flow(name="sweep", flow_run_name="sweep {name}", persist_result=True)
def sweep(
    name: str,
    parameters: list[Axis],
    seeds: Annotated[int, Field(ge=1, le=64)] = 1,
    parallel: Annotated[int, Field(ge=1, le=64)] = 1,
    preset: Preset = QUICKSTART,
    settings: Settings = EMPTY,
    config: str = "",
    overrides: tuple[str, ...] = (),
    from_run: str = "",
    root: str = ".gyre",
) -> str:
    """Train every point of a grid of settings with every seed, and compare them.

    All points are checked before the first one starts. Runs that an earlier attempt, or a sweep of
    the same name and points, has done are kept. Returns the key of the page.

    Args:
        name: of the sweep; its runs are named after it. Small letters, digits, dashes.
        parameters: the settings that are varied, with their values.
        seeds: runs of each point.
        parallel: trainings at once; the work pool may allow fewer.
        preset: what all points start from.
        settings: changes of it for all points.
        config: absolute path of a YAML file that takes the preset's place.
        overrides: any settings over all these, each `dotted.key=value`.
        from_run: a run whose first rollouts and verdicts all points train their first step on, and
            whose settings are the base; for parameters that do not touch rollouts.
        root: folder or URL of the storage.
    """
    root = absolute_root(root)
    store = Store(root)
    source = open_run(root, from_run) if from_run else None
    if source is not None:
        check_source(source)
    changes = [*overrides_of(settings), *overrides]
    base = config or preset.value
    plan, configs = make_plan(name, parameters, seeds, base, changes, root, source)
    keep_plan(store, plan)
    ended = _Trainings(plan, configs, root, source).run_all(parallel)
    results = publish(store, plan)
    get_run_logger().info("%s", verdict_line(results))
    lost = [run_id for run_id, state in ended.items() if not state.is_completed()]
    if lost:
        raise SweepError(
            f"{len(lost)} of {len(plan.runs)} runs have not completed: {', '.join(lost)}. Mend "
            f"what failed and retry the sweep: only these are run again"
        )
    return page_key(name)


def publish(store: Store, plan: SweepPlan) -> Results:
    """Write the page of a sweep and, inside a flow run, its artifact; what it has shown so far."""
    results = read_results(store, plan)
    store.write(page_key(plan.name), render(results).encode())
    if flow_run.id is not None:
        create_markdown_artifact(
            key=f"sweep-{plan.name}", markdown=markdown(results), description=verdict_line(results)
        )
    return results


def markdown(results: Results) -> str:
    """The tables of a sweep, for the Prefect UI."""
    parts = [f"# {results.plan.name}", verdict_line(results), "## Points"]
    parts.append(_markdown_table(point_columns(results), point_rows(results)))
    if results.differences:
        parts += ["## Differences", _markdown_table(*difference_table(results))]
    if results.plan.from_run:
        parts.append(f"The first step of all runs trains the rollouts of {results.plan.from_run}.")
    return "\n\n".join(parts)


def _markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


class _Trainings:
    """The runs of a sweep: made, started a few at a time, and watched to their end."""

    def __init__(
        self, plan: SweepPlan, configs: dict[str, RunConfig], root: str, source: Run | None
    ) -> None:
        self._plan = plan
        self._configs = configs
        self._root = root
        self._source = source
        self._log = get_run_logger()
        self._alive: dict[UUID, str] = {}
        """Run ids by flow run."""
        self._ended: dict[str, State[Any]] = {}

    def run_all(self, parallel: int) -> dict[str, State[Any]]:
        """The last state of each that was started. Cancelled, it cancels those that run."""
        waiting = [one for one in reversed(self._plan.runs) if not self._done(one)]
        kept = len(self._plan.runs) - len(waiting)
        self._log.info("%d trainings to run, %d are done already", len(waiting), kept)
        with get_client(sync_client=True) as client:
            try:
                while waiting or self._alive:
                    while waiting and len(self._alive) < parallel:
                        self._start(client, waiting.pop())
                    if self._look(client):
                        publish(Store(self._root), self._plan)
                    time.sleep(_POLL_S)
            except BaseException:
                self._cancel(client)
                raise
        return self._ended

    def _done(self, one: PointRun) -> bool:
        store = Store(self._root)
        if one.run_id not in store.children("runs"):
            return False
        run = open_run(self._root, one.run_id)
        return is_done(run, evaluations_of(run))

    def _start(self, client: SyncPrefectClient, one: PointRun) -> None:
        """The training's flow run; after an earlier attempt at the sweep, that one's."""
        run = create_run(self._root, one.run_id, self._configs[one.run_id])
        if self._source is not None:
            share_first_step(self._source, run)
        point = self._plan.points[one.point]
        keys = (axis.key for axis in self._plan.axes)
        tags = [f"{key}={value}" for key, value in zip(keys, point.values, strict=True)]
        made = cast(  # a coroutine only inside an event loop
            FlowRun,
            run_deployment(
                DEPLOYMENT,
                parameters={"run_id": one.run_id, "root": self._root},
                flow_run_name=f"train {one.run_id}",
                tags=[f"sweep:{self._plan.name}", *tags, f"seed={one.seed}"],
                idempotency_key=f"sweep {run.identity}",
                timeout=0,
                as_subflow=False,
            ),
        )
        found = client.read_flow_run(made.id)
        if found.state is not None and found.state.is_final():
            again: State[Any] = AwaitingRetry(scheduled_time=datetime.now(UTC))
            client.set_flow_run_state(found.id, again)
        self._alive[found.id] = one.run_id
        self._log.info("%s, seed %d: run %s", point.label, one.seed, one.run_id)

    def _look(self, client: SyncPrefectClient) -> bool:
        """Whether any has ended since the last look, or was deleted in Prefect."""
        which = FlowRunFilter(id=FlowRunFilterId(any_=list(self._alive)))
        states = {found.id: found.state for found in _patiently(client, which)}
        over = False
        for flow_run_id, run_id in list(self._alive.items()):
            state = states.get(flow_run_id, _DELETED)
            if state is not None and state.is_final():
                del self._alive[flow_run_id]
                self._ended[run_id] = state
                self._log.info("run %s: %s", run_id, state.name)
                over = True
        return over

    def _cancel(self, client: SyncPrefectClient) -> None:
        for found in self._alive:
            with suppress(HTTPError, PrefectException):
                state = client.read_flow_run(found).state
                begun = state is not None and (state.is_running() or state.is_pending())
                ending: State[Any] = Cancelling() if begun else Cancelled()
                client.set_flow_run_state(found, ending, force=True)


def _patiently(client: SyncPrefectClient, which: FlowRunFilter) -> list[FlowRun]:
    """The flow runs; asked again while the server is silent, for two minutes at most."""
    deadline = time.monotonic() + _SILENCE_S
    while True:
        try:
            return client.read_flow_runs(flow_run_filter=which)
        except (HTTPError, PrefectException):
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_S)
