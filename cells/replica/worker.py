"""The process of a replica: ``python -m cells.replica.worker --socket PATH --settings JSON``.

It connects to the Unix socket that its owner listens on and carries out the commands that come in,
one after the other. It ends when the socket closes, so it never outlives its owner.

A replica of several ranks is as many of these processes. The one that was started, rank 0, starts
the others of its machine (``--join SOCKET --rank N``), which are commanded by it in the same way;
those of other machines join it at an address (``NodeRanks``).

Frames in: ``{"id", "command", "args"}``. Frames out: ``{"id", "answer"}`` or ``{"id", "error":
{"kind", "text"}}``; the first one, ``{"ready": pid}``, says that Megatron is imported.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cells.replica.errors import DamagedError
from cells.replica.frames import pack_frame, receive_frame
from cells.replica.meeting import end_with, join, use_interface_of, welcomed
from cells.replica.place import Place
from cells.replica.settings import ReplicaSettings
from cells.replica.team import Team

if TYPE_CHECKING:
    import torch.distributed as dist

    from cells.replica.commands import Commands

Run = Callable[[str, dict[str, Any]], dict[str, Any]]


def serve(stream: socket.socket, run: Run) -> int:
    """Carry out commands until the other side closes; 1 when the state is damaged."""
    while (frame := receive_frame(stream)) is not None:
        damaged = False
        answer: dict[str, Any]
        try:
            answer = {"answer": run(str(frame["command"]), dict(frame["args"]))}
        except DamagedError as error:
            damaged = True
            answer = _error(error)
        except Exception as error:  # noqa: BLE001 - a failed command must not end the replica
            traceback.print_exc()
            answer = _error(error)
        stream.sendall(pack_frame({"id": frame["id"], **answer}))
        if damaged:
            return 1
    return 0


def _error(error: Exception) -> dict[str, Any]:
    return {"error": {"kind": type(error).__name__, "text": str(error)}}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m cells.replica.worker", description=__doc__)
    parser.add_argument("--socket", type=Path, help="of the owner")
    parser.add_argument("--settings", help="ReplicaSettings as JSON")
    parser.add_argument("--join", help="of a further rank: its leader's socket, or HOST:PORT")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--address", help="of this rank's machine")
    parser.add_argument("--limit", type=float, default=300, help="seconds to wait for the leader")
    given = parser.parse_args()
    # One core per replica: threads would fight with the engine's of another cell.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if given.join:
        return follow(given.join, given.rank, given.address, given.limit)
    return lead(given.socket, ReplicaSettings.model_validate_json(given.settings))


def lead(owner: Path, settings: ReplicaSettings) -> int:
    """Be rank 0 of a replica, which its owner commands; 1 when it is damaged."""
    with socket.socket(socket.AF_UNIX) as stream:
        stream.connect(str(owner))
        place = Place(settings.layout)
        if place.alone:
            commands = _start(settings, place, None)
            return _serve(stream, commands.run)
        team = Team(settings)
        commands = _start(settings, place, team.assemble)
        team.gather()
        return _serve(stream, partial(_with_all, team, commands))


def follow(leader: str, rank: int, address: str, limit_s: float) -> int:
    """Be another rank, which rank 0 commands, on the machine with ``address``."""
    with join(leader, rank, limit_s) as stream:
        import cells.replica.commands  # noqa: F401 - takes seconds, while others start

        welcome = welcomed(stream, limit_s)
        end_with([stream], "the leader of the replica")
        settings = welcome.settings.model_copy(update={"transfer_host": address})
        place = Place(settings.layout, rank)
        from cells.replica.rank_store import joined_store

        commands = _start(settings, place, lambda: joined_store(settings, welcome.store))
        return _serve(stream, commands.run)


def _start(
    settings: ReplicaSettings, place: Place, store: Callable[[], dist.Store] | None
) -> Commands:
    """Import Megatron, and make this process one of the ranks that meet in ``store``."""
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    from cells.replica.commands import Commands
    from cells.replica.model import start_megatron

    if settings.nodes > 1:
        use_interface_of(settings.transfer_host)
    start_megatron(
        place,
        rendezvous=store() if store else None,
        nodes=settings.nodes,
        limit_s=settings.ranks_limit_s,
    )
    return Commands(settings, place)


def _serve(stream: socket.socket, run: Run) -> int:
    stream.sendall(pack_frame({"ready": os.getpid()}))
    return serve(stream, run)


def _with_all(team: Team, commands: Commands, command: str, args: dict[str, Any]) -> dict[str, Any]:
    return team.run(command, args, lambda: commands.run(command, args))


if __name__ == "__main__":
    sys.exit(main())
