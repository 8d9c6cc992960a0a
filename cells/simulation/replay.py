"""A recorded run again under any policy: its own executions, call by call, in their order.

Where `workload_from_run` describes a run, so that more like it can be drawn, this repeats it, with
what the run shows of a cell's speed and of what a step takes beside rollouts and training.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from cells.simulation.recorded import (
    Recording,
    read_recording,
    trained_together,
    workload_from_run,
)
from cells.simulation.workload import (
    Origin,
    OverheadModel,
    ReplayedExecution,
    ReplayedExecutions,
    Source,
    TrainingModel,
    Workload,
)
from storage.journal import read_journal
from storage.layout import execution_id
from storage.records import (
    Call,
    ExecutionOutcome,
    ExecutionResult,
    QueryPlan,
    StepPlan,
    UpdateMetrics,
    decode,
)
from storage.run import Run
from storage.samples import read_header

_NONE = 1e6
"""How many times less than an output token takes what takes no time."""

_Made = tuple[tuple[ExecutionResult, tuple[Call, ...]], ...]
"""The executions of a query, each with its calls."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A step's executions with their calls, by query, and what its groups took to be sealed."""

    queries: tuple[_Made, ...]
    seals_s: tuple[float, ...]
    updates: tuple[UpdateMetrics, ...]

    @property
    def starts(self) -> list[float]:
        return sorted(result.started_at for query in self.queries for result, _ in query)

    @property
    def events(self) -> list[float]:
        """What the next step may have waited for: ends of executions and updates."""
        ended = [result.ended_at for query in self.queries for result, _ in query]
        return sorted([*ended, *(update.ended_at for update in self.updates)])


def replayed(run: Run) -> Workload:
    """The workload that repeats a recorded run.

    Cells that train together, as under colocate, show the training speed best: record that.

    Raises:
        RecordedRunError: if no execution has ended, or nothing was called or trained.
    """
    described = workload_from_run(run)
    recording = read_recording(run)
    steps = _steps(run, recording)
    calls = [call for step in steps for query in step.queries for _, made in query for call in made]
    alone, half, prefill = serving_speed(calls)
    note = f"run {run.run_id}"
    measured = Source(origin=Origin.MEASURED, note=note)
    fitted = Source(origin=Origin.MEASURED, note=f"{note}, least squares over its calls")
    overhead = _overhead(steps)
    queries = tuple(tuple(_again(*one) for one in query) for s in steps for query in s.queries)
    serving = described.serving.model_copy(
        update={
            "decode_tokens_per_s": alone,
            "half_concurrency": half,
            "prefill_tokens_per_s": prefill,
        }
    )
    training = _training(described.training, recording, trained_together(run.config))
    sources = {k: v for k, v in described.sources.items() if not k.startswith("durations.")}
    sources |= {
        "durations.queries": measured,
        "training.update_s": measured,
        "serving.decode_tokens_per_s": fitted,
        "serving.half_concurrency": fitted,
        "serving.prefill_tokens_per_s": fitted,
        **{f"overhead.{name}": measured for name in OverheadModel.model_fields},
    }
    data = described.model_dump() | {
        "durations": ReplayedExecutions(queries=queries).model_dump(),
        "serving": serving.model_dump(),
        "training": training.model_dump(),
        "overhead": overhead.model_dump(),
        "sources": {name: source.model_dump() for name, source in sources.items()},
    }
    return Workload.model_validate(data)


def _training(described: TrainingModel, recording: Recording, cells: int) -> TrainingModel:
    """A replica's speed in its micro-steps, and what an update takes beside them.

    Where one cell trains while the others serve, many updates also wait for their groups: there the
    lower quartile tells what one takes that does not.
    """
    updates = recording.updates
    busy = [update.busy_s for update in updates if update.busy_s]
    if len(busy) < len(updates):  # recorded by an older version
        return described
    wall = [update.train_s for update in updates]
    besides = [took - work / cells for took, work in zip(wall, busy, strict=True)]
    beside = fmean(besides) if cells > 1 else float(np.quantile(besides, 0.25))
    return described.model_copy(
        update={
            "tokens_per_s": described.tokens_per_s * cells * sum(wall) / sum(busy),
            "update_s": max(beside, 0.0),
        }
    )


