"""Submitting a group's executions to the execution host and waiting for what they leave."""

from __future__ import annotations

import time
from collections.abc import Callable
from hashlib import blake2b

from cells.client import DaemonClient, DaemonError
from storage.layout import execution_id
from storage.objects import MissingObjectError
from storage.records import ExecutionResult, ExecutionSpec, QueryPlan
from storage.run import Run

_POLL_S = 20.0
_PATIENCE_S = 60.0
"""How long an execution host may be silent before the group fails."""


def run_group(
    run: Run,
    host: DaemonClient,
    query: QueryPlan,
    policy_version: int,
    temperature: float,
    ended: Callable[[], None],
    stopped: Callable[[], bool],
) -> list[ExecutionResult]:
    """Results of all members in order; what an earlier attempt left is taken as it is.

    Args:
        ended: called once for each execution that has ended.
        stopped: true when the step is cancelled; the wait then ends with an error.

    Raises:
        DaemonError: the host refused, or was silent for a minute.
        InterruptedError: the step was cancelled.
    """
    specs = [
        spec_of(run, query, member, policy_version, temperature)
        for member in range(query.group_size)
    ]
    waiting = []
    for spec in specs:
        if find_result(run, spec.execution_id) is None:
            _patiently(
                lambda spec=spec: host.call(  # type: ignore[misc]
                    "PUT", f"/executions/{spec.execution_id}", spec.model_dump(mode="json")
                ),
                stopped,
            )
            waiting.append(spec)
        else:
            ended()
    for spec in waiting:
        while find_result(run, spec.execution_id) is None:
            if stopped():
                raise InterruptedError(f"{query.query_id}: the step was stopped")
            answer = _patiently(
                lambda spec=spec: host.call(  # type: ignore[misc]
                    "GET",
                    f"/executions/{spec.execution_id}",
                    params={"wait_s": _POLL_S},
                    limit_s=_POLL_S + 20,
                ),
                stopped,
            )
            if answer["state"] == "unknown":
                raise DaemonError(f"{host.name}: has forgotten {spec.execution_id}")
        ended()
    return [_result(run, spec.execution_id) for spec in specs]


def spec_of(
    run: Run, query: QueryPlan, member: int, policy_version: int, temperature: float
) -> ExecutionSpec:
    """The specification of a member; the same arguments always give the same one."""
    execution = execution_id(query.query_id, member)
    digest = blake2b(f"{run.config.seed}/{execution}".encode(), digest_size=4).digest()
    return ExecutionSpec(
        execution_id=execution,
        query_id=query.query_id,
        member=member,
        problem_id=query.problem_id,
        split=query.split,
        policy_version=policy_version,
        temperature=temperature,
        seed=int.from_bytes(digest) >> 1,
    )


def find_result(run: Run, execution: str) -> ExecutionResult | None:
    """What the execution left, or None while it has not ended."""
    try:
        return _result(run, execution)
    except MissingObjectError:
        return None


def _result(run: Run, execution: str) -> ExecutionResult:
    return run.store.read_record(run.layout.execution_result(execution), ExecutionResult)


def _patiently(
    call: Callable[[], dict[str, object]], stopped: Callable[[], bool]
) -> dict[str, object]:
    """The answer of ``call``, asked again while the host is silent, for a minute at most."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return call()
        except DaemonError:
            if stopped() or time.monotonic() > deadline:
                raise
            time.sleep(0.5)
