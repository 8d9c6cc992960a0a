"""What attacks are carried out with: a real execution under bubblewrap, and a real evaluation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest
import pytest_asyncio

from configs.run import RunConfig
from storage.records import (
    ExecutionOutcome,
    ExecutionResult,
    ExecutionSpec,
    Scored,
    Split,
    VerdictRecord,
)
from storage.run import Run, create_run
from tasks.problems.specrepo.source import SpecRepo
from tasks.rollout.door import make_client
from tasks.rollout.execution import Surroundings, carry_out
from tasks.rollout.harnesses.command import Command, Harness
from tasks.rollout.harnesses.launch import make_harness
from tasks.rollout.sandboxes.choose import make_sandbox
from tasks.rollout.sandboxes.sandbox import python_executable
from tasks.rollout.sessions import Endpoint, GatewaySessions
from tasks.rollout.snapshot import freeze, thaw
from tasks.scoring.score import score
from tests.tasks.rollout.stub_gateway import Policy, StubGateway, call, scripted

EXECUTION, QUERY = "s00000-q0000-e000", "s00000-q0000"


@pytest.fixture
def gateway() -> Iterator[StubGateway]:
    stub = StubGateway()
    yield stub
    stub.close()


@dataclass(frozen=True)
class Attacked:
    """What came of an attack during an execution."""

    result: ExecutionResult
    said: str
    """What the attacking program printed, as far as the harness lived to report it."""
    workspace: Path
    """What was frozen, thawed again."""
    run: Run
    problem: str

    @property
    def names(self) -> set[str]:
        return {str(path.relative_to(self.workspace)) for path in self.workspace.rglob("*")}

    def verdict(self) -> VerdictRecord:
        return score(self.run.store, self.run.layout, self.run.config, EXECUTION, self.problem)


class Attack(Protocol):
    async def __call__(
        self,
        program: str,
        harness: Harness | None = None,
        *,
        tool_timeout_s: float = 10,
        **rollout: object,
    ) -> Attacked: ...


@dataclass(frozen=True)
class Forged:
    """A harness that is the agent's own program from the start: the agent has taken it over."""

    program: str

    def command(self, problem: Any, endpoint: Endpoint, folder: Path) -> Command:
        script = folder / "forged.py"
        script.write_text(self.program)
        environment = {"OPENAI_BASE_URL": endpoint.base_url, "OPENAI_API_KEY": endpoint.api_key}
        argv = (python_executable(), "-I", "-S", str(script))
        return Command(argv=argv, environment=environment, readable=(script,))


@pytest_asyncio.fixture
async def attack(tmp_path: Path, gateway: StubGateway) -> AsyncIterator[Attack]:
    """Runs a Python program with the agent's shell tool, in an execution under bubblewrap."""
    made: list[Surroundings] = []

    async def carry(
        program: str,
        harness: Harness | None = None,
        *,
        tool_timeout_s: float = 10,
        **rollout: object,
    ) -> Attacked:
        settings = {
            "rollout": {"sandbox": "bubblewrap", "kill_after_s": 0.2, "retries": 0, **rollout},
            "harness": {"tool_timeout_s": tool_timeout_s},
        }
        run = create_run(str(tmp_path / "store"), "r", RunConfig.model_validate(settings))
        gateway.register(run.store, run.layout)
        source = SpecRepo(run.config.problems)
        problem = source.ids(Split.TRAIN, 1, 1)[0]
        scratch = tmp_path / "scratch"
        scratch.mkdir()
        around = Surroundings(
            store=run.store,
            layout=run.layout,
            config=run.config.rollout,
            source=source,
            sessions=GatewaySessions(run.store, run.layout, patience_s=5),
            doors=make_client(),
            sandbox=make_sandbox(run.config.rollout.sandbox),
            harness=harness or make_harness(run.config.harness, 60, tmp_path),
            scratch=scratch,
        )
        made.append(around)
        if harness is None:
            gateway.policy = agent(program)
        result = await carry_out(spec(problem), around)
        messages = gateway.requests[-1]["messages"] if gateway.requests else []
        said = str(messages[-1]["content"]) if len(messages) > 2 else ""
        kept = tmp_path / "kept"
        if result.workspace_key is not None:
            thaw(run.store.read(result.workspace_key), kept, 1 << 28)
        run.store.write_record(run.layout.execution_result(EXECUTION), result)
        return Attacked(result, said, kept, run, problem)

    yield carry
    for around in made:
        await around.sessions.close_client()
        await around.doors.close()
        assert list(around.scratch.iterdir()) == []


def agent(program: str) -> Policy:
    """A model that has its harness run a Python program."""
    shell = f"cat > attack.py <<'END'\n{program}\nEND\npython3 attack.py 2>&1"
    return scripted(call("shell", command=shell), call("done"))


def spec(problem: str) -> ExecutionSpec:
    return ExecutionSpec(
        execution_id=EXECUTION,
        query_id=QUERY,
        member=0,
        problem_id=problem,
        split=Split.TRAIN,
        policy_version=0,
        temperature=1.0,
        seed=1,
    )


@dataclass(frozen=True)
class Task:
    """A problem of four functions."""

    run: Run
    problem: str
    path: str
    names: tuple[str, ...]
    solution: str


Judge = Callable[[Mapping[str, str]], Scored]


@pytest.fixture(params=[8, 0], ids=["light", "pytest"])
def task(request: pytest.FixtureRequest, tmp_path: Path) -> Task:
    """Tested by either runner of the built-in source."""
    config = RunConfig.model_validate(
        {
            "rollout": {"sandbox": "bubblewrap"},
            "scoring": {"limit_s": 10},
            "problems": {
                "specrepo": {
                    "pytest_above": request.param,
                    "functions_min": 4,
                    "functions_max": 4,
                }
            },
        }
    )
    source = SpecRepo(config.problems)
    problem = source.ids(Split.TRAIN, 1, 1)[0]
    file = source.specification(problem).files[0]
    lines = []
    for function in file.functions:
        inputs = function.operation.inputs
        table = dict(zip(inputs, function.operation.expected(function.constant), strict=True))
        lines.append(f"def {function.name}(x):\n    return {table!r}[x]\n")
    names = tuple(function.name for function in file.functions)
    run = create_run(str(tmp_path / "store"), "r", config)
    return Task(run, problem, file.path, names, "\n".join(lines))


@pytest.fixture
def judge(task: Task, tmp_path: Path) -> Callable[[Path], Scored]:
    """The verdict of a workspace, which has to be a score."""

    def evaluate(folder: Path) -> Scored:
        run = task.run
        frozen = freeze(folder, 1 << 24)
        key = run.layout.frozen_workspace(frozen.digest)
        run.store.write(key, frozen.data)
        result = ExecutionResult(
            execution_id=EXECUTION,
            query_id=QUERY,
            outcome=ExecutionOutcome.COMPLETED,
            started_at=0,
            ended_at=1,
            waited_s=0,
            exit_code=0,
            calls=1,
            workspace_key=key,
            detail="",
        )
        run.store.write_record(run.layout.execution_result(EXECUTION), result)
        record = score(run.store, run.layout, run.config, EXECUTION, task.problem)
        assert isinstance(record.verdict, Scored), record
        return record.verdict

    return evaluate
