"""What all ranks of a replica do, or none of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from cells.replica.errors import ReplicaError
from cells.replica.place import Place
from cells.transfer.errors import TransferError


@contextmanager
def together(place: Place) -> Iterator[None]:
    """Leave the block when every rank has carried it out; where one failed, all fail.

    The block must not wait for other ranks: one that has failed does not come to them.

    Raises:
        ReplicaError, TransferError: here or, as a ReplicaError, in another rank.
    """
    failed: Exception | None = None
    try:
        yield
    except (OSError, ValueError, ReplicaError, TransferError, SafetensorError) as error:
        failed = error
    if not place.alone:
        ranks = torch.tensor(place.rank if failed else -1)
        dist.all_reduce(ranks, op=dist.ReduceOp.MAX)
        if failed is None and int(ranks) >= 0:
            raise ReplicaError(f"rank {int(ranks)} of the replica could not do its part")
    if failed is not None:
        raise failed


@contextmanager
def new_folder(folder: Path, place: Place, aside: Path) -> Iterator[Path]:
    """A folder that all ranks write into, moved to ``folder`` when all are done.

    What was there is replaced; nobody sees half of it, and nothing is left aside.

    Args:
        aside: its name until then, the same for all ranks.
    """
    leader = place.rank == 0
    try:
        with together(place):
            if leader:
                aside.mkdir(parents=True)
        yield aside
        with together(place):
            if leader:
                if folder.exists():
                    old = aside.with_name(f"{aside.name}-old")
                    folder.rename(old)
                    aside.rename(folder)
                    shutil.rmtree(old)
                else:
                    aside.rename(folder)
    finally:
        if leader:
            shutil.rmtree(aside, ignore_errors=True)
