"""Joining a run that somebody else has started."""

from __future__ import annotations

import time
from uuid import UUID

import httpx
from rich.console import Console

from flows.live import Screen, screen_on
from flows.overview import daemons_live
from flows.start import use_server
from flows.watch import Watch
from storage.run import Run

_POLL_S = 1.0
_LOOK_EVERY_S = 10.0


def watch_run(run: Run, console: Console) -> bool:
    """Show a run until it has ended; False when Ctrl-C came first.

    Asks the Prefect server for its state where one is there. Else the daemons tell: the run has
    ended when none answers.
    """
    api_url = use_server(run)
    flow_run_id = _newest_flow_run(run) if _answers(api_url) else None
    with screen_on(console) as screen:
        try:
            if flow_run_id is not None:
                _watch_flow_run(run, flow_run_id, screen)
            elif daemons_live(run):
                screen.say(f"no Prefect server at {api_url} knows the run: following its storage")
                _watch_storage(run, screen)
            else:
                screen.say(
                    f"run {run.run_id} is not under way: none of its daemons answers, and no "
                    f"Prefect server at {api_url} knows it"
                )
        except KeyboardInterrupt:
            return False
    return True


def _watch_flow_run(run: Run, flow_run_id: UUID, screen: Screen) -> None:
    # Only now: prefect reads where its server is when it is imported.
    from prefect.client.orchestration import get_client

    from flows.follow import watch_until_final

    with get_client(sync_client=True) as client:
        state = watch_until_final(client, flow_run_id, Watch(run), screen, lambda: None)
    if state.message:
        screen.say(state.message)


def _watch_storage(run: Run, screen: Screen) -> None:
    from flows.follow import show_news

    watch = Watch(run)
    looked = time.monotonic()
    while True:
        show_news(watch, screen)
        screen.show(watch.picture())
        if time.monotonic() - looked > _LOOK_EVERY_S:
            looked = time.monotonic()
            if not daemons_live(run):
                return
        time.sleep(_POLL_S)


def _answers(api_url: str) -> bool:
    try:
        return httpx.get(f"{api_url}/health", timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def _newest_flow_run(run: Run) -> UUID | None:
    """The latest attempt to train or evaluate the run that the server knows."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName
    from prefect.client.schemas.sorting import FlowRunSort

    names = [f"train {run.run_id}", f"{run.run_id} evaluation"]
    which = FlowRunFilter(name=FlowRunFilterName(any_=names))
    with get_client(sync_client=True) as client:
        found = client.read_flow_runs(
            flow_run_filter=which, sort=FlowRunSort.START_TIME_DESC, limit=1
        )
    return found[0].id if found else None
