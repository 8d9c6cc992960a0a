"""A real run to which something happens every minute and a half.

    python -m tests.chaos.chaos_run --minutes 45 --seed 1

starts `gyre train` with the quickstart's workload on three cells, kills or stops a random process
of it again and again, waits for its end, and prints one JSON object: the faults, what is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from flows.fsck.check import check_run
from flows.replay import replay
from storage.layout import execution_id
from storage.records import ExecutionOutcome, ExecutionResult, StepPlan
from storage.run import Run, open_run
from tests.flows.conftest import start_gyre
from tests.flows.orchestrated import logs, marked_processes

NAME = "chaos"
CELLS = ("a", "b", "c")
STEP_MINUTES = 1.5
"""About as long as a step of the quickstart takes with the faults, on two cores."""
STOP_S = 15.0
TOLERANCE = 1e-3
END_LIMIT_S = 1800.0


@dataclass(frozen=True)
class Fault:
    """What is done to which process."""

    name: str
    words: tuple[str, ...]
    """Of its command line."""
    below: tuple[str, ...] = ()
    """It is a child of the process with these words; itself when empty."""
    stop_s: float = 0.0
    """Stopped for so long instead of killed."""


FAULTS = (
    Fault("gateway killed", ("cells.gateway.server",)),
    Fault("execution host killed", ("tasks.rollout.host",)),
    *(Fault(f"cell host {c} killed", ("-m cells.host", f"cell-{c}")) for c in CELLS),
    *(
        Fault(f"SGLang of {c} killed", ("-m cells.host", f"cell-{c}"), ("cells.serving.launch",))
        for c in CELLS
    ),
    *(
        Fault(f"replica of {c} killed", ("-m cells.host", f"cell-{c}"), ("cells.replica.worker",))
        for c in CELLS
    ),
    Fault("Prefect server killed", ("prefect server start",)),
    Fault("Prefect server stopped", ("prefect server start",), stop_s=STOP_S),
    Fault("gateway stopped", ("cells.gateway.server",), stop_s=STOP_S),
    Fault("execution host stopped", ("tasks.rollout.host",), stop_s=STOP_S),
    *(
        Fault(f"cell host {c} stopped", ("-m cells.host", f"cell-{c}"), stop_s=STOP_S)
        for c in CELLS
    ),
)


@dataclass
class Report:
    """What was done, and what came out."""

    seed: int
    faults: list[tuple[float, str]] = field(default_factory=list)
    """Seconds since the start, and the fault's name; without those whose process was not there."""
    exit_code: int | None = None
    wrong: list[str] = field(default_factory=list)
    difference: float | None = None
    seconds: float = 0.0
    output: str = ""


def afflict(root: Path, fault: Fault) -> bool:
    """Do it; False when there is no such process now."""
    found = [process for process, line in marked_processes(root) if _has(line, fault.words)]
    if fault.below:
        children: list[psutil.Process] = []
        for process in found:
            with suppress(psutil.Error):
                children += process.children(recursive=True)
        found = [child for child in children if _has(_line(child), fault.below)]
    for process in found:
        with suppress(psutil.Error):
            process.send_signal(signal.SIGSTOP if fault.stop_s else signal.SIGKILL)
    if found and fault.stop_s:
        time.sleep(fault.stop_s)
        for process in found:
            with suppress(psutil.Error):
                process.send_signal(signal.SIGCONT)
    return bool(found)


