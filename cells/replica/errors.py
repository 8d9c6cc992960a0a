"""Why a replica refuses a command, and when it can't go on."""

from __future__ import annotations


class ReplicaError(RuntimeError):
    """A command that was refused; the replica is as it was before. The text says what to do."""


class DamagedError(RuntimeError):
    """A command failed half-way: weights or optimizer can't be trusted. The worker ends."""
