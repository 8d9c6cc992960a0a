"""Where an attempt at a step begins: what the core's weights contain, held against the ledger."""

from __future__ import annotations

import time

from tasks.training.events import Stepped
from tasks.training.ledger import Ledger, MicroState
from tasks.training.replica import Replica


class VersionMismatchError(RuntimeError):
    """The core's weights are neither of this step's start nor of one of its updates."""


def find_position(core: Replica, ledger: Ledger, updates: int) -> int:
    """The first update to train, with everything from there on ready and the core's gradient empty.

    Raises:
        VersionMismatchError: the core has to be restored first.
        ReplicaLostError: the core does not answer.
    """
    status = core.status()
    if ledger.version is None:
        ledger.open(status.version)
    assert ledger.version is not None
    done: list[Stepped] = []
    while (stepped := ledger.stepped(len(done))) is not None:
        done.append(stepped)
    versions = [ledger.version, *(stepped.version for stepped in done)]
    first = len(done)
    if status.version == versions[-1] + 1 and ledger.stepping(first) is not None:
        # The core stepped and nobody was left to write it down.
        last = status.last_step
        known = last is not None and last.version == status.version
        ledger.end_step(
            Stepped(
                update=first,
                version=status.version,
                grad_norm=last.grad_norm if last is not None and known else None,
                seconds=0.0,
                at=time.time(),
            )
        )
        first += 1
    elif status.version != versions[-1]:
        if status.version not in versions:
            raise VersionMismatchError(
                f"{core.name}: has version {status.version}; this step's ledger knows "
                f"{versions[0]} to {versions[-1]}: restore the core from a checkpoint of this step"
            )
        first = next(number for number, one in enumerate(done) if one.version > status.version)
        # Last first: an attempt that dies here leaves no gap between stepped updates.
        for update in range(len(done) - 1, first - 1, -1):
            ledger.restart(update, f"the core has version {status.version}")
    for update in range(first, updates):
        if ledger.count(update, *MicroState) > ledger.count(update, MicroState.READY):
            ledger.restart(update, "training of the step begins anew")
    core.discard()
    return first
