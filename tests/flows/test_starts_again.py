"""What a flow and a terminal do when something under them has ended: no server, no cells needed."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cells.roster import NoCellsError
from flows import server
from flows.server import SERVER_RESTARTS, ServerError
from storage.run import Run


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    made: list[subprocess.Popen[bytes]] = []
    yield made
    for process in made:
        process.kill()
        process.wait()


def test_a_server_that_ends_is_started_again_and_a_worker_is_not(
    processes: list[subprocess.Popen[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hours = itertools.count(0.0, 3600.0)
    monkeypatch.setattr(server.time, "monotonic", lambda: next(hours))

    def start() -> subprocess.Popen[bytes]:
        processes.append(subprocess.Popen(["sleep", "600"]))
        return processes[-1]

    told: list[str] = []
    started = [start(), start()]
    watch = server._Watch(started, started[0], start, tmp_path, told.append)
    watch.check()
    assert told == []
    for number in range(1, SERVER_RESTARTS + 1):
        started[0].kill()
        started[0].wait()
        watch.check()
        assert started[0].poll() is None
        assert told[-1].endswith(f"code -9: started again, {number} of {SERVER_RESTARTS} times")
    started[0].kill()
    started[0].wait()
    with pytest.raises(ServerError, match="has ended with code -9"):
        watch.check()
    started[0] = start()
    watch = server._Watch(started, started[0], start, tmp_path, told.append)
    started[1].kill()
    started[1].wait()
    with pytest.raises(ServerError, match="has ended with code -9"):
        watch.check()


class _Warden:
    """Of a core that is lost ``losses`` times."""

    def __init__(self, losses: int) -> None:
        self.losses = losses
        self.waited: list[str] = []

    def restarts(self, name: str) -> int:
        return len(self.waited)

    def well(self, name: str) -> bool:
        return len(self.waited) >= self.losses

    def wait_well(self, name: str, limit_s: float) -> None:
        self.waited.append(name)


@pytest.mark.parametrize("losses", [0, 1, 2])
def test_a_step_goes_on_from_the_newest_checkpoint_when_the_core_was_lost(
    run_store: Run, monkeypatch: pytest.MonkeyPatch, losses: int
) -> None:
    from flows import train

    warden = _Warden(losses)
    restored: list[Any] = []

    def run_step(*_: Any) -> int:
        if len(warden.waited) < losses:
            raise NoCellsError("the core has failed")
        return 7

    monkeypatch.setattr(train, "run_step", run_step)
    monkeypatch.setattr(train, "await_server", lambda say: None)
    monkeypatch.setattr(train, "restore_core", lambda *given: restored.append(given[-1]))
    monkeypatch.setattr(train, "get_run_logger", lambda: SimpleNamespace(warning=print))
    hosts: Any = SimpleNamespace(core="a", warden=warden)
    assert train._step(run_store, "root", hosts, 0) == 7
    assert warden.waited == ["cell-a"] * losses
    assert restored == [None] * losses, "there is no checkpoint yet"


def test_a_step_that_fails_for_another_reason_fails(
    run_store: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows import train

    def run_step(*_: Any) -> int:
        raise ValueError("of the step's own")

    monkeypatch.setattr(train, "run_step", run_step)
    monkeypatch.setattr(train, "await_server", lambda say: None)
    monkeypatch.setattr(train, "get_run_logger", lambda: SimpleNamespace(warning=print))
    hosts: Any = SimpleNamespace(core="a", warden=_Warden(0))
    with pytest.raises(ValueError, match="own"):
        train._step(run_store, "root", hosts, 0)
