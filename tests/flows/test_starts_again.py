"""What a flow and a terminal do when something under them has ended: no server, no cells needed."""

from __future__ import annotations

import itertools
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cells.client import DaemonGoneError
from cells.launch import StartError
from cells.roster import NoCellsError
from flows import server
from flows.server import RESTARTS, ServerError
from storage.run import Run


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    made: list[subprocess.Popen[bytes]] = []
    yield made
    for process in made:
        process.kill()
        process.wait()


@pytest.mark.parametrize("place", [0, 1])
def test_a_server_and_a_worker_that_end_are_started_again(
    processes: list[subprocess.Popen[bytes]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: int,
) -> None:
    hours = itertools.count(0.0, 3600.0)
    monkeypatch.setattr("flows.server.time.monotonic", lambda: next(hours))

    def start() -> subprocess.Popen[bytes]:
        processes.append(subprocess.Popen(["sleep", "600"]))
        return processes[-1]

    told: list[str] = []
    started = [start(), start()]
    parts = [server._Part("the server", 0, start), server._Part("the worker", 1, start)]
    watch = server._Watch(started, parts, tmp_path, told.append)
    watch.look()
    assert told == []
    other = started[1 - place]
    for number in range(1, RESTARTS + 1):
        started[place].kill()
        started[place].wait()
        watch.look()
        assert started[place].poll() is None
        assert told[-1] == (
            f"{parts[place].name} has ended with code -9: started again, {number} of 5 times"
        )
    started[place].kill()
    started[place].wait()
    with pytest.raises(ServerError, match=f"{parts[place].name} has ended with code -9 for the 6t"):
        watch.look()
    assert started[1 - place] is other


def test_what_ends_is_started_again_while_everybody_waits_for_it(
    processes: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    again = threading.Event()

    def start() -> subprocess.Popen[bytes]:
        processes.append(subprocess.Popen(["sleep", "600"]))
        if len(processes) > 1:
            again.set()
        return processes[-1]

    def refused() -> subprocess.Popen[bytes]:
        raise ServerError("port 1 is taken")

    started = [start()]
    part = server._Part("the server", 0, start)
    watch = server._Watch(started, [part], tmp_path, lambda _: None)
    watch.start()
    started[0].kill()
    assert again.wait(60), "nobody has asked for it"
    watch.check()
    part.again = refused
    started[0].kill()
    deadline = time.monotonic() + 60
    with pytest.raises(ServerError, match="port 1 is taken"):
        while time.monotonic() < deadline:
            watch.check()
            time.sleep(0.05)
    watch.close()


class _Warden:
    """Of daemons of which one is lost in each of the first ``lost`` tries."""

    def __init__(self, lost: int) -> None:
        self.lost = lost
        self.tries = 0
        self.waited: list[str] = []

    def losses(self) -> int:
        return self.tries

    def lost_since(self, losses: int, limit_s: float) -> bool:
        return losses < self.lost

    def wait_well(self, name: str, limit_s: float) -> None:
        self.waited.append(name)


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Checkpoints that a core was given."""
    from flows import surviving

    found: list[Any] = []
    monkeypatch.setattr(surviving, "await_server", lambda say: None)
    monkeypatch.setattr(surviving, "restore_core", lambda *given: found.append(given[-1]))
    monkeypatch.setattr(surviving, "get_run_logger", lambda: SimpleNamespace(warning=print))
    return found


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_what_fails_with_the_loss_of_a_daemon_is_done_again(
    run_store: Run, restored: list[Any], lost: int
) -> None:
    from flows import surviving

    warden = _Warden(lost)

    def work() -> int:
        warden.tries += 1
        if warden.tries <= lost:
            raise NoCellsError("the core has failed")
        return 7

    hosts: Any = SimpleNamespace(core="a", warden=warden)
    assert surviving.surviving(run_store, hosts, "step 0", work) == 7
    assert warden.waited == ["gateway", "executions", "cell-a"] * lost
    assert restored == [None] * lost, "there is no checkpoint yet"


def test_a_core_that_is_lost_again_while_it_is_restored_is_waited_for_again(
    run_store: Run, restored: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows import surviving

    warden = _Warden(2)
    done: list[str] = []

    def lost() -> None:
        warden.tries += 1
        if warden.tries <= 2:
            raise DaemonGoneError("cell-a: gone")

    monkeypatch.setattr(surviving, "restore_core", lambda *_: lost())
    hosts: Any = SimpleNamespace(core="a", warden=warden)

    def work() -> None:
        done.append("begun")
        lost()

    surviving.surviving(run_store, hosts, "step 0", work)
    assert done == ["begun", "begun"] and warden.tries == 4


def test_what_fails_for_another_reason_fails(run_store: Run, restored: list[Any]) -> None:
    from flows import surviving

    def work() -> int:
        raise ValueError("of the step's own")

    hosts: Any = SimpleNamespace(core="a", warden=_Warden(0))
    with pytest.raises(ValueError, match="own"):
        surviving.surviving(run_store, hosts, "step 0", work)


def test_what_does_not_come_back_ends_the_run(
    run_store: Run, restored: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows import surviving

    warden = _Warden(100)

    def gone(name: str, limit_s: float) -> None:
        raise StartError(f"{name} has ended and did not come back")

    monkeypatch.setattr(warden, "wait_well", gone)

    def work() -> int:
        raise NoCellsError("the core has failed")

    hosts: Any = SimpleNamespace(core="a", warden=warden)
    with pytest.raises(StartError, match="did not come back"):
        surviving.surviving(run_store, hosts, "step 0", work)
