"""Ranks of a replica for tests: processes that are forked from one that has imported Megatron."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cells.replica.place import Place
from configs.layout import LayoutConfig

LIMIT_S = 200

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["cells.replica.commands", "cells.replica.model"])


def run_ranks(layout: LayoutConfig, scratch: Path, work: Callable[..., None], *args: Any) -> None:
    """Run ``work(place, *args)`` as every rank of ``layout``; its errors are this one's."""
    scratch.mkdir(parents=True, exist_ok=True)
    processes = [
        _FORKS.Process(target=_rank, args=(Place(layout, rank), scratch, work, args), daemon=True)
        for rank in range(layout.ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT_S)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    told = [path.read_text() for path in sorted(scratch.glob("rank-*.txt"))]
    assert codes == [0] * layout.ranks, f"{layout}: exit codes {codes}\n" + "\n".join(told)


def _rank(place: Place, scratch: Path, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    import torch

    from cells.replica.model import start_megatron

    torch.set_num_threads(1)
    try:
        start_megatron(place, rendezvous=scratch / "rendezvous", limit_s=60)
        work(place, *args)
    except BaseException:
        (scratch / f"rank-{place.rank}.txt").write_text(traceback.format_exc())
        raise
