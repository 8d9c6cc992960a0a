"""A real run to which something happens every minute and a half.

    python -m tests.chaos.chaos_run --minutes 45 --seed 1

starts `gyre train` with the quickstart's workload on three cells, kills or stops a random process
of it again and again, waits for its end, and prints one JSON object: the faults, what is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flows.fsck.check import check_run
from flows.history import updates_of
from flows.replay import ReplayError, replay, trained_updates
from storage.errors import StorageError
from storage.records import ExecutionOutcome, ExecutionResult, RecordError, StepDone
from storage.run import Run, open_run
from tests.chaos.afflictions import Drawn, left_running, scratch_folders
from tests.flows.conftest import start_gyre
from tests.flows.orchestrated import logs

NAME = "chaos"
TOLERANCE = 1e-3
BEGIN_LIMIT_S = 900.0
END_LIMIT_S = 3600.0
CLEAN_LIMIT_S = 60.0
SETTINGS = (
    "cells.cells=[{name: a, core: true}, {name: b}, {name: c}]",
    # A machine that is busy with the start of one part after the other is no fault of a harness.
    "rollout.limit_s=1800",
)


@dataclass
class Report:
    """What was done, and what came out."""

    seed: int
    faults: list[tuple[float, str]] = field(default_factory=list)
    """Seconds since the start, and the fault's name; without those whose process was not there."""
    exit_code: int | None = None
    wrong: list[str] = field(default_factory=list)
    executions: int = 0
    """With exactly one verdict each, those of evaluations included."""
    steps: int = 0
    updates: int = 0
    micro_steps: int = 0
    difference: float | None = None
    """Of a replay, over the weights' change."""
    seconds: float = 0.0
    output: str = ""


def run_chaos(
    root: Path,
    *,
    minutes: float,
    every_s: float,
    seed: int,
    settings: tuple[str, ...] = (),
    end_limit_s: float = END_LIMIT_S,
) -> Report:
    """A run with a fault every ``every_s`` seconds for so many minutes, or until it ends, and the
    checks of what it left.

    Args:
        end_limit_s: how long it may go on after the last fault.
    """
    report = Report(seed)
    options = [part for setting in (*SETTINGS, *settings) for part in ("--set", setting)]
    began = time.monotonic()
    command = start_gyre(root, "train", "--config", "quickstart", "--name", NAME, *options)
    assert command.stdout is not None
    os.set_blocking(command.stdout.fileno(), False)
    said: list[str] = []
    scratch: set[str] = set()

    def ended() -> bool:
        with suppress(BlockingIOError, TypeError):
            said.append(command.stdout.read() or "")  # type: ignore[union-attr]
        return command.poll() is not None

    first = root / "runs" / NAME / "steps" / "00000"
    _wait(lambda: ended() or first.exists(), BEGIN_LIMIT_S)
    due, chosen = time.monotonic(), Drawn(seed)
    until = due + 60 * minutes
    while not ended() and due + every_s < until:
        due += every_s
        _wait(ended, due - time.monotonic())
        scratch |= scratch_folders(root)
        at = round(time.monotonic() - began, 1)
        name = chosen.strike(root)
        if name is not None:
            report.faults.append((at, name))
            print(report.faults[-1], file=sys.stderr, flush=True)
    _wait(ended, end_limit_s)
    if command.poll() is None:
        command.send_signal(signal.SIGTERM)
        report.wrong.append("the run did not end by itself")
        _wait(ended, 120)
    ended()
    report.exit_code, report.seconds = command.poll(), round(time.monotonic() - began, 1)
    left = left_running(root, scratch, CLEAN_LIMIT_S)
    report.wrong += [f"left running: {line}" for line in left]
    report.output = "".join(said)[-4000:]
    (root / "gyre.log").write_text("".join(said))
    if report.exit_code != 0:
        report.wrong.append(f"gyre train ended with {report.exit_code}")
    try:
        check(open_run(str(root), NAME), report)
    except (StorageError, RecordError, ReplayError) as error:
        report.wrong.append(str(error))
    return report


def check(run: Run, report: Report) -> None:
    """Hold against each other what the run has stored, and train its samples again."""
    report.wrong += [f"{one.kind} {one.key}: {one.text}" for one in check_run(run) if one.is_error]
    report.wrong += wrong_executions(run)
    report.executions = len(run.store.children("runs/" + NAME + "/executions"))
    for step in range(run.config.training.steps):
        key = run.layout.step_done(step)
        if not run.store.exists(key):
            report.wrong.append(f"step {step} is not done")
            continue
        report.steps += run.store.read_record(key, StepDone).step == step
    report.wrong += [
        f"step {one.step} update {one.update}: {one.excluded} executions excluded"
        for one in updates_of(run)
        if one.excluded
    ]
    updates = trained_updates(run)
    report.updates = len(updates)
    report.micro_steps = sum(len(one.micro_steps) for one in updates)
    for step in {one.step for one in updates}:
        samples = Counter(
            sample
            for one in updates
            if one.step == step
            for micro_step in one.micro_steps
            for sample in micro_step.samples
        )
        twice = [f"step {step}: {name} counts {n} times" for name, n in samples.items() if n > 1]
        report.wrong += twice
    difference = replay(run, say=lambda _: None).difference
    report.difference = None if difference is None else difference.share
    if report.difference is None or report.difference > TOLERANCE:
        report.wrong.append(f"a replay differs by {report.difference}")


def wrong_executions(run: Run) -> Iterator[str]:
    """Those that did not come to an end of their own, or have not exactly one verdict."""
    for name in run.store.children("runs/" + NAME + "/executions"):
        verdicts = run.store.children(run.layout.verdicts(name))
        if len(verdicts) != 1:
            yield f"{name}: {len(verdicts)} verdicts"
        key = run.layout.execution_result(name)
        if not run.store.exists(key):
            yield f"{name}: no result"
            continue
        result = run.store.read_record(key, ExecutionResult)
        if result.outcome is not ExecutionOutcome.COMPLETED or result.exit_code:
            yield f"{name}: {result.outcome}, exit code {result.exit_code}: {result.detail}"


def _wait(ready: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not ready() and time.monotonic() < deadline:
        time.sleep(0.5)


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
