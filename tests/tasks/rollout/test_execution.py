"""One execution from its specification to its result, with real harness processes."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from configs.problems import RolloutConfig, SandboxKind
from configs.run import RunConfig
from storage.records import ExecutionOutcome, ExecutionResult, ExecutionSpec, Split
from storage.run import Run, create_run
from tasks.problems.source import Problem
from tasks.rollout.door import make_client
from tasks.rollout.execution import Surroundings, carry_out
from tasks.rollout.harnesses.launch import make_harness
from tasks.rollout.sandboxes import bubblewrap
from tasks.rollout.sandboxes.choose import make_sandbox
from tasks.rollout.sessions import GatewaySessions
from tasks.rollout.snapshot import thaw
from tasks.rollout.strays import find_strays
from tests.tasks.rollout.stub_gateway import StubGateway, call, scripted

needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="no bubblewrap")
SANDBOXES = [pytest.param(SandboxKind.BUBBLEWRAP, marks=needs_bwrap), SandboxKind.PROCESS]

IGNORES_SIGTERM = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = 'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)'
for new_session in (False, True):
    subprocess.Popen([sys.executable, '-c', child], start_new_session=new_session)
open('partial.py', 'w').write('x = 1')
open('ready', 'w').close()
"""
SAYS_READY = """
import urllib.request
try:
    urllib.request.urlopen('http://127.0.0.1:8000/v1/models')
except OSError:
    pass
"""
WAITS = """
time.sleep(600)
"""


class OneProblem:
    def load(self, problem_id: str) -> Problem:
        if problem_id == "missing":
            raise KeyError(problem_id)
        return Problem(problem_id, Split.TRAIN, "do it", {"sub/given.txt": "given"}, 0.0)


def spec(problem: str = "p", name: str = "s00000-q0000-e000") -> ExecutionSpec:
    return ExecutionSpec(
        execution_id=name,
        query_id="s00000-q0000",
        member=0,
        problem_id=problem,
        split=Split.TRAIN,
        policy_version=0,
        temperature=1.0,
        seed=1,
    )


def make_run(tmp_path: Path, gateway: StubGateway, **rollout: object) -> Run:
    config = RunConfig(rollout=RolloutConfig.model_validate({"retry_delay_s": 0.01, **rollout}))
    run = create_run(str(tmp_path / "store"), "r", config)
    gateway.register(run.store, run.layout)
    return run


MakeSurroundings = Callable[..., Surroundings]


@pytest_asyncio.fixture
async def surroundings(tmp_path: Path, gateway: StubGateway) -> AsyncIterator[MakeSurroundings]:
    made: list[Surroundings] = []

    def make(**rollout: object) -> Surroundings:
        run = make_run(tmp_path, gateway, **rollout)
        scratch = tmp_path / "scratch"
        scratch.mkdir()
        around = Surroundings(
            store=run.store,
            layout=run.layout,
            config=run.config.rollout,
            source=OneProblem(),  # type: ignore[arg-type]
            sessions=GatewaySessions(run.store, run.layout, patience_s=5),
            doors=make_client(),
            sandbox=make_sandbox(run.config.rollout.sandbox),
            harness=make_harness(run.config.harness, 60, tmp_path),
            scratch=scratch,
        )
        made.append(around)
        return around

    yield make
    for around in made:
        await around.sessions.close_client()
        await around.doors.close()
        assert list(around.scratch.iterdir()) == []
        assert find_strays(str(around.scratch)) == []


def workspace_of(around: Surroundings, result: ExecutionResult, folder: Path) -> Path:
    assert result.workspace_key is not None
    thaw(around.store.read(result.workspace_key), folder, 1 << 24)
    return folder


def shell_policy(program: str) -> dict:
    return call("shell", command=f"cat > p.py <<'END'\n{program}\nEND\npython3 p.py")


