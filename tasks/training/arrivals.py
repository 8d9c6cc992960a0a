"""Groups of a step as they are sealed: each gets its update, once its order is known, for good."""

from __future__ import annotations

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
    ) -> None:
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
        """Sealed, without an update: they are shuffled with some that still run."""
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
        that were shuffled so far."""
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
