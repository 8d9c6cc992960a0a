"""What an execution leaves in storage, without having been run."""

from __future__ import annotations

from pathlib import Path

from storage.records import ExecutionOutcome, ExecutionResult
from storage.run import Run
from tasks.rollout.snapshot import freeze


def leave_result(run: Run, query: str, name: str, folder: Path, outcome: str, detail: str) -> None:
    """The result of an execution whose workspace is ``folder``; none where the host failed."""
    key = run.layout.frozen_workspace(name)
    run.store.write(key, freeze(folder, 1 << 20).data)
    result = ExecutionResult(
        execution_id=name,
        query_id=query,
        outcome=ExecutionOutcome(outcome),
        started_at=0,
        ended_at=1,
        waited_s=0,
        exit_code=0,
        calls=1,
        workspace_key=None if outcome == "host_failed" else key,
        detail=detail,
    )
    run.store.write_record(run.layout.execution_result(name), result)
