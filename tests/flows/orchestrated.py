"""A Prefect server and worker for tests that trigger, kill, cancel and retry runs through its API.

As a program: serves the storage root given as its argument until its input ends.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from cells.ports import free_port
from storage.run import Run, open_run

MARK = "GYRE_TEST_RUN"
"""Environment variable that every process of a run inherits."""
LIMIT_S = 900.0
_POLL_S = 1.0
"""Each look costs the server tens of milliseconds."""
_TRIES = 20
_HERE = Path(__file__).parent
_OWN = ("-m prefect", "-m tests.flows.orchestrated", "-m flows.cli serve")
_SMALL = (
    "model.source=hf_directory",
    "model.context=1024",
    "cells.cells=[{name: a, core: true}]",
    "harness.turns=2",
    "harness.sub_agents=0",
    "evaluation.before=false",
    "evaluation.problems=1",
    "scoring.retries=0",
    "problems.reward=tests.flows.evaluators:reward",
)
"""16 executions a step, of 2 calls each."""
FINAL = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


@dataclass(frozen=True)
class Orchestrated:
    """The API of the server, and the storage root that its worker's flows work on."""

    api: httpx.Client
    url: str
    root: Path
    deployments: dict[str, str]
    policy: Path

    @property
    def evaluators(self) -> Path:
        """Folder of ``tests.flows.evaluators``."""
        return self.root / "evaluators"

    @property
    def hold(self) -> Path:
        """While this file exists, no model call is answered."""
        return self.root / "hold"

    def train(self, name: str, *overrides: str) -> str:
        """Trigger a small run; the id of its flow run."""
        settings = [*_SMALL, f"model.path={self.policy}", *overrides]
        return self.start(
            "train", run_id=name, config="smoke", overrides=settings, root=str(self.root)
        )

    def start(self, flow: str, **parameters: Any) -> str:
        """Trigger a run of a deployment; its id."""
        body = {"parameters": parameters, "state": {"type": "SCHEDULED"}}
        path = f"/deployments/{self.deployments[flow]}/create_flow_run"
        return str(self._ask("POST", path, body)["id"])

    def automation(self, name: str, **changes: Any) -> None:
        """Change an automation as the UI does: switch it, or give it another trigger's time."""
        body = {"automations": {"name": {"any_": [name]}}}
        (found,) = self._ask("POST", "/automations/filter", body)
        within = changes.pop("within", None)
        if within is not None:
            found["trigger"]["within"] = within
        changed = {key: found[key] for key in ("name", "description", "trigger", "actions")}
        self._ask("PUT", f"/automations/{found['id']}", {**changed, **changes})

    def resume(self, flow_run: str) -> None:
        """As the button of a paused run."""
        answer = self._ask("POST", f"/flow_runs/{flow_run}/resume", {})
        assert answer["status"] == "ACCEPT", answer

    def flow_run(self, flow_run: str) -> dict[str, Any]:
        found: dict[str, Any] = self._ask("GET", f"/flow_runs/{flow_run}")
        return found

    def state(self, flow_run: str) -> str:
        return str(self.flow_run(flow_run)["state_type"])

    def propose(self, flow_run: str, state: str, name: str | None = None) -> None:
        """Ask for a state as the buttons of the UI do."""
        body = {"state": {"type": state, "name": name}, "force": False}
        answer = self._ask("POST", f"/flow_runs/{flow_run}/set_state", body)
        assert answer["status"] == "ACCEPT", answer

    def retry(self, flow_run: str) -> None:
        self.propose(flow_run, "SCHEDULED", "AwaitingRetry")

    def cancel(self, flow_run: str) -> None:
        self.propose(flow_run, "CANCELLING")

    def wait(self, flow_run: str, *states: str, attempt: int = 1) -> None:
        """Until a run is in one of these states, in this or a later attempt."""

        def reached() -> bool:
            found = self.flow_run(flow_run)
            assert (
                found["state_type"] in states
                or found["state_type"] not in FINAL
                or (found["run_count"] < attempt)
            ), f"{found['name']} ended as {found['state']}\n{self.logs()}"
            return found["state_type"] in states and found["run_count"] >= attempt

        self.until(reached, f"flow run {flow_run} in {states}")

    def until(self, ready: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while True:
            with suppress(httpx.HTTPError):  # a busy server fails a request now and then
                if ready():
                    return
            assert time.monotonic() < deadline, f"waited for: {what}\n{self.logs()}"
            time.sleep(_POLL_S)

    def steps(self, run: str) -> list[dict[str, Any]]:
        """Flow runs of a run's steps, the oldest first."""
        body = {"flows": {"name": {"any_": ["rl_step"]}}, "sort": "START_TIME_ASC"}
        found = self._ask("POST", "/flow_runs/filter", body)
        return [one for one in found if one["parameters"]["run_id"] == run]

    def flow_runs(self, name: str) -> list[str]:
        """Ids of the flow runs of that name."""
        body = {"flow_runs": {"name": {"any_": [name]}}}
        return [str(one["id"]) for one in self._ask("POST", "/flow_runs/filter", body)]

    def events(self, resource: str) -> dict[str, dict[str, Any]]:
        """The newest payload of each kind of event of a resource."""
        body = {"filter": {"resource": {"id": [resource]}}, "limit": 50}
        found = self._ask("POST", "/events/filter", body)["events"]
        return {one["event"]: one["payload"] for one in reversed(found)}

    def runs_of(self, flow: str) -> list[dict[str, Any]]:
        """Flow runs of a flow, the oldest first."""
        body = {"flows": {"name": {"any_": [flow]}}, "sort": "EXPECTED_START_TIME_ASC"}
        found: list[dict[str, Any]] = self._ask("POST", "/flow_runs/filter", body)
        return found

    def artifacts(self, key: str) -> list[dict[str, Any]]:
        """All versions of an artifact."""
        body = {"artifacts": {"key": {"any_": [key]}}}
        found: list[dict[str, Any]] = self._ask("POST", "/artifacts/filter", body)
        return found

    def tasks(self, flow_run: str) -> list[tuple[str, str]]:
        """Names and states of the task runs of a flow run, sorted."""
        body = {"flow_runs": {"id": {"any_": [flow_run]}}}
        found = self._ask("POST", "/task_runs/filter", body)
        return sorted((one["name"], one["state_name"]) for one in found)

    def run(self, name: str) -> Run:
        return open_run(str(self.root), name)

    def kill_flow(self) -> None:
        """SIGKILL to the process of the flow, and to nothing else."""
        for process, line in marked_processes(self.root):
            if "prefect.engine" in line:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)

    def kill(self, *words: str) -> None:
        """SIGKILL to the processes whose command lines hold all ``words``; there is one at least.

        As for a real fault, nobody is told."""
        self._signal(signal.SIGKILL, *words)

    @contextmanager
    def stopped(self, *words: str) -> Iterator[None]:
        """SIGSTOP to these processes for as long as the block lasts."""
        self._signal(signal.SIGSTOP, *words)
        try:
            yield
        finally:
            self._signal(signal.SIGCONT, *words)

    def _signal(self, number: int, *words: str) -> None:
        found = [
            process
            for process, line in marked_processes(self.root)
            if all(word in line for word in words)
        ]
        assert found, f"no process of {words}"
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def left(self) -> list[str]:
        """Command lines of the daemons of runs, and of all that they started."""
        lines = (line for _, line in marked_processes(self.root))
        return [line for line in lines if not any(module in line for module in _OWN)]

    def logs(self) -> str:
        return logs(self.root)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Asks again, as Prefect's own client does, where the server says that it can't now: on
        SQLite a request that meets another's transaction gets 503 and has changed nothing."""
        for _ in range(_TRIES):
            answer = self.api.request(method, path, json=body)
            if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                break
            time.sleep(_POLL_S)
        if not answer.is_success:
            raise httpx.HTTPStatusError(answer.text, request=answer.request, response=answer)
        return answer.json() if answer.content else None


