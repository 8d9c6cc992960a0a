"""Everything that one machine needs to be operated from the Prefect UI, until it is interrupted."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import uvicorn

from configs.cells import PrefectConfig
from flows.problem_sets import tell_new
from flows.serve_address import PAGES_URL
from flows.serve_pages import Pages
from flows.server import ServerError, orchestration
from flows.start import home_of
from storage.objects import Store

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun

HEARTBEAT_S = 30
"""Each flow run says so often that it lives, for the automation that looks for silent ones."""
_CHECK_S = 5.0
_START_LIMIT_S = 30.0


def serve(
    config: PrefectConfig,
    root: str,
    host: str,
    port: int,
    stop: threading.Event,
    say: Callable[[str], None],
) -> None:
    """Server, work pool, worker, deployments and pages, until ``stop`` is set. Ends all that it
    started.

    Args:
        root: absolute folder or URL of the storage.
        port: of the pages.

    Raises:
        ServerError: Prefect can't be used, the port is taken, or a part has ended.
    """
    with pages_on(root, host, port) as url:
        os.environ[PAGES_URL] = url
        os.environ.setdefault("PREFECT_FLOWS_HEARTBEAT_FREQUENCY", str(HEARTBEAT_S))
        say(f"pages of runs: {url}")
        with orchestration(config, home_of(root), say) as prefect:
            # Only now: prefect reads where its server is when it is imported.
            from prefect.client.orchestration import get_client

            from flows.automations import GONE_SILENT, make_automations
            from flows.deploy import TAG, deploy
            from flows.revival import CrashWatch
            from flows.silence import may_still_run

            make_automations(deploy(config.work_pool, root))
            say("ready: Ctrl-C ends the server, the worker and what they run")
            store = Store(root)
            with get_client(sync_client=True) as client:

                def kept(found: FlowRun) -> bool:
                    """One that is only silent may still be there: a person has to look."""
                    assert found.state is not None  # it has crashed
                    silent = (found.state.message or "").startswith(GONE_SILENT)
                    return silent and may_still_run(store, found)

                crashes = CrashWatch(client, TAG, kept, say)
                while not stop.wait(_CHECK_S):
                    prefect.check()
                    crashes.look()
                    for name in tell_new(store):
                        say(f"new problem set: {name}")


@contextmanager
def pages_on(root: str, host: str, port: int) -> Iterator[str]:
    """The pages of a storage root over HTTP while the block lasts; their address.

    Raises:
        ServerError: the port is taken.
    """
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()  # who asks before the thread serves waits, instead of being refused
    except OSError as error:
        listener.close()
        raise ServerError(f"port {port} of {host} for the pages: {error.strerror}") from None
    settings = uvicorn.Config(Pages(root).app(), log_level="warning", access_log=False)
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run, args=([listener],), name="pages", daemon=True)
    thread.start()
    try:
        yield f"http://{host}:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(_START_LIMIT_S)
        listener.close()
