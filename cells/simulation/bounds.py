"""What no schedule can beat: a result is a share of the possible, not only better than a rival."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cells.scheduler import Pipeline
from cells.simulation.executions import Draws, Execution
from cells.simulation.workload import Workload


@dataclass(frozen=True, slots=True)
class Bounds:
    """Lower bounds on the seconds of a run.

    `work_s` is all work, at the best speed of each kind, over all cells: it binds every policy.
    `burst_s` adds up, burst by burst, the larger of that and of the critical path: it binds the
    policies that train a burst before they launch the next. `critical_s` is the sum of the critical
    paths alone.
    """

    work_s: float
    critical_s: float
    burst_s: float

    def of(self, pipeline: Pipeline) -> float:
        """The bound of a policy with that pipeline, in seconds."""
        return self.work_s if pipeline.lag or pipeline.carries else self.burst_s


def colocate_limit(cells: int) -> float:
    """The most that elastic can gain over Colocate: 2 - 1/C with C cells, at equal work.

    Let all C cells need R seconds for the rollouts. No policy has fewer, one cell at least serves
    until then, and so at most (C - 1) R cell-seconds of the training X are done by then: elastic
    needs at least R + max(0, X - (C - 1) R)/C, Colocate R + X/C. The quotient is largest at
    X = (C - 1) R. Costs that only Colocate would have are not counted.
    """
    return 2 - 1 / cells


def lower_bounds(workload: Workload, seed: int) -> Bounds:
    """The bounds for the executions that this seed draws."""
    batch, cells = workload.batch, workload.cells.count
    draws = Draws(workload, seed)
    size = batch.updates_per_burst * batch.queries_per_update
    work = critical = burst = 0.0
    for first in range(0, batch.queries, size):
        groups = [draws.query(number) for number in range(first, first + size)]
        shared = _cell_seconds(workload, groups) / cells
        longest = _critical_path(workload, groups)
        work += shared
        critical += longest
        burst += max(shared, longest)
    return Bounds(work, critical, burst)


def _cell_seconds(workload: Workload, groups: Iterable[tuple[Execution, ...]]) -> float:
    """Cell-seconds of rollout and training, each at its most efficient."""
    serving, capacity = workload.serving, workload.cells.capacity
    engine = slots = training = 0.0
    for group in groups:
        for execution in group:
            work = _serving_work(workload, execution)
            engine += work / (serving.speed(capacity) * capacity)
            slots += _alone_s(workload, execution) / capacity
            training += execution.tokens / workload.training.tokens_per_s
    return max(engine, slots) + training


def _critical_path(workload: Workload, groups: Iterable[tuple[Execution, ...]]) -> float:
    """Seconds of the longest execution alone, its group's training on all cells, and the step."""
    training, cells = workload.training, workload.cells.count
    paths = []
    for group in groups:
        seconds = sum(execution.tokens for execution in group) / training.tokens_per_s
        spread = min(cells, training.micro_steps_per_group)
        longest = max(_alone_s(workload, execution) for execution in group)
        paths.append(longest + seconds / spread + training.update_s)
    return max(paths)


def _serving_work(workload: Workload, execution: Execution) -> float:
    return sum(workload.serving.work(b.prompt_tokens, b.output_tokens) for b in execution.blocks)


def _alone_s(workload: Workload, execution: Execution) -> float:
    tools = sum(block.tool_s for block in execution.blocks)
    return tools + _serving_work(workload, execution) / workload.serving.speed(1)
