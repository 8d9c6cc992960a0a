"""The runs of a storage root as gauges for Prometheus, read when they are asked for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cells.levels import LARGEST_GAP_S, Level
from cells.scheduler import Role
from configs.load import ConfigError
from storage.journal import JournalTail, LineTail
from storage.objects import StorageError, Store
from storage.records import RecordError, UpdateMetrics, decode
from storage.run import Run, open_run

GAUGES = {
    "gyre_version": "Weight version after the last update.",
    "gyre_pass_rate": "Mean reward of the last update's valid executions.",
    "gyre_held_out_pass_rate": "Held-out pass rate of the newest evaluation.",
    "gyre_logprob_gap": "Mean difference of the trainer's and the recorded log-probs.",
    "gyre_clip_fraction": "Share of ratios that were clipped.",
    "gyre_grad_norm": "Gradient norm of the last update before clipping.",
    "gyre_staleness_mean": "Staleness of the last update's targets, in updates.",
    "gyre_executions": "Valid executions of the last update.",
    "gyre_excluded": "Executions of the last update without a verdict.",
    "gyre_target_tokens": "Target tokens of the last update.",
    "gyre_rollout_seconds": "Seconds in which executions lived before the last update.",
    "gyre_train_seconds": "Seconds of computing the last update.",
    "gyre_switch_seconds": "Seconds in which a cell was switching.",
    "gyre_last_update_timestamp_seconds": "When the last update ended, in seconds since the epoch.",
    "gyre_waterlevel": "Live executions, queued and running; only of runs under way.",
    "gyre_cells": "Cells by role; only of runs under way.",
}
"""Names and what they mean. All have the label run, and gyre_cells has role."""
_RUNS = 32
"""The newest runs; older ones change no more."""


class _Follower:
    """One run, of which each line is read once."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._metrics = LineTail(run.store, run.layout.metrics)
        self._levels = JournalTail(run.store, run.layout.levels)
        self.update: UpdateMetrics | None = None
        self.level: Level | None = None

    def read(self) -> None:
        for line in self._metrics.read()[-1:]:
            self.update = decode(line, UpdateMetrics, where=self.run.layout.metrics)
        for line in self._levels.read()[-1:]:
            self.level = decode(line, Level, where=self.run.layout.levels)


class RunCollector(Collector):  # type: ignore[misc]
    """Reads the runs at each scrape."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._store = Store(root)
        self._followers: dict[str, _Follower] = {}
        self._lock = threading.Lock()

    def describe(self) -> list[Metric]:
        """Nothing, so that registering reads nothing."""
        return []

    def collect(self) -> Iterator[Metric]:
        """A gauge of each kind with a sample for each run that has it."""
        gauges = {
            name: GaugeMetricFamily(
                name, text, labels=["run", "role"] if name == "gyre_cells" else ["run"]
            )
            for name, text in GAUGES.items()
        }
        with self._lock:
            for follower in self._newest():
                with suppress(StorageError, RecordError):
                    follower.read()
                    _fill(gauges, follower)
        yield from gauges.values()

    def _newest(self) -> list[_Follower]:
        runs = []
        for name in self._store.children("runs"):
            if name not in self._followers:
                with suppress(StorageError, ConfigError):
                    self._followers[name] = _Follower(open_run(self._root, name))
            if name in self._followers:
                run = self._followers[name].run
                changed = run.store.written_at(run.layout.metrics)
                runs.append((changed or run.store.written_at(run.layout.identity) or 0.0, name))
        return [self._followers[name] for _, name in sorted(runs)[-_RUNS:]]


def _fill(gauges: dict[str, GaugeMetricFamily], follower: _Follower) -> None:
    run_id, update, level = follower.run.run_id, follower.update, follower.level
    if update is not None:
        values: dict[str, float | None] = {
            "gyre_version": update.policy_version,
            "gyre_pass_rate": update.pass_rate,
            "gyre_logprob_gap": update.logprob_gap,
            "gyre_clip_fraction": update.clip_fraction,
            "gyre_grad_norm": update.grad_norm,
            "gyre_staleness_mean": update.staleness_mean,
            "gyre_executions": update.valid,
            "gyre_excluded": update.excluded,
            "gyre_target_tokens": update.target_tokens,
            "gyre_rollout_seconds": update.rollout_s,
            "gyre_train_seconds": update.train_s,
            "gyre_switch_seconds": update.switch_s,
            "gyre_last_update_timestamp_seconds": update.ended_at,
        }
        for name, value in values.items():
            if value is not None:
                gauges[name].add_metric([run_id], value)
    # Only now: comparisons bring statistics that a scrape of no evaluation does not need.
    from flows.history import evaluations_of

    evaluations = evaluations_of(follower.run)
    if evaluations:
        newest = evaluations[max(evaluations)]
        gauges["gyre_held_out_pass_rate"].add_metric([run_id], newest.pass_rate)
    if level is not None and 0 <= time.time() - level.at < 2 * LARGEST_GAP_S:
        gauges["gyre_waterlevel"].add_metric([run_id], level.queued + level.running)
        for role in Role:
            count = sum(own is role for own in level.roles.values())
            gauges["gyre_cells"].add_metric([run_id, role.value], count)
