"""A run as a table that keeps up with it, in a terminal; as plain lines anywhere else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich import box
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from cells.levels import Level
from cells.scheduler import Role
from flows.watch import Picture
from storage.records import UpdateMetrics

_COLOURS = {Role.ROLLOUT: "blue", Role.TRAINING: "yellow", Role.SWITCHING: "bright_black"}
_BAR = 32
_BLOCKS = "▁▂▃▄▅▆▇█"
_MOST_POINTS = 40
_MOST_CELLS = 16
_MOST_VERSIONS = 3


class Screen(Protocol):
    """Where a run is shown."""

    def say(self, line: str) -> None:
        """A line that stays."""

    def show(self, picture: Picture) -> None:
        """Where the run is now; replaces what was shown before."""


class PlainScreen:
    """Lines only, for pipes and logs."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, line: str) -> None:
        self._console.print(line, soft_wrap=True)

    def show(self, picture: Picture) -> None:
        """Nothing: a log has no place that could be written again."""


class LiveScreen:
    """A table at the bottom of the terminal, with the lines above it."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def say(self, line: str) -> None:
        self._live.console.print(line, soft_wrap=True)

    def show(self, picture: Picture) -> None:
        self._live.update(panel(picture), refresh=True)


@contextmanager
def screen_on(console: Console) -> Iterator[Screen]:
    """The screen that suits where the console writes to."""
    if not console.is_terminal:
        yield PlainScreen(console)
        return
    # Drawn when there is something new, not by a thread that does it all the time.
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield LiveScreen(live)


def panel(picture: Picture) -> Panel:
    """The picture as a panel of about ten lines."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bright_black", no_wrap=True)
    table.add_column(overflow="fold")
    for name, shown in _rows(picture):
        table.add_row(name, shown)
    title = Text.assemble((picture.run_id, "bold"), f"  {picture.state}".rstrip())
    return Panel(
        table, title=title, title_align="left", subtitle=_clock(picture), subtitle_align="right",
        box=box.ROUNDED, border_style="bright_black",
    )  # fmt: skip


def _rows(picture: Picture) -> Iterator[tuple[str, Text]]:
    yield "step", _step(picture)
    yield "waterlevel", _waterlevel(picture.level)
    yield "cells", _cells(picture)
    yield "pass rate", _pass_rate(picture)
    yield "held out", _held_out(picture)
    last = picture.updates[-1] if picture.updates else None
    yield "staleness", _staleness(last)
    yield "health", _health(last)
    yield "log-prob gap", _gap(last)
    yield "tokens/s", _tokens(picture, last)


def _step(picture: Picture) -> Text:
    text = Text()
    if picture.step is not None:
        done = f"{picture.step_updates} of {picture.updates_per_step} updates"
        text.append(f"{picture.step + 1} of {picture.steps}", style="bold").append(f", {done}, ")
    return text.append(stage(picture), style="cyan")


def stage(picture: Picture) -> str:
    """What the run is at, in words."""
    level = picture.level
    if level is None:
        if picture.updates:
            return "between steps"
        return picture.preparing or "starting"
    if level.step < 0:
        return f"evaluating version {level.version} on the held-out problems"
    live = level.queued + level.running
    trains = Role.TRAINING in level.roles.values() and level.expected > 0
    if live and trains:
        return "rollouts and training"
    if live:
        return "rollouts"
    if level.expected:
        return "training" if trains else "cells change to training"
    return "checkpoint"


def _waterlevel(level: Level | None) -> Text:
    if level is None:
        return Text("-", style="bright_black")
    live = level.queued + level.running
    whole = max(live, level.capacity, 1)
    running, live_columns = (round(_BAR * part / whole) for part in (level.running, live))
    bar = Text.assemble(
        ("█" * running, "blue"),
        ("█" * (live_columns - running), "bright_blue"),
        ("░" * (_BAR - live_columns), "bright_black"),
    )
    text = f"  {level.running} running, {level.queued} waiting, {level.capacity} places"
    return bar.append(text)