def light(site: Orchestrated) -> dict[str, Any]:
    """A configuration file of a run as small as ``Orchestrated.train``'s, with fewer executions."""
    return {
        "preset": "smoke",
        "model": {"source": "hf_directory", "path": str(site.policy), "context": 1024},
        "cells": {"cells": [{"name": "a", "core": True}]},
        "harness": {"turns": 2, "sub_agents": 0},
        "rollout": {"queries": 2, "group_size": 4},
        "evaluation": {"before": False, "problems": 1},
        "scoring": {"retries": 0},
        "problems": {"reward": "tests.flows.evaluators:reward"},
        "training": {"steps": 1, "updates_per_step": 1},
    }


def environment(root: Path) -> dict[str, str]:
    """Of a process that keeps a server up, and of all that its worker starts."""
    left_out = ("PREFECT_", "AWS_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    return env | {
        MARK: str(root),
        "XDG_CACHE_HOME": str(root / "cache"),
        "GYRE_TEST_EVALUATORS": str(root / "evaluators"),
        "GYRE_TEST_HOLD": str(root / "hold"),
        # For the reward function and the stand-ins of cells, which are modules of tests.
        "PYTHONPATH": os.pathsep.join((str(_HERE / "stand_ins"), str(_HERE.parents[1]))),
        "PREFECT_WORKER_QUERY_SECONDS": "1",
    }


