"""Flow runs whose process was killed: their worker is asked to run them again."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from uuid import UUID

from httpx import HTTPError
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterParentTaskRunId,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.exceptions import PrefectException
from prefect.states import AwaitingRetry

from flows.earlier import close_below

RETRIES = 5
"""Of one flow run. What ends a flow again and again is no accident."""
SETTLE_S = 10.0
"""A retry that something takes back is asked for again after so long."""
FIRST_REPORT = "Process exited with status code"
"""A worker reports a killed process twice: with this, and, when the hooks of the flow have run, for
good. Its second report takes back a retry that came before, whose process may have begun."""
SECOND_REPORT_S = 90.0
PATIENCE_S = 300.0
"""How long a crashed run is asked for again before it stays as it is."""
LOOK_EVERY_S = 15.0


class Revival:
    """What is known of the crashed runs of one server. For one thread.

    Args:
        say: told of each retry.
    """

    def __init__(self, client: SyncPrefectClient, say: Callable[[str], None]) -> None:
        self._client = client
        self._say = say
        self._since: dict[tuple[UUID, int], float] = {}
        """When each run was first seen crashed, by its id and how often it had begun."""
        self._asked: dict[UUID, float] = {}
        self._told: set[tuple[UUID, int]] = set()

    def see_to(self, found: FlowRun) -> bool:
        """Whether a run that has crashed is going to be run again; it is asked for here.

        Raises:
            HTTPError, PrefectException: the server does not take it now.
        """
        if found.state is None or not found.state.is_crashed():
            return False
        now, attempt = time.monotonic(), found.run_count
        if not 0 < attempt <= RETRIES:
            return False
        first = self._since.setdefault((found.id, attempt), now)
        if now - first > PATIENCE_S:
            return False
        early = (found.state.message or "").startswith(FIRST_REPORT)
        if early and now - first < SECOND_REPORT_S:
            return True
        if now - self._asked.get(found.id, -SETTLE_S) >= SETTLE_S:
            if (found.id, attempt) not in self._told:
                self._told.add((found.id, attempt))
                self._say(
                    f"flow run {found.name} has crashed ({found.state.message}): it is run again, "
                    f"{attempt} of {RETRIES} times"
                )
            # Its worker does this as well, where that lived to see the crash.
            close_below(self._client, found.id)
            self._client.set_flow_run_state(found.id, AwaitingRetry())
            self._asked[found.id] = now
        return True


class CrashWatch:
    """Looks for runs that have crashed since it was made, now and then.

    Args:
        tag: of the flow runs to look at.
        kept: whether one stays crashed.
    """

    def __init__(
        self,
        client: SyncPrefectClient,
        tag: str,
        kept: Callable[[FlowRun], bool],
        say: Callable[[str], None],
    ) -> None:
        self._client = client
        self._revival = Revival(client, say)
        self._kept = kept
        self._began = datetime.now(UTC)
        self._looked = time.monotonic()
        self._filter = FlowRunFilter(
            tags=FlowRunFilterTags(all_=[tag]),
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.CRASHED])),
            # A run inside another one is that one's to repeat.
            parent_task_run_id=FlowRunFilterParentTaskRunId(is_null_=True),
        )

    def look(self) -> None:
        """See to them, if it is time. A server that is away is asked the next time."""
        if time.monotonic() - self._looked < LOOK_EVERY_S:
            return
        self._looked = time.monotonic()
        try:
            for found in self._client.read_flow_runs(flow_run_filter=self._filter, limit=200):
                state = found.state
                assert state is not None  # it is looked for by its state
                if state.timestamp >= self._began and not self._kept(found):
                    self._revival.see_to(found)
        except (HTTPError, PrefectException):
            return
