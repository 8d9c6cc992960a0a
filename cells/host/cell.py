"""One cell: an engine and a replica that take turns, and never both work."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from cells.daemon import Fence, StaleEpochError
from cells.host.exports import Exports
from cells.host.handover import Handover
from cells.host.parts import Engine, Further, Replica
from cells.host.roles import HostRole, RoleMachine
from cells.serving.engine import EngineError

WATCH_S = 0.5
PROBE_EVERY_S = 5.0
PROBE_LIMIT_S = 15.0
SILENT_PROBES = 8
"""So many in a row without an answer fail the cell: about two and a half minutes. An engine that
computes a long prompt on few cores says nothing for a while either."""
_SMOOTHING = 0.3
"""Weight of the newest measurement in a running mean."""

TRAINING_COMMANDS = frozenset({"micro_step", "freeze", "reduce", "step"})
"""Only in role training: they compute, or need what was computed."""
COMMANDS = TRAINING_COMMANDS | {
    "load",
    "discard",
    "release",
    "publish",
    "pull",
    "export",
    "save",
    "restore",
    "logprobs",
    "status",
}
COMPUTING = frozenset({"micro_step", "step", "logprobs"})
VERSION_COMMANDS = frozenset({"load", "restore", "pull", "step", "status"})
"""Their answer has the version that the replica holds. Status too: a step that was answered too
late was carried out all the same."""


class UnknownCommandError(ValueError):
    """No such command of a replica."""


class SwitchLateError(RuntimeError):
    """A switch did not end before its deadline; the cell is in the role that it had, or failed."""


@dataclass
class Moved:
    """What Mooncake moved for this cell."""

    reads: int = 0
    read_bytes: int = 0
    published: int = 0
    published_bytes: int = 0

    def count(self, command: str, answer: dict[str, Any]) -> None:
        """Add what the answer to ``command`` tells."""
        if command in ("pull", "reduce"):
            self.reads += 1
            self.read_bytes += int(answer["bytes"])
        elif command in ("publish", "freeze"):
            self.published += 1
            self.published_bytes += int(answer["descriptor"]["nbytes"])


@dataclass
class Pace:
    """Running means of what the scheduler weighs, in seconds; None before the first one."""

    micro_step_s: float | None = None
    pull_s: float | None = None

    def count(self, command: str, seconds: float) -> None:
        """Add how long ``command`` took, its wait for an earlier one included."""
        if command == "micro_step":
            self.micro_step_s = _mean(self.micro_step_s, seconds)
        elif command == "pull":
            self.pull_s = _mean(self.pull_s, seconds)


class Cell:
    """Engine and replica of one cell under one role.

    Args:
        version: of the weights that both start with.
        switch_limit_s: longest time of a role change, and of a command that moves weights.
        compute_limit_s: longest time of a command that computes.
        backup_limit_s: longest wait of a cell that leaves for its KV pages to be written.
        release_memory: the engine gives its memory back while the cell trains.
        bucket_bytes: weights come to the engine in shared memory, so much at a time; None brings
            them in files.
        nodes: the further machines of the cell, if it spans several.
    """

    def __init__(
        self,
        name: str,
        *,
        engine: Engine,
        replica: Replica,
        exports: Exports,
        version: int,
        switch_limit_s: float,
        compute_limit_s: float,
        backup_limit_s: float,
        release_memory: bool = False,
        bucket_bytes: int | None = None,
        nodes: Further | None = None,
    ) -> None:
        self.name = name
        self.engine = engine
        self.replica = replica
        self.roles = RoleMachine()
        self.fence = Fence()
        self.moved = Moved()
        self.pace = Pace()
        self._exports = exports
        self._nodes = nodes
        self._weights = Handover(
            name, engine, replica, exports, version, bucket_bytes, switch_limit_s
        )
        self._switch_limit_s = switch_limit_s
        self._compute_limit_s = compute_limit_s
        self._backup_limit_s = backup_limit_s
        self._release_memory = release_memory
        self._switching = asyncio.Lock()

    @property
    def engine_version(self) -> int:
        """Of the weights that the engine serves."""
        return self._weights.engine_version

    @property
    def replica_version(self) -> int:
        """Of the weights that the replica holds."""
        return self._weights.replica_version

    async def start(self) -> None:
        """Begin in rollout, the replica asleep. Both processes are ready.

        Raises:
            ReplicaCallError: the replica did not do it.
        """
        await self.replica.call("sleep", {}, self._switch_limit_s)
        self.roles.started()

    async def watch(self) -> None:
        """Fail the cell when one of its processes ends, or its engine says nothing any more. Runs
        until then, or until cancelled."""
        probing = asyncio.create_task(self._probe_engine())
        try:
            while self.roles.role is not HostRole.FAILED:
                if found := self.engine.failure() or self.replica.failure() or self._lost_node():
                    self.roles.fail(found)
                await asyncio.sleep(WATCH_S)
        finally:
            probing.cancel()

    async def _probe_engine(self) -> None:
        """Commands to a replica have deadlines; the calls of harnesses to an engine have none that
        is short. Probes are counted, not seconds, so that a host that stood still blames nobody."""
        silent = 0
        while self.roles.role is not HostRole.FAILED:
            await asyncio.sleep(PROBE_EVERY_S)
            if self.roles.role is not HostRole.ROLLOUT:
                silent = 0
                continue
            try:
                await self.engine.answers(PROBE_LIMIT_S)
                silent = 0
            except EngineError as error:
                silent += 1
                if silent >= SILENT_PROBES and self.roles.role is HostRole.ROLLOUT:
                    self.roles.fail(f"SGLang has not answered {silent} times in a row: {error}")

    async def change_role(self, epoch: int, to: HostRole, version: int | None) -> None:
        """Go to rollout or training; to rollout with ``version`` in the engine, if one is given.

        Nothing is done where the cell is as asked already. When the change is refused on the way,
        the cell goes back to its role before.

        Raises:
            StaleEpochError: a newer epoch has been seen, also while this waited for another switch.
            WrongRoleError: the cell is starting or has failed.
            VersionAbsentError: the replica does not hold ``version``.
            SwitchLateError: not done in time.
            EngineError, ReplicaCallError: a process refused, died or was too slow.
        """
        async with self._turn(epoch):
            same_version = version in (None, self.engine_version)
            if self.roles.role is to and (to is HostRole.TRAINING or same_version):
                return
            async with self._switch(to):
                if to is HostRole.TRAINING:
                    with self.roles.part("drain"):
                        await self.engine.drain(self._switch_limit_s)
                    with self.roles.part("backup"):
                        # What is late is computed anew by whoever needs it.
                        await self.engine.settle(self._backup_limit_s)
                    with self.roles.part("memory"):
                        if self._release_memory:
                            await self._weights.release_memory()
                    with self.roles.part("replica"):
                        await self.replica.call("wake", {}, self._switch_limit_s)
                    return
                with self.roles.part("memory"):
                    await self._weights.resume_memory()
                with self.roles.part("weights"):
                    await self._weights.serve(self.engine_version if version is None else version)
                with self.roles.part("replica"):
                    await self.replica.call("sleep", {}, self._switch_limit_s)

    async def set_version(self, epoch: int, version: int) -> None:
        """Give the engine the replica's weights of ``version``; the role stays.

        Raises: as ``change_role``.
        """
        async with self._turn(epoch):
            if version != self.engine_version:
                async with self._switch(self.roles.role):
                    await self._weights.serve(version)

    async def command(self, epoch: int, command: str, args: dict[str, Any]) -> dict[str, Any]:
        """Have the replica carry out a command and return its answer.

        Raises:
            StaleEpochError: a newer epoch has been seen.
            UnknownCommandError: not a command that may be sent through the host.
            WrongRoleError: it needs role training.
            ReplicaCallError: the replica refused, is dead or was too slow.
        """
        self.fence.admit(epoch)
        if command not in COMMANDS:
            raise UnknownCommandError(
                f"{command!r} is not a command; there are {', '.join(sorted(COMMANDS))}"
            )
        if command in TRAINING_COMMANDS:
            self.roles.require(HostRole.TRAINING, command)
        limit_s = self._compute_limit_s if command in COMPUTING else self._switch_limit_s
        began = time.monotonic()
        answer = await self.replica.call(command, args, limit_s)
        self.pace.count(command, time.monotonic() - began)
        if command in VERSION_COMMANDS:
            self._weights.replica_version = int(answer["version"])
        self.moved.count(command, answer)
        return answer

    async def close(self) -> None:
        """End both processes and remove the exported weights."""
        ending = [self.engine.close(), self.replica.close()]
        if self._nodes is not None:
            ending.append(self._nodes.close())
        try:
            await asyncio.gather(*ending)
        finally:
            await asyncio.to_thread(self._exports.close)

    def _lost_node(self) -> str:
        return self._nodes.failure() if self._nodes is not None else ""

    @asynccontextmanager
    async def _turn(self, epoch: int) -> AsyncIterator[None]:
        """One switch at a time; one that waited is refused when a newer epoch came meanwhile."""
        self.fence.admit(epoch)
        try:
            await asyncio.wait_for(self._switching.acquire(), self._switch_limit_s)
        except TimeoutError:
            raise SwitchLateError("another switch did not end in time") from None
        try:
            if epoch < self.fence.epoch:
                raise StaleEpochError(f"epoch {epoch} is older than {self.fence.epoch}")
            yield
        finally:
            self._switching.release()

    @asynccontextmanager
    async def _switch(self, to: HostRole) -> AsyncIterator[None]:
        before = self.roles.role
        self.roles.begin(to)
        try:
            async with asyncio.timeout(self._switch_limit_s):
                yield
        except TimeoutError:
            late = SwitchLateError(f"not in {to} within {self._switch_limit_s:g} s")
            await self._go_back(before, late)
            raise late from None
        except Exception as error:
            await self._go_back(before, error)
            raise
        self.roles.finish(to)

    async def _go_back(self, before: HostRole, error: BaseException) -> None:
        """After a refusal: as before if the processes still do as they are told, else failed."""
        if self.roles.role is HostRole.FAILED:
            return
        try:
            await self._weights.ask_version()
            if before is not HostRole.TRAINING:
                await self._weights.resume_memory()
                await self._weights.serve(self.engine_version)
            elif self._release_memory:
                await self._weights.release_memory()
            command = "wake" if before is HostRole.TRAINING else "sleep"
            await self.replica.call(command, {}, self._switch_limit_s)
            self.roles.abandon(f"a switch was refused: {error}")
        except Exception as worse:  # noqa: BLE001 - whatever it is, the cell can't be trusted
            self.roles.fail(f"{error}; after that: {worse}")


def _mean(old: float | None, new: float) -> float:
    return new if old is None else _SMOOTHING * new + (1 - _SMOOTHING) * old
