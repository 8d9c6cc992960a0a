"""Supervised fitting of a policy to token sequences, data parallel over processes.

    python -m cells.replica.fit --model-config config.json --plan plan.json --out HF_DIR \\
        [--start HF_DIR] [--processes 2] [--cpus 0,1]

``plan.json`` is a ``FitPlan``. Progress goes to standard output, one JSON object a line; the last
one has ``"event": "done"``. ``HF_DIR`` gets config.json and model.safetensors, written aside and
moved. With ``--start`` the first weights come from there, otherwise they are drawn.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from cells.process import end_group, spawn
from cells.replica.corpus import read_corpus
from cells.replica.fit_plan import FitPlan
from cells.replica.shape import read_shape
from configs.layout import LayoutConfig

_LOG_SHOWN = 4000
"""Characters of a further process's log that a failure repeats."""


def fit(
    *,
    config: Path,
    plan: FitPlan,
    out: Path,
    rank: int,
    processes: int,
    start: Path | None = None,
    rendezvous: Path | None = None,
) -> None:
    """Fit and, as rank 0, write the HF directory ``out``.

    Raises:
        FitError: the loss is not a number any more, or the time limit has passed.
        ShapeError, CorpusError, WeightsError: unusable files, before anything is fitted.
    """
    began = time.monotonic()
    shape = read_shape(config)
    corpora = [read_corpus(Path(phase.data), vocabulary=shape.vocabulary) for phase in plan.phases]
    # Imported here: what is wrong with the files above is said before seconds of imports.
    import torch

    from cells.replica.fitter import Fitter
    from cells.replica.model import start_megatron
    from cells.replica.place import Place
    from cells.replica.weights import write_policy

    torch.set_num_threads(1)
    place = Place(LayoutConfig(data=processes), rank)
    start_megatron(place, rendezvous=rendezvous, limit_s=min(plan.limit_s, 300))
    fitter = Fitter(shape, plan, place, start)
    fitter.run(corpora)
    if rank == 0:
        beside = {"config.json": config.read_bytes()}
        write_policy(out, fitter.flat.split(fitter.flat.weights), shape, beside)
        line = {"event": "done", "out": str(out), "seconds": round(time.monotonic() - began, 1)}
        print(json.dumps(line), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of ``python -m cells.replica.fit``; 0 when the policy was written."""
    given = _parser().parse_args(argv)
    if given.cpus:
        os.sched_setaffinity(0, {given.cpus[given.rank % len(given.cpus)]})
    try:
        plan = FitPlan.model_validate_json(given.plan.read_text(encoding="utf-8"))
    except (OSError, ValidationError) as error:
        print(f"{given.plan}: {error}", file=sys.stderr)
        return 2
    arguments = sys.argv[1:] if argv is None else list(argv)
    with tempfile.TemporaryDirectory(prefix="gyre-fit-") as scratch:
        rendezvous = given.rendezvous or Path(scratch) / "rendezvous"
        logs = [Path(scratch) / f"rank-{rank}.log" for rank in range(1, given.processes)]
        others = [
            _start_rank(arguments, rank, rendezvous, log)
            for rank, log in enumerate(logs if given.rank == 0 else [], start=1)
        ]
        try:
            fit(
                config=given.model_config,
                plan=plan,
                out=given.out,
                rank=given.rank,
                processes=given.processes,
                start=given.start,
                rendezvous=rendezvous,
            )
        except (ValueError, RuntimeError, OSError) as error:
            print(f"fit failed (rank {given.rank}): {error}", file=sys.stderr)
            for log in logs[: len(others)]:
                print(log.read_text(errors="replace")[-_LOG_SHOWN:], file=sys.stderr)
            return 1
        finally:
            for process in others:
                end_group(process.pid, grace_s=2)
                process.wait(timeout=5)
    return 0


def _start_rank(
    arguments: Sequence[str], rank: int, rendezvous: Path, log: Path
) -> subprocess.Popen[bytes]:
    return spawn(
        [
            *(sys.executable, "-m", "cells.replica.fit", *arguments),
            *("--rank", str(rank), "--rendezvous", str(rendezvous)),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        log=log,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cells.replica.fit", description=__doc__)
    parser.add_argument("--model-config", type=Path, required=True, help="HF config.json")
    parser.add_argument("--plan", type=Path, required=True, help="FitPlan as JSON")
    parser.add_argument("--out", type=Path, required=True, help="HF directory to write")
    parser.add_argument("--start", type=Path, help="HF directory of the first weights")
    parser.add_argument("--processes", type=int, default=1, help="data-parallel processes")
    parser.add_argument("--cpus", type=_cpus, default=(), help="core of each process, as 0,1")
    parser.add_argument("--rank", type=int, default=0, help="of a further process; set by rank 0")
    parser.add_argument("--rendezvous", type=Path, help="shared file; set by rank 0")
    return parser


def _cpus(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)


if __name__ == "__main__":
    sys.exit(main())
