"""Calls to the daemons of a run, with a deadline each and errors that say which one refused."""

from __future__ import annotations

from typing import Any, Self

import httpx

from cells.daemon import Registration
from cells.tls import trust_of
from storage.layout import RunLayout
from storage.objects import MissingObjectError, Store

CALL_LIMIT_S = 20.0


class DaemonError(RuntimeError):
    """A daemon refused a call or can't be reached; the text names it and its answer."""


class DaemonGoneError(DaemonError):
    """Nothing answers there."""


class FencedError(DaemonError):
    """A newer manager has taken over; this one has to stop."""


class DaemonClient:
    """Administrative calls to one daemon. Safe to use from several threads."""

    def __init__(self, registration: Registration) -> None:
        self.become(registration)

    def become(self, registration: Registration) -> None:
        """Lead to another process of the same daemon from now on, for everybody who holds this.

        Calls under way go on to the old one, which does not answer any more.
        """
        self._http = httpx.Client(
            base_url=registration.url,
            headers={"authorization": f"Bearer {registration.token}"},
            timeout=httpx.Timeout(CALL_LIMIT_S, connect=5),
            # Loopback and cluster addresses are never behind a proxy of the environment.
            trust_env=False,
            verify=trust_of(registration.ca),
        )
        self.name = registration.name
        self.url = registration.url
        self.registration = registration

    @classmethod
    def find(cls, store: Store, layout: RunLayout, name: str) -> Self:
        """The client of the daemon that is registered under ``name``.

        Raises:
            DaemonGoneError: none is registered.
        """
        try:
            return cls(store.read_record(layout.host(name), Registration))
        except MissingObjectError:
            raise DaemonGoneError(f"{name}: not registered in run {layout.run_id}") from None

    def close(self) -> None:
        self._http.close()

    def alive(self) -> bool:
        """Whether the registered process itself answers, not another one on its old port."""
        try:
            answer = self.call("GET", "/healthz", limit_s=5)
        except DaemonError:
            return False
        return bool(answer.get("incarnation") == self.registration.incarnation)

    def renew(self) -> float:
        """Returns by how much the daemon's event loop was behind at most since the last time, in
        seconds."""
        return float(self.call("POST", "/lease", limit_s=5).get("recent_loop_lag_s", 0.0))

    def stop(self) -> None:
        self.call("POST", "/stop", limit_s=5)

    def call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        limit_s: float = CALL_LIMIT_S,
        params: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Send a request and return its JSON answer.

        Raises:
            FencedError: the epoch in ``body`` is too old.
            DaemonGoneError: no connection.
            DaemonError: any other refusal, or no answer within ``limit_s``.
        """
        try:
            response = self._http.request(
                method, path, json=body, params=params, timeout=httpx.Timeout(limit_s, connect=5)
            )
        except httpx.TimeoutException:
            raise DaemonError(f"{self.name}: {method} {path}: no answer in {limit_s:g} s") from None
        except httpx.TransportError as error:
            raise DaemonGoneError(f"{self.name}: {method} {path}: {error}") from error
        text = response.text
        if response.status_code == 409:
            raise FencedError(f"{self.name}: {method} {path}: {text}")
        if response.is_error:
            raise DaemonError(f"{self.name}: {method} {path}: {response.status_code} {text}")
        answer = response.json()
        if not isinstance(answer, dict):
            raise DaemonError(f"{self.name}: {method} {path}: answer is not an object")
        return answer
