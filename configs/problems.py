"""Where problems come from, how the agents that work on them run, and how they are scored."""

from __future__ import annotations

from enum import StrEnum

from pydantic import field_validator, model_validator

from configs.field import Section, absolute_path, setting


class SpecRepoConfig(Section):
    """The built-in source: specifications of small packages with hidden tests."""

    files: int = setting(1, "Most files of a package.", unit="files", ge=1, le=16)
    functions_min: int = setting(2, "Fewest functions of a package.", unit="functions", ge=1, le=64)
    functions_max: int = setting(4, "Most functions of a package.", unit="functions", ge=1, le=64)
    difficulty: int = setting(
        1,
        "How many of the behaviours may be used: 1 is arithmetic of one argument, 2 adds "
        "conditions, 3 adds lists.",
        unit="level",
        ge=1,
        le=3,
    )
    slow_share: float = setting(
        0.0, "Share of the problems whose tool runs slowly.", unit="share", ge=0, le=1
    )
    slow_median_s: float = setting(
        2.0, "Median time that a slow tool adds to a call.", unit="seconds", ge=0, le=86_400
    )
    slow_sigma: float = setting(
        1.0, "Spread of that time: sigma of a lognormal.", unit="1", ge=0, le=4
    )
    pytest_above: int = setting(
        8,
        "Packages with more functions than this are tested by pytest, smaller ones by a light "
        "runner.",
        unit="functions",
        ge=0,
        le=1000,
    )

    @model_validator(mode="after")
    def _ordered(self) -> SpecRepoConfig:
        if self.functions_min > self.functions_max:
            raise ValueError(
                f"functions_min ({self.functions_min}) is larger than functions_max "
                f"({self.functions_max})"
            )
        return self


MIXTURE = "mixture"
_WITH_FOLDER = ("harbor", "nl2repo")
_WITHOUT_FOLDER = ("specrepo", "humaneval", MIXTURE)


class SourceConfig(Section):
    """One source of problems and what is taken from it."""

    source: str = setting(
        "specrepo",
        "specrepo, humaneval, harbor, nl2repo, mixture, or an own import path module:Class.",
        min_length=1,
        max_length=256,
    )
    path: str | None = setting(
        None, "Folder of the tasks, for harbor and nl2repo.", min_length=1, max_length=4096
    )
    held_out: bool = setting(
        False, "Never train on this source: all of its problems are for evaluation."
    )
    held_out_share: float = setting(
        0.2,
        "Share of a listed source's problems that is for evaluation only. specrepo has its own.",
        unit="share",
        ge=0,
        le=1,
    )
    include: tuple[str, ...] = setting(
        (),
        "Take only problems of these names; * and ? stand for any characters.",
        max_length=10_000,
    )
    exclude: tuple[str, ...] = setting(
        (),
        "Leave out problems of these names; * and ? stand for any characters.",
        max_length=10_000,
    )

    _absolute = field_validator("path")(absolute_path)

    @model_validator(mode="after")
    def _path_fits_source(self) -> SourceConfig:
        if self.source in _WITH_FOLDER and self.path is None:
            raise ValueError(f"source {self.source} needs path, the folder of its tasks")
        if self.source in _WITHOUT_FOLDER and self.path is not None:
            raise ValueError(f"path has no meaning for source {self.source}: leave it out")
        return self


class MixturePart(SourceConfig):
    """A source inside a mixture."""

    name: str = setting(
        ..., "Comes before the ids of its problems.", pattern=r"^[a-z0-9][a-z0-9_-]{0,31}$"
    )
    weight: float = setting(
        1.0, "Its share of the problems, relative to the others'.", unit="1", gt=0, le=1e6
    )

    @model_validator(mode="after")
    def _is_one_source(self) -> MixturePart:
        if self.source == MIXTURE:
            raise ValueError("a part of a mixture can't be a mixture")
        return self


