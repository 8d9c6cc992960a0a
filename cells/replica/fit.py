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
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from pydantic import ValidationError

from cells.process import end_group, spawn
from cells.replica.corpus import Corpus, Document, read_corpus
from cells.replica.fit_plan import FitPlan, Phase
from cells.replica.flat import FlatModel
from cells.replica.model import initialise, make_model, start_megatron, target_logprobs
from cells.replica.muon import Muon
from cells.replica.packing import in_rows, pack
from cells.replica.shape import PolicyShape, read_shape
from cells.replica.weights import read_weights, write_policy

_ADAM_BETAS = (0.9, 0.98)
_LOSS_MEMORY = 0.9


class FitError(RuntimeError):
    """The fit can't go on; the text says why."""


@dataclass(frozen=True)
class Place:
    """Which of the data-parallel processes this is."""

    rank: int
    world: int


class Fitter:
    """The model, its weights and gradients, and the steps over them."""

    def __init__(self, shape: PolicyShape, plan: FitPlan, place: Place, start: Path | None) -> None:
        self.shape = shape
        self.plan = plan
        self.place = place
        self.model = make_model(shape)
        self.flat = FlatModel(self.model)
        if start is None:
            initialise(self.model, shape.initial_std, plan.seed)
        else:
            loaded = read_weights(start, shape)
            with torch.no_grad():
                for name, parameter in self.flat.named.items():
                    parameter.copy_(loaded[name])
        self.deadline = time.monotonic() + plan.limit_s

    def run(self) -> None:
        """All phases.

        Raises:
            FitError: the loss is not a number any more, or the time limit has passed.
            CorpusError: the data of a phase is unusable.
        """
        corpora = [
            read_corpus(Path(phase.data), vocabulary=self.shape.vocabulary)
            for phase in self.plan.phases
        ]
        for phase, corpus in zip(self.plan.phases, corpora, strict=True):
            self._phase(phase, corpus)

    def _phase(self, phase: Phase, corpus: Corpus) -> None:
        gradients = self.flat.split(self.flat.gradients)
        muon = Muon(self.flat.split(self.flat.weights), gradients, self.shape)
        rest = [p for name, p in self.flat.named.items() if name not in set(muon.names)]
        adam = torch.optim.AdamW(rest, betas=_ADAM_BETAS, weight_decay=0.0)
        began, tokens, mean = time.monotonic(), 0, math.nan
        for step in range(phase.steps):
            first = step * phase.sequences
            documents = [corpus.document(first + offset) for offset in range(phase.sequences)]
            loss = self.backward(documents)
            if not math.isfinite(loss):
                raise FitError(f"phase {phase.name}, step {step}: the loss is {loss}")
            factor = phase.rate_factor(step)
            muon.step(phase.muon_rate * factor)
            for group in adam.param_groups:
                group["lr"] = phase.adam_rate * factor
            adam.step()
            tokens += sum(len(ids) for ids, _ in documents)
            mean = loss if step == 0 else _LOSS_MEMORY * mean + (1 - _LOSS_MEMORY) * loss
            stop = mean < phase.stop_loss
            if stop or step + 1 == phase.steps or (step + 1) % self.plan.report_every == 0:
                seconds = time.monotonic() - began
                self._report(
                    event="step",
                    phase=phase.name,
                    step=step + 1,
                    steps=phase.steps,
                    loss=round(loss, 5),
                    loss_mean=round(mean, 5),
                    rate_factor=round(factor, 4),
                    tokens=tokens,
                    tokens_per_s=round(tokens / seconds),
                    seconds=round(seconds, 2),
                )
            if stop:
                return
            if time.monotonic() > self.deadline:
                raise FitError(
                    f"phase {phase.name}, step {step + 1}: {self.plan.limit_s:g} s have passed"
                )

    def backward(self, documents: Sequence[Document]) -> float:
        """Mean negative log-probability over all targets of ``documents``, with its gradient.

        Every process is given all documents, runs its share, and ends with the same gradient.
        """
        self.flat.zero_gradients()
        total = sum(int(targets.sum()) for _, targets in documents)
        mine = share(documents, self.place)
        rows = in_rows(mine, [len(ids) for ids, _ in mine], self.plan.micro_tokens)
        summed = torch.zeros(1, dtype=torch.float64)
        for row in rows:
            loss = -target_logprobs(self.model, pack(row)).sum() / total
            loss.backward()
            summed += loss.detach()
        if self.place.world > 1:
            dist.all_reduce(self.flat.gradients)
            dist.all_reduce(summed)
        return float(summed)

    def _report(self, **line: object) -> None:
        if self.place.rank == 0:
            print(json.dumps(line), flush=True)


def share(documents: Sequence[Document], place: Place) -> list[Document]:
    """The documents of one process: longest first, each to whoever has the fewest tokens.

    The longest come first in a row too, so that rows hold documents of similar length.
    """
    loads = [0] * place.world
    mine = []
    for document in sorted(documents, key=lambda document: -len(document[0])):
        rank = loads.index(min(loads))
        loads[rank] += len(document[0])
        if rank == place.rank:
            mine.append(document)
    return mine


def fit(
    *,
    config: Path,
    plan: FitPlan,
    out: Path,
    place: Place,
    start: Path | None = None,
    rendezvous: Path | None = None,
) -> None:
    """Fit and, as rank 0, write the HF directory ``out``."""
    began = time.monotonic()
    shape = read_shape(config)
    start_megatron(
        rank=place.rank, world=place.world, rendezvous=rendezvous, limit_s=min(plan.limit_s, 300)
    )
    fitter = Fitter(shape, plan, place, start)
    fitter.run()
    if place.rank == 0:
        beside = {"config.json": config.read_bytes()}
        write_policy(out, fitter.flat.split(fitter.flat.weights), shape, beside)
        line = {"event": "done", "out": str(out), "seconds": round(time.monotonic() - began, 1)}
        print(json.dumps(line), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of ``python -m cells.replica.fit``; 0 when the policy was written."""
    given = _parser().parse_args(argv)
    if given.cpus:
        os.sched_setaffinity(0, {given.cpus[given.rank % len(given.cpus)]})
    torch.set_num_threads(1)
    try:
        plan = FitPlan.model_validate_json(given.plan.read_text(encoding="utf-8"))
    except (OSError, ValidationError) as error:
        print(f"{given.plan}: {error}", file=sys.stderr)
        return 2
    arguments = sys.argv[1:] if argv is None else list(argv)
    with tempfile.TemporaryDirectory(prefix="gyre-fit-") as scratch:
        rendezvous = given.rendezvous or Path(scratch) / "rendezvous"
        others = [
            _start_rank(arguments, rank, rendezvous)
            for rank in range(1, given.processes if given.rank == 0 else 1)
        ]
        try:
            fit(
                config=given.model_config,
                plan=plan,
                out=given.out,
                place=Place(given.rank, given.processes),
                start=given.start,
                rendezvous=rendezvous,
            )
        except (FitError, ValueError, RuntimeError, OSError) as error:
            print(f"fit failed (rank {given.rank}): {error}", file=sys.stderr)
            return 1
        finally:
            for process in others:
                end_group(process.pid, grace_s=2)
                process.wait(timeout=5)
    return 0


def _start_rank(arguments: Sequence[str], rank: int, rendezvous: Path) -> subprocess.Popen[bytes]:
    return spawn(
        [
            *(sys.executable, "-m", "cells.replica.fit", *arguments),
            *("--rank", str(rank), "--rendezvous", str(rendezvous)),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        log=Path("/dev/stderr"),
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
