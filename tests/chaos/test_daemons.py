"""Daemons that are killed, stopped, cut off, and clocks that jump."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from cells import launch
from cells import warden as warden_module
from cells.client import DaemonClient, DaemonError
from cells.launch import DaemonSpec, LeaseKeeper, StartError, ensure_daemons, stop_daemons
from cells.process import end_group
from cells.warden import BUDGET, Warden
from storage.run import Run
from tests.chaos.daemons import LIMIT_S, spec

NAMESPACE = f"gyre{os.getpid() % 10_000}c"
SUBNET = f"10.78.{os.getpid() % 250}"


@pytest.fixture
def keeper() -> Iterator[LeaseKeeper]:
    with closing(LeaseKeeper(60)) as made:
        yield made


@pytest.fixture
def daemon(run_store: Run, keeper: LeaseKeeper) -> Iterator[DaemonClient]:
    """A living daemon; whatever process it is at the end is ended."""
    run = run_store
    client = ensure_daemons(run.store, run.layout, [spec()], keeper, lambda _: None)["small"]
    yield client
    if psutil.pid_exists(client.registration.pid):
        os.kill(client.registration.pid, signal.SIGCONT)
    stop_daemons([client], 15)


def until(ready: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def watched(run: Run, client: DaemonClient, keeper: LeaseKeeper, told: list[str]) -> Warden:
    return Warden(
        run.store,
        run.layout,
        specs=lambda: [spec()],
        clients={"small": client},
        keeper=keeper,
        say=told.append,
    )


def test_a_killed_daemon_is_started_again_and_everybody_is_led_to_it(
    run_store: Run, daemon: DaemonClient, keeper: LeaseKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warden_module, "FIRST_PAUSE_S", 0.01)
    told: list[str] = []
    first = daemon.registration
    with closing(watched(run_store, daemon, keeper, told)) as warden:
        os.kill(first.pid, signal.SIGKILL)
        until(lambda: daemon.registration.pid != first.pid)
        warden.wait_well("small", LIMIT_S)
        assert daemon.alive() and warden.restarts("small") == 1
        assert daemon.registration.incarnation != first.incarnation
    assert told[0] == "small has ended: started again, 1 of 5 times"


def test_a_start_under_way_is_given_up_with_its_run(
    run_store: Run,
    daemon: DaemonClient,
    keeper: LeaseKeeper,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """A cell takes minutes to start. One that is ready after the end is nobody's any more."""
    (tmp_path / "o2_never_ready.py").write_text("import time; time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{Path.cwd()}")
    monkeypatch.setattr(warden_module, "FIRST_PAUSE_S", 0.01)
    run, told = run_store, list[str]()
    slow = DaemonSpec("small", "o2_never_ready", (), LIMIT_S)

    def starting() -> list[psutil.Process]:
        return [one for one in psutil.process_iter() if "o2_never_ready" in argv(one)]

    warden = Warden(
        run.store,
        run.layout,
        specs=lambda: [slow],
        clients={"small": daemon},
        keeper=keeper,
        say=told.append,
    )
    os.kill(daemon.registration.pid, signal.SIGKILL)
    until(starting)
    warden.close()
    assert starting() == []
    assert told[-1] == "small was not started again: small: not needed any more"


def argv(process: psutil.Process) -> list[str]:
    try:
        return [] if process.status() == psutil.STATUS_ZOMBIE else process.cmdline()
    except psutil.Error:
        return []


