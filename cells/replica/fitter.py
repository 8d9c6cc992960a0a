"""The steps of a supervised fit, shared by data-parallel processes."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from cells.replica.corpus import Corpus, Document
from cells.replica.fit_plan import FitPlan, Phase
from cells.replica.flat import FlatModel
from cells.replica.model import initialise, make_model, target_logprobs
from cells.replica.muon import Muon
from cells.replica.packing import in_rows, pack
from cells.replica.place import Place
from cells.replica.shape import PolicyShape
from cells.replica.weights import read_weights

_ADAM_BETAS = (0.9, 0.98)
_LOSS_MEMORY = 0.9


class FitError(RuntimeError):
    """The fit can't go on; the text says why."""


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

    def run(self, corpora: Sequence[Corpus]) -> None:
        """All phases, each on its corpus.

        Raises:
            FitError: the loss is not a number any more, or the time limit has passed.
        """
        for phase, corpus in zip(self.plan.phases, corpora, strict=True):
            self._phase(phase, corpus)

    def _phase(self, phase: Phase, corpus: Corpus) -> None:
        gradients = self.flat.split(self.flat.gradients)
        muon = None
        names: set[str] = set()
        if phase.muon_rate:
            muon = Muon(self.flat.split(self.flat.weights), gradients, self.shape)
            names = set(muon.names)
        rest = [p for name, p in self.flat.named.items() if name not in names]
        adam = torch.optim.AdamW(rest, betas=_ADAM_BETAS, weight_decay=0.0)
        began, tokens, mean = time.monotonic(), 0, math.nan
        for step in range(phase.steps):
            first = step * phase.sequences
            documents = [corpus.document(first + offset) for offset in range(phase.sequences)]
            loss = self.backward(documents)
            if not math.isfinite(loss):
                raise FitError(f"phase {phase.name}, step {step}: the loss is {loss}")
            factor = phase.rate_factor(step)
            if muon is not None:
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
        if not self.place.alone:
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
    loads = [0] * place.layout.data
    mine = []
    for document in sorted(documents, key=lambda document: -len(document[0])):
        rank = loads.index(min(loads))
        loads[rank] += len(document[0])
        if rank == place.rank:
            mine.append(document)
    return mine
