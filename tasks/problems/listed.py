"""Sources with a fixed list of problems: splits, filters, and draws without replacement."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

from configs.problems import SourceConfig
from storage.records import Split
from tasks.problems.source import (
    BARE,
    Enclosure,
    EvaluationLimits,
    Problem,
    ProblemSourceError,
    TestReport,
)


class ListedSource(ABC):
    """The part of a source that chooses among its names. A subclass loads and evaluates.

    A name is in the same split in every run, whatever other names there are: held out is one whose
    hash falls below ``held_out_share``. A source that is marked held out has nothing to train on.

    Args:
        names: of all problems, without repeats.
        label: of the source, for errors.

    Raises:
        ProblemSourceError: the filters leave nothing.
    """

    def __init__(self, config: SourceConfig, names: Sequence[str], label: str) -> None:
        self._label = label
        self._config = config
        chosen = [name for name in names if _wanted(name, config)]
        if not chosen:
            raise ProblemSourceError(
                f"{label}: none of its {len(names)} problems is left by problems.include "
                f"{list(config.include)} and problems.exclude {list(config.exclude)}"
            )
        held_out = [name for name in chosen if config.held_out or _is_held_out(name, config)]
        train = [name for name in chosen if name not in set(held_out)]
        self._names = {Split.TRAIN: tuple(sorted(train)), Split.HELD_OUT: tuple(sorted(held_out))}

    @abstractmethod
    def load(self, problem_id: str) -> Problem:
        """The problem of an id."""

    @abstractmethod
    def evaluate(
        self,
        problem: Problem,
        workspace: Path,
        limits: EvaluationLimits,
        enclosure: Enclosure = BARE,
    ) -> TestReport:
        """Run the hidden tests on a workspace."""

    def names(self, split: Split) -> tuple[str, ...]:
        """All problems of a split, sorted."""
        return self._names[split]

    def split_of(self, name: str) -> Split:
        """The split that a problem belongs to.

        Raises:
            ProblemSourceError: the source has no such problem, or the filters leave it out.
        """
        for split, names in self._names.items():
            if name in names:
                return split
        raise ProblemSourceError(
            f"{self._label}: no problem {name!r}, or problems.include and problems.exclude leave "
            f"it out"
        )

    def ids(self, split: Split, count: int, seed: int) -> list[str]:
        """The first ``count`` problems of a seed. For evaluation, never one twice: fewer are given
        where there are not more.

        Raises:
            ProblemSourceError: the split is empty.
        """
        if split is Split.HELD_OUT:
            count = min(count, len(self._some(split)))
        return epoch_slice(self._some(split), seed, 0, count)

    def step_ids(self, step: int, count: int, seed: int) -> list[str]:
        """The problems of a training step: no problem comes again before all others came.

        Raises:
            ProblemSourceError: nothing may be trained on.
        """
        return self.train_slice(step * count, count, seed)

    def train_slice(self, start: int, count: int, seed: int) -> list[str]:
        """Training problems ``start`` to ``start + count`` of the endless row of a seed."""
        return epoch_slice(self._some(Split.TRAIN), seed, start, count)

    def _some(self, split: Split) -> tuple[str, ...]:
        names = self._names[split]
        if names:
            return names
        if split is Split.TRAIN and self._config.held_out:
            raise ProblemSourceError(f"{self._label} is marked held_out: it is never trained on")
        other = "smaller" if split is Split.TRAIN else "larger"
        raise ProblemSourceError(
            f"{self._label}: none of its problems is in the split {split.value}: choose a {other} "
            f"problems.held_out_share (now {self._config.held_out_share:g}) or other filters"
        )


def epoch_slice(names: tuple[str, ...], seed: int, start: int, count: int) -> list[str]:
    """Entries ``start`` to ``start + count`` of an endless row in which each epoch is a new order
    of all names. Depends on nothing but the arguments, so that a resumed run draws the same."""
    found: list[str] = []
    while len(found) < count:
        epoch, place = divmod(start + len(found), len(names))
        found += _order(names, seed, epoch)[place : place + count - len(found)]
    return found


@lru_cache(maxsize=64)
def _order(names: tuple[str, ...], seed: int, epoch: int) -> tuple[str, ...]:
    return tuple(random.Random(f"epoch {seed} {epoch}").sample(names, len(names)))


def _wanted(name: str, config: SourceConfig) -> bool:
    included = not config.include or any(fnmatchcase(name, one) for one in config.include)
    return included and not any(fnmatchcase(name, one) for one in config.exclude)


def _is_held_out(name: str, config: SourceConfig) -> bool:
    digest = blake2b(name.encode(), digest_size=6).digest()
    return int.from_bytes(digest) < config.held_out_share * 2**48
