"""The store in which torch's ranks tell each other their addresses."""

from __future__ import annotations

import socket
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from cells.replica.meeting import host_and_port
from cells.replica.settings import ReplicaSettings


def leader_store(settings: ReplicaSettings, folder: Path) -> tuple[dist.Store, str]:
    """A new store, and where the other ranks find it: a file in ``folder``, or a free port of the
    leader's machine where they are on several."""
    ranks = settings.layout.ranks
    if settings.nodes == 1:
        path = str(folder / "store")
        return dist.FileStore(path, ranks), path
    # Bound here, since torch would listen on every address of the machine.
    host, _ = host_and_port(settings.meeting)
    listening = socket.create_server((host, 0))
    port = listening.getsockname()[1]
    store = dist.TCPStore(
        host,
        port,
        ranks,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=settings.ranks_limit_s),
        master_listen_fd=listening.detach(),
    )
    return store, f"{host}:{port}"


def joined_store(settings: ReplicaSettings, where: str) -> dist.Store:
    """The leader's store, for another rank."""
    ranks = settings.layout.ranks
    if settings.nodes == 1:
        return dist.FileStore(where, ranks)
    host, port = host_and_port(where)
    limit = timedelta(seconds=settings.ranks_limit_s)
    return dist.TCPStore(host, port, ranks, wait_for_workers=False, timeout=limit)