@pytest.mark.parametrize("sandbox", SANDBOXES)
async def test_completed(
    sandbox: SandboxKind, surroundings: MakeSurroundings, gateway: StubGateway, tmp_path: Path
) -> None:
    gateway.policy = scripted(
        call("write", path="m.py", content="def f(x):\n    return x\n"),
        call("run", path="m.py"),
        call("shell", command="sleep 600 & cat sub/given.txt; env"),
        call("done"),
    )
    around = surroundings(sandbox=sandbox)
    result = await carry_out(spec(), around)
    assert result.outcome is ExecutionOutcome.COMPLETED, result.detail
    assert (result.exit_code, result.calls) == (0, 4)
    texts = [message["content"] for message in gateway.requests[-1]["messages"]]
    assert texts[:2] == ["Write the module. Tools: write, append, run, task, done.", "do it"]
    assert texts[3] == "ok m.py"
    assert texts[5] == "defines f"
    assert texts[7].startswith("given")
    assert "key-" not in texts[7]
    assert gateway.requests[0]["headers"]["authorization"] == "Bearer key-s00000-q0000-e000"
    assert result.workspace_key == around.layout.frozen_workspace(
        Path(result.workspace_key or "").name.removesuffix(".tar.zst")
    )
    assert gateway.closed == ["s00000-q0000-e000"]
    kept = workspace_of(around, result, tmp_path / "kept")
    assert sorted(str(path.relative_to(kept)) for path in kept.rglob("*")) == [
        "m.py",
        "sub",
        "sub/given.txt",
    ]


@pytest.mark.parametrize("sandbox", SANDBOXES)
async def test_time_limit_ends_what_ignores_sigterm(
    sandbox: SandboxKind, surroundings: MakeSurroundings, gateway: StubGateway, tmp_path: Path
) -> None:
    program = IGNORES_SIGTERM
    if sandbox is SandboxKind.BUBBLEWRAP:  # whose files can't be seen from here
        program += SAYS_READY
    gateway.policy = scripted(shell_policy(program + WAITS))
    around = surroundings(sandbox=sandbox, limit_s=0.5, kill_after_s=0.2)
    ready = around.scratch / spec().execution_id / "workspace" / "ready"
    started = time.monotonic()

    def waited_s() -> float:
        """The clock stands still until the agent's program is under way, however slow it is."""
        under_way = ready.exists() or gateway.refused.is_set()
        return 0.0 if under_way else time.monotonic() - started

    gateway.waited_s = waited_s
    result = await carry_out(spec(), around)
    assert result.outcome is ExecutionOutcome.TIMED_OUT
    assert result.exit_code is None
    kept = workspace_of(around, result, tmp_path / "kept")
    assert (kept / "partial.py").read_text() == "x = 1"
    # That nothing of it lives any more is asserted for every test when it ends.


async def test_waiting_in_the_gateway_does_not_count(
    surroundings: MakeSurroundings, gateway: StubGateway
) -> None:
    gateway.hold.clear()
    started = time.monotonic()
    asked = threading.Semaphore(0)

    def waited_s() -> float:  # it waits all the time
        asked.release()
        return time.monotonic() - started

    gateway.waited_s = waited_s
    around = surroundings(sandbox="process", limit_s=0.5)
    running = asyncio.create_task(carry_out(spec(), around))
    await asyncio.to_thread(gateway.called.wait, 20)
    for _ in range(3):  # it was asked at the limit, more than once
        await asyncio.to_thread(asked.acquire, timeout=20)
    assert not running.done()
    gateway.hold.set()
    result = await running
    assert result.outcome is ExecutionOutcome.COMPLETED
    assert result.waited_s > 0.5


async def test_the_wall_clock_counts_waiting(
    surroundings: MakeSurroundings, gateway: StubGateway
) -> None:
    gateway.hold.clear()
    gateway.waited_s = lambda: 1000.0
    around = surroundings(sandbox="process", limit_s=0.5, clock="wall")
    result = await carry_out(spec(), around)
    assert result.outcome is ExecutionOutcome.TIMED_OUT


async def test_a_workspace_that_is_too_large_keeps_what_fits(
    surroundings: MakeSurroundings, gateway: StubGateway, tmp_path: Path
) -> None:
    command = "for n in 1 2 3; do head -c 600000 /dev/urandom > f$n; done; echo x > small"
    gateway.policy = scripted(call("shell", command=command), call("done"))
    around = surroundings(sandbox="process", workspace_limit_mb=1)
    result = await carry_out(spec(), around)
    assert result.outcome is ExecutionOutcome.COMPLETED
    assert "f2" in result.detail and "f3" in result.detail
    kept = workspace_of(around, result, tmp_path / "kept")
    assert {path.name for path in kept.iterdir()} == {"f1", "small", "sub"}


