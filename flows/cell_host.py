"""Keeping the host of a cell on a machine that no flow of the run works on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable

from cells.host.nodes import agent_daemon
from cells.process import end_group, spawn
from cells.reason import log_since, log_size, reason
from cells.wanted import Wanted, find_wanted
from configs.cells import CellConfig
from configs.load import ConfigError
from flows.hosts import cell_daemon
from storage.copies import local_copy
from storage.objects import Store
from storage.run import Run, open_run

_POLL_S = 0.5
_END_GRACE_S = 15.0
_RESTART_DELAYS_S = (1.0, 5.0, 30.0)
"""Waits before a host that failed is started again; after the last one, the failure stands."""


class CellHostError(RuntimeError):
    """The host of the cell fails whenever it is started; the text holds the cause."""


def await_run(root: str, run_id: str, limit_s: float, say: Callable[[str], None]) -> Run:
    """The run, which may be made later than its hosts are started.

    Raises:
        TimeoutError: it is not there after ``limit_s``.
    """
    store, deadline, told = Store(root), time.monotonic() + limit_s, False
    while not store.exists(f"runs/{run_id}/config.yaml"):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no run {run_id} in {store.url} after {limit_s:g} s")
        if not told:
            say(f"waiting for run {run_id} in {store.url}")
            told = True
        time.sleep(_POLL_S)
    return open_run(root, run_id)


def cell_of(run: Run, name: str, node: int = 0) -> CellConfig:
    """The cell of that name, whose machine ``node`` must be one that the flow does not see to.

    Raises:
        ConfigError: there is none, or the flow starts it.
    """
    cells = {cell.name: cell for cell in run.config.cells.cells}
    if name not in cells:
        raise ConfigError(f"run {run.run_id} has no cell {name}; it has {', '.join(cells)}")
    if not 0 <= node < cells[name].machines:
        raise ConfigError(
            f"cell {name} of run {run.run_id} spans {cells[name].machines} machines: --node is "
            f"from 0, the leader's, to {cells[name].machines - 1}"
        )
    if node == 0 and not cells[name].elsewhere:
        raise ConfigError(
            f"cell {name} of run {run.run_id} is started by its flow: set elsewhere: true at that "
            f"cell in the run's settings"
        )
    return cells[name]


def keep_host(
    run: Run, name: str, wait_s: float, say: Callable[[str], None], node: int = 0
) -> None:
    """Start the host of a cell whenever an attempt at the run wants it, until none has for
    ``wait_s`` seconds.

    Args:
        node: machine of the cell; 0 has the host itself, others an agent of it.

    Raises:
        CellHostError: it failed again after every delay.
    """
    served, deadline = 0, time.monotonic() + wait_s
    while time.monotonic() < deadline:
        wanted = find_wanted(run)
        if wanted is None or wanted.attempt <= served:
            time.sleep(_POLL_S)
            continue
        _serve_attempt(run, name, node, wanted, say)
        served, deadline = wanted.attempt, time.monotonic() + wait_s
    say(f"cell {name}: no attempt has wanted it for {wait_s:g} s")


def _serve_attempt(
    run: Run, name: str, node: int, wanted: Wanted, say: Callable[[str], None]
) -> None:
    """One host, or several after each other where they fail, until one has ended well."""
    daemon = agent_daemon(name, node) if node else cell_daemon(name)
    log = run.store.local_file(run.layout.log(daemon))
    for delay_s in (*_RESTART_DELAYS_S, None):
        logged = log_size(log)
        say(f"cell {name}: starting for attempt {wanted.attempt}, version {wanted.version}")
        process = spawn(
            _argv(run, name, node, wanted),
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            log=log,
        )
        code = _ended(process)
        if code == 0:
            say(f"cell {name}: attempt {wanted.attempt} is over")
            return
        why = f"cell {name}: {reason(log_since(log, logged))}\nlog: {log}"
        now = find_wanted(run)
        if now is None or now.attempt != wanted.attempt:
            say(f"{why}\nnobody wants it any more")
            return
        wanted = now  # the weights that it began with may be deleted since
        if delay_s is None:
            raise CellHostError(why)
        say(f"{why}\nonce more in {delay_s:g} s")
        time.sleep(delay_s)


def _argv(run: Run, name: str, node: int, wanted: Wanted) -> list[str]:
    where = ["--root", run.store.url, "--run", run.run_id]
    policy = str(local_copy(run.store, wanted.policy_key))
    if node:
        argv = [sys.executable, "-m", "cells.host.agent", *where, "--cell", name]
        return [*argv, "--node", str(node)]
    argv = [sys.executable, "-m", "cells.host", *where, "--name", cell_daemon(name)]
    return [*argv, "--policy", policy, "--version", str(wanted.version)]


def _ended(process: subprocess.Popen[bytes]) -> int:
    """Its exit code; interrupted, it is ended first."""
    try:
        return process.wait()
    finally:
        if process.poll() is None:
            end_group(process.pid, _END_GRACE_S)
            process.wait()
