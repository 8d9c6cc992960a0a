"""An engine and a replica that remember what was asked of them, and fail on demand."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from cells.host.cell import Cell
from cells.host.exports import Exports
from cells.serving.engine import Bucket, EngineLateError

BUCKETS = 2
"""That the replica's weights are shared in."""


class FakeEngine:
    """``refuse`` holds the exception of the next call; ``hold`` lets a drain wait."""

    url = "http://127.0.0.1:1"
    token = "engine-key"
    token_capacity = 4096

    def __init__(self, said: list[str]) -> None:
        self.pid = os.getpid()
        self.said = said
        self.served = 0
        self.dead = ""
        self.silent = False
        self.probed = 0
        self.refuse: dict[str, Exception] = {}
        self.draining = asyncio.Event()
        self.hold = asyncio.Event()
        self.hold.set()

    def failure(self) -> str:
        return self.dead

    async def drain(self, limit_s: float) -> None:
        self._say("drain")
        self.draining.set()
        await self.hold.wait()

    async def update_weights(self, path: Path, version: int, limit_s: float) -> None:
        assert (path / "model.safetensors").exists()
        self._say("update")
        self.served = version

    async def load_tensors(
        self, buckets: AsyncIterator[Bucket], version: int, limit_s: float
    ) -> None:
        self._say("begin")
        async for bucket in buckets:
            self._say(f"take {bucket.payload}")
        assert bucket.last
        self.served = version

    async def settle(self, limit_s: float) -> bool:
        self._say("settle")
        return True

    async def release_memory(self, limit_s: float) -> None:
        self._say("release")

    async def resume_memory(self, limit_s: float) -> None:
        self._say("resume")

    async def version(self) -> int:
        self._say("version")
        return self.served

    async def answers(self, limit_s: float) -> None:
        self.probed += 1
        if self.silent:
            raise EngineLateError("no answer")

    async def close(self) -> None:
        self._say("close")

    def _say(self, what: str) -> None:
        self.said.append(f"engine {what}")
        if what in self.refuse:
            raise self.refuse.pop(what)


class FakeReplica:
    """Holds a version; ``export`` writes a file, ``share`` tells of buckets."""

    def __init__(self, said: list[str]) -> None:
        self.pid = os.getpid()
        self.said = said
        self.holds = 0
        self.dead = ""
        self.refuse: dict[str, Exception] = {}

    def failure(self) -> str:
        return self.dead

    async def call(self, command: str, args: dict[str, Any], limit_s: float) -> dict[str, Any]:
        self._say(command)
        match command:
            case "pull":
                self.holds = args["descriptor"]["version"]
                return {"version": self.holds, "bytes": 1000, "seconds": 0.1}
            case "step":
                self.holds += 1
                return {"version": self.holds, "grad_norm": 1.0, "skipped": False}
            case "share":
                first = args["first"]
                following = first + 1 if first + 1 < BUCKETS else None
                return {"version": self.holds, "next": following, "payload": f"bucket {first}"}
            case "export":
                _write_weights(Path(args["path"]))
                return {"version": self.holds}
            case _:
                return {"said": command, "version": self.holds}

    async def close(self) -> None:
        self._say("close")

    def _say(self, what: str) -> None:
        self.said.append(f"replica {what}")
        if what in self.refuse:
            raise self.refuse.pop(what)


def _write_weights(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")


class FakeCell:
    """A cell on fakes. ``said`` has all calls to both in order."""

    def __init__(
        self,
        folder: Path,
        switch_limit_s: float = 10,
        *,
        release_memory: bool = False,
        bucket_bytes: int | None = None,
    ) -> None:
        self.said: list[str] = []
        self.engine = FakeEngine(self.said)
        self.replica = FakeReplica(self.said)
        self.exports = Exports(
            root=str(folder),
            run_id="run",
            cell="a",
            scratch=folder / "scratch",
            policy=folder,
            version=0,
            memory=folder / "no-memory",
        )
        self.cell = Cell(
            "a",
            engine=self.engine,
            replica=self.replica,
            exports=self.exports,
            version=0,
            switch_limit_s=switch_limit_s,
            compute_limit_s=10,
            backup_limit_s=10,
            release_memory=release_memory,
            bucket_bytes=bucket_bytes,
        )

    def take(self) -> list[str]:
        """What was said since the last look."""
        said = self.said[:]
        self.said.clear()
        return said
