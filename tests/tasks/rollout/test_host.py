"""The execution host as a daemon: its HTTP side, adoption, and what is left when it is killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from cells.daemon import Registration
from configs.run import RunConfig
from storage.records import ExecutionResult, ExecutionSpec, Split, encode
from storage.run import Run, create_run
from tasks.problems.specrepo.source import SpecRepo
from tasks.rollout.strays import find_strays
from tests.tasks.rollout.stub_gateway import StubGateway, call, scripted

SANDBOX = "bubblewrap" if shutil.which("bwrap") else "process"
BACKGROUND = "setsid sleep 600 & nohup sleep 600 >/dev/null 2>&1 & cat"


def wait_for(ready: Callable[[], object], what: str, limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while not ready():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


class Host:
    """A host in a process of its own."""

    def __init__(self, run: Run, folder: Path) -> None:
        self.run = run
        self.temporary = folder / "tmp"
        self.temporary.mkdir(exist_ok=True)
        arguments = ["--root", run.store.url, "--run", run.run_id, "--name", "executions"]
        self.log = folder / "host.log"
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tasks.rollout.host", *arguments],
                env={**os.environ, "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        key = run.layout.host("executions")
        wait_for(
            lambda: run.store.exists(key) or self.process.poll() is not None, "no registration"
        )
        assert self.process.poll() is None, self.log.read_text()
        registration = run.store.read_record(key, Registration)
        assert registration.kind == "execution-host"
        headers = {"authorization": f"Bearer {registration.token}"}
        self.url = registration.url
        self.http = httpx.Client(base_url=self.url, headers=headers, timeout=90)

    def put(self, spec: ExecutionSpec, plain: bool = False) -> httpx.Response:
        body = spec.model_dump_json() if plain else encode(spec)
        return self.http.put(f"/executions/{spec.execution_id}", content=body)

    def get(self, name: str, wait_s: float = 0) -> dict:
        return self.http.get(f"/executions/{name}", params={"wait_s": wait_s}).json()

    def ended(self, names: list[str], wait_s: float) -> dict[str, str]:
        return self.http.post("/ended", json={"names": names, "wait_s": wait_s}).json()["states"]

    def left(self) -> list[Path]:
        return list(self.temporary.iterdir())

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            assert self.process.wait(timeout=60) == 0, self.log.read_text()
        self.http.close()


MakeHost = Callable[..., Host]


@pytest.fixture
def make_host(tmp_path: Path, gateway: StubGateway) -> Iterator[MakeHost]:
    hosts: list[Host] = []

    def make(**rollout: object) -> Host:
        settings = {"sandbox": SANDBOX, "kill_after_s": 0.1, **rollout}
        run = create_run(
            str(tmp_path / "store"), "r", RunConfig.model_validate({"rollout": settings})
        )
        gateway.register(run.store, run.layout)
        hosts.append(Host(run, tmp_path))
        return hosts[-1]

    yield make
    for host in hosts:
        host.close()
    for host in hosts:
        assert host.left() == []
        assert find_strays(str(host.temporary)) == []


def spec(host: Host, member: int = 0) -> ExecutionSpec:
    return ExecutionSpec(
        execution_id=f"s00000-q0000-e{member:03d}",
        query_id="s00000-q0000",
        member=member,
        problem_id=SpecRepo(host.run.config.problems).ids(Split.TRAIN, 1, 1)[0],
        split=Split.TRAIN,
        policy_version=0,
        temperature=1.0,
        seed=1,
    )


def test_submitting_waiting_and_adopting(make_host: MakeHost, gateway: StubGateway) -> None:
    host = make_host(concurrent=1)
    first, second = spec(host, 0), spec(host, 1)
    gateway.hold.clear()
    assert host.get(first.execution_id) == {"state": "unknown"}
    assert host.put(first).status_code == 202
    wait_for(lambda: host.get(first.execution_id)["state"] == "running", "not running")
    assert host.put(second, plain=True).json() == {"state": "queued"}
    assert host.put(first).json() == {"state": "running"}
    assert host.http.get("/state").json() == {"queued": 1, "running": 1, "ended": 0}
    assert gateway.called.wait(60)
    gateway.hold.set()
    answer = host.get(second.execution_id, wait_s=60)
    assert answer["state"] == "ended"
    result = ExecutionResult.model_validate(answer["result"])
    assert (result.outcome, result.calls) == ("completed", 1), result.detail
    key = host.run.layout.execution_result(second.execution_id)
    assert host.run.store.read_record(key, ExecutionResult) == result
    assert host.http.get("/state").json() == {"queued": 0, "running": 0, "ended": 2}
    asked = len(gateway.requests)
    host.close()
    assert not host.run.store.exists(host.run.layout.host("executions"))
    # Another host takes what is in storage as it is.
    other = make_host(concurrent=1)
    assert other.put(second).json() == {"state": "ended"}
    assert other.get(second.execution_id)["result"] == answer["result"]
    assert len(gateway.requests) == asked


def test_refusals(make_host: MakeHost) -> None:
    host = make_host()
    one = spec(host)
    path = f"/executions/{one.execution_id}"
    for method, where in [("PUT", path), ("GET", path), ("DELETE", path), ("GET", "/state")]:
        answer = httpx.request(method, f"{host.url}{where}")
        assert (answer.status_code, answer.json()) == (401, {"error": "wrong token"})
    assert host.http.put(path, content=b"{").status_code == 400
    assert host.http.put(path, content=b"{}").status_code == 400
    assert host.http.put(path, content=b'{"record": "Other"}').status_code == 400
    wrong = host.http.put("/executions/other", content=encode(one))
    assert wrong.status_code == 400 and one.execution_id in wrong.json()["error"]
    assert host.http.get(path, params={"wait_s": "x"}).status_code == 400
    assert host.http.post("/ended", content=b'{"names": "x", "wait_s": 1}').status_code == 400


def test_an_execution_that_is_dropped_can_be_submitted_again(
    make_host: MakeHost, gateway: StubGateway
) -> None:
    host = make_host(concurrent=1)
    running, queued = spec(host, 0), spec(host, 1)
    gateway.policy = scripted(call("shell", command=BACKGROUND))
    gateway.hold.clear()
    for one in (running, queued):
        host.put(one)
    assert gateway.called.wait(60)
    names = [running.execution_id, queued.execution_id]
    assert host.ended(names, wait_s=0) == dict(zip(names, ("running", "queued"), strict=True))
    for one in (queued, running):
        assert host.http.delete(f"/executions/{one.execution_id}").json() == {"state": "unknown"}
        assert host.get(one.execution_id) == {"state": "unknown"}
        assert not host.run.store.exists(host.run.layout.execution_result(one.execution_id))
    assert host.http.delete("/executions/none").json() == {"state": "unknown"}
    gateway.policy = scripted(call("done"))
    gateway.hold.set()
    host.put(running)
    # The other one is not there any more, which is told at once.
    assert host.ended(names, wait_s=60)[queued.execution_id] == "unknown"
    assert host.ended(names[:1], wait_s=60) == {running.execution_id: "ended"}
    assert host.get(running.execution_id, wait_s=60)["result"]["outcome"] == "completed"


KILLS = [(SANDBOX, signal.SIGKILL), ("process", signal.SIGKILL), (SANDBOX, signal.SIGTERM)]


@pytest.mark.parametrize(("sandbox", "number"), KILLS)
def test_a_killed_host_leaves_no_harness(
    sandbox: str, number: signal.Signals, make_host: MakeHost, gateway: StubGateway
) -> None:
    host = make_host(sandbox=sandbox)
    say = "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/v1/models')"
    command = f'setsid sleep 600 & touch ready; python3 -c "{say}"; sleep 600'
    gateway.policy = scripted(call("shell", command=command))
    host.put(spec(host))
    wait_for(
        lambda: gateway.refused.is_set() or list(host.temporary.glob("*/*/workspace/ready")),
        "the tool did not start",
    )
    pids = processes_of(host.process.pid)
    assert len(pids) >= 4
    host.process.send_signal(number)
    host.process.wait(timeout=60)
    wait_for(lambda: not any(runs(pid) for pid in pids), "processes are left")
    wait_for(lambda: host.left() == [], "folders are left")
    assert not host.run.store.exists(host.run.layout.execution_result(spec(host).execution_id))


def test_what_a_killed_host_had_not_ended_is_done_anew(
    make_host: MakeHost, gateway: StubGateway
) -> None:
    host = make_host()
    one = spec(host)
    gateway.hold.clear()
    host.put(one)
    assert gateway.called.wait(60)
    stale = f"{host.run.layout.calls(one.execution_id)}/00000000.jsonl"
    host.run.store.write(stale, b"{}\n")  # what the gateway keeps of that call
    host.process.kill()
    host.process.wait(timeout=60)
    wait_for(lambda: host.left() == [], "the folder of the killed host is left")
    host.run.store.delete(host.run.layout.host("executions"))
    gateway.hold.set()
    again = make_host()
    assert again.get(one.execution_id) == {"state": "unknown"}
    again.put(one)
    result = again.get(one.execution_id, wait_s=60)["result"]
    assert (result["outcome"], result["exit_code"]) == ("completed", 0)
    assert not host.run.store.exists(stale)


def processes_of(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def test_a_missing_bubblewrap_is_said(tmp_path: Path, gateway: StubGateway) -> None:
    settings = {"rollout": {"sandbox": "bubblewrap"}}
    run = create_run(str(tmp_path / "store"), "r", RunConfig.model_validate(settings))
    done = subprocess.run(
        [sys.executable, "-m", "tasks.rollout.host", "--root", run.store.url, "--run", "r"],
        env={"PATH": str(tmp_path), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode != 0
    assert "apt-get install bubblewrap" in done.stderr
    assert "rollout.sandbox=process" in done.stderr
    assert not list(tmp_path.glob("gyre-*"))
