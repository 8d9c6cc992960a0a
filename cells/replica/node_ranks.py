"""The ranks of a replica on a machine other than the leader's."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from cells.process import end_group, spawn
from cells.reason import exit_words, log_since, log_size, reason
from cells.replica.meeting import TOKEN_VARIABLE

_END_GRACE_S = 3.0


class NodeRanks:
    """Owner of one machine's rank processes. They end by themselves when their leader does."""

    def __init__(
        self, processes: dict[int, subprocess.Popen[bytes]], log: Path, logged: int
    ) -> None:
        self.processes = processes
        self._log = log
        self._logged = logged

    @classmethod
    def start(
        cls,
        *,
        node: int,
        ranks: int,
        meeting: str,
        address: str,
        token: str,
        log: Path,
        limit_s: float,
        cpus: Sequence[int] = (),
    ) -> Self:
        """Start the ranks of machine ``node``, which join their leader by themselves. Call it on
        the main thread.

        Args:
            node: number of the machine; the leader's is 0.
            ranks: on each machine.
            meeting: HOST:PORT of ``ReplicaSettings.meeting``.
            address: of this machine, at which other ranks and cells reach it.
            token: the leader's ``ranks_token``.
            limit_s: longest wait for the leader.
        """
        logged = log_size(log)
        processes = {
            rank: spawn(
                [
                    *(sys.executable, "-m", "cells.replica.worker", "--join", meeting),
                    *("--rank", str(rank), "--address", address, "--limit", str(limit_s)),
                ],
                env={**os.environ, "OMP_NUM_THREADS": "1", TOKEN_VARIABLE: token},
                log=log,
                cpus=cpus,
            )
            for rank in range(node * ranks, (node + 1) * ranks)
        }
        return cls(processes, log, logged)

    def failure(self) -> str:
        """Which rank ended and why, from the log; empty while all live."""
        for rank, process in self.processes.items():
            if (code := process.poll()) is not None:
                why = reason(log_since(self._log, self._logged))
                return f"rank {rank} {exit_words(code)}: {why}\nlog: {self._log}"
        return ""

    async def close(self) -> None:
        """End all and their groups."""
        await asyncio.gather(
            *(asyncio.to_thread(_end, process) for process in self.processes.values())
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    end_group(process.pid, grace_s=_END_GRACE_S)
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=_END_GRACE_S)
