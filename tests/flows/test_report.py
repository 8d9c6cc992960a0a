"""The page about a run whose history is known, and about runs that lack something."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from cells.decisions import Decision
from cells.levels import Level
from cells.scheduler import Role
from configs.load import load_config
from flows.report import figures, make_report, reported, write_report
from flows.report.history import LATE, TIMED_OUT, read_history
from flows.report.roles import FAILED, Span, role_spans
from flows.report.timeline import roles_and_waterlevel
from storage.journal import append_line
from storage.run import Run, create_run
from tests.flows.recorded import (
    CELLS,
    EVALUATION_S,
    MEMBERS,
    QUERIES,
    ROLLOUT_S,
    STEP_S,
    STEPS,
    SWITCH_S,
    UPDATES,
    record_run,
)

LEVELS = 24
"""Level of the waterlevel at the begin of an evaluation: 12 problems, 2 executions each."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return record_run(tmp_path_factory.mktemp("report"))


def test_roles_follow_decisions_and_fill_the_run(run: Run) -> None:
    history = read_history(run)
    for cell in CELLS:
        own = [span for span in history.spans if span.cell == cell]
        assert own[0].start == history.began and own[-1].end == history.ended
        assert all(a.end == b.start for a, b in pairwise(own))
        turns = [str(span.role) for span in own]
        assert turns == ["rollout", "switching", "training", "switching"] * STEPS + ["rollout"]
    began = history.began + EVALUATION_S + ROLLOUT_S
    first = next(span for span in history.spans if span.role == Role.SWITCHING)
    assert (first.start, first.end) == pytest.approx((began, began + SWITCH_S))
    assert first.why == "the last execution has ended"


def test_what_is_out_of_the_ordinary_is_counted_once(run: Run) -> None:
    verdicts = read_history(run).verdicts
    assert verdicts[0] == Counter({"excluded: no verdict": 1, TIMED_OUT: 1, LATE: 1})
    assert all(verdicts[step] == Counter({TIMED_OUT: 1}) for step in range(1, STEPS))


def test_executions_have_their_times(run: Run) -> None:
    executions = read_history(run).executions
    assert len(executions) == STEPS * QUERIES * MEMBERS
    assert sum(one.timed_out for one in executions) == STEPS
    # Members begin a second after each other and wait as long in the gateway.
    assert {one.waited_s for one in executions} == {float(member) for member in range(MEMBERS)}
    assert all(one.worked_s <= ROLLOUT_S for one in executions)


def test_figures_show_what_was_recorded(run: Run) -> None:
    history = read_history(run)
    batches, held_out = figures.pass_rates(history).data
    assert list(batches.x) == list(range(1, STEPS * UPDATES + 1))
    assert list(batches.y) == [update.pass_rate for update in history.updates]
    assert list(held_out.x) == [0, STEPS * UPDATES]
    for value, up, down in zip(
        held_out.y, held_out.error_y.array, held_out.error_y.arrayminus, strict=True
    ):
        assert 0 <= value - down < value < value + up <= 1
    clock = {trace.name: trace for trace in roles_and_waterlevel(history).data}
    assert max(clock["running"].y) == 16 and max(clock["waiting"].y) == LEVELS - 16
    minutes = sum(clock["training"].x)
    assert minutes * 60 == pytest.approx(
        len(CELLS) * STEPS * (STEP_S - ROLLOUT_S - 2 * SWITCH_S), rel=0.01
    )
    steps = {trace.name: trace for trace in figures.seconds_of_steps(history).data}
    assert list(steps["a cell was switching"].y) == [SWITCH_S] * STEPS
    assert list(steps["whole step"].y) == [STEP_S] * STEPS


def test_health_shows_each_figure_of_each_update(run: Run) -> None:
    history = read_history(run)
    lines = {trace.name: list(trace.y) for trace in figures.health(history).data}
    first, second = lines["the trained version"][:2]
    assert (first, second) == (1e-7, None)
    assert lines["older versions"][:2] == [None, 1e-2]
    assert lines["below"][:2] == [0.0, 0.04] and lines["above"][:2] == [0.0, 0.06]
    assert lines["share of the targets"][:2] == [1.0, 0.9]
    assert lines["before clipping"] == [0.2] * STEPS * UPDATES
    assert lines["share"][:2] == [0.0, UPDATES / QUERIES]
    assert lines["mean over targets"][0] == 0.3 and lines["rate"][0] == 5e-4


def test_the_page_needs_nothing_else(run: Run) -> None:
    key = write_report(run)
    page = run.store.read(key).decode()
    own = page.replace(re.search(r"<script>/\*\*.*?</script>", page, re.DOTALL).group(), "")  # type: ignore[union-attr]
    assert "prefers-color-scheme: dark" in own
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", own)
    assert len(own) < 400_000
    for heading in ("Pass rate", "Cells and waterlevel", "Executions", "Updates", "Time of a step"):
        assert f"<h2>{heading}</h2>" in own
    assert "excluded: no verdict" in own and "+0.188" in own
    assert "rollout:" in own  # the settings


