"""Submitting executions of groups to the execution host and waiting for what they leave."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import blake2b

from cells.client import DaemonClient, DaemonError
from storage.layout import execution_id
from storage.objects import MissingObjectError
from storage.records import ExecutionOutcome, ExecutionResult, ExecutionSpec, QueryPlan
from storage.run import Run

_POLL_S = 3.0
"""Short enough that a cancelled step ends within its grace."""
_PATIENCE_S = 180.0
"""How long an execution host may be silent before the group fails: longer than a new one takes."""
_LOSSES = 3
"""How often an execution may be lost with its host before the group fails."""
_ALIVE = ("queued", "running")


def run_groups(
    run: Run,
    host: DaemonClient,
    queries: Sequence[QueryPlan],
    policy_version: int,
    temperature: float,
    ended: Callable[[str], None],
    stopped: Callable[[], bool],
    released: Callable[[], bool] | None = None,
) -> bool:
    """Run every execution of the queries to its end; what an earlier attempt left is kept.

    Executions that an earlier attempt started and that still run are waited for. One that failed
    on our side is run again as long as its group is not sealed, and in this attempt
    ``rollout.replace_excluded`` times. At ``rollout.group_limit_s`` those that still run end as at
    their own limit: what they have is kept and scored.

    Args:
        ended: called with each execution when it has ended, also with those that had before.
        stopped: true when the step is over or can't go on; the wait then ends with an error.
        released: where executions may outlive the step, under newer weights: true when it is over;
            those that run then go on, and who waits for the rest of them is the next step.

    Returns:
        Whether all have ended.

    Raises:
        DaemonError: the host refused, or was silent for minutes.
        InterruptedError: the step was stopped.
    """
    specs = [
        spec_of(run, query, member, policy_version, temperature, newer=released is not None)
        for query in queries
        for member in range(query.group_size)
    ]
    for spec in specs:
        _start(run, host, spec, stopped)
    limit = _GroupLimit(run, host, specs)
    left = {spec.execution_id: spec for spec in specs}
    again = dict.fromkeys(left, run.config.rollout.replace_excluded)
    lost = Counter[str]()
    states: Mapping[str, object] = {}
    while True:
        # In whatever order they end: cells are given to training by how many live.
        for name, spec in list(left.items()):
            if states.get(name) in _ALIVE:
                continue
            if find_result(run, name) is None:
                if states:  # the host was started again, and what ran there has ended with it
                    lost[name] += 1
                    if lost[name] > _LOSSES:
                        raise DaemonError(f"{host.name}: has forgotten {name}")
                    _start(run, host, spec, stopped)
            elif again[name] and not limit.over and is_due(run, name, spec.query_id):
                again[name] -= 1
                _start(run, host, spec, stopped)
            else:
                del left[name]
                ended(name)
        if not left:
            return True
        if released is not None and released():
            return False
        limit.enforce(stopped)
        if stopped():
            raise InterruptedError(f"{', '.join(left)}: the step was stopped")
        states = _states(host, list(left), limit, stopped)


def _states(
    host: DaemonClient, names: list[str], limit: _GroupLimit, stopped: Callable[[], bool]
) -> Mapping[str, object]:
    """Where these executions are, as soon as one of them has ended or after a moment."""
    wait_s = limit.poll_s if not limit.over else _POLL_S
    body = {"names": names, "wait_s": wait_s}
    answer = _patiently(partial(host.call, "POST", "/ended", body, limit_s=wait_s + 20), stopped)
    states = answer["states"]
    assert isinstance(states, dict)
    return states


def is_due(run: Run, execution: str, query: str) -> bool:
    """Whether an execution has to be run, again or for the first time."""
    result = find_result(run, execution)
    if result is None:
        return True
    failed = result.outcome is ExecutionOutcome.HOST_FAILED
    return failed and not run.store.exists(run.layout.group(query))


def _start(run: Run, host: DaemonClient, spec: ExecutionSpec, stopped: Callable[[], bool]) -> None:
    """Have the host run an execution, unless it has ended or runs there already."""
    if not is_due(run, spec.execution_id, spec.query_id):
        return
    # A failure makes place for what follows. All else that an earlier attempt left is the host's to
    # delete, as the gateway has to hear of it first: its session may still be open there.
    run.store.delete(run.layout.execution_result(spec.execution_id))
    path = f"/executions/{spec.execution_id}"
    _patiently(partial(host.call, "PUT", path, spec.model_dump(mode="json")), stopped)


class _GroupLimit:
    """The time limit of these executions together, from now on. A resumed run counts anew: time in
    which nothing ran must not end what is left before its first call."""

    def __init__(self, run: Run, host: DaemonClient, specs: Sequence[ExecutionSpec]) -> None:
        limit_s = run.config.rollout.group_limit_s
        self._deadline = math.inf if limit_s is None else time.monotonic() + limit_s
        self._run = run
        self._host = host
        self._names = [spec.execution_id for spec in reversed(specs)]
        """Still to be ended when the time is over, the first one last."""

    @property
    def over(self) -> bool:
        return time.monotonic() >= self._deadline

    @property
    def poll_s(self) -> float:
        """How long to wait before looking at the limit again."""
        return min(_POLL_S, max(self._deadline - time.monotonic(), 0.05))

    def enforce(self, stopped: Callable[[], bool]) -> None:
        """Where the time is over, end all that still run, each once."""
        while self.over and self._names:
            name = self._names[-1]
            if find_result(self._run, name) is None:
                path = f"/executions/{name}/finish"
                _patiently(partial(self._host.call, "POST", path), stopped)
            self._names.pop()


def spec_of(
    run: Run,
    query: QueryPlan,
    member: int,
    policy_version: int,
    temperature: float,
    newer: bool = False,
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
        newer=newer,
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
    """The answer of ``call``, asked again while the host is silent, for minutes at most."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return call()
        except DaemonError:
            if stopped() or time.monotonic() > deadline:
                raise
            time.sleep(0.5)
