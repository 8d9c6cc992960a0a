"""The process of a replica: ``python -m cells.replica.worker --socket PATH --settings JSON``.

It connects to the Unix socket that its owner listens on and carries out the commands that come in,
one after the other. It ends when the socket closes, so it never outlives its owner.

A replica of several ranks is as many of these processes. The one that was started, rank 0, starts
the others, which are commanded by it in the same way.

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
from cells.replica.place import Place
from cells.replica.settings import ReplicaSettings
from cells.replica.team import Team

if TYPE_CHECKING:
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
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--settings", required=True, help="ReplicaSettings as JSON")
    parser.add_argument("--rank", type=int, default=0, help="of a further process; set by rank 0")
    parser.add_argument("--rendezvous", type=Path, help="shared file; set by rank 0")
    given = parser.parse_args()
    settings = ReplicaSettings.model_validate_json(given.settings)
    # One core per replica: threads would fight with the engine's of another cell.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with socket.socket(socket.AF_UNIX) as stream:
        stream.connect(str(given.socket))
        place = Place(settings.layout, given.rank)
        leads = not place.alone and given.rank == 0
        team = Team(settings) if leads else None
        import torch

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        from cells.replica.commands import Commands
        from cells.replica.model import start_megatron

        rendezvous = team.rendezvous if team else given.rendezvous
        start_megatron(place, rendezvous=rendezvous, limit_s=settings.ranks_limit_s)
        commands = Commands(settings, place)
        run: Run = commands.run
        if team:
            team.gather()
            run = partial(_with_all, team, commands)
        stream.sendall(pack_frame({"ready": os.getpid(), "rank": given.rank}))
        return serve(stream, run)


def _with_all(team: Team, commands: Commands, command: str, args: dict[str, Any]) -> dict[str, Any]:
    return team.run(command, args, lambda: commands.run(command, args))


if __name__ == "__main__":
    sys.exit(main())