@pytest.mark.timeout(600)
def test_the_script_of_the_documents_makes_pictures(run: Run, tmp_path: Path) -> None:
    """As Debian's Chromium shows the page, light and dark, and the live table."""
    script = Path(__file__).parents[2] / "scripts" / "pictures.py"
    words = [run.run_id, "--root", run.store.url, "--out", str(tmp_path)]
    subprocess.run([sys.executable, str(script), *words], check=True, timeout=500)
    light, dark = (tmp_path / f"report-{theme}.png" for theme in ("light", "dark"))
    assert light.read_bytes()[:4] == dark.read_bytes()[:4] == b"\x89PNG"
    assert light.read_bytes() != dark.read_bytes()
    assert f"gyre train {run.run_id}" in (tmp_path / "live.svg").read_text().replace("&#160;", " ")


@pytest.mark.parametrize("steps", [0, 2])
def test_an_unfinished_run_has_a_page(tmp_path: Path, steps: int) -> None:
    run = record_run(tmp_path, steps=steps)
    assert f"{steps} of {STEPS} steps" in make_report(run)


def test_a_run_that_has_not_begun_has_a_page(tmp_path: Path) -> None:
    page = make_report(create_run(str(tmp_path), "new", load_config("smoke", environment={})))
    assert "nothing was recorded yet" in page
    assert "No execution has ended yet" in page


def test_text_of_a_run_is_text_on_the_page(tmp_path: Path) -> None:
    run = record_run(tmp_path, "a<b>&c", steps=0)
    page = make_report(run)
    assert "a&lt;b&gt;&amp;c" in page and "a<b>" not in page


def test_without_levels_roles_come_from_decisions_and_water_from_executions(run: Run) -> None:
    history = read_history(run)
    spans = role_spans((), history.decisions, history.began, history.ended)
    with_levels = {(span.cell, span.role, round(span.start)) for span in history.spans}
    assert {(span.cell, span.role, round(span.start)) for span in spans} == with_levels


def level(at: float, **roles: Role) -> Level:
    return Level(
        at=at, step=0, version=0, queued=0, running=0, capacity=0, roles=roles,
        expected=0, sealed=0, claimed=0, tokens_out=0,
    )  # fmt: skip


def decision(at: float, to: str, failed: str = "") -> Decision:
    return Decision(
        at=at, step=0, cell="a", to=to, reason="r", waterlevel=0, seconds=2.0, failed=failed
    )


def test_a_pause_of_the_run_is_left_empty() -> None:
    rows = [level(0, a=Role.ROLLOUT), level(30, a=Role.ROLLOUT), level(5000, a=Role.ROLLOUT)]
    spans = role_spans(rows, (), 0, 5010)
    assert spans == (Span("a", "rollout", 0, 30, ""), Span("a", "rollout", 5000, 5010, ""))


def test_a_failed_cell_is_shown_as_failed_until_it_is_back() -> None:
    rows = [level(0, a=Role.ROLLOUT), level(12, b=Role.ROLLOUT), level(40, a=Role.ROLLOUT)]
    spans = role_spans(rows, (decision(10, "switching", "it died"),), 0, 50)
    own = [(span.role, span.start, span.end) for span in spans if span.cell == "a"]
    assert own == [("rollout", 0, 10), (FAILED, 10, 40), ("rollout", 40, 50)]


def test_a_switch_that_has_not_ended_is_a_switch() -> None:
    rows = [level(0, a=Role.ROLLOUT), level(5, a=Role.SWITCHING)]
    assert role_spans(rows, (), 0, 9)[-1] == Span("a", "switching", 5, 9, "")


def test_a_page_is_written_at_the_end_of_a_run_that_failed_too(tmp_path: Path) -> None:
    run = record_run(tmp_path, steps=1)
    with pytest.raises(RuntimeError, match="evaluator"), reported(run, pytest.fail):
        raise RuntimeError("the evaluator")
    assert run.store.exists(run.layout.report)


def test_a_cancelled_run_is_not_held_up(tmp_path: Path) -> None:
    run = record_run(tmp_path, steps=1)
    with pytest.raises(KeyboardInterrupt), reported(run, pytest.fail):
        raise KeyboardInterrupt
    assert not run.store.exists(run.layout.report)


def test_a_page_that_cant_be_made_fails_no_run(tmp_path: Path) -> None:
    run = record_run(tmp_path, steps=0)
    append_line(run.store, run.layout.metrics, b"{}")
    warnings: list[str] = []
    with reported(run, warnings.append):
        pass
    assert len(warnings) == 1 and "gyre report recorded" in warnings[0]
