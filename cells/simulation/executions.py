"""Executions drawn from a workload: the same for every policy that is given the same seed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cells.simulation.workload import (
    LognormalDurations,
    RecordedDurations,
    ReplayedExecution,
    ReplayedExecutions,
    Workload,
)


@dataclass(frozen=True, slots=True)
class Block:
    """One model call and the tools that run after it; times in seconds."""

    prompt_tokens: float
    output_tokens: float
    tool_s: float


@dataclass(frozen=True, slots=True)
class Execution:
    """One execution of a query; `nominal_s` is its duration after the cut.

    `cut_s` is when its limit ended a recorded one, in seconds from its start: its last tools run
    until then, however fast its calls are this time.
    """

    query: int
    nominal_s: float
    timed_out: bool
    blocks: tuple[Block, ...]
    cut_s: float | None = None

    @property
    def tokens(self) -> float:
        """Prompt and output tokens of the whole execution, each counted once."""
        return sum(block.prompt_tokens + block.output_tokens for block in self.blocks)


class Draws:
    """Draws queries one after another; query q of a seed is the same whoever asks when."""

    def __init__(self, workload: Workload, seed: int) -> None:
        """Only `workload.durations`, `.execution` and `.serving` matter."""
        self._workload = workload
        self._seed = seed

    def query(self, number: int) -> tuple[Execution, ...]:
        """The executions of a query, whose durations are correlated."""
        durations = self._workload.durations
        if isinstance(durations, ReplayedExecutions):
            members = durations.queries[number % len(durations.queries)]
            return tuple(self._replayed(number, member) for member in members)
        random = np.random.default_rng((self._seed, number))
        limit = self._workload.execution.timeout_s
        raw = self._durations(durations, random)
        return tuple(
            self._execution(number, float(min(seconds, limit)), bool(seconds >= limit), random)
            for seconds in raw
        )

    def _replayed(self, query: int, recorded: ReplayedExecution) -> Execution:
        blocks = tuple(Block(*call) for call in recorded.calls)
        serving = self._workload.serving
        speed = serving.speed(serving.nominal_requests)
        seconds = sum(
            block.tool_s + serving.work(block.prompt_tokens, block.output_tokens) / speed
            for block in blocks
        )
        cut_s = self._workload.execution.timeout_s if recorded.timed_out else None
        return Execution(query, seconds, recorded.timed_out, blocks, cut_s)

    def _durations(
        self, durations: LognormalDurations | RecordedDurations, random: np.random.Generator
    ) -> NDArray[np.float64]:
        size = self._workload.batch.executions_per_query
        if not isinstance(durations, LognormalDurations):
            problems = tuple(durations.seconds)
            problem = problems[random.integers(len(problems))]
            return random.choice(np.asarray(durations.seconds[problem]), size)
        deviation = durations.sigma_query * random.standard_normal()
        own = durations.sigma_execution * random.standard_normal(size)
        seconds = durations.median_s * np.exp(deviation + own)
        hung = random.random(size) < durations.hung_share
        return np.where(hung, np.inf, seconds)

    def _execution(
        self, query: int, seconds: float, timed_out: bool, random: np.random.Generator
    ) -> Execution:
        model, serving = self._workload.execution, self._workload.serving
        speed = serving.speed(serving.nominal_requests)
        count = max(1, round(seconds / model.block_s))
        tools = seconds * model.tool_share * _shares(count, random)
        # Serving time at nominal speed, as work; what the prompts take of it is not output.
        work = seconds * (1 - model.tool_share) * speed
        first = min(model.first_prompt_tokens, work / serving.work(2.0, 0.0))
        work -= serving.work(first, 0.0)
        outputs = work / serving.work(model.prompt_per_output, 1.0) * _shares(count, random)
        prompts = outputs * model.prompt_per_output
        prompts[0] += first
        rows = zip(prompts.tolist(), outputs.tolist(), tools.tolist(), strict=True)
        return Execution(query, seconds, timed_out, tuple(Block(*row) for row in rows))


def _shares(count: int, random: np.random.Generator) -> NDArray[np.float64]:
    """Random positive shares that add up to one."""
    weights = random.standard_exponential(count)
    return np.asarray(weights / weights.sum())
