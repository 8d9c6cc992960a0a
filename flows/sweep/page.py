"""The page of a sweep: one file that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import plotly.graph_objects as go

from flows.estimates import share_interval
from flows.report.html import document, figure, section, table, tiles
from flows.report.style import AMBER, BLUE, GREEN, GREY, PALE, RED, VIOLET, styled
from flows.sweep.results import Difference, Results, Trained, verdict_line

_COLOURS = (BLUE, AMBER, GREEN, VIOLET, RED, PALE, GREY)
_MOST_CURVES = 12


def render(results: Results) -> str:
    """The page as text; a sweep under way has one too."""
    plan = results.plan
    about = f"{results.done} of {len(plan.runs)} runs are done. {verdict_line(results)}"
    return document(
        title=f"Gyre sweep {plan.name}",
        heading=plan.name,
        about=about,
        body="\n".join(
            (
                tiles(_facts(results)),
                *([_shared(results)] if plan.from_run else []),
                section(
                    "Points",
                    "Held-out pass rate at the end of each run, and the mean over seeds with its "
                    "95 % interval.",
                    figure(_by_point(results)) + table(point_columns(results), point_rows(results)),
                ),
                section("Is it more than noise?", _how(results), table(*difference_table(results))),
                section(
                    "Learning",
                    "Pass rate of the training batches by update, the mean over seeds. Batches are "
                    "of other problems each time.",
                    figure(_learning(results)),
                ),
                section("Runs", "", table(*_runs(results))),
            )
        ),
    )


def point_columns(results: Results) -> tuple[str, ...]:
    """Headings of the table of points."""
    keys = (one.key for one in results.plan.axes)
    return (*keys, "pass rate", "95 % interval", *(f"seed {one}" for one in results.plan.seeds),
            "targets", "runs done")  # fmt: skip


def point_rows(results: Results) -> list[tuple[str, ...]]:
    """The cells of the table of points, as text."""
    rows = []
    for number, point in enumerate(results.plan.points):
        runs, found = results.of_point(number), results.points[number]
        rates = {run.seed: run.last.pass_rate for run in runs if run.last is not None}
        targets = [sum(one.target_tokens for one in run.updates) for run in runs if run.done]
        mean, interval = "-", "-"
        if found is not None:
            mean = f"{found.mean:.3f}"
            low, high = share_interval(found)
            interval = f"{low:.3f} to {high:.3f}" if found.count > 1 else "one seed"
        rows.append(
            (
                *point.values,
                f"{mean} (highest)" if number == results.best else mean,
                interval,
                *(f"{rates[seed]:.3f}" if seed in rates else "-" for seed in results.plan.seeds),
                f"{fmean(targets):,.0f}" if targets else "-",
                f"{len(rates)} of {len(runs)}",
            )
        )
    return rows


def difference_table(results: Results) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headings and cells of what the highest point is ahead of the others."""
    columns = ("difference", "mean", "interval", "pairs", "more than noise")
    return columns, [_difference(results, one) for one in results.differences]


def _difference(results: Results, one: Difference) -> tuple[str, ...]:
    points = results.plan.points
    low, high = one.interval
    return (
        f"{points[one.better].label} over {points[one.other].label}",
        f"{one.gain.mean:+.3f}",
        f"{low:+.3f} to {high:+.3f}" if one.gain.count > 1 else "one pair",
        f"{one.gain.count} {one.over}",
        "yes" if one.beyond_noise else "no",
    )


def _facts(results: Results) -> list[tuple[str, str]]:
    plan = results.plan
    facts = [("points", str(len(plan.points))), ("seeds of each", str(len(plan.seeds)))]
    if results.best is not None:
        best = results.points[results.best]
        assert best is not None
        facts.append((f"highest: {plan.points[results.best].label}", f"{best.mean:.3f}"))
    if results.differences:
        least = min(results.differences, key=lambda one: one.gain.mean)
        facts.append((f"over {plan.points[least.other].label}", f"{least.gain.mean:+.3f}"))
    return facts