def _cells(picture: Picture) -> Text:
    level, text = picture.level, Text()
    if level is None:
        return Text("-", style="bright_black")
    if len(picture.cells) > _MOST_CELLS:
        counts = [(each, sum(own is each for own in level.roles.values())) for each in _COLOURS]
        for each, count in counts:
            text.append(f"{count} {each.value}  ", style=_COLOURS[each])
        failed = len(picture.cells) - len(level.roles)
        return text.append(f"{failed} failed", style="red") if failed else text
    for name in picture.cells:
        role = level.roles.get(name)
        if role is None:
            text.append(f"{name} failed  ", style="bold red")
        else:
            text.append(f"{name} ").append(f"● {role.value}  ", style=_COLOURS[role])
    return text


def _pass_rate(picture: Picture) -> Text:
    rates = [update.pass_rate for update in picture.updates if update.pass_rate is not None]
    if not rates:
        return Text("-", style="bright_black")
    line = sparkline(rates[-_MOST_POINTS:])
    return Text.assemble((f"{rates[-1]:.3f}", "bold"), "  ", (line, "green"), "  by update")


def _held_out(picture: Picture) -> Text:
    if not picture.evaluations:
        return Text("-", style="bright_black")
    text = Text()
    for evaluation in (picture.evaluations[0], *picture.evaluations[1:][-2:]):
        text.append(f"{evaluation.pass_rate:.3f}", style="bold")
        text.append(f" ± {evaluation.standard_error:.3f} (version {evaluation.version})   ")
    return text


def _staleness(last: UpdateMetrics | None) -> Text:
    if last is None:
        return Text("-", style="bright_black")
    return Text(f"{last.staleness_mean:.2f} mean, {last.staleness_max} at most, in updates")


def _health(last: UpdateMetrics | None) -> Text:
    """Of the last update: what a collapse or a dead batch is seen by first."""
    if last is None:
        return Text("-", style="bright_black")
    norm = "not finite, skipped" if last.skipped else f"{last.grad_norm or 0:.3g}"
    text = Text(f"gradient norm {norm}", style="bold red" if last.skipped else "")
    text.append(f", clipped {last.clip_fraction:.0%}")
    if last.clip_fraction_low is not None and last.clip_fraction_high is not None:
        text.append(f" ({last.clip_fraction_low:.0%} below, {last.clip_fraction_high:.0%} above)")
    if last.effective_samples is not None:
        text.append(f", effective samples {last.effective_samples:.0%}")
    if last.groups:
        text.append(f", {last.groups_without_gradient} of {last.groups} groups without gradient")
    return text


def _gap(last: UpdateMetrics | None) -> Text:
    if last is None:
        return Text("-", style="bright_black")
    text = Text(f"{last.logprob_gap:.1e} mean, {last.logprob_gap_max:.1e} at most")
    newest = sorted(last.logprob_gap_by_version.items(), reverse=True)[:_MOST_VERSIONS]
    parts = ", ".join(f"version {version} {gap:.1e}" for version, gap in newest)
    return text.append(f"; {parts}") if parts else text


def _tokens(picture: Picture, last: UpdateMetrics | None) -> Text:
    parts = []
    if picture.sampled_per_s is not None:
        parts.append(f"{picture.sampled_per_s:,.0f} sampled")
    if last is not None and last.train_s > 0:
        parts.append(f"{last.trained_tokens / last.train_s:,.0f} trained in the last update")
    return Text(", ".join(parts)) if parts else Text("-", style="bright_black")


def _clock(picture: Picture) -> Text:
    parts = []
    if picture.running_s is not None:
        parts.append(f"running for {duration(picture.running_s)}")
    if picture.left is not None:
        steps = "1 step" if picture.left.steps == 1 else f"{picture.left.steps} steps"
        parts.append(f"about {duration(picture.left.seconds)} left at the pace of {steps}")
    elif picture.level is not None and not picture.updates:
        parts.append("time left is known after the first step")
    return Text(", ".join(parts))


def sparkline(shares: Sequence[float]) -> str:
    """Shares in [0, 1] as a row of blocks, on a scale from the lowest to the highest of them."""
    low, high = min(shares), max(shares)
    span = (high - low) or 1.0
    return "".join(_BLOCKS[round((share - low) / span * (len(_BLOCKS) - 1))] for share in shares)


def duration(seconds: float) -> str:
    """Seconds in the words of a clock."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
