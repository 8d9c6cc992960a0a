"""Trainings that say they run, and whose process has ended without a word to the server.

A flow that ends with its worker tells the server so, and is run again (`flows.revival`). Where that
was away too, the run would stay in state Running for ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun, State
from prefect.states import AwaitingRetry, Crashed

from configs.load import ConfigError
from flows.roots import own_name
from storage.errors import StorageError
from storage.hold import HeldError, alone
from storage.objects import Store
from storage.records import RecordError
from storage.run import Run, open_run

SILENT_S = 180.0
"""More than a flow takes from its first word to its turn, and from its turn's end to its last word.
One that is wrongly taken for dead costs a second attempt, which waits for the first one's end."""
LOOK_EVERY_S = 15.0
GONE = "the process that ran it has ended without a word"


def nobody_runs(run: Run) -> bool:
    """Whether no process of this machine works on the run now."""
    try:
        with alone(run.store, run.layout.turn):
            return True
    except HeldError:
        return False


def seen_from_here(store: Store) -> bool:
    """Whether locks of the storage hold against all who may work on its runs: those of an object
    store are this machine's own."""
    return "://" not in store.url


def may_still_run(store: Store, found: FlowRun) -> bool:
    """Whether a training that no heartbeat was heard of may have a process all the same."""
    run_id = found.parameters.get("run_id") or own_name(found.id)
    if not seen_from_here(store) or not found.name.startswith("train "):
        return True
    if found.parameters.get("root", store.url) != store.url:
        return True
    try:
        return not nobody_runs(open_run(store.url, run_id))
    except (StorageError, RecordError, ConfigError):
        return True  # it had not begun, or is gone


class Silence:
    """Watches one training that is followed from here. For one thread.

    Args:
        say: told when the run is marked as crashed.
    """

    def __init__(self, client: SyncPrefectClient, run: Run, say: Callable[[str], None]) -> None:
        self._client = client
        self._run = run
        self._say = say
        self._looked = -LOOK_EVERY_S
        self._since: float | None = None
        """When nobody was first seen to work on it, on the monotonic clock."""

    def see_to(self, found: FlowRun) -> None:
        """Mark the run as crashed when nobody has worked on it for too long; one that its worker
        has taken and never begun is given to the next worker.

        Args:
            found: what the server says of it now.

        Raises:
            HTTPError, PrefectException: the server does not take it now.
        """
        now = time.monotonic()
        if now - self._looked < LOOK_EVERY_S:
            return
        self._looked = now
        state = found.state
        due = state is not None and (state.is_running() or state.is_pending())
        if state is None or not due or not nobody_runs(self._run):
            self._since = None
            return
        if self._since is None:
            self._since = now
        if now - self._since < SILENT_S:
            return
        self._since = None
        if state.is_pending():
            self._say(f"flow run {found.name} was taken by a worker that did not begin it")
            again: State[Any] = AwaitingRetry()
        else:
            self._say(f"flow run {found.name} says that it runs, and nobody runs it")
            again = Crashed(message=GONE)
        self._client.set_flow_run_state(found.id, again, force=True)
