"""A file of token sequences for supervised fitting.

One safetensors file: ``ids`` int32 [tokens], ``targets`` bool [tokens] (the loss is taken at these
tokens), ``lengths`` int32 [sequences]. The sequences lie one after the other, in training order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

Document = tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]
"""Ids [n] and target marks [n] of one sequence."""


class CorpusError(ValueError):
    """A file that is not a usable corpus; the text says which sequence and why."""


@dataclass(frozen=True)
class Corpus:
    """Token sequences in training order."""

    ids: npt.NDArray[np.int32]
    targets: npt.NDArray[np.bool_]
    bounds: npt.NDArray[np.int64]
    """Start of each sequence, and the end of the last one: [sequences + 1]."""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def document(self, index: int) -> Document:
        """The sequence at ``index``, modulo the number of sequences."""
        at = index % len(self)
        cut = slice(self.bounds[at], self.bounds[at + 1])
        return self.ids[cut], self.targets[cut]


def write_corpus(path: Path, documents: Iterable[tuple[Sequence[int], Sequence[bool]]]) -> int:
    """Write sequences of (ids, target marks) to ``path``; returns how many there were.

    Raises:
        CorpusError: there are none, or one is unusable (see ``read_corpus``).
    """
    ids: list[npt.NDArray[np.int32]] = []
    targets: list[npt.NDArray[np.bool_]] = []
    for some_ids, some_targets in documents:
        ids.append(np.asarray(some_ids, np.int32))
        targets.append(np.asarray(some_targets, np.bool_))
        if len(ids[-1]) != len(targets[-1]):
            raise CorpusError(
                f"{path}: sequence {len(ids) - 1} has {len(ids[-1])} ids and {len(targets[-1])} "
                f"target marks"
            )
    if not ids:
        raise CorpusError(f"{path}: no sequences")
    arrays = {
        "ids": np.concatenate(ids),
        "targets": np.concatenate(targets),
        "lengths": np.array([len(part) for part in ids], np.int32),
    }
    _checked(arrays, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".writing-{path.name}")
    save_file(arrays, aside)
    aside.replace(path)
    return len(ids)


def read_corpus(path: Path, *, vocabulary: int | None = None) -> Corpus:
    """The corpus at ``path``.

    Raises:
        CorpusError: no such file, other arrays, an empty sequence, a sequence without a target or
            with one at position 0, or an id outside ``vocabulary``.
    """
    try:
        arrays = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CorpusError(f"{path}: can't be read: {error}") from error
    if set(arrays) != {"ids", "targets", "lengths"}:
        raise CorpusError(f"{path}: has {sorted(arrays)}, not ids, targets and lengths")
    corpus = _checked(arrays, path)
    highest = int(corpus.ids.max())
    if vocabulary is not None and highest >= vocabulary:
        raise CorpusError(f"{path}: id {highest} is outside a vocabulary of {vocabulary}")
    return corpus


def _checked(arrays: dict[str, npt.NDArray[np.generic]], path: Path) -> Corpus:
    ids, targets = arrays["ids"].astype(np.int32), arrays["targets"].astype(np.bool_)
    lengths = arrays["lengths"].astype(np.int64)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    if len(lengths) == 0 or lengths.min() < 1 or bounds[-1] != len(ids) or len(targets) != len(ids):
        raise CorpusError(f"{path}: lengths don't add up to {len(ids)} ids, or one is empty")
    if ids.min() < 0:
        raise CorpusError(f"{path}: a negative id")
    first = targets[bounds[:-1]]
    if first.any():
        raise CorpusError(
            f"{path}: sequence {int(first.argmax())} has a target at its first token, which "
            f"nothing predicts"
        )
    counts = np.add.reduceat(targets.astype(np.int64), bounds[:-1])
    if counts.min() == 0:
        raise CorpusError(f"{path}: sequence {int(counts.argmin())} has no target")
    return Corpus(ids, targets, bounds)
