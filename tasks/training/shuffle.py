"""The order in which sealed groups get their updates: as they come, or shuffled."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from configs.training import ShuffleKind, TrainingConfig
from tasks.training.plan import update_shares


@dataclass(frozen=True)
class Order:
    """How the groups of one step are put in order.

    The place of a group among those that it is shuffled with follows from ``seed``, ``step`` and
    its name alone. So an attempt that dies between two groups of a window is continued with the
    same order.
    """

    kind: ShuffleKind
    window: int
    """Groups that are shuffled together; the last ones of a step may be fewer."""
    planned: int
    """Groups of the step. Those beyond them are placed as they come."""
    seed: int
    step: int

    def placeable(self, waiting: Sequence[str], *, placed: int, ended: bool) -> list[str]:
        """Those of ``waiting`` that get their update now, in that order.

        Args:
            waiting: sealed groups without an update, in order of arrival.
            placed: groups of the step that have one.
            ended: no further group will come, so that nothing is waited for.
        """
        found: list[str] = []
        while rest := list(waiting[len(found) :]):
            room = self._room(placed + len(found)) or len(rest)
            if len(rest) < room and not ended:
                break
            found += sorted(rest[:room], key=self._place)
        return found

    def _room(self, placed: int) -> int:
        """Groups that the open window still takes; 0 when no window is open."""
        if self.kind is ShuffleKind.ARRIVAL:
            return 1
        begin = placed - placed % self.window
        return max(0, min(begin + self.window, self.planned) - placed)

    def _place(self, group: str) -> bytes:
        return hashlib.sha256(f"{self.seed}/{self.step}/{group}".encode()).digest()


def order_of(training: TrainingConfig, *, groups: int, seed: int, step: int) -> Order:
    """The order that the settings ask for, in a step that plans to train ``groups``."""
    window = training.shuffle_window if training.shuffle is ShuffleKind.WINDOW else max(1, groups)
    return Order(training.shuffle, window, groups, seed, step)


def counted_together(training: TrainingConfig, groups: int) -> tuple[int, ...]:
    """How many groups, in the order in which they are sealed, are held against
    ``scoring.max_excluded_share`` together.

    Those of an update; where they are shuffled those of a window, since nobody knows yet, when a
    group is sealed, which update it will be in.
    """
    match training.shuffle:
        case ShuffleKind.ARRIVAL:
            return update_shares(groups, training.updates_per_step)
        case ShuffleKind.WINDOW:
            whole, left = divmod(groups, training.shuffle_window)
            return (training.shuffle_window,) * whole + ((left,) if left else ())
        case ShuffleKind.GLOBAL:
            return (groups,)
