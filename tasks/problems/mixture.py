"""Several sources as one, with weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

from configs.problems import MixturePart, ProblemsConfig, SourceConfig
from storage.records import Split
from tasks.problems.listed import ListedSource
from tasks.problems.source import (
    BARE,
    Enclosure,
    EvaluationLimits,
    Problem,
    ProblemSource,
    ProblemSourceError,
    TestReport,
    make_source,
    step_seed,
)


class Mixture:
    """Problems of its parts, in numbers by their weights. An id is ``<part>/<the part's id>``.

    Each part goes through its own problems at its own pace, without replacement where it is a
    listed one. A part that is marked held out takes part in evaluations only.
    """

    def __init__(self, config: ProblemsConfig) -> None:
        self._weights = {part.name: part.weight for part in config.mixture}
        self._trained = [part.name for part in config.mixture if not part.held_out]
        self._sources = {part.name: make_source(_alone(config, part)) for part in config.mixture}

    @property
    def sources(self) -> dict[str, ProblemSource]:
        """The parts by name."""
        return dict(self._sources)

    def ids(self, split: Split, count: int, seed: int) -> list[str]:
        """The first ``count`` problems of a seed. Every part that has problems of the split gives
        by its weight, a listed one at most all it has.

        Raises:
            ProblemSourceError: no part has any.
        """
        if split is Split.TRAIN:
            return self.step_ids(0, count, seed)
        names = [name for name in self._sources if self._has_held_out(name)]
        if not names:
            raise ProblemSourceError("problems.mixture: no part has a held-out problem")
        wanted = Counter(turns([self._weights[name] for name in names], 0, count))
        return [
            f"{name}/{problem}"
            for number, name in enumerate(names)
            if wanted[number]
            for problem in self._sources[name].ids(split, wanted[number], seed)
        ]

    def step_ids(self, step: int, count: int, seed: int) -> list[str]:
        """The problems of a training step.

        Raises:
            ProblemSourceError: a part has nothing to train on.
        """
        weights = [self._weights[name] for name in self._trained]
        before = Counter(turns(weights, 0, step * count))
        now = turns(weights, step * count, count)
        rows = {
            number: iter(self._row(self._trained[number], before[number], wanted, step, seed))
            for number, wanted in Counter(now).items()
        }
        return [f"{self._trained[number]}/{next(rows[number])}" for number in now]

    def load(self, problem_id: str) -> Problem:
        """The problem of an id.

        Raises:
            ProblemSourceError: no part knows it.
        """
        source, own = self._part(problem_id)
        found = source.load(own)
        return _renamed(found, problem_id)

    def evaluate(
        self,
        problem: Problem,
        workspace: Path,
        limits: EvaluationLimits,
        enclosure: Enclosure = BARE,
    ) -> TestReport:
        """The tests of the part that the problem comes from."""
        source, own = self._part(problem.problem_id)
        return source.evaluate(_renamed(problem, own), workspace, limits, enclosure)

    def _row(self, name: str, start: int, count: int, step: int, seed: int) -> list[str]:
        source = self._sources[name]
        own_seed = int.from_bytes(blake2b(f"{seed}/{name}".encode(), digest_size=4).digest())
        if isinstance(source, ListedSource):
            return source.train_slice(start, count, own_seed)
        return source.ids(Split.TRAIN, count, step_seed(own_seed, step))

    def _part(self, problem_id: str) -> tuple[ProblemSource, str]:
        name, _, own = problem_id.partition("/")
        source = self._sources.get(name)
        if source is None:
            raise ProblemSourceError(
                f"{problem_id!r}: not of a part of problems.mixture ({', '.join(self._sources)})"
            )
        return source, own

    def _has_held_out(self, name: str) -> bool:
        source = self._sources[name]
        return not isinstance(source, ListedSource) or bool(source.names(Split.HELD_OUT))


def turns(weights: Sequence[float], start: int, count: int) -> list[int]:
    """Whose turn it is at places ``start`` to ``start + count`` of an endless row.

    Each place goes to the part that is furthest behind its share, so that after any number of
    places every part has had its share to within one.
    """
    total = sum(weights)
    had = [0] * len(weights)
    row: list[int] = []
    for place in range(start + count):
        behind = [w / total * (place + 1) - n for w, n in zip(weights, had, strict=True)]
        turn = behind.index(max(behind))
        had[turn] += 1
        row.append(turn)
    return row[start:]


def _alone(config: ProblemsConfig, part: MixturePart) -> ProblemsConfig:
    """The settings of a part as if it were the run's only source."""
    own = {name: getattr(part, name) for name in SourceConfig.model_fields}
    return config.model_copy(update={**own, "mixture": ()})


def _renamed(problem: Problem, problem_id: str) -> Problem:
    return replace(problem, problem_id=problem_id)
