"""Following a flow run: what it measures, as it comes, and a clean Ctrl-C."""

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

from flows.live import Screen
from flows.revival import Revival
from flows.silence import Silence
from flows.watch import Watch
from storage.records import Evaluation, UpdateMetrics
from storage.run import Run

_POLL_S = 1.0
_ASK_EVERY_S = 2.0
_CANCEL_LIMIT_S = 60.0
_SILENCE_S = 600.0
"""What runs goes on for as long without a server."""


def follow(
    flow_run_id: UUID,
    run: Run,
    screen: Screen,
    check: Callable[[], None],
    *,
    runs_here: bool = False,
) -> State:
    """Show a flow run and what it measures until it has ended, and return its last state.

    Ctrl-C cancels the flow run, waits for its end and returns its state; a second one gives up
    waiting. One that crashes is run again, a few times.

    Args:
        check: called often; raises when what runs the flow has ended.
        runs_here: it is a training, and a lock of the run tells whether a process works on it: one
            that says it runs while none does has crashed.
    """
    watch = Watch(run)
    with get_client(sync_client=True) as client:
        silence = Silence(client, run, screen.say) if runs_here else None
        try:
            return watch_until_final(
                client,
                flow_run_id,
                watch,
                screen,
                check,
                revived=Revival(client, screen.say).see_to,
                heard=silence.see_to if silence else lambda _: None,
            )
        except KeyboardInterrupt:
            screen.say("cancelling: harnesses and cells are being ended (Ctrl-C stops waiting)")
            state = client.read_flow_run(flow_run_id).state
            begun = state is not None and (state.is_running() or state.is_pending())
            ending: State[Any] = Cancelling() if begun else Cancelled()
            client.set_flow_run_state(flow_run_id, ending, force=True)
            return watch_until_final(
                client, flow_run_id, watch, screen, check, limit_s=_CANCEL_LIMIT_S
            )


def watch_until_final(
    client: SyncPrefectClient,
    flow_run_id: UUID,
    watch: Watch,
    screen: Screen,
    check: Callable[[], None],
    limit_s: float | None = None,
    revived: Callable[[FlowRun], bool] = lambda _: False,
    heard: Callable[[FlowRun], None] = lambda _: None,
) -> State:
    """Show a flow run until it has ended, or for ``limit_s`` seconds; its last state.

    Args:
        revived: asked about a run that has ended: whether it is going to be run again.
        heard: told of each answer of the server.

    Raises:
        HTTPError, PrefectException: the server was silent for ten minutes.
        Exception: what ``check`` raises.
    """
    deadline = None if limit_s is None else time.monotonic() + limit_s
    server = _Server(client, flow_run_id, check, heard)
    said = ""
    while True:
        flow_run = server.flow_run()
        show_news(watch, screen)
        state = flow_run.state if flow_run else None
        if flow_run is not None and state is not None:
            name = state.name or state.type.value.title()
            if name != said:
                screen.say(f"flow run {flow_run.name}: {name}")
                said = name
            watch.flow_run(name, _began_at(flow_run))
        screen.show(watch.picture())
        late = deadline is not None and time.monotonic() > deadline
        if state is not None and (late or (state.is_final() and not server.bears(revived))):
            return state
        check()
        time.sleep(_POLL_S)


def show_news(watch: Watch, screen: Screen) -> None:
    """A line for each update and evaluation that is new."""
    updates, evaluations = watch.read()
    for update in updates:
        screen.say(update_line(update))
    for evaluation in evaluations:
        screen.say(evaluation_line(evaluation))


class _Server:
    """Asks for the flow run now and then, and bears a busy server."""

    def __init__(
        self,
        client: SyncPrefectClient,
        flow_run_id: UUID,
        check: Callable[[], None],
        heard: Callable[[FlowRun], None],
    ) -> None:
        self._client = client
        self._id = flow_run_id
        self._check = check
        self._heard = heard
        self._asked = -_ASK_EVERY_S
        self._answered = time.monotonic()
        self._last: FlowRun | None = None

    def flow_run(self) -> FlowRun | None:
        """The last answer; none before the first."""
        now = time.monotonic()
        # A request costs client and server more than all else that is looked at.
        if now - self._asked < _ASK_EVERY_S:
            return self._last
        self._asked = now
        try:
            self._last = self._client.read_flow_run(self._id)
            self._answered = now
            self._heard(self._last)
        except (HTTPError, PrefectException):
            # A busy server fails a request now and then; the run goes on without it.
            self._check()
            if now - self._answered > _SILENCE_S:
                raise
        return self._last

    def bears(self, revived: Callable[[FlowRun], bool]) -> bool:
        """What ``revived`` says of the last answer; a server that is away is asked again."""
        assert self._last is not None  # it has a state
        try:
            return revived(self._last)
        except (HTTPError, PrefectException):
            return True


def _began_at(flow_run: FlowRun) -> float | None:
    return flow_run.start_time.timestamp() if flow_run.start_time else None


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
