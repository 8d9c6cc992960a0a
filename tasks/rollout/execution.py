"""One execution from its specification to its result."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from configs.problems import RolloutConfig
from storage.layout import RunLayout
from storage.objects import Store
from storage.records import ExecutionOutcome, ExecutionResult, ExecutionSpec
from tasks.problems.source import Problem, ProblemSource
from tasks.rollout.clock import ExecutionClock
from tasks.rollout.harness_process import HarnessProcess
from tasks.rollout.harnesses.launch import Command, Harness
from tasks.rollout.sandboxes.sandbox import ProcessLimits, Room, Sandbox
from tasks.rollout.sessions import Endpoint, GatewayError, GatewaySessions, Usage
from tasks.rollout.snapshot import Snapshot, freeze, remove_tree

_LOG_TAIL_BYTES = 2000
_SHORTEST_WAIT_S = 0.05


@dataclass(frozen=True)
class Surroundings:
    """What all executions of a host share."""

    store: Store
    layout: RunLayout
    config: RolloutConfig
    source: ProblemSource
    sessions: GatewaySessions
    sandbox: Sandbox
    harness: Harness
    scratch: Path


@dataclass(frozen=True)
class _End:
    """How the harness ended. ``exit_code`` is None when its time was up."""

    exit_code: int | None
    started_at: float
    ended_at: float


async def carry_out(spec: ExecutionSpec, around: Surroundings) -> ExecutionResult:
    """Run an execution from scratch and freeze what it leaves.

    Whatever fails on our side becomes a result that says so. A cancellation ends the harness and
    leaves no result. Neither leaves a process or a folder behind.
    """
    folder = around.scratch / spec.execution_id
    started_at = time.time()
    try:
        return await _attempt(spec, around, folder)
    except Exception as error:  # noqa: BLE001  (our side failed, in whatever way)
        detail = f"{type(error).__name__}: {error}"
        return _result(
            spec, ExecutionOutcome.HOST_FAILED, _End(None, started_at, time.time()), detail
        )
    finally:
        await asyncio.shield(asyncio.to_thread(remove_tree, folder))


async def _attempt(spec: ExecutionSpec, around: Surroundings, folder: Path) -> ExecutionResult:
    sessions, name = around.sessions, spec.execution_id
    if await asyncio.to_thread(_has_leftovers, around, name):
        # An attempt that no result came of: its calls belong to a workspace that is lost.
        await sessions.forget(name)
        await asyncio.to_thread(around.store.delete, around.layout.execution(name))
    endpoint = await sessions.open(name, spec.temperature, spec.policy_version)
    try:
        command = await asyncio.to_thread(_prepare, spec, around, folder, endpoint)
        end = await _run(spec, around, folder, command)
    except BaseException:
        with suppress(GatewayError):
            await sessions.close(name)
        raise
    limit_bytes = int(around.config.workspace_limit_mb * 1e6)
    usage, frozen = await asyncio.gather(
        sessions.close(name), asyncio.to_thread(freeze, folder / "workspace", limit_bytes)
    )
    log = await asyncio.to_thread(_tail, folder / "harness.log")
    failure = _failure(around, end, usage)
    if failure:
        detail = f"{failure}; the harness's log ends: {log}"
        return _result(spec, ExecutionOutcome.HOST_FAILED, end, detail, usage)
    key = around.layout.workspace(name)
    await asyncio.to_thread(around.store.write, key, frozen.data)
    timed_out = end.exit_code is None
    outcome = ExecutionOutcome.TIMED_OUT if timed_out else ExecutionOutcome.COMPLETED
    return _result(spec, outcome, end, _detail(end, frozen, log), usage, key)


async def _run(spec: ExecutionSpec, around: Surroundings, folder: Path, command: Command) -> _End:
    """Let the harness work until it ends or its time is up. Nothing of it is left afterwards."""
    config = around.config
    room = Room(
        folder=folder,
        readable=command.readable,
        network=True,
        limits=_limits(config),
    )
    started_at = time.time()
    clock = ExecutionClock(config.clock, config.limit_s, time.monotonic())
    process = await HarnessProcess.start(
        command.argv, command.environment, folder / "harness.log", around.sandbox, room
    )
    try:
        exit_code = await _until_limit(spec, around, process, clock)
        ended_at = time.time()
    finally:
        await asyncio.shield(process.end(config.kill_after_s))
    return _End(exit_code, started_at, ended_at)


async def _until_limit(
    spec: ExecutionSpec, around: Surroundings, process: HarnessProcess, clock: ExecutionClock
) -> int | None:
    waited_s = 0.0
    while (left_s := clock.left_s(time.monotonic(), waited_s)) > 0:
        exit_code = await process.exit_code(max(left_s, _SHORTEST_WAIT_S))
        if exit_code is not None:
            return exit_code
        waited_s = (await around.sessions.usage(spec.execution_id)).waited_s
    return await process.exit_code(0)  # it may have ended while the gateway was asked


def _limits(config: RolloutConfig) -> ProcessLimits:
    return ProcessLimits(
        memory_mb=config.memory_mb,
        file_mb=max(1, int(config.workspace_limit_mb)),
        cpu_s=int(config.limit_s) + int(config.kill_after_s) + 1,
    )


def _has_leftovers(around: Surroundings, name: str) -> bool:
    return bool(around.store.children(around.layout.execution(name)))


def _prepare(
    spec: ExecutionSpec, around: Surroundings, folder: Path, endpoint: Endpoint
) -> Command:
    """Make the execution's folder and the command that works in it."""
    problem = around.source.load(spec.problem_id)
    _furnish(folder, problem)
    return around.harness.command(problem, endpoint, folder)


def _furnish(folder: Path, problem: Problem) -> None:
    """Make the execution's folder with the problem's files in its workspace."""
    remove_tree(folder)
    workspace = folder / "workspace"
    workspace.mkdir(parents=True, mode=0o700)
    for name, text in problem.files.items():
        path = workspace / name
        if Path(name).is_absolute() or ".." in path.parts:
            raise ValueError(f"{problem.problem_id}: file {name!r} lies outside of the workspace")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _failure(around: Surroundings, end: _End, usage: Usage) -> str:
    """Why the end of the harness is our fault; empty when it is not."""
    if end.exit_code is None or end.exit_code == 0:
        return ""
    if end.exit_code == around.harness.unavailable_code:
        return "the model was unavailable"
    if usage.calls == 0:
        return f"the harness ended with code {end.exit_code} before its first call"
    return ""


def _detail(end: _End, frozen: Snapshot, log: str) -> str:
    lines = [f"log: {log}"] if end.exit_code else []
    lines += [f"left out of the workspace: {'; '.join(frozen.left_out)}"] * bool(frozen.left_out)
    return "\n".join(lines)


def _tail(log: Path) -> str:
    with open(log, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_TAIL_BYTES))
        return file.read(_LOG_TAIL_BYTES).decode("utf-8", "replace").strip()


def _result(
    spec: ExecutionSpec,
    outcome: ExecutionOutcome,
    end: _End,
    detail: str,
    usage: Usage | None = None,
    workspace_key: str | None = None,
) -> ExecutionResult:
    return ExecutionResult(
        execution_id=spec.execution_id,
        query_id=spec.query_id,
        outcome=outcome,
        started_at=end.started_at,
        ended_at=end.ended_at,
        waited_s=usage.waited_s if usage else 0.0,
        exit_code=end.exit_code,
        calls=usage.calls if usage else 0,
        workspace_key=workspace_key,
        detail=detail,
    )