def serve(root: Path, port: int) -> subprocess.Popen[str]:
    """Start server, worker and deployments; their addresses are its first line of output."""
    with open(root / "orchestrated.log", "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.flows.orchestrated", str(root), str(port)],
            env=environment(root),
            cwd=root,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
            text=True,
        )


def start_light(root: Path, policy: Path, name: str, *overrides: str) -> subprocess.Popen[str]:
    """`gyre train` of a run as small as ``Orchestrated.train``'s, with a server of its own."""
    settings = [*_SMALL, f"model.path={policy}", f"prefect.port={free_port()}", *overrides]
    options = [part for setting in settings for part in ("--set", setting)]
    argv = [sys.executable, "-m", "flows.cli", "train", "--config", "smoke", "--name", name]
    return subprocess.Popen(
        [*argv, "--root", str(root), *options],
        cwd=root,
        env=environment(root),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
    )


def marked_processes(root: Path) -> list[tuple[psutil.Process, str]]:
    """Living processes that were started for ``root``, with their command lines."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            alive = process.status() != psutil.STATUS_ZOMBIE
            if alive and process.environ().get(MARK) == str(root):
                found.append((process, " ".join(process.cmdline())))
    return found


def logs(root: Path) -> str:
    """The ends of all logs below a storage root."""
    found = []
    for path in sorted(root.rglob("*.log")):
        lines = path.read_text(errors="replace").splitlines()[-25:]
        found.append(f"--- {path}\n" + "\n".join(lines))
    return "\n".join(found)


def main() -> None:
    from configs.cells import PrefectConfig
    from flows.server import orchestration

    root, port = Path(sys.argv[1]), int(sys.argv[2])
    config = PrefectConfig(port=port, start_limit_s=LIMIT_S)
    with orchestration(config, root / "prefect", lambda text: print(text, file=sys.stderr)) as to:
        from flows.deploy import deploy

        ids = {name: str(one) for name, one in deploy(config.work_pool, str(root)).items()}
        print(json.dumps({"api": to.api_url, "ui": to.ui_url, "deployments": ids}), flush=True)
        while not select.select([sys.stdin], [], [], 1)[0]:
            to.check()


if __name__ == "__main__":
    main()
