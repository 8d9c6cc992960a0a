"""The product's stream over real replica processes: two cells, and training while others run.

The workload is fixed here. Seconds are CPU seconds of the replica processes, which other work on
the machine does not lengthen much: a step of several replicas is as long as the busiest of them
works. Wall seconds are printed beside them; they mean something on an idle machine with a core for
each replica only.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Self

import psutil

from cells.scheduler import TrainingWork
from configs.training import ObjectiveConfig
from storage.layout import RunLayout
from storage.objects import Store
from tasks.training.feed import GroupFeed
from tasks.training.metrics import Spent
from tasks.training.stream import train_stream
from tests.benchmarks.training_speed import SHAPES, make_policy
from tests.tasks.training.fakes import START, STEP, config, make_group
from tests.tasks.training.processes import EventLoop, Replica

SEED = 17
GROUPS = 8
UPDATES = 4
BUDGET = 2048
LENGTHS = (60, 240)
CELLS = {"many_micro_steps": (1, 512), "one_micro_step_an_update": (UPDATES, BUDGET)}
"""Updates of the step and tokens of a micro-step. With one micro-step an update there is nothing to
share: a second cell can't help."""
BURSTS = (1, 2, 4, 8)
"""Groups that come together at the end, of the eight; with all eight there is nothing to gain."""


class Streams:
    """A core and a satellite, and steps to train with them."""

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            loop = stack.enter_context(EventLoop())
            self._store = Store(folder / "store")
            self._policy = make_policy(folder, SHAPES["quickstart"])
            loss = ObjectiveConfig(clip_low=0.2, clip_high=0.2)
            self._core, self._satellite = (
                Replica(loop, self._store.url, folder / "log", name, core=core, loss=loss)
                for name, core in (("core", True), ("satellite", False))
            )
            stack.callback(self._core.close)
            stack.callback(self._satellite.close)
            self._steps = 0
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def two_cells(self, turns: int) -> dict[str, Any]:
        """All groups are there; one replica trains them, or two, by turns."""
        cases = {name: self._two_cells(turns, *sizes) for name, sizes in CELLS.items()}
        return {
            "two_cells_over_one": cases["many_micro_steps"]["by_busiest"],
            "cells": cases,
        }

    def _two_cells(self, turns: int, updates: int, budget: int) -> dict[str, Any]:
        one, two = [], []
        for _ in range(turns + 1):
            one.append(self._step([self._core], "arrival", GROUPS, updates, budget))
            both = [self._core, self._satellite]
            two.append(self._step(both, "arrival", GROUPS, updates, budget))
        one, two = one[1:], two[1:]  # the first ones warm up
        pairs = list(zip(one, two, strict=True))
        shares = [step["cpu_s"]["satellite"] / sum(step["cpu_s"].values()) for step in two]
        return {
            "by_busiest": round(median(a["busiest_s"] / b["busiest_s"] for a, b in pairs), 3),
            "by_wall": round(median(a["wall_s"] / b["wall_s"] for a, b in pairs), 3),
            "satellite_share_of_cpu": round(median(shares), 3),
            "cpu_s_one": round(median(step["busiest_s"] for step in one), 2),
            "cpu_s_two_added": round(median(sum(step["cpu_s"].values()) for step in two), 2),
            "updates": updates,
            "micro_step_tokens": budget,
        }

    def tail(self, turns: int) -> dict[str, Any]:
        """From the last group's arrival to the end of the step, streamed over waiting for all.

        A group comes when training has nothing to do, as where rollouts take longer than training;
        the last ones come together.
        """
        cases: dict[str, Any] = {}
        for burst in BURSTS:
            steps: dict[str, list[dict[str, Any]]] = {"arrival": [], "global": []}
            for _ in range(turns):
                for shuffle, own in steps.items():
                    own.append(self._step([self._core], shuffle, burst))
            seconds = {
                name: median(step["tail_cpu_s"] for step in own) for name, own in steps.items()
            }
            ratios = [
                a["tail_cpu_s"] / b["tail_cpu_s"]
                for a, b in zip(steps["arrival"], steps["global"], strict=True)
            ]
            cases[str(burst)] = {
                "streamed_over_waiting": round(median(ratios), 3),
                "streamed_s": round(seconds["arrival"], 2),
                "waiting_s": round(seconds["global"], 2),
            }
        return {
            "tail_s_streamed_over_waiting": cases["1"]["streamed_over_waiting"],
            "tail_by_groups_that_come_last_together": cases,
        }

    def _step(
        self,
        replicas: list[Replica],
        shuffle: str,
        burst: int,
        updates: int = UPDATES,
        budget: int = BUDGET,
    ) -> dict[str, Any]:
        """Train one step anew, with the last ``burst`` groups at once."""
        self._steps += 1
        layout = RunLayout(f"run-{self._steps}")
        chance = random.Random(SEED)
        names = [
            make_group(
                self._store,
                number,
                rewards=(0.0, 1.0),
                lengths=tuple(chance.choices(range(*LENGTHS), k=2)),
                logprob=-6.6,
                layout=layout,
            )
            for number in range(GROUPS)
        ]
        for replica in replicas:
            replica.call("load", {"path": str(self._policy), "version": START}, 60)
        feed = _Feed(names, burst, lambda: {one.name: _cpu(one) for one in replicas})

        def members() -> list[Replica]:
            feed.look()
            return replicas

        first = {replica.name: _cpu(replica) for replica in replicas}
        wall = time.monotonic()
        train_stream(
            store=self._store,
            layout=layout,
            config=config(
                updates=updates,
                budget=budget,
                **{"training.shuffle": shuffle, "training.learning_rate": 1e-4},
            ),
            step=STEP,
            groups=len(names),
            feed=feed.groups,
            members=members,
            spent=lambda: Spent(0.0, 0.0),
            report=feed.report,
        )
        used = {replica.name: _cpu(replica) - first[replica.name] for replica in replicas}
        return {
            "wall_s": time.monotonic() - wall,
            "cpu_s": used,
            "busiest_s": max(used.values()),
            "tail_cpu_s": max(_cpu(replica) - feed.last_at[replica.name] for replica in replicas),
        }


class _Feed:
    """Seals a group whenever training has done all that is there, the last ones together."""

    def __init__(self, names: list[str], burst: int, clock: Callable[[], dict[str, float]]) -> None:
        self.groups = GroupFeed()
        self.last_at: dict[str, float] = {}
        """CPU seconds of the replicas when the last groups came."""
        self._waiting, self._burst, self._clock = list(names), burst, clock
        self._idle = True
        self._old = False

    def look(self) -> None:
        """Called by the stream's thread, before it reports."""
        if not self._idle or not self._waiting:
            return
        last = len(self._waiting) <= self._burst
        due = self._waiting[:] if last else self._waiting[:1]
        del self._waiting[: len(due)]
        if last:
            self.last_at = self._clock()
        for name in due:
            self.groups.put(name)
        if last:
            self.groups.close()
        self._idle, self._old = False, True

    def report(self, work: TrainingWork) -> None:
        if self._old:
            self._old = False  # it does not know of what was sealed just now
        else:
            self._idle = work.sealed + work.claimed == 0


def _cpu(replica: Replica) -> float:
    times = psutil.Process(replica.client.pid).cpu_times()
    return float(times.user + times.system)
