"""How long a run will still take, at the pace of its finished steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from cells.levels import Level
from configs.run import RunConfig
from storage.records import UpdateMetrics


@dataclass(frozen=True)
class TimeLeft:
    """Seconds until the run is done."""

    seconds: float
    steps: int
    """Finished steps that the estimate rests on."""


class Pace:
    """Learns when steps and evaluations began, from what managers saw."""

    def __init__(self, config: RunConfig) -> None:
        self._steps = config.training.steps
        self._last_update = config.training.updates_per_step - 1
        every = config.evaluation.every
        last = self._steps - 1
        self._evaluated_after = {
            step
            for step in range(self._steps)
            if step == last or (every and (step + 1) % every == 0)
        }
        self._began: dict[int, float] = {}
        self._evaluations: dict[int, tuple[float, float]] = {}

    def note(self, level: Level) -> None:
        """Take a row of the journal, in order."""
        if level.step >= 0:
            self._began.setdefault(level.step, level.at)
        else:
            began, _ = self._evaluations.get(level.version, (level.at, level.at))
            self._evaluations[level.version] = (began, level.at)

    def left(self, now: float, level: Level, updates: Sequence[UpdateMetrics]) -> TimeLeft | None:
        """None until a step is done: before, nothing tells.

        Steps count with the median of those that are done, evaluations with the longest. What lies
        between the steps, a few seconds each, is left out.
        """
        done = {update.step: update.ended_at for update in updates if self._is_last(update)}
        paces = [ended - self._began[step] for step, ended in done.items() if step in self._began]
        if not paces:
            return None
        pace = median(paces)
        ahead = [step for step in range(self._steps) if step not in done]
        seconds = pace * len(ahead)
        if level.step in ahead:
            seconds -= min(now - self._began[level.step], pace)
        whole = self._evaluation_s(level)
        seconds += whole * len(self._evaluated_after.intersection(ahead))
        if level.step < 0:
            seconds += max(whole - (now - self._evaluations[level.version][0]), 0.0)
        return TimeLeft(seconds, len(paces))

    def _is_last(self, update: UpdateMetrics) -> bool:
        return update.update == self._last_update

    def _evaluation_s(self, level: Level) -> float:
        """The longest evaluation that has ended."""
        ended = [
            end - began
            for version, (began, end) in self._evaluations.items()
            if level.step >= 0 or version != level.version
        ]
        return max(ended, default=0.0)
