"""Training of one step: from groups as they are sealed to a fixed number of updates.

Which group belongs to which update is settled by order of arrival (shuffled: by the seed and the
groups that came), and durable before the update's first micro-step, so that an attempt that dies is
repeated with the same samples. The version of the core's weights tells which updates they contain:
those whose step the core did not see, or that an older checkpoint does not have, are trained again
from the ledger; their records stay as they were written.

An update without any sample with an advantage counts as an update, so that their number is fixed,
but makes no optimizer step: gradient norm 0, version unchanged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from cells.scheduler import TrainingWork
from configs.run import RunConfig
from storage.layout import RunLayout
from storage.objects import Store
from storage.records import UpdateMetrics
from tasks.training.anchors import Anchor
from tasks.training.arrivals import Arrivals
from tasks.training.crew import Crew
from tasks.training.events import Stepped
from tasks.training.exchange import CoreLostError
from tasks.training.feed import GroupFeed
from tasks.training.ledger import Ledger
from tasks.training.metrics import Spent, update_metrics
from tasks.training.plan import check_excluded, divisor, learning_rate
from tasks.training.replica import Limits, Replica, ReplicaLostError, ReplicaPort
from tasks.training.resume import find_position
from tasks.training.round import Round


def train_stream(
    *,
    store: Store,
    layout: RunLayout,
    config: RunConfig,
    step: int,
    groups: int,
    feed: GroupFeed,
    members: Callable[[], Sequence[ReplicaPort]],
    spent: Callable[[], Spent],
    anchors: Callable[[int], Mapping[str, Anchor]] = lambda _: {},
    on_update: Callable[[UpdateMetrics], None] = lambda _: None,
    report: Callable[[TrainingWork], None] = lambda _: None,
    held: Callable[[frozenset[str]], None] = lambda _: None,
    waits: Callable[[str], None] = lambda _: None,
    carries: bool = False,
    holds: Callable[[], bool] = lambda: False,
    more: Callable[[], bool] = lambda: False,
) -> tuple[UpdateMetrics, ...]:
    """Train the updates of a step, also those that an earlier attempt left undone.

    Blocks; run it in a thread of its own. One attempt at a time.

    Args:
        groups: that the step plans to train; they are shared out evenly over its updates.
        feed: brings them as they are sealed. Whoever made it closes it.
        members: asked often: the replicas that may train now. Whoever is missing is let go after
            its micro-step, its gradient brought to the core first.
        spent: seconds of rollout and switching up to now.
        anchors: called with the version at the step's start: the policies that the objective needs.
        on_update: called after each update that was trained here, when its record is durable and no
            replica works: the place to save a checkpoint.
        report: called with the training that is left, for the scheduler.
        held: called often with the replicas that it still needs: busy ones, and those with a
            gradient that is not at the core yet. It gives nothing to one that was no member when it
            last looked, so that a replica that is in neither may be put to sleep.
        waits: called often with what it waits for, in words.
        carries: groups may outlive their step: more than ``groups`` may come, the oldest are
            trained first, and the others are left to the next step.
        holds: asked when an update is complete: whether it has to wait for a group that still runs
            and would be too old for the next one.
        more: asked for what is told to the scheduler: whether groups of later steps are on their
            way, so that replicas are needed for longer.

    Returns:
        The records of all updates of the step.

    Raises:
        TooManyExcludedError: an update's executions failed too often; nothing of it was trained.
        CoreLostError: restore the core from a checkpoint of this step, then call this again.
        NoReplicaError: nobody came to train.
        VersionMismatchError: the core's weights are not of this step.
        LedgerError, StorageError: what is stored is damaged or can't be written.
    """
    ledger = Ledger(store, layout, step)
    crew = Crew(feed.wake)
    updates = config.training.updates_per_step
    try:
        arrivals = Arrivals(
            store=store,
            layout=layout,
            ledger=ledger,
            feed=feed,
            config=config,
            step=step,
            groups=groups,
            carries=carries,
            more=more,
        )
        limits = Limits.of(config)

        still: Mapping[str, Anchor] = {}

        def replicas() -> Mapping[str, Replica]:
            return {port.name: Replica(port, layout, limits, step, still) for port in members()}

        rounds = Round(
            config=config,
            ledger=ledger,
            arrivals=arrivals,
            feed=feed,
            crew=crew,
            members=replicas,
            report=report,
            held=held,
            waits=waits,
            holds=holds,
        )
        run = _Step(store, layout, config, step, ledger, arrivals, spent)
        core = rounds.wait_for_core()
        try:
            first = find_position(core, ledger, updates)
        except ReplicaLostError as error:
            raise CoreLostError(str(error)) from error
        assert ledger.version is not None  # a position was found
        still = anchors(ledger.version)
        for update in range(first):
            run.record(update)
        for update in range(first, updates):
            core, seconds = rounds.train(update, run.version_before(update))
            run.close(update, core, seconds)
            on_update(run.record(update))
        report(TrainingWork())
        return read_updates(store, layout, step, updates)
    finally:
        crew.close()
        ledger.close()


def read_updates(
    store: Store, layout: RunLayout, step: int, updates: int
) -> tuple[UpdateMetrics, ...]:
    """Records of the updates of a step that are durable, in order."""
    keys = [layout.update(step, update) for update in range(updates)]
    return tuple(store.read_record(key, UpdateMetrics) for key in keys if store.exists(key))


class _Step:
    """The ends of a step's updates."""

    def __init__(
        self,
        store: Store,
        layout: RunLayout,
        config: RunConfig,
        step: int,
        ledger: Ledger,
        arrivals: Arrivals,
        spent: Callable[[], Spent],
    ) -> None:
        self._store = store
        self._layout = layout
        self._config = config
        self._step = step
        self._ledger = ledger
        self._arrivals = arrivals
        self._spent = spent

    def version_before(self, update: int) -> int:
        """Of the weights that an update is trained on."""
        if update == 0:
            assert self._ledger.version is not None  # opened before the first update
            return self._ledger.version
        stepped = self._ledger.stepped(update - 1)
        assert stepped is not None  # updates are trained in order
        return stepped.version

    def close(self, update: int, core: Replica, seconds: float) -> None:
        """Step the core, whose gradient holds all of an update.

        The figures of the first attempt at this are kept for any later one.
        """
        groups = self._arrivals.of(update)
        version = self.version_before(update)
        if not self._ledger.closed(update):
            counted = self._arrivals.counted_with(update)
            check_excluded(counted, self._config.scoring.max_excluded_share)
        grad_norm: float | None = 0.0
        if self._ledger.micro_steps(update):
            settled = self._ledger.stepping(update)
            mean = self._config.training.objective.update_mean
            executions = divisor(groups, mean, self._config.scoring.min_valid)
            rate = learning_rate(self._config.training, self._step, update)
            if settled is not None:
                executions, rate = settled.executions, settled.learning_rate
            try:
                self._ledger.begin_step(update, executions, rate)
                answer = core.step(update, executions, rate)
            except ReplicaLostError as error:
                raise CoreLostError(str(error)) from error
            if answer.version != version + (not answer.skipped):
                raise CoreLostError(
                    f"{core.name}: version {answer.version} after a step on version {version}"
                )
            version, grad_norm = answer.version, answer.grad_norm
        stepped = Stepped(
            update=update, version=version, grad_norm=grad_norm, seconds=seconds, at=time.time()
        )
        self._ledger.end_step(stepped)

    def record(self, update: int) -> UpdateMetrics:
        """The durable record of an update; written now unless an earlier attempt did."""
        key = self._layout.update(self._step, update)
        if self._store.exists(key):
            return self._store.read_record(key, UpdateMetrics)
        stepped = self._ledger.stepped(update)
        assert stepped is not None  # only of updates that are closed
        settled = self._ledger.stepping(update)
        metrics = update_metrics(
            step=self._step,
            trained_version=self.version_before(update),
            groups=self._arrivals.of(update),
            stats=self._ledger.stats(update),
            stepped=stepped,
            spent=self._spent(),
            learning_rate=None if settled is None else settled.learning_rate,
        )
        self._store.write_record_once(key, metrics)
        return metrics
