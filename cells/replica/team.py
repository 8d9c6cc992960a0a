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
from typing import Any

from cells.process import spawn
from cells.replica.errors import DamagedError, ReplicaError
from cells.replica.frames import FrameError, pack_frame, receive_frame
from cells.replica.place import Place
from cells.replica.settings import ReplicaSettings

Answer = dict[str, Any]


class Team:
    """The other ranks of a leader's replica: child processes with the same program.

    When one of them ends, the leader ends too: what it held is gone, and others may wait for it.
    """

    def __init__(self, settings: ReplicaSettings) -> None:
        self._settings = settings
        self._folder = tempfile.TemporaryDirectory(prefix="gyre-ranks-")
        self.rendezvous = Path(self._folder.name) / "rendezvous"
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(Path(self._folder.name) / "socket"))
        self._listening.listen(settings.layout.ranks)
        self._listening.settimeout(settings.ranks_limit_s)
        self._streams: list[socket.socket] = []
        for rank in range(1, settings.layout.ranks):
            self._start(rank)

    def gather(self) -> None:
        """Wait until all ranks are ready; call it when this one is.

        Raises:
            TimeoutError: one is not, within the limit of the settings.
        """
        streams: dict[int, socket.socket] = {}
        while len(streams) < self._settings.layout.ranks - 1:
            stream, _ = self._listening.accept()
            stream.settimeout(self._settings.ranks_limit_s)
            ready = receive_frame(stream)
            if ready is None:
                raise DamagedError("a rank ended while it started")
            stream.settimeout(None)
            streams[int(ready["rank"])] = stream
        self._streams = [streams[rank] for rank in sorted(streams)]
        self._listening.close()

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
                *("--socket", str(Path(self._folder.name) / "socket")),
                *("--settings", self._settings.model_dump_json()),
                *("--rank", str(rank), "--rendezvous", str(self.rendezvous)),
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