class ProblemsConfig(SourceConfig):
    """The problem source of a run."""

    mixture: tuple[MixturePart, ...] = setting(
        (), "The parts, with source mixture and only with it.", max_length=64
    )
    reward: str | None = setting(
        None,
        "Import path module:function of an own reward, (problem, tests, workspace) -> [0, 1]; "
        "none takes what the source defines, by default the share of tests that pass.",
        max_length=256,
    )
    evaluator: str | None = setting(
        None,
        "Import path module:function of an own evaluator, (problem, workspace, limits, enclosure) "
        "-> TestReport, in place of the source's tests.",
        max_length=256,
    )
    seed: int = setting(1, "Seed that the problems are made from.", unit="1", ge=0, le=2**31 - 1)
    specrepo: SpecRepoConfig = setting(SpecRepoConfig(), "Settings of the built-in source.")

    @property
    def trainable(self) -> bool:
        """Whether there is a source that is not marked held out."""
        if self.held_out:
            return False
        return self.source != MIXTURE or not all(part.held_out for part in self.mixture)

    @model_validator(mode="after")
    def _mixture_has_parts(self) -> ProblemsConfig:
        if (self.source == MIXTURE) != bool(self.mixture):
            raise ValueError("mixture must have parts with source mixture, and only with it")
        names = [part.name for part in self.mixture]
        if len(set(names)) < len(names):
            raise ValueError(f"two parts of the mixture have one name: {', '.join(sorted(names))}")
        if self.source == MIXTURE and (self.include or self.exclude):
            raise ValueError("include and exclude belong to the parts of a mixture")
        return self


class SandboxKind(StrEnum):
    """What keeps an agent's commands away from the machine."""

    BUBBLEWRAP = "bubblewrap"
    DOCKER = "docker"
    PODMAN = "podman"
    PROCESS = "process"


class HarnessConfig(Section):
    """The agent program that works on a problem."""

    name: str = setting(
        "loop",
        "Name of the harness: loop, or a client that `gyre harness list` shows.",
        min_length=1,
        max_length=64,
    )
    version: str | None = setting(
        None,
        "Version of a client, of those that `gyre harness list` shows; none takes the first.",
        max_length=64,
    )
    folder: str | None = setting(
        None,
        "Where clients are installed; none takes the user's folder of caches.",
        max_length=4096,
    )
    turns: int = setting(8, "Most model calls of the main agent.", unit="calls", ge=1, le=10_000)
    sub_agent_turns: int = setting(
        5, "Most model calls of one sub-agent.", unit="calls", ge=1, le=10_000
    )
    sub_agents: int = setting(2, "Most sub-agents of an execution.", unit="agents", ge=0, le=1000)
    context_budget: int = setting(
        175,
        "Prompt and output tokens after which the agent compacts its history.",
        unit="tokens",
        ge=32,
        le=1_048_576,
    )
    max_tokens: int = setting(150, "Most tokens of one reply.", unit="tokens", ge=1, le=262_144)
    tool_timeout_s: float = setting(
        10, "Longest time of one command in the workspace.", unit="seconds", ge=0.1, le=86_400
    )

    _absolute = field_validator("folder")(absolute_path)


class ClockKind(StrEnum):
    """Which time counts towards an execution's limit."""

    WORK = "work"
    WALL = "wall"


