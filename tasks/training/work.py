"""How much training is left, as the scheduler wants to know it."""

from __future__ import annotations

import math

from cells.scheduler import TrainingWork
from tasks.training.arrivals import Arrivals
from tasks.training.ledger import Ledger, MicroState


def training_work(
    ledger: Ledger,
    arrivals: Arrivals,
    *,
    update: int,
    updates: int,
    budget: int,
    closing: bool,
    awaited: bool,
) -> TrainingWork:
    """Micro-steps that are left from ``update`` on.

    Args:
        budget: tokens of a micro-step; what is not packed yet is counted by it.
        closing: gradients are being brought to the core, or it steps. That counts as one claimed
            micro-step: the cells are needed until it is over.
        awaited: the core is away. What it has to close counts as one sealed micro-step instead, so
            that it is called.
    """
    early = sum(math.ceil(group.new_tokens / budget) for group in arrivals.early())
    waiting = {
        later: ledger.count(later, MicroState.READY)
        + math.ceil(sum(sample.new_tokens for sample in arrivals.unformed(later)) / budget)
        for later in range(update, updates)
    }
    claimed = ledger.count(update, MicroState.CLAIMED) + (closing and not awaited)
    sealed = sum(waiting.values()) + early + (closing and awaited)
    known = sum(len(ledger.micro_steps(one)) for one in range(updates)) + sum(
        math.ceil(sum(sample.new_tokens for sample in arrivals.unformed(one)) / budget)
        for one in range(updates)
    )
    # Groups that still run are taken to be like those that have come; at least one micro-step.
    each = max(1.0, known / len(arrivals)) if len(arrivals) else 1.0
    to_come = math.ceil(arrivals.to_come() * each)
    ready = waiting.get(update, 0)
    return TrainingWork(
        expected=sealed + claimed + to_come,
        sealed=sealed,
        ready=ready,
        claimed=claimed,
        closing=not ready and arrivals.complete(update),
    )
