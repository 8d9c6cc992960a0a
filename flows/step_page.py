"""A step in the Prefect UI: its figures, groups, verdicts and moves of cells, in one artifact."""

from __future__ import annotations

import os
import re
from base64 import b64encode
from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from prefect.artifacts import create_markdown_artifact

from cells.decisions import Decision
from flows.history import evaluations_of, updates_of
from flows.serve_address import PAGES_URL
from flows.summary import step_columns, step_rows
from storage.records import Excluded, GroupHeader, Scored, StepDone, UpdateMetrics
from storage.run import Run

_MOST_GROUPS = 200
_MOST_MOVES = 100
_MOST_STEPS = 50
_WIDTH, _HEIGHT, _PAD = 640, 160, 34


def show_step(
    run: Run, done: StepDone, headers: Sequence[GroupHeader], decisions: Sequence[Decision]
) -> None:
    """One artifact of the run, with a version for each step: one request a step."""
    create_markdown_artifact(
        key=artifact_key(run.run_id),
        markdown=markdown(run, done, headers, decisions),
        description=f"step {done.step + 1} of {run.config.training.steps}, "
        f"version {done.policy_version}",
    )


def artifact_key(run_id: str) -> str:
    """Key of a run's artifact: small letters, digits and dashes."""
    return "run-" + (re.sub(r"[^a-z0-9]+", "-", run_id.lower()).strip("-") or "x")


def markdown(
    run: Run, done: StepDone, headers: Sequence[GroupHeader], decisions: Sequence[Decision]
) -> str:
    """The page as text."""
    updates = updates_of(run)
    steps = step_rows(updates)[-_MOST_STEPS:]
    parts = [
        f"# {run.run_id}, step {done.step + 1} of {run.config.training.steps}",
        _links(run, done.step),
        _plot("pass rate of the training batches, by update", _rates(updates)),
        *_held_out(run),
        "## Steps",
        _table(step_columns(), steps),
        "## Verdicts of this step",
        _table(("verdict", "executions"), _verdicts(headers)),
        f"## Groups of this step{_cut(len(headers), _MOST_GROUPS)}",
        _table(
            ("query", "problem", "mean reward", "rewards", "excluded", "spread", "targets"),
            [_group(header) for header in headers[:_MOST_GROUPS]],
        ),
        f"## Cells{_cut(len(decisions), _MOST_MOVES)}",
        _table(
            ("cell", "to", "why", "live executions", "seconds", "failed"),
            [
                (one.cell, one.to, one.reason, str(one.waterlevel), f"{one.seconds:.2f}",
                 one.failed)
                for one in decisions[:_MOST_MOVES]
            ],
        ),
    ]  # fmt: skip
    return "\n\n".join(part for part in parts if part)


def _links(run: Run, step: int) -> str:
    pages = os.environ.get(PAGES_URL)
    if not pages:
        return f"report: `gyre report {run.run_id}`; pages of runs: `gyre serve`"
    own = f"{pages}/runs/{run.run_id}"
    return f"[report]({own}) | [executions of this step]({own}/executions?step={step})"


def _held_out(run: Run) -> list[str]:
    found = evaluations_of(run)
    rows = [
        (str(version), f"{one.pass_rate:.3f}", f"{one.standard_error:.3f}", str(one.problems))
        for version, one in found.items()
    ]
    columns = ("version", "held-out pass rate", "standard error", "problems")
    return [_table(columns, rows)] if rows else []


def _verdicts(headers: Sequence[GroupHeader]) -> list[tuple[str, str]]:
    counts: Counter[str] = Counter()
    for header in headers:
        for member in header.members:
            verdict = member.verdict
            if isinstance(verdict, Excluded):
                counts[f"excluded: {verdict.reason}"] += 1
            elif verdict.timed_out:
                counts["timed out"] += 1
            else:
                counts["in time"] += 1
    return [(name, str(count)) for name, count in counts.most_common()]


def _group(header: GroupHeader) -> tuple[str, ...]:
    rewards = [one.verdict.reward for one in header.members if isinstance(one.verdict, Scored)]
    return (
        header.query_id,
        header.problem_id,
        f"{fmean(rewards):.3f}" if rewards else "-",
        " ".join(f"{reward:.2g}" for reward in rewards),
        str(len(header.members) - len(rewards)),
        "yes" if header.spread else "no",
        str(sum(one.target_tokens for one in header.members)),
    )


def _rates(updates: Sequence[UpdateMetrics]) -> list[float]:
    return [update.pass_rate for update in updates if update.pass_rate is not None]


def _plot(title: str, values: Sequence[float]) -> str:
    """A line as a picture inside the text: the UI draws no figures of its own."""
    if len(values) < 2:
        return ""
    wide, high = _WIDTH - 2 * _PAD, _HEIGHT - 2 * _PAD
    low, top = min(values), max(values)
    span = (top - low) or 1.0
    points = " ".join(
        f"{_PAD + wide * at / (len(values) - 1):.1f},{_HEIGHT - _PAD - high * (v - low) / span:.1f}"
        for at, v in enumerate(values)
    )
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'font-family="sans-serif" font-size="12" fill="#888">'
        f'<text x="{_PAD}" y="16">{title}: {values[-1]:.3f}</text>'
        f'<text x="0" y="{_PAD + 4}">{top:.2f}</text>'
        f'<text x="0" y="{_HEIGHT - _PAD + 4}">{low:.2f}</text>'
        f'<polyline points="{points}" fill="none" stroke="#3b82f6" stroke-width="2"/></svg>'
    )
    return f"![{title}](data:image/svg+xml;base64,{b64encode(svg.encode()).decode()})"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        return (
            "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
        )

    if not rows:
        return "none"
    return "\n".join((line(columns), line(["---"] * len(columns)), *(line(row) for row in rows)))


def _cut(count: int, most: int) -> str:
    return f", the first {most} of {count}" if count > most else ""
