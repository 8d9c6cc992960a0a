"""The daemons of a run, as flows see them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

from cells.client import DaemonClient, DaemonGoneError
from cells.epoch import owns, take_ownership
from cells.host.nodes import agent_daemon
from cells.kv_pool.search import NAME as KV_POOL
from cells.launch import DaemonSpec, LeaseKeeper, ensure_daemons, is_renewed, stop_daemons
from cells.wanted import Wanted, want, want_no_more
from cells.warden import Warden
from storage.copies import local_copy
from storage.run import Run
from tasks.rollout.harnesses.launch import install_harness

GATEWAY = "gateway"
_CELL = "cells.host"
EXECUTIONS = "executions"
_STOP_GRACE_S = 15.0
_CANCEL_GRACE_S = 3.0
"""Somebody waits, and Prefect kills a cancelled flow half a minute later."""
_SMALL_START_S = 120.0


@dataclass(frozen=True)
class Hosts:
    """Clients of every daemon of a run."""

    gateway: DaemonClient
    executions: DaemonClient
    cells: dict[str, DaemonClient]
    core: str
    warden: Warden | None = None
    """Starts again what ends; None where somebody else keeps the daemons."""

    def core_version(self) -> int:
        """Version of the weights that the core holds."""
        return int(self.cells[self.core].call("GET", "/status")["replica"]["version"])


_kept: ContextVar[tuple[Run, Hosts] | None] = ContextVar("kept", default=None)


def cell_daemon(cell: str) -> str:
    """Registered name of the host of a cell."""
    return f"cell-{cell}"


@contextmanager
def hosts_of(
    run: Run,
    policy_key: str,
    version: int,
    say: Callable[[str], None],
    again: Callable[[], tuple[str, int]] | None = None,
    first_policy: str | None = None,
) -> Iterator[Hosts]:
    """Every daemon of the run, adopted or started, kept alive until the block ends, then ended.

    Args:
        policy_key: HF directory in storage that engines and replicas start with.
        version: the weight version that it is.
        again: both, for a cell that is started again later; the same when left out.
        first_policy: HF directory that stays as long as the run does, which a checkpoint does not:
            the gateway has its tokenizer from there. ``policy_key`` when left out.

    A daemon that ends meanwhile is started again, within a budget. When this process is killed the
    daemons live on until their lease ends, so that the next attempt adopts them with the harnesses
    that run on them.
    """
    # Here, because a download may take longer than a daemon may take to start.
    install_harness(run.config.harness, say)
    policy = str(local_copy(run.store, policy_key))
    tokenizer = local_copy(run.store, first_policy or policy_key, without=".safetensors")
    cells = run.config.cells
    specs = [
        DaemonSpec(GATEWAY, "cells.gateway.server", ("--policy", str(tokenizer)), _SMALL_START_S),
        DaemonSpec(EXECUTIONS, "tasks.rollout.host", (), _SMALL_START_S),
        *([DaemonSpec(KV_POOL, "cells.kv_pool", (), _SMALL_START_S)] if cells.kv_pool else []),
        *(
            DaemonSpec(
                cell_daemon(cell.name),
                "cells.host",
                ("--policy", policy, "--version", str(version)),
                cells.start_limit_s,
                elsewhere=f"gyre host {run.run_id} {cell.name}" if cell.elsewhere else None,
            )
            for cell in cells.cells
        ),
        *(
            DaemonSpec(
                agent_daemon(cell.name, node),
                "cells.host.agent",
                (),
                cells.start_limit_s,
                elsewhere=f"gyre host {run.run_id} {cell.name} --node {node}",
            )
            for cell in cells.cells
            for node in range(1, cell.machines)
        ),
    ]
    owner = take_ownership(run.store, run.layout)
    keeper = LeaseKeeper(cells.lease_s, say)
    grace_s = _CANCEL_GRACE_S
    try:
        want(run, Wanted(attempt=owner, policy_key=policy_key, version=version))
        clients = ensure_daemons(run.store, run.layout, specs, keeper, say)
        warden = Warden(
            run.store,
            run.layout,
            specs=lambda: _started_now(run, specs, again) if again else specs,
            clients=clients,
            keeper=keeper,
            say=say,
        )
        hosts = replace(_hosts(run, clients), warden=warden)
        before = _kept.set((run, hosts))
        try:
            yield hosts
        except Exception:
            grace_s = _STOP_GRACE_S
            raise
        else:
            grace_s = _STOP_GRACE_S
        finally:
            _kept.reset(before)
            warden.close(grace_s)
    finally:
        keeper.close()
        # A later attempt that has adopted the daemons goes on with them.
        if owns(run.store, run.layout, owner):
            want_no_more(run)
            stop_daemons(keeper.clients(), grace_s)


def kept_hosts(run: Run) -> Hosts | None:
    """The daemons of the run, where a flow around this one keeps them alive."""
    kept = _kept.get()
    return kept[1] if kept is not None and kept[0] == run else None


def kept_elsewhere(run: Run) -> bool:
    """Whether another process keeps the run's daemons alive. Watches a lease for a while."""
    try:
        gateway = DaemonClient.find(run.store, run.layout, GATEWAY)
    except DaemonGoneError:
        return False
    try:
        return is_renewed(gateway, run.config.cells.lease_s)
    finally:
        gateway.close()


def find_hosts(run: Run) -> Hosts:
    """Clients of daemons that somebody else keeps alive.

    Raises:
        DaemonGoneError: one is not registered.
    """
    names = [GATEWAY, EXECUTIONS, *(cell_daemon(cell.name) for cell in run.config.cells.cells)]
    clients = {name: DaemonClient.find(run.store, run.layout, name) for name in names}
    return _hosts(run, clients)


def _started_now(
    run: Run, specs: Sequence[DaemonSpec], again: Callable[[], tuple[str, int]]
) -> list[DaemonSpec]:
    """The daemons as they are to be started now: cells with the weights to go on from."""
    policy_key, version = again()
    policy = str(local_copy(run.store, policy_key))
    arguments = ("--policy", policy, "--version", str(version))
    return [replace(spec, arguments=arguments) if spec.module == _CELL else spec for spec in specs]


def _hosts(run: Run, clients: dict[str, DaemonClient]) -> Hosts:
    cells = {cell.name: clients[cell_daemon(cell.name)] for cell in run.config.cells.cells}
    core = next(cell.name for cell in run.config.cells.cells if cell.core)
    return Hosts(clients[GATEWAY], clients[EXECUTIONS], cells, core)
