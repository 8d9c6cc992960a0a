"""A run whose storage is written by hand, with a clock of its own: what is shown of it is known."""

from __future__ import annotations

import random
from pathlib import Path

from cells.decisions import Decision
from cells.levels import Level
from cells.scheduler import Role
from configs.load import load_config
from storage.journal import Journal, append_line
from storage.layout import evaluation_query_id, execution_id, query_id
from storage.records import (
    Evaluation,
    Excluded,
    ExecutionOutcome,
    ExecutionResult,
    GroupHeader,
    Member,
    QueryPlan,
    Scored,
    Split,
    StepDone,
    StepPlan,
    UpdateMetrics,
    VerdictRecord,
    encode,
)
from storage.run import Run, create_run
from storage.samples import SealedGroup, seal

STEPS, UPDATES, QUERIES, MEMBERS = 6, 2, 4, 4
STEP_S, ROLLOUT_S, SWITCH_S = 60.0, 44.0, 2.0
EVALUATION_S = 20.0
PROBLEMS = 12
CELLS = ("a", "b")
RATE, CAPACITY = 500, 8
"""Tokens that the gateway samples a second while rollouts run; places of a serving cell."""


def record_run(
    root: Path, name: str = "recorded", *, began: float = 1_800_000_000.0, steps: int = STEPS
) -> Run:
    """A run of ``STEPS`` steps of which ``steps`` are done: an evaluation, then steps of rollouts,
    a switch of both cells, training, a switch back; an evaluation at the end.

    In step 0 one execution is excluded, and one has a verdict that came late. In every step one
    execution times out.
    """
    settings = [
        f"training.steps={STEPS}",
        f"training.updates_per_step={UPDATES}",
        f"rollout.queries={QUERIES}",
        f"rollout.group_size={MEMBERS}",
        f"evaluation.problems={PROBLEMS}",
        "evaluation.samples=2",
        f"cells.executions_per_cell={CAPACITY}",
    ]
    run = create_run(str(root), name, load_config("smoke", settings, environment={}))
    _Writer(run, began).write(steps)
    return run


