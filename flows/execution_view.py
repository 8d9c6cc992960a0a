"""One execution as people look at it: its calls, its reward, and what is trained of it."""

from __future__ import annotations

from dataclasses import dataclass

from flows.samples_cli import kinds_text, verdict_text
from storage.records import Member
from storage.run import Run
from storage.samples import read_header
from tasks.sampling.group import is_sealed, read_calls
from tasks.sampling.outline import Line, outline
from tasks.sampling.selection import Selection, select
from tasks.sampling.tree import CallTree, build_tree


class NoExecutionError(LookupError):
    """No calls of such an execution are recorded; the text says which executions have some."""


@dataclass(frozen=True)
class ExecutionView:
    """Everything that is shown of an execution."""

    run_id: str
    execution: str
    member: Member | None
    """What was sealed of it; None before its group is."""
    tree: CallTree
    selection: Selection
    lines: tuple[Line, ...]


def view_execution(run: Run, execution: str) -> ExecutionView:
    """Build the execution's tree and select as the training does.

    Raises:
        NoExecutionError: nothing is recorded of it.
        RecordError, CallTreeError: what is recorded is damaged.
    """
    calls = read_calls(run.store, run.layout, execution)
    if not calls:
        query = execution.rpartition("-")[0]
        names = run.store.children(f"{run.layout.prefix}/executions")
        near = [name for name in names if name.startswith(query)] or names
        shown = ", ".join(near[:8]) + (" ..." if len(near) > 8 else "")
        raise NoExecutionError(
            f"no calls of {execution} in run {run.run_id}; there are: {shown or 'no executions'}"
        )
    tree = build_tree(calls)
    rule, context = run.config.trajectory, run.config.model.context
    selection = select(tree, rule, context)
    lines = outline(tree, selection, rule, context)
    return ExecutionView(run.run_id, execution, _member(run, execution), tree, selection, lines)


def _member(run: Run, execution: str) -> Member | None:
    query = execution.rpartition("-")[0]
    if not is_sealed(run.store, run.layout, query):
        return None
    header = read_header(run.store, run.layout.group(query))
    return next((one for one in header.members if one.execution_id == execution), None)


def summary_lines(view: ExecutionView) -> list[str]:
    """What is said above the tree."""
    selection, member = view.selection, view.member
    stored = sum(len(segment.ids) for segment in view.tree.segments)
    flat = sum(view.tree.calls[one.tip].tokens for one in selection.trajectories)
    reward = "its group is not sealed"
    if member is not None:
        advantage = "none" if member.advantage is None else f"{member.advantage:+.3f}"
        reward = f"reward {verdict_text(member)}, advantage {advantage}"
    lines = [
        reward,
        f"{len(view.tree.calls)} calls, {stored} distinct tokens, {selection.paths} trajectories",
        f"trained: {kinds_text(dict(selection.kept))}; {selection.target_tokens} targets in "
        f"{flat} tokens",
        f"beyond the cap: {kinds_text(dict(selection.dropped))}; {selection.dropped_tokens} targets"
        f"; too long: {selection.cut_tokens} targets",
    ]
    for number, one in enumerate(selection.trajectories):
        tip = view.tree.calls[one.tip]
        lines.append(
            f"  {number}: {one.kind.value}, to call {tip.call.index}, {tip.tokens} tokens, "
            f"{one.target_tokens} targets"
        )
    return lines
