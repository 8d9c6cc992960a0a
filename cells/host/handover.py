"""How the engine of a cell gets weights: from the replica beside it, or back from files."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from cells.host.exports import Exports
from cells.host.parts import Engine, Replica
from cells.replica.client import ReplicaCallError, ReplicaRefusedError
from cells.serving.engine import Bucket, EngineRefusedError

log = logging.getLogger(__name__)


class VersionAbsentError(RuntimeError):
    """The weights that the engine is to serve are not in the replica, or in no files."""


class Handover:
    """Which weights both sides of a cell hold, and their way from the replica to the engine.

    Args:
        cell: its name.
        version: that both start with.
        bucket_bytes: weights come in shared memory, so much at a time, and by files where that is
            refused; None brings them by files.
        limit_s: longest time of each call.
    """

    def __init__(
        self,
        cell: str,
        engine: Engine,
        replica: Replica,
        exports: Exports,
        version: int,
        bucket_bytes: int | None,
        limit_s: float,
    ) -> None:
        self.engine_version = version
        self.replica_version = version
        self._cell = cell
        self._engine = engine
        self._replica = replica
        self._exports = exports
        self._bucket_bytes = bucket_bytes
        self._limit_s = limit_s
        self._released = False
        """The engine has given its memory back."""
        self._lost = False
        """The engine has its memory, and not the weights of ``engine_version`` in it."""

    async def serve(self, version: int) -> None:
        """Have the engine serve ``version``.

        Raises:
            VersionAbsentError: the replica holds another one.
            EngineError, ReplicaCallError: refused, dead or late.
        """
        if version == self.engine_version:
            if self._lost:
                await self._load(self._kept(version), version)
            return
        if not await self._load_tensors(version):
            await self._load(await self._export(version), version)
        self.engine_version = version
        await asyncio.to_thread(self._exports.keep_only, version)

    async def ask_version(self) -> None:
        """Take the engine's word: an update that was late may have taken effect.

        Raises:
            EngineError: it does not answer.
        """
        self.engine_version = await self._engine.version()

    async def release_memory(self) -> None:
        """Have the engine give its memory back, when its weights can be had again.

        Raises: as ``serve``.
        """
        if not self._released:
            if self._exports.kept(self.engine_version) is None:
                await self._export(self.engine_version)
            await self._engine.release_memory(self._limit_s)
            self._released = True

    async def resume_memory(self) -> None:
        """Have the engine take its memory again, if it gave it back; its weights are not in it.

        Raises:
            EngineError: refused, dead or late.
        """
        if self._released:
            await self._engine.resume_memory(self._limit_s)
            self._released, self._lost = False, True

    def _kept(self, version: int) -> Path:
        path = self._exports.kept(version)
        if path is None:
            raise VersionAbsentError(f"the engine has lost version {version}; no files have it")
        return path

    async def _load(self, path: Path, version: int) -> None:
        await self._engine.update_weights(path, version, self._limit_s)
        self._lost = False

    async def _export(self, version: int) -> Path:
        """The replica's weights as files."""
        path = await asyncio.to_thread(self._exports.fresh, version)
        answer = await self._replica.call("export", {"path": str(path)}, self._limit_s)
        try:
            self._check(answer, version)
        except VersionAbsentError:
            await asyncio.to_thread(self._exports.fresh, version)
            raise
        return path

    async def _load_tensors(self, version: int) -> bool:
        """Whether the engine has taken the replica's weights from shared memory."""
        if self._bucket_bytes is None:
            return False
        try:
            first = await self._share(0)
            self._check(first, version)
            self._lost = True
            await self._engine.load_tensors(self._buckets(first), version, self._limit_s)
            self._lost = False
        except (EngineRefusedError, ReplicaRefusedError) as error:
            log.warning("%s: version %d goes by files: %s", self._cell, version, error)
            return False
        finally:
            with suppress(ReplicaCallError):  # the next one takes its place
                await self._replica.call("unshare", {}, self._limit_s)
        return True

    async def _buckets(self, answer: dict[str, Any]) -> AsyncIterator[Bucket]:
        while answer["next"] is not None:
            yield Bucket(answer["payload"], last=False)
            answer = await self._share(answer["next"])
        yield Bucket(answer["payload"], last=True)

    async def _share(self, first: int) -> dict[str, Any]:
        args = {"first": first, "limit_bytes": self._bucket_bytes}
        return await self._replica.call("share", args, self._limit_s)

    def _check(self, answer: dict[str, Any], version: int) -> None:
        self.replica_version = int(answer["version"])
        if self.replica_version != version:
            raise VersionAbsentError(
                f"the engine is to serve version {version}, the replica holds "
                f"{self.replica_version}; pull or load it first"
            )