class _Writer:
    def __init__(self, run: Run, began: float) -> None:
        self._run = run
        self._now = began
        self._random = random.Random(7)
        self._levels = Journal(run.store, run.layout.levels)
        self._decisions = Journal(run.store, run.layout.decisions)
        self._tokens = 0

    def write(self, steps: int) -> None:
        self._evaluation(0, 0.35)
        for step in range(steps):
            self._step(step)
        if steps == STEPS:
            self._evaluation(STEPS * UPDATES, 0.6)
        self._levels.close()
        self._decisions.close()

    def _evaluation(self, version: int, rate: float) -> None:
        for second in range(int(EVALUATION_S)):
            live = round(PROBLEMS * 2 * (1 - second / EVALUATION_S))
            self._level(self._now + second, -1, version, live, Role.ROLLOUT)
        rewards = {}
        for index in range(PROBLEMS):
            name = execution_id(evaluation_query_id(version, index), 0)
            self._execution(name, evaluation_query_id(version, index), 0.0, 12.0)
            solved = float(index < PROBLEMS * rate)
            rewards[f"p{index}"] = (solved, min(1.0, solved + 0.5))
        rates = {name: sum(own) / 2 for name, own in rewards.items()}
        record = Evaluation(
            version=version,
            problems=PROBLEMS,
            executions=2 * PROBLEMS,
            excluded=0,
            timed_out=1,
            pass_rate=sum(rates.values()) / PROBLEMS,
            standard_error=0.1,
            rates=rates,
            samples=2,
            seed=1,
            rewards=rewards,
        )
        self._run.store.write_record(self._run.layout.evaluation(version), record)
        self._now += EVALUATION_S

    def _step(self, step: int) -> None:
        store, layout = self._run.store, self._run.layout
        queries = tuple(
            QueryPlan(
                query_id=query_id(step, index),
                problem_id=f"p{index}",
                split=Split.TRAIN,
                group_size=MEMBERS,
            )
            for index in range(QUERIES)
        )
        plan = StepPlan(step=step, policy_version=step * UPDATES, queries=queries)
        store.write_record(layout.step_plan(step), plan)
        for second in range(int(ROLLOUT_S)):
            live = round(QUERIES * MEMBERS * (1 - second / ROLLOUT_S))
            self._level(self._now + second, step, step * UPDATES, live, Role.ROLLOUT)
        for query in queries:
            self._group(step, query)
        trains = self._now + ROLLOUT_S + SWITCH_S
        self._switch(step, "training", "the last execution has ended", trains)
        for second in range(int(STEP_S - ROLLOUT_S - 2 * SWITCH_S)):
            self._level(trains + second, step, step * UPDATES, 0, Role.TRAINING)
        self._now += STEP_S
        for update in range(UPDATES):
            ended = self._now - SWITCH_S - 3.0 * (UPDATES - 1 - update)
            append_line(store, layout.metrics, encode(self._update(step, update, ended)))
        self._switch(step, "rollout", "nothing is left to train", self._now)
        done = StepDone(step=step, policy_version=(step + 1) * UPDATES, seconds=STEP_S)
        store.write_record(layout.step_done(step), done)

    def _group(self, step: int, query: QueryPlan) -> None:
        store, layout = self._run.store, self._run.layout
        members = []
        for member in range(MEMBERS):
            name = execution_id(query.query_id, member)
            first = query.query_id == query_id(step, 0)
            timed_out = first and member == 0
            seconds = ROLLOUT_S if timed_out else self._random.uniform(8.0, 30.0)
            self._execution(name, query.query_id, float(member), seconds, timed_out=timed_out)
            verdict: Scored | Excluded = Scored(
                reward=self._random.choice([0.0, 0.5, 1.0]),
                timed_out=timed_out,
                tests_passed=1,
                tests_total=2,
                log="",
            )
            if step == 0 and first and member == 1:
                verdict = Excluded(reason="no_verdict", detail="it was not scored")
                late = Scored(reward=1, timed_out=False, tests_passed=2, tests_total=2, log="")
                self._verdict(name, query.query_id, late, late=True)
            else:
                self._verdict(name, query.query_id, verdict, late=False)
            members.append(
                Member(execution_id=name, verdict=verdict, advantage=None, paths=1, selected=1)
            )
        header = GroupHeader(
            query_id=query.query_id,
            step=step,
            problem_id=query.problem_id,
            sealed_at=self._now + ROLLOUT_S,
            members=tuple(members),
            spread=True,
        )
        seal(store, layout.group(query.query_id), SealedGroup(header, ()))

    def _verdict(self, name: str, query: str, verdict: Scored | Excluded, *, late: bool) -> None:
        record = VerdictRecord(
            execution_id=name,
            query_id=query,
            version=0,
            late=late,
            scored_at=self._now,
            seconds=0.5,
            verdict=verdict,
        )
        self._run.store.write_record(self._run.layout.verdict(name, 0), record)

    def _execution(
        self, name: str, query: str, after: float, seconds: float, *, timed_out: bool = False
    ) -> None:
        result = ExecutionResult(
            execution_id=name,
            query_id=query,
            outcome=ExecutionOutcome.TIMED_OUT if timed_out else ExecutionOutcome.COMPLETED,
            started_at=self._now + after,
            ended_at=self._now + after + seconds,
            waited_s=min(after, 4.0),
            exit_code=0,
            calls=3,
            workspace_key=None,
            detail="",
        )
        self._run.store.write_record(self._run.layout.execution_result(name), result)

    def _level(self, at: float, step: int, version: int, live: int, role: Role) -> None:
        capacity = CAPACITY * len(CELLS) if role is Role.ROLLOUT else 0
        running = min(live, capacity)
        self._tokens += RATE if running else 0
        level = Level(
            at=at,
            step=step,
            version=version,
            queued=live - running,
            running=running,
            capacity=capacity,
            roles=dict.fromkeys(CELLS, role),
            expected=4 if role is Role.TRAINING else 0,
            sealed=0,
            claimed=0,
            tokens_out=self._tokens,
        )
        self._levels.append([encode(level)])

    def _switch(self, step: int, to: str, reason: str, ended: float) -> None:
        for cell in CELLS:
            decision = Decision(
                at=ended,
                step=step,
                cell=cell,
                to=to,
                reason=reason,
                waterlevel=0,
                seconds=SWITCH_S,
                failed="",
            )
            self._decisions.append([encode(decision)])

    def _update(self, step: int, update: int, ended: float) -> UpdateMetrics:
        excluded = int(step == 0 and update == 0)
        executions = QUERIES * MEMBERS // UPDATES
        return UpdateMetrics(
            step=step,
            update=update,
            policy_version=step * UPDATES + update + 1,
            executions=executions,
            valid=executions - excluded,
            excluded=excluded,
            timed_out=1 - update,
            reward_mean=0.35 + 0.05 * step,
            pass_rate=0.35 + 0.05 * step,
            staleness_mean=float(update),
            staleness_max=update,
            clip_fraction=0.1 * update,
            grad_norm=0.2,
            logprob_gap=1e-7 if update == 0 else 1e-2,
            logprob_gap_max=1e-1,
            logprob_gap_by_version={step * UPDATES: 1e-7 if update == 0 else 1e-2},
            fresh_gap=1e-7 if update == 0 else None,
            clip_fraction_low=0.04 * update,
            clip_fraction_high=0.06 * update,
            effective_samples=1 - 0.1 * update,
            entropy=0.3,
            learning_rate=5e-4,
            groups=QUERIES // UPDATES,
            groups_without_gradient=update,
            target_tokens=1000,
            trained_tokens=3000,
            rollout_s=ROLLOUT_S if update == 0 else 0.0,
            train_s=3.0,
            switch_s=SWITCH_S if update == 0 else 0.0,
            ended_at=ended,
        )