@pytest.mark.parametrize("status", [503, 401, 0])
async def test_a_model_that_is_unavailable_is_our_fault(
    status: int,
    surroundings: MakeSurroundings,
    gateway: StubGateway,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gateway.failures = [(status, {})] * 1000
    around = surroundings(sandbox="process")
    monkeypatch.setitem(around.harness._flags, "give-up-s", 0.5)  # type: ignore[attr-defined]
    result = await carry_out(spec(), around)
    assert result.outcome is ExecutionOutcome.HOST_FAILED
    assert "unavailable" in result.detail
    assert result.workspace_key is None


async def test_our_own_failures_are_results(
    surroundings: MakeSurroundings, gateway: StubGateway
) -> None:
    around = surroundings(sandbox="process")
    result = await carry_out(spec(problem="missing"), around)
    assert result.outcome is ExecutionOutcome.HOST_FAILED
    assert "KeyError" in result.detail
    assert gateway.closed == ["s00000-q0000-e000"] * 2  # it was tried again
    gateway.admin_down = True
    around.sessions.patience_s = 0.3
    result = await carry_out(spec(name="s00000-q0000-e001"), around)
    assert result.outcome is ExecutionOutcome.HOST_FAILED
    assert "503" in result.detail


@needs_bwrap
async def test_a_sandbox_that_can_not_start_is_our_fault(
    surroundings: MakeSurroundings, gateway: StubGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    around = surroundings(sandbox="bubblewrap")
    real = bubblewrap._namespaces
    monkeypatch.setattr(
        bubblewrap, "_namespaces", lambda program: (*real(program), "--ro-bind", "/nowhere", "/x")
    )
    result = await carry_out(spec(), around)
    assert result.outcome is ExecutionOutcome.HOST_FAILED
    assert "/nowhere" in result.detail


async def test_an_agent_that_kills_its_harness_is_scored(
    surroundings: MakeSurroundings, gateway: StubGateway, tmp_path: Path
) -> None:
    gateway.policy = scripted(call("shell", command="echo 1 > f; kill -9 $PPID; sleep 5"))
    around = surroundings(sandbox="process")
    result = await carry_out(spec(), around)
    assert (result.outcome, result.exit_code) == (ExecutionOutcome.COMPLETED, -9)
    assert (workspace_of(around, result, tmp_path / "kept") / "f").exists()


async def test_a_cancelled_execution_leaves_nothing(
    surroundings: MakeSurroundings, gateway: StubGateway
) -> None:
    gateway.hold.clear()
    around = surroundings(sandbox="process")
    running = asyncio.create_task(carry_out(spec(), around))
    await asyncio.to_thread(gateway.called.wait, 20)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert gateway.closed == ["s00000-q0000-e000"]


async def test_calls_of_a_lost_attempt_are_forgotten(
    surroundings: MakeSurroundings, gateway: StubGateway
) -> None:
    around = surroundings(sandbox="process")
    key = f"{around.layout.calls('s00000-q0000-e000')}/00000000.jsonl"
    around.store.write(key, b"{}\n")
    gateway.opened.append("s00000-q0000-e000")
    result = await carry_out(spec(), around)
    assert result.outcome is ExecutionOutcome.COMPLETED
    assert not around.store.exists(key)
    assert gateway.closed == ["s00000-q0000-e000"] * 2


@needs_bwrap
async def test_what_bubblewrap_hides(
    surroundings: MakeSurroundings, gateway: StubGateway, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hidden")
    look = {
        "secret": f"cat {secret}",
        "root": "touch /x",
        "system": "touch /usr/x",
        "processes": f"kill -0 {os.getpid()}",
        "shadow": "cat /etc/shadow",
        "home": "ls /home | grep -v agent",
    }
    script = "; ".join(
        f"({command}) >/dev/null 2>&1 && echo {name}" for name, command in look.items()
    )
    gateway.policy = scripted(call("shell", command=f"{script}; pwd; true"), call("done"))
    await carry_out(spec(), surroundings(sandbox="bubblewrap"))
    assert gateway.requests[-1]["messages"][-1]["content"] == "/workspace"
