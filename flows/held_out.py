"""What an evaluation is of: a weight version, and the held-out problems that it is tried on."""

from __future__ import annotations

from dataclasses import dataclass, field

from configs.load import ConfigError
from configs.model import ModelSource
from storage.layout import RunLayout, evaluation_query_id
from storage.records import Evaluation, QueryPlan, Split
from storage.run import Run, create_run
from tasks.problems.source import make_source


@dataclass(frozen=True)
class HeldOut:
    """Held-out problems, and how often each is tried."""

    problems: int
    samples: int
    seed: int
    variant: str = field(default="", compare=False)
    """What tells its results from those of the run's own settings; empty for these."""

    @classmethod
    def of(cls, run: Run, problems: int | None, samples: int | None, seed: int | None) -> HeldOut:
        """The run's settings, with what is given in their place."""
        own = run.config.evaluation
        chosen = (
            own.problems if problems is None else problems,
            own.samples if samples is None else samples,
            own.seed if seed is None else seed,
        )
        if chosen == (own.problems, own.samples, own.seed):
            return cls(*chosen)
        return cls(*chosen, variant=f"-p{chosen[0]}-n{chosen[1]}-r{chosen[2]}")

    def key(self, layout: RunLayout, version: int) -> str:
        """Where the result of a version is kept."""
        return layout.evaluation(version, self.variant)

    def queries(self, run: Run, version: int) -> tuple[QueryPlan, ...]:
        """The same problems for every version, so that versions pair."""
        names = make_source(run.config.problems).ids(Split.HELD_OUT, self.problems, self.seed)
        return tuple(
            QueryPlan(
                query_id=evaluation_query_id(version, index, self.variant),
                problem_id=name,
                split=Split.HELD_OUT,
                group_size=self.samples,
            )
            for index, name in enumerate(names)
        )


def find_evaluations(run: Run, held_out: HeldOut) -> dict[int, Evaluation]:
    """What is stored of these problems, by version."""
    ending = f"{held_out.variant}.json"
    found = {}
    for name in run.store.children(run.layout.evaluations):
        version = name.removesuffix(ending)
        if version.isdigit() and name.endswith(ending):
            key = f"{run.layout.evaluations}/{name}"
            found[int(version)] = run.store.read_record(key, Evaluation)
    return dict(sorted(found.items()))


def ceiling_name(run_id: str) -> str:
    """Name of the run whose version 0 is the ceiling of ``run_id``."""
    return f"{run_id}-ceiling"


def ceiling_run(run: Run) -> Run:
    """A run beside ``run`` that starts from a policy fitted to demonstrations without mistakes:
    what the same model reaches on these problems when nothing has to be found out.

    It is a run of its own, so that its weights are never taken for a version of ``run``.

    Raises:
        ConfigError: the run's policy was not made by a warm start.
    """
    if run.config.model.source is not ModelSource.WARM_START:
        raise ConfigError(
            f"run {run.run_id} started from {run.config.model.path}: only a policy that the warm "
            f"start makes has a ceiling, as there are demonstrations of what it learns"
        )
    clean = run.config.warm_start.model_copy(update={"error_share": 0.0})
    config = run.config.model_copy(update={"warm_start": clean})
    return create_run(run.store.url, ceiling_name(run.run_id), config)
