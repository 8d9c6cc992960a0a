"""The ranks of a replica: the leader gives each command to all, and makes one answer of theirs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cells.process import spawn
from cells.replica.errors import DamagedError, ReplicaError
from cells.replica.frames import FrameError, pack_frame, receive_frame
from cells.replica.meeting import Meeting, end_with
from cells.replica.place import Place
from cells.replica.settings import ReplicaSettings

if TYPE_CHECKING:
    import torch.distributed as dist

Answer = dict[str, Any]


class Team:
    """The other ranks of a leader's replica: processes with the same program, children on its own
    machine.

    When one of them ends, the leader ends too: what it held is gone, and others may wait for it.
    """

    def __init__(self, settings: ReplicaSettings) -> None:
        self._settings = settings
        self._folder = tempfile.TemporaryDirectory(prefix="gyre-ranks-")
        self._meeting = Meeting(settings, Path(self._folder.name))
        self._streams: list[socket.socket] = []
        for rank in range(1, settings.node_ranks):
            self._start(rank)

    def assemble(self) -> dist.Store:
        """Wait until all ranks have joined; returns the store that they meet in next.

        Raises:
            TimeoutError: one did not come within the limit of the settings.
        """
        from cells.replica.rank_store import leader_store  # imports torch

        store, where = leader_store(self._settings, Path(self._folder.name))
        self._streams = self._meeting.admit(where)
        end_with(self._streams, "a rank of the replica")
        return store

    def gather(self) -> None:
        """Wait until all ranks are ready; call it when this one is.

        Raises:
            TimeoutError: one is not, within the limit of the settings.
        """
        for stream in self._streams:
            stream.settimeout(self._settings.ranks_limit_s)
            if receive_frame(stream) is None:
                raise DamagedError("a rank ended while it started")
            stream.settimeout(None)

    def run(self, command: str, args: dict[str, Any], own: Callable[[], Answer]) -> Answer:
        """Have all ranks carry out a command, this one by ``own``, and return one answer.

        Raises:
            DamagedError: a rank ended, or some did what others refused.
            Exception: what ``own`` raised, when all refused.
        """
        frame = pack_frame({"id": 0, "command": command, "args": args})
        try:
            for stream in self._streams:
                stream.sendall(frame)
        except OSError as error:
            raise DamagedError(f"a rank ended before {command}: {error}") from error
        refused: Exception | None = None
        answers: list[Answer] = []
        try:
            answers.append(own())
        except DamagedError:
            raise
        except Exception as error:  # noqa: BLE001 - the others have to be heard first
            refused = error
        try:
            others = [receive_frame(stream) for stream in self._streams]
        except (OSError, FrameError) as error:
            raise DamagedError(f"a rank ended during {command}: {error}") from error
        for rank, found in enumerate(others, start=1):
            if found is None:
                raise DamagedError(f"rank {rank} ended during {command}")
            told = found.get("error")
            damaged = told is not None and told["kind"] == DamagedError.__name__
            if damaged or (told is None) is not (refused is None):
                text = refused if told is None else told["text"]
                raise DamagedError(f"ranks disagree about {command}, or rank {rank} failed: {text}")
            if told is None:
                answers.append(found["answer"])
            elif told["text"] != str(refused):
                refused = ReplicaError(f"{refused}; rank {rank}: {told['text']}")
        if refused is not None:
            raise refused
        return merged(command, answers, self._settings)

    def _start(self, rank: int) -> None:
        process = spawn(
            [
                *(sys.executable, "-m", "cells.replica.worker"),
                *("--join", self._meeting.address, "--rank", str(rank)),
                *("--address", self._settings.transfer_host),
                *("--limit", str(self._settings.ranks_limit_s)),
            ],
            env=dict(os.environ),
            log=_own_log(),
        )
        threading.Thread(target=_end_with, args=(process, rank), daemon=True).start()


def merged(command: str, answers: Sequence[Answer], settings: ReplicaSettings) -> Answer:
    """One answer of those of all ranks, in order."""
    places = [Place(settings.layout, rank) for rank in range(len(answers))]
    reports = [answer for answer, at in zip(answers, places, strict=True) if at.reports]
    leader = dict(answers[0])
    if command == "micro_step":
        for name in ("tokens", "target_tokens", "samples"):
            leader[name] = sum(answer[name] for answer in reports)
        leader["seconds"] = max(answer["seconds"] for answer in answers)
        leader["stats"] = _added([answer["stats"] for answer in reports])
    elif command == "logprobs":
        tokens = sum(answer["tokens"] for answer in reports)
        gap = sum(answer["gap_mean"] * answer["tokens"] for answer in reports)
        leader["gap_mean"] = gap / max(tokens, 1)
        leader["gap_max"] = max(answer["gap_max"] for answer in reports)
        leader["tokens"] = tokens
    elif command in ("publish", "freeze"):
        blocks = [answer["descriptor"] for answer in answers]
        leader["descriptor"] = {
            "ranks": blocks,
            "nbytes": sum(block["nbytes"] for block in blocks),
            "version": blocks[0]["version"],
        }
    elif command in ("pull", "reduce"):
        leader["bytes"] = sum(answer["bytes"] for answer in answers)
        leader["seconds"] = max(answer["seconds"] for answer in answers)
    return leader


def _added(stats: Sequence[dict[str, float]]) -> dict[str, float]:
    """Sums, and the highest of what is a maximum."""
    total: dict[str, float] = {}
    for each in stats:
        for name, value in each.items():
            both = (total.get(name, value), value)
            total[name] = max(both) if name.endswith("_max") else total.get(name, 0.0) + value
    return total


def _end_with(process: subprocess.Popen[bytes], rank: int) -> None:
    code = process.wait()
    print(f"rank {rank} of the replica ended with code {code}", file=sys.stderr, flush=True)
    os._exit(1)


def _own_log() -> Path:
    """Where this process writes, so that the other ranks' words are found there too."""
    return Path("/proc/self/fd/2")
