"""What a server that Gyre starts is told where the environment names a database and a Redis."""

from __future__ import annotations

import pytest

from flows import server
from flows.server import REDIS_URL, ServerError


def test_redis_carries_events_their_order_and_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(REDIS_URL, raising=False)
    assert server._through_redis() == {}
    monkeypatch.setenv(REDIS_URL, "redis://127.0.0.1:1/0")
    told = server._through_redis()
    assert told["PREFECT_SERVER_DOCKET_URL"] == "redis://127.0.0.1:1/0"
    assert told["PREFECT_SERVER_EVENTS_MESSAGING_BROKER"] == "prefect_redis.messaging"
    assert set(server.THROUGH_REDIS) < set(told)


def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REDIS_URL, "redis://127.0.0.1:1/0")
    monkeypatch.setattr(server, "find_spec", lambda _: None)
    with pytest.raises(ServerError, match=r"gyre-rl\[scaled\]"):
        server._through_redis()