def serving_speed(calls: Sequence[Call]) -> tuple[float, float, float]:
    """Output tokens per second of a call alone on its cell, half concurrency, prompt tokens/s.

    Least squares of a call's seconds = outputs (a + b n) + prompt c, with the mean number n of
    others on its cell while it ran. Where others or the prompt make no call longer, b or c is next
    to nothing.
    """
    outputs = np.array([len(call.output_ids) for call in calls], float)
    prompts = np.array([len(call.new_ids) for call in calls], float)
    seconds = np.array([_served_s(call) for call in calls])
    columns = {"alone": outputs, "beside": outputs * _others(calls), "prompt": prompts}
    while True:
        table = np.column_stack(list(columns.values()))
        found = dict(zip(columns, np.linalg.lstsq(table, seconds)[0].tolist(), strict=True))
        below = [name for name in ("prompt", "beside") if found.get(name, 0.0) < 0]
        if not below:
            break
        del columns[below[0]]
    alone = max(found["alone"], 1e-6)
    beside, prompt = (max(found.get(name, 0.0), alone / _NONE) for name in ("beside", "prompt"))
    return 1 / alone, alone / beside, 1 / prompt


def _others(calls: Sequence[Call]) -> NDArray[np.float64]:
    """How many other calls ran on a call's cell beside it, on average."""
    begun = np.array([call.started_at + call.waited_s for call in calls])
    ended = begun + np.array([_served_s(call) for call in calls])
    found = np.zeros(len(calls))
    cells = np.array([call.cell for call in calls])
    for cell in set(cells.tolist()):
        here = cells == cell
        times = np.sort(np.concatenate([begun[here], ended[here]]))
        begins, ends = np.sort(begun[here]), np.sort(ended[here])
        running = np.searchsorted(begins, times, "right") - np.searchsorted(ends, times, "right")
        area = np.concatenate([[0.0], np.cumsum(running[:-1] * np.diff(times))])
        beside = np.interp(ended[here], times, area) - np.interp(begun[here], times, area)
        found[here] = beside / (ended[here] - begun[here]) - 1
    return np.maximum(found, 0.0)


def _served_s(call: Call) -> float:
    return max(call.seconds - call.waited_s, 1e-3)


def _again(result: ExecutionResult, calls: Sequence[Call]) -> ReplayedExecution:
    """Its calls, and between them the time that was neither a call nor a wait for a place."""
    rows: list[tuple[float, float, float]] = []
    prompt = output = 0
    last = result.started_at
    for call in calls:
        rows.append((prompt, output, max(call.started_at - last, 0.0)))
        prompt, output = len(call.new_ids), len(call.output_ids)
        last = call.started_at + call.seconds
    rows.append((prompt, output, max(result.ended_at - last, 0.0)))
    timed_out = result.outcome is ExecutionOutcome.TIMED_OUT
    return ReplayedExecution(calls=tuple(rows), timed_out=timed_out)


def _overhead(steps: Sequence[_Step]) -> OverheadModel:
    gaps = [
        after.starts[0] - max(time for time in before.events if time <= after.starts[0])
        for before, after in pairwise(steps)
        if before.events[0] <= after.starts[0]
    ]
    # Groups that are carried over are launched after each update, also within a step.
    published = sorted(update.ended_at for step in steps for update in step.updates)
    between = [
        after - before
        for step in steps
        for before, after in pairwise(step.starts)
        if bisect(published, before) == bisect(published, after)
    ]
    seals = [seconds for step in steps for seconds in step.seals_s]
    return OverheadModel(
        launch_s=fmean(gaps) if gaps else 0.0,
        start_s=fmean(between) if between else 0.0,
        seal_s=fmean(seals) if seals else 0.0,
    )


def _steps(run: Run, recording: Recording) -> list[_Step]:
    found: list[_Step] = []
    for step in sorted({update.step for update in recording.updates}):
        plan = run.store.read_record(run.layout.step_plan(step), StepPlan)
        made = {query.query_id: tuple(_executions(run, query)) for query in plan.queries}
        found.append(
            _Step(
                queries=tuple(one for one in made.values() if one),
                seals_s=tuple(_seals(run, made)),
                updates=tuple(update for update in recording.updates if update.step == step),
            )
        )
    return found


def _seals(run: Run, made: Mapping[str, _Made]) -> Iterable[float]:
    for query, executions in made.items():
        key = run.layout.group(query)
        if executions and run.store.exists(key):
            ended = max(result.ended_at for result, _ in executions)
            yield max(read_header(run.store, key).sealed_at - ended, 0.0)


def _executions(run: Run, query: QueryPlan) -> Iterable[tuple[ExecutionResult, tuple[Call, ...]]]:
    for member in range(query.group_size):
        name = execution_id(query.query_id, member)
        key = run.layout.execution_result(name)
        if not run.store.exists(key):
            continue
        result = run.store.read_record(key, ExecutionResult)
        if result.outcome is ExecutionOutcome.HOST_FAILED:
            continue
        lines = read_journal(run.store, run.layout.calls(name))
        made = sorted((decode(line, Call, name) for line in lines), key=lambda c: c.started_at)
        yield result, tuple(made)
