"""One execution from its specification to its result."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp

from configs.problems import RolloutConfig
from storage.layout import RunLayout
from storage.objects import Store
from storage.records import ExecutionOutcome, ExecutionResult, ExecutionSpec
from tasks.problems.source import Problem, ProblemSource
from tasks.rollout.clock import ExecutionClock
from tasks.rollout.door import DUMMY_KEY, Door, loopback_listener
from tasks.rollout.harness_process import HarnessProcess
from tasks.rollout.harnesses.command import Harness
from tasks.rollout.sandboxes.limits import Limits
from tasks.rollout.sandboxes.sandbox import INSIDE, PORT, Room, Sandbox, SandboxError
from tasks.rollout.sessions import Endpoint, GatewayError, GatewaySessions, Usage
from tasks.rollout.snapshot import Snapshot, freeze, remove_tree

_LOG_TAIL_BYTES = 2000
_SHORTEST_WAIT_S = 0.05
_LONG_CALL_S = 30.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Surroundings:
    """What all executions of a host share."""

    store: Store
    layout: RunLayout
    config: RolloutConfig
    source: ProblemSource
    sessions: GatewaySessions
    doors: aiohttp.ClientSession
    """From ``tasks.rollout.door.make_client``."""
    sandbox: Sandbox
    harness: Harness
    scratch: Path


@dataclass(frozen=True)
class _End:
    """How the harness ended. ``exit_code`` is None when a limit of time was reached."""

    exit_code: int | None
    started_at: float
    ended_at: float
    limit: str = ""
    """Which limit of time."""


async def carry_out(
    spec: ExecutionSpec, around: Surroundings, finish: asyncio.Event | None = None
) -> ExecutionResult:
    """Run an execution from scratch and freeze what it leaves.

    Whatever fails on our side is tried again ``rollout.retries`` times, then it becomes a result
    that says so. A cancellation ends the harness and leaves no result. Neither leaves a process or
    a folder behind.

    Args:
        finish: when it is set the execution's time is up, whatever its clock says.
    """
    finish = finish or asyncio.Event()
    pause = around.config.retry_delay_s
    for _ in range(around.config.retries):
        result = await _carry_out_once(spec, around, finish)
        if result.outcome is not ExecutionOutcome.HOST_FAILED or finish.is_set():
            return result
        _log.warning("%s: tried again: %s", spec.execution_id, result.detail)
        with suppress(TimeoutError):
            await asyncio.wait_for(finish.wait(), pause)
        pause *= 2
    return await _carry_out_once(spec, around, finish)


async def _carry_out_once(
    spec: ExecutionSpec, around: Surroundings, finish: asyncio.Event
) -> ExecutionResult:
    folder = around.scratch / spec.execution_id
    started_at = time.time()
    try:
        return await _attempt(spec, around, folder, finish)
    except Exception as error:  # noqa: BLE001  (our side failed, in whatever way)
        detail = f"{type(error).__name__}: {error}"
        return _result(
            spec, ExecutionOutcome.HOST_FAILED, _End(None, started_at, time.time()), detail
        )
    finally:
        await asyncio.shield(asyncio.to_thread(remove_tree, folder))


async def _attempt(
    spec: ExecutionSpec, around: Surroundings, folder: Path, finish: asyncio.Event
) -> ExecutionResult:
    sessions, name = around.sessions, spec.execution_id
    if await asyncio.to_thread(_has_leftovers, around, name):
        # An attempt that no result came of: its calls belong to a workspace that is lost.
        await sessions.forget(name)
        await asyncio.to_thread(around.store.delete, around.layout.execution(name))
    endpoint = await sessions.open(name, spec.temperature, spec.policy_version, spec.newer)
    door = Door(endpoint, around.doors)
    process: HarnessProcess | None = None
    try:
        try:
            problem = await asyncio.to_thread(around.source.load, spec.problem_id)
            process = await _start(around, folder, problem, door)
            limit_s = min(around.config.limit_s, problem.limit_s or around.config.limit_s)
            clock = ExecutionClock(around.config.clock, limit_s, time.monotonic())
            end = await _until_end(spec, around, process, door, clock, finish)
        except BaseException:
            with suppress(GatewayError):
                await sessions.close(name)
            raise
        limit_bytes = int(around.config.workspace_limit_mb * 1e6)
        usage, frozen = await asyncio.gather(
            sessions.close(name), asyncio.to_thread(_frozen, process.workspace, limit_bytes)
        )
    finally:
        await door.close()
        if process is not None:
            process.release()
    log = await asyncio.to_thread(_tail, folder / "harness.log")
    failure = _failure(end, usage, door, frozen)
    if failure or frozen is None:
        detail = f"{failure}; the harness's log ends: {log}"
        return _result(spec, ExecutionOutcome.HOST_FAILED, end, detail, usage)
    key = await asyncio.to_thread(_keep, around, frozen)
    timed_out = end.exit_code is None
    outcome = ExecutionOutcome.TIMED_OUT if timed_out else ExecutionOutcome.COMPLETED
    return _result(spec, outcome, end, _detail(end, frozen, process, door, log), usage, key)


async def _start(
    around: Surroundings, folder: Path, problem: Problem, door: Door
) -> HarnessProcess:
    """The harness at work on the problem, with its door open."""
    await asyncio.to_thread(_make_folder, folder)
    if problem.workdir and not around.sandbox.isolates:
        raise SandboxError(
            f"{problem.problem_id}: its workspace has to be seen at {problem.workdir}: set "
            f"rollout.sandbox=bubblewrap"
        )
    room = Room(folder, limits=_limits(around.config), inside=problem.workdir or INSIDE)
    listener = None if around.sandbox.isolates else loopback_listener()
    port = PORT if listener is None else listener.getsockname()[1]
    endpoint = Endpoint(f"http://127.0.0.1:{port}/v1", DUMMY_KEY)
    command = await asyncio.to_thread(around.harness.command, problem, endpoint, folder)

    async def ready(workspace: Path, inside: socket.socket | None) -> None:
        await asyncio.to_thread(_furnish, workspace, problem)
        found = inside or listener
        assert found is not None
        await door.open(found)

    return await HarnessProcess.start(
        command.argv,
        command.environment,
        folder / "harness.log",
        around.sandbox,
        replace(room, readable=command.readable),
        ready,
    )


async def _until_end(
    spec: ExecutionSpec,
    around: Surroundings,
    process: HarnessProcess,
    door: Door,
    clock: ExecutionClock,
    finish: asyncio.Event,
) -> _End:
    """Let the harness work until it ends or its time is up. Nothing of it is left afterwards."""
    started_at = time.time()
    finishing = asyncio.create_task(finish.wait())
    try:
        exit_code, limit = await _until_limit(spec, around, process, door, clock, finishing)
        ended_at = time.time()
    finally:
        finishing.cancel()
        await asyncio.shield(process.end(around.config.kill_after_s))
    return _End(exit_code, started_at, ended_at, limit)


async def _until_limit(
    spec: ExecutionSpec,
    around: Surroundings,
    process: HarnessProcess,
    door: Door,
    clock: ExecutionClock,
    finishing: asyncio.Task[bool],
) -> tuple[int | None, str]:
    """The exit code, or the limit that was reached."""
    waited_s = 0.0
    limit = ""
    while not limit:
        now = time.monotonic()
        left_s = clock.left_s(now, waited_s)
        turn_left_s = around.config.turn_limit_s - door.quiet_s(now)
        if left_s <= 0:
            limit = "the execution's"
        elif turn_left_s <= 0:
            limit = "the turn's"
        elif finishing.done():
            limit = "the group's"
        else:
            wait_s = max(min(left_s, turn_left_s), _SHORTEST_WAIT_S)
            exit_code = await process.exit_code(wait_s, finishing)
            if exit_code is not None:
                return exit_code, ""
            if clock.left_s(time.monotonic(), 0.0) <= 0:
                waited_s = (await around.sessions.usage(spec.execution_id)).waited_s
    exit_code = await process.exit_code(0)  # it may have ended while the gateway was asked
    return exit_code, "" if exit_code is not None else limit


def _limits(config: RolloutConfig) -> Limits:
    return Limits(
        memory_mb=config.memory_mb,
        file_mb=max(1, int(config.disk_mb)),
        cpu_s=int(config.limit_s) + int(config.kill_after_s) + 1,
        processes=config.processes,
        disk_mb=max(1, int(config.disk_mb)),
        cores=config.cores,
    )


def _has_leftovers(around: Surroundings, name: str) -> bool:
    return bool(around.store.children(around.layout.execution(name)))


def _make_folder(folder: Path) -> None:
    remove_tree(folder)
    (folder / "workspace").mkdir(parents=True, mode=0o700)


def _furnish(workspace: Path, problem: Problem) -> None:
    """Put the problem's files into a workspace."""
    for name, text in problem.files.items():
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{problem.problem_id}: file {name!r} lies outside of the workspace")
        path = workspace / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        if name in problem.executable:
            path.chmod(0o755)


