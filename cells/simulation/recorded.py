"""A workload out of a recorded run: what it measured, and assumptions where it says nothing."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from cells.decisions import Decision
from cells.scheduler import Role
from cells.simulation.workload import Workload
from configs.run import RunConfig
from storage.journal import read_journal, read_lines
from storage.layout import execution_id
from storage.records import (
    Call,
    ExecutionOutcome,
    ExecutionResult,
    StepPlan,
    UpdateMetrics,
    decode,
)
from storage.run import Run

_DECODES_PER_PREFILL = 10.0
_HALF_CONCURRENCY = 13.4


class RecordedRunError(ValueError):
    """The run holds too little to be simulated; the text says what is missing."""


@dataclass(frozen=True, slots=True)
class Recording:
    """What is read from a run: ended executions with their problems, calls, updates, switches."""

    executions: tuple[tuple[str, ExecutionResult], ...]
    calls: tuple[Call, ...]
    updates: tuple[UpdateMetrics, ...]
    decisions: tuple[Decision, ...]

    @property
    def active_s(self) -> float:
        """Seconds of all executions without their waiting."""
        return sum(active_seconds(result) for _, result in self.executions)

    @property
    def serving_s(self) -> float:
        """Seconds of all calls without their waiting."""
        return sum(max(call.seconds - call.waited_s, 0.0) for call in self.calls)

    def switch_s(self, to: Role) -> float:
        """Mean seconds of the moves to a role; zero if there was none."""
        seconds = [d.seconds for d in self.decisions if d.to == to.value and not d.failed]
        return fmean(seconds) if seconds else 0.0


@dataclass(frozen=True, slots=True)
class RecordedTimes:
    """Seconds of a run, to set beside the simulated ones.

    `wall_s` goes from the start of the first execution to the end of the last update. What it has
    beyond the other three, where these do not overlap, the simulation does not know: scoring, the
    building of samples, and the start of a step.
    """

    policy: str
    wall_s: float
    rollout_s: float
    train_s: float
    switch_s: float


def recorded_times(run: Run) -> RecordedTimes:
    """The seconds that the run recorded of itself.

    Raises:
        RecordedRunError: if no execution has ended, or nothing was called or trained.
    """
    recording = read_recording(run)
    updates = recording.updates
    began = min(result.started_at for _, result in recording.executions)
    return RecordedTimes(
        policy=run.config.cells.policy.value,
        wall_s=max(update.ended_at for update in updates) - began,
        rollout_s=sum(update.rollout_s for update in updates),
        train_s=sum(update.train_s for update in updates),
        switch_s=sum(update.switch_s for update in updates),
    )


def active_seconds(result: ExecutionResult) -> float:
    """How long an execution ran, without its waiting in the gateway."""
    return max(result.ended_at - result.started_at - result.waited_s, 1e-3)


def workload_from_run(run: Run) -> Workload:
    """The workload that a recorded run amounts to.

    Raises:
        RecordedRunError: if no execution has ended, or nothing was called or trained.
    """
    recording = read_recording(run)
    return Workload.model_validate(_settings(run.run_id, run.config, recording))


def read_recording(run: Run) -> Recording:
    """Read the executions of every step that trained something."""
    store, layout = run.store, run.layout
    updates = tuple(
        decode(line, UpdateMetrics, layout.metrics) for line in read_lines(store, layout.metrics)
    )
    executions: list[tuple[str, ExecutionResult]] = []
    calls: list[Call] = []
    for step in sorted({update.step for update in updates}):
        for query in store.read_record(layout.step_plan(step), StepPlan).queries:
            for member in range(query.group_size):
                name = execution_id(query.query_id, member)
                if not store.exists(layout.execution_result(name)):
                    continue
                result = store.read_record(layout.execution_result(name), ExecutionResult)
                if result.outcome is ExecutionOutcome.HOST_FAILED:
                    continue
                executions.append((query.problem_id, result))
                lines = read_journal(store, layout.calls(name))
                calls.extend(decode(line, Call, name) for line in lines)
    if not executions or not calls or not updates:
        raise RecordedRunError(
            f"run {run.run_id} has {len(executions)} ended executions, {len(calls)} model calls "
            f"and {len(updates)} updates; a simulation needs at least one of each"
        )
    lines = read_journal(store, layout.decisions)
    decisions = tuple(decode(line, Decision, layout.decisions) for line in lines)
    return Recording(tuple(executions), tuple(calls), updates, decisions)


def _settings(name: str, config: RunConfig, recording: Recording) -> dict[str, Any]:
    """The workload file that the recording amounts to, sources included."""
    settings: dict[str, dict[str, Any]] = {
        "durations": {"kind": "recorded", "seconds": _durations(recording)},
        "execution": _execution(config, recording),
        "serving": _serving(config, recording),
        "training": _training(config, recording),
        "cells": _cells(config, recording),
        "batch": _batch(config, recording),
    }
    sources = {
        f"{part}.{key}": {"origin": "measured", "note": f"run {name}"}
        for part, values in settings.items()
        for key in values
        if key != "kind"
    }
    for key, note in _ASSUMED.items():
        sources[key] = {"origin": "assumed", "note": note}
    return {"name": name, **settings, "sources": sources}


_ASSUMED = {
    "serving.half_concurrency": "a small server went from 450 tokens/s for one to 3,400 for 16",
    "serving.prefill_tokens_per_s": "ten times the speed of decoding; a call records their sum",
    "serving.kv_kept_on_reroute": "none: the conservative end",
    "training.update_s": "zero: the recorded training time includes it",
    "training.pull_s": "zero: the recorded switch time includes it",
    "cells.async_training_cells": "half of the cells",
    "batch.async_launch": "a run launches step by step",
}


def _durations(recording: Recording) -> dict[str, list[float]]:
    durations: dict[str, list[float]] = defaultdict(list)
    for problem, result in recording.executions:
        durations[problem].append(active_seconds(result))
    return durations


def _execution(config: RunConfig, recording: Recording) -> dict[str, float]:
    first = [len(call.new_ids) for call in recording.calls if call.parent is None]
    new = [len(call.new_ids) for call in recording.calls if call.parent is not None]
    outputs = sum(len(call.output_ids) for call in recording.calls)
    return {
        "timeout_s": config.rollout.limit_s,
        "block_s": recording.active_s / len(recording.calls),
        "tool_share": max(0.0, 1 - recording.serving_s / recording.active_s),
        "prompt_per_output": sum(new) / max(outputs, 1),
        "first_prompt_tokens": fmean(first) if first else 0.0,
    }


def _serving(config: RunConfig, recording: Recording) -> dict[str, float]:
    rollout_s = sum(update.rollout_s for update in recording.updates)
    together = recording.serving_s / max(rollout_s, 1e-3) / len(config.cells.cells)
    requests = max(1.0, together)
    outputs = sum(len(call.output_ids) for call in recording.calls)
    prompts = sum(len(call.new_ids) for call in recording.calls)
    work = outputs + prompts / _DECODES_PER_PREFILL
    observed = max(work, 1.0) / max(recording.serving_s, 1e-3)
    alone = observed * (1 + (requests - 1) / _HALF_CONCURRENCY)
    return {
        "decode_tokens_per_s": alone,
        "half_concurrency": _HALF_CONCURRENCY,
        "prefill_tokens_per_s": alone * _DECODES_PER_PREFILL,
        "kv_kept_on_reroute": 0.0,
        "nominal_requests": requests,
    }


def _training(config: RunConfig, recording: Recording) -> dict[str, float]:
    """A replica's speed, in tokens as the simulation counts them: the whole of each execution."""
    tokens = sum(len(call.new_ids) + len(call.output_ids) for call in recording.calls)
    seconds = sum(update.train_s for update in recording.updates)
    groups = len(recording.updates) * _queries_per_update(config)
    packed = sum(update.trained_tokens for update in recording.updates)
    micro_steps = packed / config.training.micro_step_tokens / groups
    return {
        "tokens_per_s": tokens / max(seconds, 1e-3) / trained_together(config),
        "micro_steps_per_group": max(1, round(micro_steps)),
        "update_s": 0.0,
        "pull_s": 0.0,
    }


def _cells(config: RunConfig, recording: Recording) -> dict[str, float]:
    count = len(config.cells.cells)
    return {
        "count": count,
        "capacity": config.cells.executions_per_cell
        or max(1, config.cells.kv_tokens // config.model.context),
        "async_training_cells": max(1, count // 2),
        "to_training_s": recording.switch_s(Role.TRAINING),
        "to_rollout_s": recording.switch_s(Role.ROLLOUT),
        "decide_every_s": config.cells.decide_every_s,
    }


def _batch(config: RunConfig, recording: Recording) -> dict[str, Any]:
    burst = config.training.updates_per_step
    steps = max(1, len(recording.updates) // burst)
    return {
        "updates": steps * burst,
        "updates_per_burst": burst,
        "queries_per_update": _queries_per_update(config),
        "executions_per_query": config.rollout.group_size,
        "async_launch": "steps",
    }


def _queries_per_update(config: RunConfig) -> int:
    return max(1, config.rollout.queries // config.training.updates_per_step)


def trained_together(config: RunConfig) -> int:
    """Cells that trained together in the recorded run; a lower bound for the elastic policy."""
    return len(config.cells.cells) if config.cells.policy.value == "colocate" else 1