def run_chaos(
    root: Path, *, minutes: float, every_s: float, seed: int, settings: tuple[str, ...] = ()
) -> Report:
    """A run of about so many minutes with a fault every ``every_s`` seconds, and the checks."""
    drawn, report = random.Random(seed), Report(seed)
    cells = ", ".join(f"{{name: {c}{', core: true' * (c == 'a')}}}" for c in CELLS)
    steps = max(2, round(minutes / STEP_MINUTES))
    chosen = (f"cells.cells=[{cells}]", f"training.steps={steps}", *settings)
    options = [part for setting in chosen for part in ("--set", setting)]
    began = time.monotonic()
    log = root / "gyre.log"
    command = start_gyre(root, "train", "--config", "quickstart", "--name", NAME, *options)
    assert command.stdout is not None
    os.set_blocking(command.stdout.fileno(), False)
    said: list[str] = []

    def ended() -> bool:
        with suppress(BlockingIOError, TypeError):
            said.append(command.stdout.read() or "")  # type: ignore[union-attr]
        return command.poll() is not None

    _wait(lambda: ended() or (root / "runs" / NAME / "steps" / "00000").exists(), END_LIMIT_S)
    until = time.monotonic() + 60 * minutes
    while not ended() and time.monotonic() < until:
        _wait(ended, every_s)
        fault = drawn.choice(FAULTS)
        if command.poll() is None and afflict(root, fault):
            report.faults.append((round(time.monotonic() - began, 1), fault.name))
            print(f"{report.faults[-1]}", file=sys.stderr, flush=True)
    _wait(ended, END_LIMIT_S)
    if command.poll() is None:
        command.send_signal(signal.SIGTERM)
        report.wrong.append("the run did not end by itself")
        _wait(ended, 120)
    ended()
    report.exit_code, report.seconds = command.poll(), round(time.monotonic() - began, 1)
    report.output = "".join(said)[-4000:]
    log.write_text("".join(said))
    left = [line for _, line in marked_processes(root)]
    report.wrong += [f"left running: {line}" for line in left]
    if report.exit_code != 0:
        report.wrong.append(f"gyre train ended with {report.exit_code}")
    with suppress(FileNotFoundError):
        report.wrong += wrong_with(open_run(str(root), NAME))
        found = replay(open_run(str(root), NAME), say=lambda _: None)
        if found.difference is not None:
            report.difference = found.difference.share
        if report.difference is None or report.difference > TOLERANCE:
            report.wrong.append(f"a replay differs by {report.difference}")
    return report


def wrong_with(run: Run) -> list[str]:
    """Contradictions in storage, and executions that our side did not bring to an end."""
    found = [f"{one.kind} {one.key}: {one.text}" for one in check_run(run) if one.is_error]
    outcomes: Counter[str] = Counter()
    for step in range(run.config.training.steps):
        if not run.store.exists(run.layout.step_plan(step)):
            continue
        for query in run.store.read_record(run.layout.step_plan(step), StepPlan).queries:
            for member in range(query.group_size):
                name = execution_id(query.query_id, member)
                key = run.layout.execution_result(name)
                if not run.store.exists(key):
                    found.append(f"{name}: no result")
                    continue
                result = run.store.read_record(key, ExecutionResult)
                outcomes[result.outcome.value] += 1
                if result.outcome is ExecutionOutcome.HOST_FAILED:
                    found.append(f"{name}: {result.detail}")
                verdicts = run.store.children(run.layout.verdicts(name))
                if len(verdicts) != 1:
                    found.append(f"{name}: {len(verdicts)} verdicts")
    print(dict(outcomes), file=sys.stderr)
    return found


def _wait(ready: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not ready() and time.monotonic() < deadline:
        time.sleep(0.5)


def _has(line: str, words: tuple[str, ...]) -> bool:
    return all(word in line for word in words)


def _line(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.chaos_run", description=__doc__)
    parser.add_argument("--minutes", type=float, default=45.0)
    parser.add_argument("--every", type=float, default=90.0, help="seconds between faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--root", type=Path, help="storage; a temporary folder without it")
    parser.add_argument("--set", action="append", default=[], help="further settings")
    given = parser.parse_args()
    root = given.root or Path(tempfile.mkdtemp(prefix="gyre-chaos-"))
    root.mkdir(parents=True, exist_ok=True)
    report = run_chaos(
        root, minutes=given.minutes, every_s=given.every, seed=given.seed, settings=tuple(given.set)
    )
    told: dict[str, Any] = {"format": 1, "root": str(root), **vars(report)}
    print(json.dumps(told, indent=1))
    if report.wrong:
        print(logs(root), file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
