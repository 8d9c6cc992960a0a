"""Training in virtual time: sealed groups become micro-steps, micro-steps become updates."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import simpy

from cells.scheduler import TrainingWork
from cells.simulation.outcome import Update
from cells.simulation.workload import Workload


@dataclass(frozen=True, slots=True)
class Group:
    """A sealed group: the version that generated it, mean and oldest, and its tokens.

    The mean is over generated tokens; it is whole where the group was launched with one version
    and nothing was carried over.
    """

    query: int
    version: float
    oldest: int
    tokens: float


class Trainer:
    """The due samples, the update under way, and the replicas that claim micro-steps.

    Groups join updates in the order in which they are sealed, or the oldest first. `together` is
    how many groups must be sealed before the first of them may be claimed: one where training
    streams, those of an update or of a batch where it does not.
    """

    def __init__(
        self,
        env: simpy.Environment,
        workload: Workload,
        together: int,
        changed: Callable[[], None],
        holds: Callable[[], bool],
        oldest_first: bool,
    ) -> None:
        """`changed` is called whenever the scheduler might want to decide anew; while `holds`
        says so, the update that is complete is not published. With `oldest_first` the groups with
        the oldest tokens join the next update, whenever they were sealed."""
        self._env = env
        self._training = workload.training
        self._groups_per_update = workload.batch.queries_per_update
        self._together = together
        self._changed = changed
        self._holds = holds
        self._oldest_first = oldest_first
        self._sealed: deque[Group] = deque()
        self._released = 0
        self._in_update: list[Group] = []
        self._ready: deque[float] = deque()
        self._claimed = 0
        self._accumulated = 0
        self._idle: dict[str, simpy.Event] = {}
        self._unsealed = 0
        self._stepping = False
        self.version = 0
        self.busy_s = 0.0
        self._done = 0
        self.updates: list[Update] = []
        self.published = env.event()
        self.sealing = env.event()

    def announce(self, groups: int) -> None:
        """Groups were launched: their micro-steps are to be expected."""
        self._unsealed += groups

    @property
    def unsealed(self) -> int:
        """Groups that were launched and still run."""
        return self._unsealed

    def seal(self, group: Group) -> None:
        """A group is complete."""
        self._unsealed -= 1
        self._sealed.append(group)
        if len(self._sealed) - self._released >= self._together:
            self._released += self._together
        self._fill()
        if self._complete():
            self._wake_all()  # it may have been held for this group
        sealing, self.sealing = self.sealing, self._env.event()
        sealing.succeed()
        self._changed()

    def work(self) -> TrainingWork:
        """The micro-steps as a policy sees them."""
        each = self._training.micro_steps_per_group
        ready = len(self._ready)
        sealed = ready + len(self._sealed) * each
        expected = sealed + self._claimed + self._unsealed * each
        return TrainingWork(expected, sealed, ready, self._claimed)

    @property
    def closing(self) -> bool:
        """Whether nothing of the update under way is left to claim."""
        return len(self._in_update) == self._groups_per_update and not self._ready

    @property
    def micro_step_s(self) -> float:
        """The measured mean of a micro-step; a second until one has ended."""
        return self.busy_s / self._done if self._done else 1.0

    @property
    def groups_trained(self) -> int:
        """Groups whose update is published."""
        return len(self.updates) * self._groups_per_update

    def replica(
        self, cell_id: str, is_core: bool, leaving: Callable[[], bool]
    ) -> Generator[Any, Any, None]:
        """A replica's life: claim, run, and for the core step, until `leaving` says so."""
        version = self.version
        while not leaving():
            if not is_core and version < self.version:
                version = self.version
                yield self._env.timeout(self._training.pull_s)
            elif self._ready:
                yield from self._micro_step()
            elif is_core and self._complete():
                yield from self._step()
            else:
                self._idle[cell_id] = self._env.event()
                yield self._idle[cell_id]
        # The core does not leave an update that only the step is missing from.
        if is_core and self._complete():
            yield from self._step()

    def wake(self, cell_id: str) -> None:
        """Let an idle replica look whether it shall leave."""
        if cell_id in self._idle:
            self._idle.pop(cell_id).succeed()

    def _micro_step(self) -> Generator[Any, Any, None]:
        seconds = self._ready.popleft()
        self._claimed += 1
        yield self._env.timeout(seconds)
        self.busy_s += seconds
        self._claimed -= 1
        self._accumulated += 1
        self._done += 1
        if self._complete():
            self._wake_all()
        self._changed()

    def _complete(self) -> bool:
        """Whether every micro-step of the update under way is accumulated."""
        needed = self._groups_per_update * self._training.micro_steps_per_group
        return self._accumulated == needed and not self._stepping and not self._holds()

    def _step(self) -> Generator[Any, Any, None]:
        self._stepping = True
        yield self._env.timeout(self._training.update_s)
        self._stepping = False
        stale = sum(self.version - group.version for group in self._in_update)
        tokens = sum(group.tokens for group in self._in_update)
        oldest = self.version - min(group.oldest for group in self._in_update)
        self.updates.append(Update(self._env.now, stale / len(self._in_update), tokens, oldest))
        self.version += 1
        self._accumulated = 0
        self._in_update.clear()
        self._fill()
        self._wake_all()
        published, self.published = self.published, self._env.event()
        published.succeed()
        self._changed()

    def _fill(self) -> None:
        """Move released groups into the update under way, as micro-steps."""
        each = self._training.micro_steps_per_group
        while self._released and len(self._in_update) < self._groups_per_update:
            group = self._next()
            self._released -= 1
            self._in_update.append(group)
            seconds = group.tokens / self._training.tokens_per_s / each
            self._ready.extend([seconds] * each)
            self._wake_all()

    def _next(self) -> Group:
        if not self._oldest_first:
            return self._sealed.popleft()
        group = min(self._sealed, key=lambda sealed: sealed.oldest)
        self._sealed.remove(group)
        return group

    def _wake_all(self) -> None:
        for cell_id in tuple(self._idle):
            self.wake(cell_id)
