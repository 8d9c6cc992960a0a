"""Following a flow run from a terminal: what was measured, as it comes, and a clean Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from uuid import UUID

from httpx import HTTPError
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.exceptions import PrefectException
from prefect.states import Cancelled, Cancelling

from flows.history import evaluations_of, updates_of
from storage.records import Evaluation, UpdateMetrics
from storage.run import Run

_POLL_S = 1.0
_CANCEL_LIMIT_S = 60.0
_SILENCE_S = 60.0


def follow(
    flow_run_id: UUID, run: Run, say: Callable[[str], None], check: Callable[[], None]
) -> State:
    """Print new measurements until the flow run has ended, and return its last state.

    Ctrl-C cancels the flow run, waits for its end and returns its state; a second one gives up
    waiting.

    Args:
        check: called often; raises when what runs the flow has ended.
    """
    seen = Seen(run, say)
    with get_client(sync_client=True) as client:
        try:
            return _until_final(client, flow_run_id, seen, check)
        except KeyboardInterrupt:
            say("cancelling: harnesses and cells are being ended (Ctrl-C again stops waiting)")
            state = client.read_flow_run(flow_run_id).state
            begun = state is not None and (state.is_running() or state.is_pending())
            ending: State[Any] = Cancelling() if begun else Cancelled()
            client.set_flow_run_state(flow_run_id, ending, force=True)
            return _until_final(client, flow_run_id, seen, check, limit_s=_CANCEL_LIMIT_S)


class Seen:
    """What of a run was printed already."""

    def __init__(self, run: Run, say: Callable[[str], None]) -> None:
        self._run = run
        self._say = say
        self._updates = len(updates_of(run))
        self._evaluations = set(evaluations_of(run))
        self._state = ""

    def state(self, flow_run: FlowRun) -> None:
        name = (flow_run.state.name if flow_run.state else None) or "unknown"
        if name != self._state:
            self._say(f"flow run {flow_run.name}: {name}")
            self._state = name

    def measurements(self) -> None:
        """Print the updates and evaluations that are new."""
        updates = updates_of(self._run)
        for update in updates[self._updates :]:
            self._say(update_line(update))
        self._updates = len(updates)
        evaluations = evaluations_of(self._run)
        for version in sorted(set(evaluations) - self._evaluations):
            self._say(evaluation_line(evaluations[version]))
        self._evaluations = set(evaluations)


def update_line(update: UpdateMetrics) -> str:
    """One update in a line for people."""
    rate = "   -  " if update.pass_rate is None else f"{update.pass_rate:.3f}"
    norm = "-" if update.grad_norm is None else f"{update.grad_norm:.3g}"
    return (
        f"step {update.step} update {update.update}: version {update.policy_version}, "
        f"pass rate {rate}, {update.valid} valid, {update.excluded} excluded, "
        f"{update.timed_out} timed out, staleness {update.staleness_mean:.1f}, "
        f"clipped {update.clip_fraction:.0%}, gradient {norm}, "
        f"log-prob gap {update.logprob_gap:.1e}, {update.target_tokens} targets; "
        f"seconds: rollout {update.rollout_s:.1f}, train {update.train_s:.1f}, "
        f"switch {update.switch_s:.1f}"
    )


def evaluation_line(evaluation: Evaluation) -> str:
    """One evaluation in a line for people."""
    return (
        f"held-out, version {evaluation.version}: pass rate {evaluation.pass_rate:.3f} "
        f"(standard error {evaluation.standard_error:.3f}, {evaluation.problems} problems, "
        f"{evaluation.executions} executions, {evaluation.excluded} excluded)"
    )


def _until_final(
    client: SyncPrefectClient,
    flow_run_id: UUID,
    seen: Seen,
    check: Callable[[], None],
    limit_s: float | None = None,
) -> State:
    deadline = None if limit_s is None else time.monotonic() + limit_s
    answered = time.monotonic()
    state: State | None = None
    while True:
        try:
            flow_run = client.read_flow_run(flow_run_id)
        except (HTTPError, PrefectException):
            # A busy server fails a request now and then; the run goes on without it.
            check()
            if time.monotonic() - answered > _SILENCE_S:
                raise
        else:
            answered = time.monotonic()
            seen.state(flow_run)
            seen.measurements()
            state = flow_run.state
        late = deadline is not None and time.monotonic() > deadline
        if state is not None and (state.is_final() or late):
            return state
        check()
        time.sleep(_POLL_S)