class RolloutConfig(Section):
    """How executions are run."""

    queries: int = setting(24, "Problems of a step.", unit="queries", ge=1, le=100_000)
    group_size: int = setting(8, "Executions of one problem.", unit="executions", ge=2, le=1024)
    limit_s: float = setting(60, "Time limit of an execution.", unit="seconds", ge=0.5, le=604_800)
    clock: ClockKind = setting(
        ClockKind.WORK, "work leaves out time spent waiting in the gateway; wall counts all."
    )
    kill_after_s: float = setting(
        2, "Time between SIGTERM and SIGKILL.", unit="seconds", ge=0, le=600
    )
    group_limit_s: float | None = setting(
        None,
        "Time limit of a whole group, wall time from its first start, anew when a run is resumed: "
        "what still runs then ends as at its own limit. None leaves it to the executions' limits.",
        unit="seconds",
        ge=0.5,
        le=2_592_000,
    )
    replace_excluded: int = setting(
        0,
        "How often a step starts an execution again that failed on our side, beyond what its host "
        "tried by itself (retries).",
        unit="starts",
        ge=0,
        le=20,
    )
    concurrent: int = setting(
        64, "Most harness processes at once.", unit="processes", ge=1, le=100_000
    )
    temperature: float = setting(
        1.0, "Sampling temperature of training rollouts.", unit="1", gt=0, le=10
    )
    sandbox: SandboxKind = setting(
        SandboxKind.BUBBLEWRAP,
        "bubblewrap isolates by namespaces, docker and podman by containers; process does not "
        "isolate.",
    )
    image: str = setting("", "Image of the containers of docker and podman.", max_length=512)
    memory_mb: int = setting(
        4096,
        "Memory of an execution, files in memory included. Without control groups: address space "
        "of each of its processes.",
        unit="MB",
        ge=64,
        le=16_777_216,
    )
    processes: int = setting(
        256,
        "Most processes and threads of an execution at once.",
        unit="processes",
        ge=4,
        le=1_000_000,
    )
    cores: float = setting(
        0, "Most processors that an execution uses at once; 0 for any.", unit="cores", ge=0, le=4096
    )
    disk_mb: float = setting(
        64,
        "Size of an execution's workspace, and of each of its temporary folders, in memory. Also "
        "the largest file.",
        unit="MB",
        ge=1,
        le=16_777_216,
    )
    turn_limit_s: float = setting(
        3600,
        "Longest time that an agent works between two model calls.",
        unit="seconds",
        ge=0.5,
        le=604_800,
    )
    retries: int = setting(
        1,
        "How often an execution that failed on our side is tried again.",
        unit="retries",
        ge=0,
        le=20,
    )
    retry_delay_s: float = setting(
        1.0, "First wait before that; it doubles.", unit="seconds", ge=0, le=3600
    )
    workspace_limit_mb: float = setting(
        16, "Largest frozen workspace.", unit="MB", gt=0, le=1_000_000
    )


class ScoringConfig(Section):
    """How a frozen workspace becomes a verdict."""

    limit_s: float = setting(20, "Time limit of one evaluation.", unit="seconds", ge=0.1, le=86_400)
    memory_mb: int = setting(512, "Memory of one evaluation.", unit="MB", ge=64, le=1_000_000)
    retries: int = setting(
        2, "Retries of a failed evaluator, with back-off.", unit="retries", ge=0, le=20
    )
    retry_delay_s: float = setting(
        1.0, "First wait before a retry; it doubles.", unit="seconds", ge=0, le=3600
    )
    parallel: int = setting(2, "Evaluations at once.", unit="processes", ge=1, le=1024)
    min_valid: int = setting(
        2,
        "A group with fewer executions that have a reward is dropped: nothing of it is trained.",
        unit="executions",
        ge=2,
        le=1024,
    )
    max_excluded_share: float = setting(
        0.25,
        "More excluded executions than this stop the step before its update.",
        unit="share",
        ge=0,
        le=1,
    )


class EvaluationConfig(Section):
    """The held-out evaluation."""

    problems: int = setting(48, "Held-out problems.", unit="problems", ge=1, le=100_000)
    samples: int = setting(2, "Executions of each.", unit="executions", ge=1, le=1024)
    seed: int = setting(1, "Seed of the held-out problems.", unit="1", ge=0, le=2**31 - 1)
    temperature: float = setting(1.0, "Sampling temperature.", unit="1", ge=0, le=10)
    before: bool = setting(True, "Evaluate the first policy before step 0.")
    every: int = setting(
        0, "Evaluate after every so many steps; 0 only at the end.", unit="steps", ge=0, le=100_000
    )
