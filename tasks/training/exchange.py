"""What passes between a satellite and the core: weights when it joins, its gradient at the end."""

from __future__ import annotations

from typing import Any

from tasks.training.replica import Replica, ReplicaLostError, Status


class CoreLostError(RuntimeError):
    """The core, or what it has accumulated, is gone. Restore it and train the step again."""


def join(satellite: Replica, descriptor: dict[str, Any], version: int) -> None:
    """Give a satellite an empty gradient and the core's published weights.

    Raises:
        ReplicaLostError: it can't take them.
    """
    satellite.discard()
    found = satellite.pull(descriptor)
    if found != version:
        raise ReplicaLostError(f"{satellite.name}: pulled version {found} instead of {version}")


def holds(core: Replica, version: int, expected: set[str]) -> bool:
    """Whether the core's gradient is what the ledger says.

    Raises:
        CoreLostError: it has other weights, or does not answer.
    """
    status = _status(core)
    if status.version != version:
        raise CoreLostError(
            f"{core.name}: has version {status.version}, the update trains version {version}"
        )
    return set(status.micro_steps) == expected


def fetch(core: Replica, satellite: Replica, update: int, expected: set[str]) -> bool:
    """Add a satellite's gradient to the core's, then empty it.

    The satellite keeps it until the core has acknowledged. When the core gives no answer, its list
    of micro-steps tells whether it has added them.

    Args:
        expected: micro-steps that the ledger says are in that gradient.

    Returns:
        Whether the satellite may go on; False when its gradient is at the core but it did not
        empty its own.

    Raises:
        ReplicaLostError: the satellite failed and the core has added nothing.
        CoreLostError: the core does not say what it has.
    """
    frozen = satellite.freeze(update)
    if set(frozen.micro_steps) != expected:
        raise ReplicaLostError(
            f"{satellite.name}: its gradient holds {len(frozen.micro_steps)} micro-steps, not the "
            f"{len(expected)} that it accumulated"
        )
    try:
        core.reduce(update, frozen)
    except ReplicaLostError as error:
        if not expected <= set(_status(core).micro_steps):
            raise ReplicaLostError(
                f"{satellite.name}: the core could not take its gradient: {error}"
            ) from error
    try:
        satellite.release(update)
    except ReplicaLostError:
        return False
    return True


def _status(core: Replica) -> Status:
    try:
        return core.status()
    except ReplicaLostError as error:
        raise CoreLostError(str(error)) from error
