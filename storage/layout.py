"""Keys of everything a run stores, in one place."""

from __future__ import annotations

from dataclasses import dataclass


def policy_prefix(key: str) -> str:
    """Folder of a warm-started policy, keyed by its configuration."""
    return f"policies/{key}"


def query_id(step: int, index: int) -> str:
    """Identifier of a training query."""
    return f"s{step:05d}-q{index:04d}"


def evaluation_query_id(version: int, index: int, variant: str = "") -> str:
    """Identifier of a held-out query. ``variant`` tells evaluations of one version apart."""
    return f"v{version:05d}{variant}-q{index:04d}"


def execution_id(query: str, member: int) -> str:
    """Identifier of a member of a query's group. Deterministic, so that a later attempt adopts."""
    return f"{query}-e{member:03d}"


@dataclass(frozen=True)
class RunLayout:
    """Keys of one run, relative to the storage root."""

    run_id: str

    @property
    def prefix(self) -> str:
        return f"runs/{self.run_id}"

    @property
    def config(self) -> str:
        return f"{self.prefix}/config.yaml"

    @property
    def lock(self) -> str:
        """Held by every process that works on the run."""
        return f"{self.prefix}/lock"

    @property
    def turn(self) -> str:
        """Held by the one attempt that drives the run."""
        return f"{self.prefix}/turn"

    @property
    def first_policy(self) -> str:
        """Which policy the run starts from."""
        return f"{self.prefix}/policy.json"

    @property
    def identity(self) -> str:
        """A random name of this very run, whatever other run has the same id."""
        return f"{self.prefix}/identity"

    @property
    def authority(self) -> str:
        """What signs the certificates of the run's daemons."""
        return f"{self.prefix}/authority.json"

    @property
    def manifest(self) -> str:
        """Versions, processes and byte counters of the run."""
        return f"{self.prefix}/run.json"

    @property
    def metrics(self) -> str:
        return f"{self.prefix}/metrics.jsonl"

    @property
    def decisions(self) -> str:
        """Journal of what the manager did and why."""
        return f"{self.prefix}/decisions"

    @property
    def paces(self) -> str:
        """Journal of the paces of launches that an adaptive policy chose."""
        return f"{self.prefix}/paces.jsonl"

    @property
    def levels(self) -> str:
        """Journal of the waterlevel and the roles of cells over time."""
        return f"{self.prefix}/levels"

    @property
    def report(self) -> str:
        """The page about the run."""
        return f"{self.prefix}/report.html"

    @property
    def epochs(self) -> str:
        """One empty object for each fencing number that was taken."""
        return f"{self.prefix}/epochs"

    @property
    def owners(self) -> str:
        """One empty object for each flow that has taken the daemons."""
        return f"{self.prefix}/owners"

    @property
    def hosts(self) -> str:
        """Registrations of daemons."""
        return f"{self.prefix}/hosts"

    @property
    def wanted(self) -> str:
        """What hosts that are started elsewhere shall hold; there while an attempt wants them."""
        return f"{self.prefix}/wanted.json"

    def host(self, name: str) -> str:
        """Registration of a daemon."""
        return f"{self.hosts}/{name}.json"

    def address(self, name: str) -> str:
        """Where a daemon listened last; outlives its registration."""
        return f"{self.prefix}/addresses/{name}.json"

    def log(self, name: str) -> str:
        return f"{self.prefix}/logs/{name}.log"

    def step(self, step: int) -> str:
        return f"{self.prefix}/steps/{step:05d}"

    def step_plan(self, step: int) -> str:
        return f"{self.step(step)}/plan.json"

    def step_done(self, step: int) -> str:
        return f"{self.step(step)}/done.json"

    def ledger(self, step: int) -> str:
        return f"{self.step(step)}/ledger"

    def update(self, step: int, update: int) -> str:
        return f"{self.step(step)}/updates/{update:04d}.json"

    def execution(self, execution: str) -> str:
        return f"{self.prefix}/executions/{execution}"

    def execution_result(self, execution: str) -> str:
        return f"{self.execution(execution)}/result.json"

    def frozen_workspace(self, digest: str) -> str:
        """A frozen workspace by its content: equal ones lie once."""
        return f"{self.prefix}/workspaces/{digest[:2]}/{digest}.tar.zst"

    def calls(self, execution: str) -> str:
        """Journal prefix of the execution's calls."""
        return f"{self.execution(execution)}/calls"

    def turns(self, execution: str) -> str:
        """Journal prefix of the messages that belong to the calls."""
        return f"{self.execution(execution)}/turns"

    def session(self, execution: str) -> str:
        """What a gateway needs to go on with an execution after its restart."""
        return f"{self.execution(execution)}/session.json"

    def verdicts(self, execution: str) -> str:
        return f"{self.execution(execution)}/verdicts"

    def verdict(self, execution: str, version: int) -> str:
        return f"{self.verdicts(execution)}/{version:04d}.json"

    def group(self, query: str) -> str:
        """A sealed group: header and samples in one object."""
        return f"{self.prefix}/groups/{query}.safetensors"

    def checkpoint(self, version: int) -> str:
        return f"{self.prefix}/checkpoints/{version:08d}"

    @property
    def evaluations(self) -> str:
        return f"{self.prefix}/evaluations"

    def evaluation(self, version: int, variant: str = "") -> str:
        """The result of a version on the run's own held-out problems, or of a ``variant``."""
        return f"{self.evaluations}/{version:08d}{variant}.json"
