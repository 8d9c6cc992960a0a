"""What a move does to real cells and to the gateway, a deadline for each call."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from cells.client import DaemonClient, DaemonError, DaemonGoneError, FencedError
from configs.run import RunConfig
from storage.layout import RunLayout
from storage.objects import Store

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
        self._capacity = config.cells.executions_per_cell
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

    def to_training(self, name: str) -> None:
        """New calls go elsewhere, running ones are re-issued elsewhere, then the role changes."""
        self.announce(name, "leaving", self.status(name)["engine"]["version"])
        self._set_role(name, "training", None)

    def to_rollout(self, name: str, version: int) -> None:
        """Weights of ``version`` come first, from the core where this cell lacks them."""
        status = self.status(name)
        if version not in (status["engine"]["version"], status["replica"]["version"]):
            self._pull(name, version)
        self._set_role(name, "rollout", version)
        self.announce(name, "serving", version)

    def announce(self, name: str, state: str, version: int) -> None:
        """Tell the gateway that a cell is ``serving`` or ``leaving``."""
        engine = self.status(name)["engine"]
        body = {
            "epoch": self._epoch,
            "url": engine["url"],
            "token": engine.get("token"),
            "capacity": self._capacity,
            "version": version,
            "state": state,
        }
        self._gateway.call("PUT", f"/admin/cells/{name}", body, limit_s=self._limit_s)

    def forget(self, name: str) -> None:
        """Take a lost cell from the gateway, if that answers."""
        with suppress(DaemonError):
            self._gateway.call(
                "DELETE",
                f"/admin/cells/{name}",
                params={"epoch": self._epoch},
                limit_s=_ASK_LIMIT_S,
            )

    def _pull(self, name: str, version: int) -> None:
        # A gradient that was left when a micro-step failed belongs to the old weights.
        self._replica(name, "discard", {})
        published = self._replica(self._core, "publish", {})
        answer = self._replica(name, "pull", {"descriptor": published["descriptor"]})
        if answer["version"] != version:
            raise DaemonError(
                f"{name}: pulled version {answer['version']} from the core, the step serves "
                f"version {version}"
            )

    def _replica(self, name: str, command: str, args: dict[str, Any]) -> dict[str, Any]:
        body = {"epoch": self._epoch, "args": args}
        return self._cells[name].call("POST", f"/replica/{command}", body, limit_s=self._limit_s)

    def _set_role(self, name: str, role: str, version: int | None) -> None:
        body = {"epoch": self._epoch, "role": role, "version": version}
        self._cells[name].call("POST", "/role", body, limit_s=self._limit_s)