def _frozen(workspace: Path | None, limit_bytes: int) -> Snapshot | None:
    return None if workspace is None else freeze(workspace, limit_bytes)


def _keep(around: Surroundings, frozen: Snapshot) -> str:
    """Key of the workspace in storage, where equal ones lie once."""
    key = around.layout.frozen_workspace(frozen.digest)
    if not around.store.exists(key):
        around.store.write(key, frozen.data)
    return key


def _failure(end: _End, usage: Usage, door: Door, frozen: Snapshot | None) -> str:
    """Why the end of the harness is our fault; empty when it is not.

    Nothing of it rests on what the harness says, because the agent can make it say anything: what
    the gateway failed at was seen by the door, and before its first call no agent has done
    anything.
    """
    if frozen is None:
        return "the sandbox did not come up"
    if end.limit == "the group's" and usage.calls == 0:
        return "the group's time was over before its first call"
    if end.exit_code is None:
        return ""
    # A call that generated until its limit was asked for; one that waited so long was not.
    asked_for = door.problem_s > _LONG_CALL_S and usage.waited_s < door.problem_s / 2
    if door.problem and not asked_for:
        return f"the model was unavailable: {door.problem}"
    if usage.calls == 0 and end.exit_code:
        return f"the harness ended with code {end.exit_code} before its first call"
    return ""


def _detail(end: _End, frozen: Snapshot, process: HarnessProcess, door: Door, log: str) -> str:
    lines = [f"{end.limit} limit of time"] * bool(end.limit)
    lines += [f"its sandbox's limit of {breach.value}" for breach in process.breaches]
    lines += [f"log: {log}"] * bool(end.exit_code)
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
