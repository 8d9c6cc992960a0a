"""Forward and backward passes of packed rows over the ranks of a replica.

Samples of a micro-step are shared out over data ranks, and over rows where pipeline stages need
several to be busy at once. All ranks are given all samples, so that each knows the size of the
others' rows: stages, and ranks that exchange tokens for experts, need rows of one length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cells.replica.corpus import Document
from cells.replica.cpu_support import megatron_imports
from cells.replica.model import outcome, run_stage
from cells.replica.packing import PackedRow, pack, padded
from cells.replica.place import Place
from configs.layout import LayoutConfig

with megatron_imports():
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.pipeline_parallel.schedules import (
        forward_backward_pipelining_without_interleaving,
    )

Loss = Callable[[int, Tensor, Tensor], Tensor]
"""From the number of a row, log-probs [targets] and entropies [targets] to the row's loss."""


class BackwardError(RuntimeError):
    """A backward pass failed: some of its gradient may have been added."""


_NOTHING: Document = (np.zeros(2, np.int32), np.array([False, True]))
"""Stands for the samples of a row that has none."""


@dataclass(frozen=True)
class Share:
    """The samples of one row, by their number in the micro-step, and the row."""

    samples: tuple[int, ...]
    row: PackedRow


def share_out(documents: Sequence[Document], place: Place, *, prefixes: bool) -> list[Share]:
    """This data rank's rows of a micro-step; those of a rank alone are one row of all documents.

    Neighbours stay together, as they are likely to have prefixes in common (``prefixes``: computed
    once).
    """
    layout = place.layout
    lengths = [len(ids) for ids, _ in documents]
    each = _rows(lengths, layout)
    slots = cut(lengths, layout.data * each)
    mine = range(place.data * each, (place.data + 1) * each)
    same = layout.pipeline > 1 or layout.expert > 1
    rows = {
        slot: pack([documents[i] for i in slots[slot]] or [_NOTHING], share=prefixes)
        for slot in (range(len(slots)) if same else mine)
    }
    longest = max(len(row.ids) for row in rows.values()) if same else 0
    multiple = place.row_multiple
    found = []
    for slot in mine:
        row = rows[slot]
        tokens = -(-max(longest, len(row.ids)) // multiple) * multiple
        found.append(Share(tuple(slots[slot]), padded(row, tokens)))
    return found


def cut(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Numbers of the items in each of ``parts`` runs of about as many tokens; some may be empty."""
    found: list[list[int]] = [[] for _ in range(parts)]
    total, before = sum(lengths), 0
    for number, length in enumerate(lengths):
        middle = before + length / 2
        found[min(parts - 1, int(parts * middle / total))].append(number)
        before += length
    return found


def _rows(lengths: Sequence[int], layout: LayoutConfig) -> int:
    """Rows of each data rank: as many as make a pipeline the shortest, whose rows are of one
    length. Its last stage ends after as many turns as there are rows, and one for each other
    stage."""

    def turns(rows: int) -> int:
        slots = cut(lengths, layout.data * rows)
        longest = max(sum(lengths[index] for index in slot) for slot in slots)
        return (rows + layout.pipeline - 1) * longest

    return min(range(1, 2 * layout.pipeline), key=turns) if layout.pipeline > 1 else 1


class Passes:
    """Passes of a model, or of this rank's part with those of the others.

    All ranks of a replica make the same calls, data ranks with as many rows.
    """

    def __init__(self, model: GPTModel, place: Place) -> None:
        self.model = model
        self.place = place

    def backward(self, rows: Sequence[PackedRow], loss: Loss) -> None:
        """Add the gradient of the sum of the rows' losses, which the last stage computes."""
        if self.place.layout.pipeline == 1:
            for number, row in enumerate(rows):
                total = loss(number, *self._outcome(row, run_stage(self.model, row, self.place)))
                try:
                    total.backward()
                except Exception as error:  # its kind is of whoever failed
                    raise BackwardError(str(error)) from error
            return
        self._pipeline(rows, loss, forward_only=False)

    def logprobs(self, rows: Sequence[PackedRow]) -> list[Tensor] | None:
        """Log-probs [targets] of each row, without gradient; None before the last stage."""
        with torch.no_grad():
            if self.place.layout.pipeline == 1:
                return [
                    self._outcome(row, run_stage(self.model, row, self.place))[0] for row in rows
                ]
            found: list[Tensor] = []

            def keep(number: int, logprobs: Tensor, entropies: Tensor) -> Tensor:
                found.append(logprobs)
                return logprobs.sum()

            self._pipeline(rows, keep, forward_only=True)
        return found if self.place.last_stage else None

    def _outcome(self, row: PackedRow, found: Any) -> tuple[Tensor, Tensor]:
        logprobs, entropies = outcome(self.model, found, row, self.place, entropies=True)
        assert entropies is not None
        return logprobs, entropies

    def _pipeline(self, rows: Sequence[PackedRow], loss: Loss, *, forward_only: bool) -> None:
        """Megatron's schedule of one forward, one backward. Rows are of one length."""

        def step(numbered: Iterator[tuple[int, PackedRow]], model: GPTModel) -> tuple[Any, Any]:
            number, row = next(numbered)
            hidden, share = run_stage(model, row, self.place)

            def end(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
                told = self._outcome(row, (output, share))
                return loss(number, *told), torch.tensor(0, dtype=torch.int), {}

            return hidden, end

        forward_backward_pipelining_without_interleaving(
            forward_step_func=step,
            data_iterator=iter(enumerate(rows)),
            model=self.model,
            num_microbatches=len(rows),
            seq_length=len(rows[0].ids),
            micro_batch_size=1,
            forward_only=forward_only,
        )