def test_a_daemon_that_ends_again_and_again_is_given_up(
    run_store: Run, daemon: DaemonClient, keeper: LeaseKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warden_module, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(warden_module, "WATCH_S", 0.01)
    starts: list[float] = []

    def refused(*_: object) -> None:
        starts.append(time.monotonic())
        raise StartError("no GPU")

    monkeypatch.setattr(warden_module, "ensure_daemons", refused)
    told: list[str] = []
    with closing(watched(run_store, daemon, keeper, told)) as warden:
        os.kill(daemon.registration.pid, signal.SIGKILL)
        until(lambda: "it is not started again" in told[-1] if told else False)
        assert len(starts) == BUDGET
        with pytest.raises(StartError, match="small has ended and did not come back: 5 restarts"):
            warden.wait_well("small", LIMIT_S)


def test_a_stopped_daemon_is_left_to_who_waits_and_comes_back(
    run_store: Run, daemon: DaemonClient, keeper: LeaseKeeper
) -> None:
    """Silence is not death: who calls gets an error at the deadline, and an answer later."""
    told: list[str] = []
    with closing(watched(run_store, daemon, keeper, told)) as warden:
        os.kill(daemon.registration.pid, signal.SIGSTOP)
        with pytest.raises(DaemonError, match="small: GET /healthz: no answer in 1 s"):
            daemon.call("GET", "/healthz", limit_s=1)
        assert warden.well("small")
        os.kill(daemon.registration.pid, signal.SIGCONT)
        assert daemon.call("GET", "/healthz", limit_s=LIMIT_S)["kind"] == "test"
        assert warden.restarts("small") == 0 and told == []


def test_a_daemon_whose_event_loop_stood_still_is_told(
    daemon: DaemonClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "ALARM_S", 0.5)
    told: list[str] = []
    with closing(LeaseKeeper(1.2, told.append)) as keeper:
        keeper.add(daemon)
        os.kill(daemon.registration.pid, signal.SIGSTOP)
        time.sleep(2)  # what is to be noticed
        os.kill(daemon.registration.pid, signal.SIGCONT)
        until(lambda: told)
    assert told[0].startswith("small: its event loop was ")
    assert daemon.call("GET", "/healthz", limit_s=LIMIT_S)["worst_loop_lag_s"] > 0.5


def test_a_jump_of_the_clock_ends_no_lease_and_no_wait(
    daemon: DaemonClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the clock says another year; the daemon and its lease count on the monotonic one."""
    real = time.time
    for jump in (-3e7, 3e7):
        monkeypatch.setattr(time, "time", lambda jump=jump: real() + jump)
        daemon.renew()
        left_s = daemon.call("GET", "/healthz")["lease_left_s"]
        assert 0 < left_s <= 120
        with pytest.raises(DaemonError, match="404"):
            daemon.call("GET", "/nothing", limit_s=LIMIT_S)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=LIMIT_S)


@pytest.fixture
def link() -> Iterator[str]:
    """A network namespace with one link to here; the name of its end here."""
    outside = f"{NAMESPACE}0"
    ip("netns", "add", NAMESPACE)
    try:
        ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", NAMESPACE)
        ip("address", "add", f"{SUBNET}.1/24", "dev", outside)
        ip("link", "set", outside, "up")
        ip("-n", NAMESPACE, "address", "add", f"{SUBNET}.2/24", "dev", "eth0")
        ip("-n", NAMESPACE, "link", "set", "eth0", "up")
        ip("-n", NAMESPACE, "link", "set", "lo", "up")
        yield outside
    finally:
        ip("netns", "delete", NAMESPACE)


@pytest.fixture
def away(run_store: Run, link: str) -> Iterator[DaemonClient]:
    """A daemon behind that link."""
    argv = ["ip", "netns", "exec", NAMESPACE, sys.executable, "-m", "tests.chaos.daemons"]
    argv += ["--root", run_store.store.url, "--run", run_store.run_id, "--name", "away"]
    process = subprocess.Popen([*argv, "--host", f"{SUBNET}.2"], start_new_session=True)
    try:
        until(lambda: run_store.store.exists(run_store.layout.host("away")))
        yield DaemonClient.find(run_store.store, run_store.layout, "away")
    finally:
        end_group(process.pid, grace_s=5)
        process.wait()


def test_a_cut_link_is_an_error_at_the_deadline_and_heals(away: DaemonClient, link: str) -> None:
    assert away.alive()
    ip("link", "set", link, "down")
    with pytest.raises(DaemonError, match="away: GET /healthz"):
        away.call("GET", "/healthz", limit_s=2)
    ip("link", "set", link, "up")
    until(away.alive)
