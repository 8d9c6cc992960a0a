"""Why a read failed. After any of these nothing that was read may be used."""

from __future__ import annotations


class TransferError(RuntimeError):
    """The peer can't be reached, or the engine failed."""


class TransferTimeoutError(TransferError):
    """Not complete within its own deadline."""


class StaleBlockError(TransferError):
    """The block is not the one that was asked for: another version, or a restarted process."""


class CorruptBlockError(TransferError):
    """The block's bytes don't fit its checksum."""
