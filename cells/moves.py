"""What a move does to real cells and to the gateway, a deadline for each call."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from cells.client import DaemonClient, DaemonError, DaemonGoneError, FencedError
from configs.run import RunConfig
from storage.layout import RunLayout
from storage.objects import Store

Parts = dict[str, float]
"""Seconds by what was done: reroute, pull, role and ready here; what the role change consisted of
as its host tells."""

SILENCE_S = 60.0
"""How long a daemon may not answer before it counts as lost."""
_ASK_LIMIT_S = 10.0
_POLL_S = 0.2


class Mover:
    """Commands of one manager. Safe to use from several threads, one a cell.

    Args:
        core: name of the cell that weights are pulled from.
        epoch: of the manager; every command carries it.
    """

    def __init__(
        self,
        *,
        store: Store,
        layout: RunLayout,
        config: RunConfig,
        cells: Mapping[str, DaemonClient],
        core: str,
        gateway: DaemonClient,
        epoch: int,
    ) -> None:
        self._store = store
        self._layout = layout
        self._limit_s = config.cells.switch_limit_s
        self._cells = dict(cells)
        self._core = core
        self._gateway = gateway
        self._epoch = epoch

    def status(self, name: str) -> dict[str, Any]:
        """What a cell host says of itself.

        Raises:
            FencedError: it obeys a newer manager.
            DaemonError: it does not answer.
        """
        status = self._cells[name].call("GET", "/status", limit_s=_ASK_LIMIT_S)
        if status["epoch"] > self._epoch:
            raise FencedError(f"{name}: epoch {status['epoch']} has replaced {self._epoch}")
        return status

    def gateway_state(self, until: Callable[[], bool]) -> dict[str, Any]:
        """What the gateway says, asked again while it is silent, for a minute or ``until``.

        Raises:
            DaemonError: it stayed silent.
        """
        deadline = time.monotonic() + SILENCE_S
        while True:
            try:
                return self._gateway.call("GET", "/admin/state", limit_s=_ASK_LIMIT_S)
            except DaemonError:
                if until() or time.monotonic() > deadline:
                    raise
            time.sleep(_POLL_S)
            # A restarted gateway has another token and perhaps another address.
            with suppress(DaemonGoneError):
                self._gateway = DaemonClient.find(self._store, self._layout, self._gateway.name)

    def to_training(self, name: str) -> Parts:
        """New calls go elsewhere, running ones are re-issued elsewhere, then the role changes.

        Raises:
            DaemonError: not done within the limit of a move, or refused.
        """
        left = _Left(self._limit_s)
        version = self.status(name)["engine"]["version"]
        with left.part("reroute"):
            self.announce(name, "leaving", version, limit_s=left.seconds())
        return left.parts | self._set_role(name, "training", None, left)

    def to_rollout(
        self,
        name: str,
        version: int,
        capacity: int,
        ahead: Callable[[int, float], bool] | None = None,
    ) -> Parts:
        """Weights of ``version`` come first, from the core where this cell lacks them.

        Args:
            ahead: where newer weights will do: whether those of a version may be served, asked with
                the seconds that it may wait for them. A cell that serves gives up its executions
                before it loads them.

        Raises:
            DaemonError: not done within the limit of a move, or refused.
        """
        left = _Left(self._limit_s)
        status = self.status(name)
        if version not in (status["engine"]["version"], status["replica"]["version"]):
            with left.part("pull"):
                version = self._pull(name, version, left, ahead)
        held = status["engine"]["version"]
        if ahead is not None and status["role"] == "rollout" and held != version:
            with left.part("reroute"):
                self.announce(name, "leaving", held, limit_s=left.seconds())
        host = self._set_role(name, "rollout", version, left)
        with left.part("ready"):
            self.announce(name, "serving", version, capacity, limit_s=left.seconds())
        return left.parts | host

    def settled_status(self, name: str, limit_s: float) -> dict[str, Any]:
        """The status of a cell when a switch that is under way, or going back, has ended. A host
        that is only slow gets a minute to answer.

        Raises:
            FencedError: it obeys a newer manager.
            DaemonError: it can't be asked, has failed, or goes on switching.
        """
        deadline = time.monotonic() + limit_s
        heard = time.monotonic()
        while True:
            try:
                status = self.status(name)
            except (FencedError, DaemonGoneError):
                raise
            except DaemonError:
                if time.monotonic() > min(deadline, heard + SILENCE_S):
                    raise
            else:
                heard = time.monotonic()
                if status["role"] in ("rollout", "training"):
                    return status
                if status["role"] == "failed" or heard > deadline:
                    raise DaemonError(f"{name}: role {status['role']}: {status.get('detail', '')}")
            time.sleep(_POLL_S)

    def announce(
        self,
        name: str,
        state: str,
        version: int,
        capacity: int = 1,
        *,
        limit_s: float | None = None,
    ) -> None:
        """Tell the gateway that a cell is ``serving`` so many executions, or ``leaving``.

        Raises:
            DaemonError: the cell or the gateway does not answer in time.
        """
        engine = self.status(name)["engine"]
        body = {
            "epoch": self._epoch,
            "url": engine["url"],
            "token": engine.get("token"),
            "capacity": capacity,
            "version": version,
            "state": state,
        }
        limit_s = self._limit_s if limit_s is None else limit_s
        self._gateway.call("PUT", f"/admin/cells/{name}", body, limit_s=limit_s)

    def forget(self, name: str) -> None:
        """Take a lost cell from the gateway, if that answers."""
        with suppress(DaemonError):
            self._gateway.call(
                "DELETE",
                f"/admin/cells/{name}",
                params={"epoch": self._epoch},
                limit_s=_ASK_LIMIT_S,
            )

    def _pull(
        self,
        name: str,
        version: int,
        left: _Left,
        ahead: Callable[[int, float], bool] | None,
    ) -> int:
        """The version that was pulled."""
        # A gradient that was left when a micro-step failed belongs to the old weights.
        self._replica(name, "discard", {}, left)
        published = self._replica(self._core, "publish", {}, left)
        answer = self._replica(name, "pull", {"descriptor": published["descriptor"]}, left)
        pulled = int(answer["version"])
        newer = ahead is not None and pulled > version and ahead(pulled, left.seconds())
        if pulled != version and not newer:
            raise DaemonError(
                f"{name}: pulled version {pulled} from the core, the step serves version {version}"
            )
        return pulled

    def _replica(
        self, name: str, command: str, args: dict[str, Any], left: _Left
    ) -> dict[str, Any]:
        body = {"epoch": self._epoch, "args": args}
        path = f"/replica/{command}"
        return self._cells[name].call("POST", path, body, limit_s=left.seconds())

    def _set_role(self, name: str, role: str, version: int | None, left: _Left) -> Parts:
        """What the host says the switch consisted of; nothing where the cell was as asked."""
        body = {"epoch": self._epoch, "role": role, "version": version}
        with left.part("role"):
            answer = self._cells[name].call("POST", "/role", body, limit_s=left.seconds())
        switches = answer.get("switches") or [{}]
        return dict(switches[-1].get("parts", {}))


class _Left:
    """What is left of a move's time, and what was spent on which part."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._deadline = time.monotonic() + limit_s
        self.parts: Parts = {}

    def seconds(self) -> float:
        """
        Raises:
            DaemonError: none is left.
        """
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise DaemonError(
                f"the move took longer than cells.switch_limit_s ({self._limit_s:g} s); "
                f"so far: {self.parts}"
            )
        return left

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the seconds of the block."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.parts[name] = round(time.monotonic() - began, 4)
