"""Specifications: made from an id, worded for the agent."""

from __future__ import annotations

import random
import re
import zlib
from dataclasses import dataclass

from configs.problems import SpecRepoConfig
from storage.records import Split
from tasks.problems.source import ProblemSourceError
from tasks.problems.specrepo.operations import CONSTANTS, Operation, operations_up_to
from tasks.problems.specrepo.words import WORDS

_HELD_OUT_ONE_IN = 5


@dataclass(frozen=True)
class Function:
    """A function that the agent has to write."""

    name: str
    operation: Operation
    constant: int
    """0 for an operation without one."""

    @property
    def line(self) -> str:
        """How the specification words it."""
        words = self.operation.words.format(c=self.constant)
        return f"{self.name}({self.operation.argument}): {words}"

    @property
    def held_out(self) -> bool:
        """Which split owns it: a (name, operation, constant) is in exactly one."""
        triple = f"{self.name}/{self.operation.name}/{self.constant}"
        return zlib.crc32(triple.encode()) % _HELD_OUT_ONE_IN == 0


@dataclass(frozen=True)
class SpecFile:
    """A file and the functions that belong in it."""

    path: str
    functions: tuple[Function, ...]

    def text(self, functions: tuple[Function, ...] | None = None) -> str:
        """The file's part of a specification, or of one for only some of its functions."""
        lines = [function.line for function in (self.functions if functions is None else functions)]
        return "\n".join([f"file: {self.path}", *lines])


@dataclass(frozen=True)
class Specification:
    """A small package to write."""

    files: tuple[SpecFile, ...]

    @property
    def text(self) -> str:
        """The instruction of the problem."""
        return "\n".join(file.text() for file in self.files)

    @property
    def functions(self) -> tuple[Function, ...]:
        return tuple(function for file in self.files for function in file.functions)


@dataclass(frozen=True)
class ProblemName:
    """Everything that makes a problem; its text form is the problem's id."""

    split: Split
    seed: int
    number: int
    difficulty: int
    files: int
    functions_min: int
    functions_max: int
    slow_share: float
    slow_median_s: float
    slow_sigma: float

    @classmethod
    def of(cls, config: SpecRepoConfig, split: Split, seed: int, number: int) -> ProblemName:
        """The name of problem ``number`` of a split under these settings."""
        return cls(
            split=split,
            seed=seed,
            number=number,
            difficulty=config.difficulty,
            files=config.files,
            functions_min=config.functions_min,
            functions_max=config.functions_max,
            slow_share=config.slow_share,
            slow_median_s=config.slow_median_s if config.slow_share else 0.0,
            slow_sigma=config.slow_sigma if config.slow_share else 0.0,
        )

    @classmethod
    def parse(cls, problem_id: str) -> ProblemName:
        """The name in an id.

        Raises:
            ProblemSourceError: it is not an id of this source.
        """
        found = _ID.fullmatch(problem_id)
        if found is None:
            raise ProblemSourceError(
                f"{problem_id!r}: not a specrepo id (specrepo-<split>-<seed>-<number>-<settings>)"
            )
        slow = [float(found[name] or 0) for name in ("share", "median", "sigma")]
        return cls(
            Split(found["split"]),
            *(int(found[name]) for name in ("seed", "number", "level", "files", "least", "most")),
            *slow,
        )

    def __str__(self) -> str:
        slow = f"-w{self.slow_share}x{self.slow_median_s}x{self.slow_sigma}"
        return (
            f"specrepo-{self.split.value}-{self.seed}-{self.number}-d{self.difficulty}"
            f"f{self.files}n{self.functions_min}to{self.functions_max}"
            f"{slow if self.slow_share else ''}"
        )


_NUMBER = r"\d+(?:\.\d+)?(?:e[+-]?\d+)?"
_ID = re.compile(
    r"specrepo-(?P<split>train|held_out)-(?P<seed>\d+)-(?P<number>\d+)-d(?P<level>\d+)"
    r"f(?P<files>\d+)n(?P<least>\d+)to(?P<most>\d+)"
    rf"(?:-w(?P<share>{_NUMBER})x(?P<median>{_NUMBER})x(?P<sigma>{_NUMBER}))?"
)


def make_specification(name: ProblemName) -> Specification:
    """The specification of a problem; equal names make equal ones."""
    rng = random.Random(f"specification {name}")
    total = rng.randint(name.functions_min, name.functions_max)
    return draw_specification(rng, name.split, name.difficulty, total, name.files)


def draw_specification(
    rng: random.Random, split: Split, difficulty: int, functions: int, most_files: int
) -> Specification:
    """A random specification of ``functions`` functions of a split, spread over files."""
    files = rng.randint(1, min(most_files, functions))
    names = rng.sample(WORDS, functions + files + (files > 1))
    # One file stands alone at the top, several share a folder.
    folder = f"{names.pop()}/" if files > 1 else ""
    paths = [f"{folder}{names.pop()}.py" for _ in range(files)]
    drawn = [draw_function(rng, name, split, difficulty) for name in names]
    cuts = sorted(rng.sample(range(1, functions), files - 1))
    bounds = list(zip([0, *cuts], [*cuts, functions], strict=True))
    return Specification(
        tuple(
            SpecFile(path, tuple(drawn[start:end]))
            for path, (start, end) in zip(paths, bounds, strict=True)
        )
    )


def draw_function(rng: random.Random, name: str, split: Split, difficulty: int) -> Function:
    """A random behaviour for ``name`` that belongs to the split."""
    choices = operations_up_to(difficulty)
    while True:
        operation = rng.choice(choices)
        constant = rng.choice(CONSTANTS)
        function = Function(name, operation, constant if operation.takes_constant else 0)
        if function.held_out is (split is Split.HELD_OUT):
            return function


def tool_delay_s(name: ProblemName) -> float:
    """Seconds that a command takes longer in this problem: mostly 0, with a lognormal tail."""
    rng = random.Random(f"delay {name}")
    if rng.random() >= name.slow_share:
        return 0.0
    return name.slow_median_s * rng.lognormvariate(0.0, name.slow_sigma)
