"""What a cell needs of its two processes, however they run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Protocol

from cells.serving.engine import Bucket


class Engine(Protocol):
    """An inference server. ``cells.serving.process.EngineProcess`` is one."""

    @property
    def pid(self) -> int: ...

    @property
    def url(self) -> str: ...

    @property
    def token(self) -> str:
        """For its control calls."""

    @property
    def token_capacity(self) -> int:
        """Tokens that its KV cache holds."""

    def failure(self) -> str:
        """How its process ended and what it said last; empty while it lives."""

    async def drain(self, limit_s: float) -> None:
        """End every generation with its partial answer."""

    async def update_weights(self, path: Path, version: int, limit_s: float) -> None: ...

    async def load_tensors(
        self, buckets: AsyncIterator[Bucket], version: int, limit_s: float
    ) -> None:
        """As ``update_weights``; when it is refused, what was served before is gone."""

    async def settle(self, limit_s: float) -> bool:
        """Wait until other engines can have what this one computed; whether it was in time."""

    async def release_memory(self, limit_s: float) -> None:
        """Give back what weights and KV cache take; only while nothing generates."""

    async def resume_memory(self, limit_s: float) -> None:
        """Take it again, without what was in it."""

    async def version(self) -> int: ...

    async def answers(self, limit_s: float) -> None:
        """Raises ``EngineError`` when the server, or what computes behind it, says nothing."""

    async def close(self) -> None: ...


class Replica(Protocol):
    """A training replica with a policy. ``cells.host.replica.ReplicaProcess`` is one.

    Commands run one at a time, in the order of the calls.
    """

    @property
    def pid(self) -> int: ...

    def failure(self) -> str:
        """How its process ended and what it said last; empty while it lives."""

    async def call(self, command: str, args: dict[str, Any], limit_s: float) -> dict[str, Any]: ...

    async def close(self) -> None: ...


class Further(Protocol):
    """What of a cell is on machines other than its leader's. ``cells.host.nodes.Nodes`` is it."""

    def failure(self) -> str:
        """What ended there; empty while all lives."""

    async def close(self) -> None: ...
