"""What goes on with the loss of a daemon: done again when that is back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from prefect import get_run_logger

from cells.checkpoint import Checkpoint, latest_checkpoint
from cells.epoch import take_epoch
from cells.launch import StartError
from cells.warden import WINDOW_PAUSES_S
from flows.hosts import EXECUTIONS, GATEWAY, Hosts, cell_daemon
from flows.server import await_server
from storage.copies import local_copy
from storage.run import Run

NOTICE_S = 10.0
"""How much later than whoever fails for it the warden may notice the end of a daemon."""

T = TypeVar("T")


def surviving(run: Run, hosts: Hosts, what: str, work: Callable[[], T]) -> T:
    """What ``work`` returns; where it fails with the loss of a daemon, done again when those that
    it needs are back, a core from the newest checkpoint.

    How often a daemon is started again is the warden's to say.
    """
    warden = hosts.warden
    again = False
    while True:
        losses = warden.losses() if warden else 0
        await_server(get_run_logger().warning)
        try:
            if again:
                _bring_back(run, hosts)
            return work()
        except StartError:
            raise
        except Exception as error:
            if warden is None or not warden.lost_since(losses, NOTICE_S):
                raise
            get_run_logger().warning("%s: a daemon was lost: %s", what, error)
            again = True


def _bring_back(run: Run, hosts: Hosts) -> None:
    """Wait for what no step can do without.

    Raises:
        StartError: it does not come back.
    """
    assert hosts.warden is not None  # somebody starts them
    limit_s = run.config.cells.start_limit_s + WINDOW_PAUSES_S
    for name in (GATEWAY, EXECUTIONS, cell_daemon(hosts.core)):
        hosts.warden.wait_well(name, limit_s)
    restore_core(run, hosts, latest_checkpoint(run))


def restore_core(run: Run, hosts: Hosts, checkpoint: Checkpoint | None) -> None:
    """Give a fresh core the optimizer state of the checkpoint; an adopted one is ahead of it."""
    if checkpoint is None:
        return
    if hosts.core_version() > checkpoint.manifest.version:
        return
    epoch = take_epoch(run.store, run.layout)
    args = {"path": str(local_copy(run.store, checkpoint.state_key))}
    hosts.cells[hosts.core].call(
        "POST",
        "/replica/restore",
        {"epoch": epoch, "args": args},
        limit_s=run.config.cells.switch_limit_s,
    )
