"""Groups of a step as they are sealed: each gets its update, once its order is known, for good.

Where groups may outlive their step more of them come than a step trains. Those with the oldest
tokens then join the update under way, as many as it has room for; what is left when the step ends
is in none of its updates, and comes again in the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from configs.run import RunConfig
from configs.training import ShuffleKind
from storage.layout import RunLayout
from storage.objects import Store
from storage.samples import read_group
from tasks.training.feed import GroupFeed
from tasks.training.ledger import Ledger
from tasks.training.packing import SampleSize
from tasks.training.plan import (
    GroupFacts,
    group_facts,
    update_of,
    update_shares,
    without_stale,
)
from tasks.training.shuffle import order_of


class Arrivals:
    """What has arrived of a step, in the order of training; rebuilt from the ledger.

    Args:
        groups: that the step plans to train. Fewer may come when the feed ends early.
        carries: more may come, and the oldest go first.
        more: asked with ``carries``: whether more than this step's groups are on their way.
    """

    def __init__(
        self,
        *,
        store: Store,
        layout: RunLayout,
        ledger: Ledger,
        feed: GroupFeed,
        config: RunConfig,
        step: int,
        groups: int,
        carries: bool = False,
        more: Callable[[], bool] = lambda: False,
    ) -> None:
        self._carries = carries
        self._more = more
        self._store = store
        self._layout = layout
        self._ledger = ledger
        self._feed = feed
        self._planned = groups
        self._pack = config.training.pack
        self._shares = update_shares(groups, config.training.updates_per_step)
        self._max_staleness = config.staleness.max
        self._in_order = config.training.shuffle is ShuffleKind.ARRIVAL
        self._order = order_of(config.training, groups=groups, seed=config.seed, step=step)
        self._waiting: list[str] = []
        """Sealed, without an update: they are shuffled with some that still run, or are more than
        the update under way has room for."""
        self._early: dict[str, GroupFacts] = {}
        """Of those, where the oldest go first."""
        self._facts = {group: self._read(group) for group in ledger.groups()}
        self._ended = False

    def pump(self) -> bool:
        """Take in what the feed holds; whether anything came.

        A group that comes when all updates are closed is not trained.
        """
        names, self._ended = self._feed.take()
        known = {*self._facts, *self._waiting}
        new = [name for name in dict.fromkeys(names) if name not in known]
        self._waiting += new
        self._place()
        return bool(new)

    def _place(self) -> None:
        """Give updates to the groups whose turn it is."""
        if self._carries:
            self._place_oldest()
            return
        due = self._order.placeable(self._waiting, placed=len(self._facts), ended=self._ended)
        for name in due:
            update = update_of(len(self._facts), self._shares)
            while self._ledger.closed(update):  # an earlier attempt ended without this group
                update += 1
            if update < len(self._shares):
                facts = self._read(name)
                self._ledger.arrive(name, update)
                self._facts[name] = facts
        self._waiting = [name for name in self._waiting if name not in due]

    def _place_oldest(self) -> None:
        for name in self._waiting:
            if name not in self._early:
                self._early[name] = self._read(name)
        update = next((u for u in range(len(self._shares)) if not self._ledger.closed(u)), None)
        if update is None:
            return
        placed = sum(its == update for its in self._ledger.groups().values())
        oldest = sorted(self._waiting, key=lambda name: _age_key(self._early[name]))
        for name in oldest[: self._shares[update] - placed]:
            self._ledger.arrive(name, update)
            self._facts[name] = self._early.pop(name)
            self._waiting.remove(name)

    def early(self) -> list[GroupFacts]:
        """Sealed groups that the update under way has no room for."""
        return list(self._early.values())

    def to_come(self) -> int:
        """Groups that are not sealed and will be trained, in this step or, one, after it."""
        return max(0, self.missing() - len(self._early)) + (self._carries and self._more())

    def of(self, update: int) -> list[GroupFacts]:
        """Groups of an update; those that are too old for it without their samples."""
        groups = self._ledger.groups()
        version = self._version_before(update)
        return [
            facts if version is None else without_stale(facts, version, self._max_staleness)
            for name, facts in self._facts.items()
            if groups[name] == update
        ]

    def _version_before(self, update: int) -> int | None:
        """The version that an update trains on, taking each one before it that is still to come for
        a step; None before the step's first one is known."""
        opened = self._ledger.version
        before = self._ledger.stepped(update - 1) if update else None
        if before is not None:
            return before.version
        return None if opened is None else opened + update

    def counted_with(self, update: int) -> list[GroupFacts]:
        """Groups whose excluded executions count together at the end of an update: its own, or all
        that were shuffled so far. Where the oldest go first, those of the whole step, which is what
        they were counted in when they were sealed."""
        if self._carries:
            return list(self._facts.values()) if update == len(self._shares) - 1 else []
        return self.of(update) if self._in_order else list(self._facts.values())

    def complete(self, update: int) -> bool:
        """Whether no further group will come for this update."""
        if self._ended or self._ledger.closed(update):
            return True
        return len(self.of(update)) >= self._shares[update]

    def unformed(self, update: int) -> list[SampleSize]:
        """Samples of an update that are in no micro-step yet."""
        return [
            sample
            for facts in self.of(update)
            for sample in facts.samples
            if not self._ledger.formed(sample.group, sample.index)
        ]

    def missing(self) -> int:
        """Groups that have no update yet and may get one."""
        return 0 if self._ended else max(0, self._planned - len(self._facts))

    def __len__(self) -> int:
        return len(self._facts)

    def _read(self, group: str) -> GroupFacts:
        return group_facts(read_group(self._store, self._layout.group(group)), self._pack)


def _age_key(group: GroupFacts) -> float:
    """Those with the oldest target first; without any it does not matter when."""
    return min(group.versions, default=math.inf)
