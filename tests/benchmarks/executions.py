"""What an execution costs beside the model and the tests, and whether anything is left of it.

``python -m tests.benchmarks.executions [COUNT]`` runs that many executions (1,000 unless it is
given) of a trivial problem with a scripted model, each from its specification to its verdict: host,
sandbox, built-in harness, snapshot, evaluation. It prints one JSON object.

CPU is that of this process and of all that it starts; the scripted model is another process.
``tests_cpu_ms`` is the CPU of the same tests without any of it, and is taken off.
``leaked`` counts processes, mounts, sockets, control groups and directories that were not there
before.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil

from cells.daemon import Registration
from configs.load import load_config
from storage.records import ExecutionSpec, Scored, Split
from storage.run import Run, create_run
from tasks.problems.source import EvaluationLimits, ProblemSource, make_source
from tasks.problems.specrepo.specification import ProblemName, make_specification
from tasks.rollout.door import make_client
from tasks.rollout.execution import Surroundings
from tasks.rollout.executions import Executions
from tasks.rollout.harnesses.launch import make_harness
from tasks.rollout.sandboxes.choose import make_sandbox
from tasks.rollout.sessions import GatewaySessions
from tasks.scoring.score import score

_AT_ONCE = 4
_SET_CHILD_SUBREAPER = 36
_TESTS = 20
"""How often the tests alone are measured."""

_POLICY = """
import sys
from tests.tasks.rollout.stub_gateway import StubGateway, call
solution = sys.argv[1]
def policy(history, headers):
    if len(history) > 2:
        return call("done")
    return call("write", path=sys.argv[2], content=solution)
stub = StubGateway()
stub.policy = policy
print(stub.url, flush=True)
sys.stdin.read()
stub.close()
"""


def main(count: int) -> None:
    """Run the executions and print what they cost and left."""
    _adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="gyre-benchmark-") as folder:
        temporary = Path(folder, "tmp")
        temporary.mkdir()
        tempfile.tempdir = str(temporary)
        config = load_config("quickstart", (f"storage.root={folder}/store",), environment={})
        run = create_run(f"{folder}/store", "benchmark", config)
        source = make_source(config.problems)
        problem = source.ids(Split.TRAIN, 1, 1)[0]
        file = make_specification(ProblemName.parse(problem)).files[0]
        solution = "".join(f"def {one.name}(x):\n    return None\n" for one in file.functions)
        gateway = subprocess.Popen(
            [sys.executable, "-c", _POLICY, solution, file.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert gateway.stdout is not None
            _register(run, gateway.stdout.readline().strip())
            tests_ms = _tests_ms(source, problem, solution, file.path, temporary)
            print(json.dumps(_measure(run, problem, count, tests_ms, temporary)))
        finally:
            gateway.communicate()


def _register(run: Run, url: str) -> None:
    registration = Registration(
        name="gateway",
        kind="gateway",
        url=url,
        token="admin",
        pid=os.getpid(),
        incarnation="benchmark",
        started_at=time.time(),
    )
    run.store.write_record(run.layout.host("gateway"), registration)


def _tests_ms(
    source: ProblemSource, problem: str, solution: str, path: str, temporary: Path
) -> float:
    """CPU of the tests alone, in milliseconds."""
    with tempfile.TemporaryDirectory(dir=temporary) as folder:
        Path(folder, path).parent.mkdir(parents=True, exist_ok=True)
        Path(folder, path).write_text(solution)
        loaded = source.load(problem)
        before = _cpu_s()
        for _ in range(_TESTS):
            source.evaluate(loaded, Path(folder), EvaluationLimits(20, 512))
        return (_cpu_s() - before) / _TESTS * 1000


def _measure(
    run: Run, problem: str, count: int, tests_ms: float, temporary: Path
) -> dict[str, object]:
    asyncio.run(_carry_out(run, problem, range(-2, 0), temporary))  # what is made once
    before, started, cpu = _inventory(temporary), time.monotonic(), _cpu_s()
    host, scoring, rewards = asyncio.run(_carry_out(run, problem, range(count), temporary))
    seconds, total = time.monotonic() - started, _cpu_s() - cpu
    leaked = _inventory(temporary) - before
    return {
        "executions": count,
        "scored": sum(rewards.values()),
        "cpu_ms_per_execution": round(total / count * 1000 - tests_ms, 2),
        "cpu_ms_rollout": round(host / count * 1000, 2),
        "cpu_ms_scoring": round(scoring / count * 1000 - tests_ms, 2),
        "tests_cpu_ms": round(tests_ms, 2),
        "seconds": round(seconds, 1),
        "leaked": sum(leaked.values()),
        "leaks": [str(leak) for leak in leaked][:20],
    }


async def _carry_out(
    run: Run, problem: str, numbers: range, temporary: Path
) -> tuple[float, float, Counter[float]]:
    """Run and then score; CPU seconds of each."""
    with tempfile.TemporaryDirectory(dir=temporary) as scratch:
        config = run.config
        around = Surroundings(
            store=run.store,
            layout=run.layout,
            config=config.rollout.model_copy(update={"concurrent": _AT_ONCE}),
            source=make_source(config.problems),
            sessions=GatewaySessions(run.store, run.layout),
            doors=make_client(),
            sandbox=make_sandbox(config.rollout.sandbox),
            harness=make_harness(config.harness, config.gateway.call_limit_s, Path(scratch)),
            scratch=Path(scratch),
        )
        executions = Executions(run, around)
        before = _cpu_s()
        names = [f"s00000-q0000-e{number:04d}" for number in numbers]
        for start in range(0, len(names), _AT_ONCE):
            batch = names[start : start + _AT_ONCE]
            for name in batch:
                await executions.submit(_spec(name, problem))
            for name in batch:
                entry = await executions.find(name)
                assert entry is not None
                await entry.ended.wait()
                assert entry.result is not None and entry.result.workspace_key, entry.result
        middle = _cpu_s()
        rewards: Counter[float] = Counter()
        for name in names:
            record = await asyncio.to_thread(
                score, run.store, run.layout, run.config, name, problem
            )
            assert isinstance(record.verdict, Scored), record
            rewards[record.verdict.reward] += 1
        await executions.close()
        return middle - before, _cpu_s() - middle, rewards


def _spec(name: str, problem: str) -> ExecutionSpec:
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


def _adopt_orphans() -> None:
    """Let what a sandbox leaves behind become a child of this process, so that its CPU is seen."""
    if ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError("PR_SET_CHILD_SUBREAPER is refused")


def _cpu_s() -> float:
    """CPU seconds of this process and of everything that it started. Called only while nothing
    runs that somebody else waits for."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def _mounts() -> list[str]:
    return Path("/proc/self/mountinfo").read_text().splitlines()


def _inventory(temporary: Path) -> Counter[str]:
    """What an execution may leave behind, by kind and name."""
    me = psutil.Process()
    found: Counter[str] = Counter()
    found.update(f"process {child.name()}" for child in me.children(recursive=True))
    found.update(f"mount {line.split()[4]}" for line in _mounts())
    for number in Path("/proc/self/fd").iterdir():
        try:
            target = str(number.readlink())
        except OSError:
            continue
        found[f"descriptor {target.split(':')[0]}"] += 1
    found.update(f"folder {path}" for path in temporary.rglob("*"))
    found.update(
        f"control group {path}" for path in Path("/sys/fs/cgroup").glob(f"**/gyre-{os.getpid()}/*/")
    )
    found.update(f"thread {thread.name}" for thread in threading.enumerate() if not thread.daemon)
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