def _shared(results: Results) -> str:
    count = sum(run.shared for run in results.runs)
    return section(
        "Shared first step",
        f"{count} of {len(results.runs)} runs train their first step on the model calls and "
        f"verdicts of run {results.plan.from_run}, also where their seeds differ. Every later step "
        f"has rollouts of its own policy. So the points start from the same samples, and what they "
        f"differ in is what was made of them.",
        "",
    )


def _how(results: Results) -> str:
    if not results.differences:
        return "Two points with results are needed."
    one = results.differences[0]
    text = (
        f"Paired over {one.over}: Student's interval of the mean difference"
        f"{', with the noise of seeds and of problems' if one.over == 'seeds' else ''}, at "
        f"{one.confidence:.2%}, so that 95 % hold for all pairs of points together (Bonferroni)."
    )
    if one.over == "problems":
        text += (
            " There is one seed: how far another seed would be away is not known, so that a yes "
            "here is about these runs and not about the settings."
        )
    return text


def _by_point(results: Results) -> go.Figure:
    shown = go.Figure()
    labels = [point.label for point in results.plan.points]
    dots = [
        (labels[run.point], run.last.pass_rate, f"seed {run.seed}, {run.run_id}")
        for run in results.runs
        if run.last is not None
    ]
    shown.add_scatter(
        x=[dot[0] for dot in dots], y=[dot[1] for dot in dots], text=[dot[2] for dot in dots],
        mode="markers", name="a run", marker={"color": PALE, "size": 8},
    )  # fmt: skip
    known = [(label, found) for label, found in zip(labels, results.points, strict=True) if found]
    shown.add_scatter(
        x=[label for label, _ in known],
        y=[found.mean for _, found in known],
        error_y={
            "type": "data",
            "symmetric": False,
            "array": [share_interval(found)[1] - found.mean for _, found in known],
            "arrayminus": [found.mean - share_interval(found)[0] for _, found in known],
        },
        mode="markers",
        name="mean over seeds, 95 %",
        marker={"color": BLUE, "size": 11, "symbol": "diamond"},
    )
    shown.update_xaxes(type="category", categoryorder="array", categoryarray=labels)
    shown.update_yaxes(title_text="pass rate")
    return styled(shown, 380)


def _learning(results: Results) -> go.Figure:
    shown = go.Figure()
    for number, point in enumerate(results.plan.points[:_MOST_CURVES]):
        curve = _curve(results.of_point(number))
        shown.add_scatter(
            x=[version for version, _ in curve],
            y=[rate for _, rate in curve],
            mode="lines",
            name=point.label,
            line={"color": _COLOURS[number % len(_COLOURS)]},
        )
    shown.update_xaxes(title_text="version")
    shown.update_yaxes(title_text="pass rate of the batch")
    return styled(shown, 380)


def _curve(runs: Sequence[Trained]) -> list[tuple[int, float]]:
    rates: dict[int, list[float]] = {}
    for run in runs:
        for update in run.updates:
            if update.pass_rate is not None:
                rates.setdefault(update.policy_version, []).append(update.pass_rate)
    return [(version, fmean(own)) for version, own in sorted(rates.items())]


def _runs(results: Results) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    columns = ("run", "point", "seed", "first step", "updates", "held out before", "at the end")
    rows: list[tuple[str, ...]] = []
    for run in results.runs:
        before = run.evaluations.get(0)
        rows.append(
            (
                run.run_id,
                results.plan.points[run.point].label,
                str(run.seed),
                f"rollouts of {results.plan.from_run}" if run.shared else "its own",
                str(len(run.updates)),
                "-" if before is None else f"{before.pass_rate:.3f}",
                "-" if run.last is None else f"{run.last.pass_rate:.3f}",
            )
        )
    return columns, rows
