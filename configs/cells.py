"""Cells and the processes around them: engines, replicas, gateway, storage, Prefect."""

from __future__ import annotations

from enum import StrEnum

from pydantic import model_validator

from configs.field import Section, setting
from configs.layout import LayoutConfig

LOOPBACK = "127.0.0.1"


class PolicyName(StrEnum):
    """Scheduler policies of the manager."""

    COLOCATE = "colocate"
    ELASTIC = "elastic"
    ASYNC = "async"
    ADAPTIVE = "adaptive"


class Device(StrEnum):
    """What engines and replicas run on."""

    CPU = "cpu"
    CUDA = "cuda"


class WeightsBy(StrEnum):
    """How weights pass from a cell's replica to its engine."""

    TENSORS = "tensors"
    FILES = "files"


class CellConfig(Section):
    """One block of processors."""

    name: str = setting(..., "Name of the cell.", pattern=r"^[a-z][a-z0-9-]{0,31}$")
    cpus: tuple[int, ...] = setting(
        (), "CPU cores that its processes are pinned to; empty does not pin.", unit="core numbers"
    )
    core: bool = setting(
        False, "This cell holds the authoritative weights and the optimizer state."
    )
    address: str = setting(
        LOOPBACK,
        "Address of its machine, at which the run's other processes reach the cell.",
        min_length=1,
        max_length=255,
    )
    elsewhere: bool = setting(
        False,
        "Its host is started with gyre host, on the machine of address; the run waits for it. "
        "Otherwise the flow starts it where the flow runs.",
    )

    nodes: tuple[str, ...] = setting(
        (),
        "Addresses of further machines that the cell spans: the ranks of cells.layout are shared "
        "out evenly over them and that of address, in order. gyre host RUN CELL --node N runs on "
        "the Nth of these.",
        max_length=1024,
    )

    @property
    def machines(self) -> int:
        """How many the cell spans."""
        return 1 + len(self.nodes)


class ElasticConfig(Section):
    """When cells.policy=elastic moves a cell."""

    min_gain: float = setting(
        1.0,
        "Seconds of training that a satellite must save for each second that its switches and its "
        "pull of weights cost.",
        unit="1",
        ge=0,
        le=1e6,
    )
    dwell_s: float = setting(
        0.0, "Shortest time in a role before a cell leaves it.", unit="seconds", ge=0, le=86_400
    )
    headroom: float = setting(
        0.0,
        "Share of the live work that the cells that stay must have room for beyond it.",
        unit="share",
        ge=0,
        le=10,
    )


class AdaptiveConfig(Section):
    """When cells.policy=adaptive carries groups over. dwell_s and headroom are those of elastic."""

    min_gain: float = setting(
        0.03,
        "Share of the time of an update in bursts that carrying groups over has to save by what "
        "the run has measured.",
        unit="share",
        ge=0,
        lt=1,
    )
    always: bool = setting(
        False, "Carry groups over from the first update on, whatever is measured."
    )


class CellsConfig(Section):
    """The cells of a run."""

    policy: PolicyName = setting(
        PolicyName.COLOCATE,
        "colocate: all cells serve, then all train. elastic: cells leave rollout one after another "
        "as soon as the others can serve what still lives, train what is sealed, and come back. "
        "async: training_cells train, the others serve the next step's batch meanwhile. "
        "adaptive: elastic, until the workload is known; then, where it pays, groups that still "
        "run when their step is trained go on under newer weights and are trained in the next.",
    )
    training_cells: int = setting(
        1, "Cells that train under cells.policy=async, the core first.", unit="cells", ge=1, le=255
    )
    elastic: ElasticConfig = setting(ElasticConfig(), "The policy elastic.")
    adaptive: AdaptiveConfig = setting(AdaptiveConfig(), "The policy adaptive.")
    device: Device = setting(Device.CPU, "cuda was not run on a GPU yet.")
    cells: tuple[CellConfig, ...] = setting(
        (CellConfig(name="a", cpus=(0,), core=True), CellConfig(name="b", cpus=(1,))),
        "The cells; exactly one is the core.",
        min_length=1,
        max_length=256,
    )
    layout: LayoutConfig = setting(
        LayoutConfig(), "How the replica of each cell is spread over processes."
    )
    executions_per_cell: int | None = setting(
        32,
        "Most live executions of a cell; further ones wait. None derives it from the tokens of its "
        "KV cache and the mean context of the executions that run.",
        unit="executions",
        ge=1,
        le=65_536,
    )
    kv_tokens: int = setting(
        32_768, "Tokens of a cell's KV cache.", unit="tokens", ge=1024, le=1_073_741_824
    )
    kv_pool: bool = setting(
        False,
        "Engines share the KV pages of what they computed, by weight version, through a Mooncake "
        "store in memory that belongs to none of them: a session that moves to another cell finds "
        "its prefix there, in pages of 16 tokens. Without it, it is computed anew.",
    )
    kv_pool_gb: float = setting(
        2,
        "Memory of that store; when it is full, pages that were long not used go.",
        unit="GB",
        ge=0.05,
        le=1e6,
    )
    kv_backup_limit_s: float = setting(
        5,
        "With kv_pool: longest time that executions whose cell leaves wait until what it computed "
        "is in that store; then they go on elsewhere without the rest.",
        unit="seconds",
        ge=0,
        le=600,
    )
    release_memory: bool = setting(
        False,
        "An engine gives the memory of its weights and KV cache back while its cell trains; needed "
        "where engine and replica do not fit side by side. Frees nothing on a CPU.",
    )
    weights: WeightsBy = setting(
        WeightsBy.FILES,
        "How an engine gets its replica's weights. tensors: in shared memory, some at a time, and "
        "by files where that is refused. files: an HF directory, in memory where there is room.",
    )
    weights_bucket_mb: float = setting(
        512,
        "Tensors that are in shared memory at once with weights=tensors, or one if it is larger.",
        unit="MB",
        ge=0.001,
        le=1e6,
    )
    decide_every_s: float = setting(
        0.5, "Time between two decisions of the manager.", unit="seconds", ge=0.05, le=600
    )
    switch_limit_s: float = setting(
        120, "Longest time of a role switch.", unit="seconds", ge=1, le=3600
    )
    start_limit_s: float = setting(
        300, "Longest start of an engine or a replica.", unit="seconds", ge=10, le=7200
    )
    progress_limit_s: float = setting(
        3600,
        "A step or an evaluation in which nothing moves for so long is ended with what each part "
        "waits for: no token is sampled, and no execution, evaluation, micro-step or switch ends. "
        "To be longer than the longest tool call of a harness.",
        unit="seconds",
        ge=1,
        le=604_800,
    )
    lease_s: float = setting(
        120,
        "A daemon whose lease nobody renews for this long ends itself.",
        unit="seconds",
        ge=5,
        le=86_400,
    )

    @model_validator(mode="after")
    def _one_core(self) -> CellsConfig:
        names = [cell.name for cell in self.cells]
        if len(set(names)) != len(names):
            raise ValueError(f"cell names must differ: {', '.join(names)}")
        cores = [cell.name for cell in self.cells if cell.core]
        if len(cores) != 1:
            raise ValueError(f"exactly one cell must be the core, got {cores or 'none'}")
        away = [cell.name for cell in self.cells if cell.address != LOOPBACK]
        if away and len(away) < len(self.cells):
            raise ValueError(
                f"cells {', '.join(away)} have an address, the others {LOOPBACK}, at which cells "
                f"of other machines can't read their weights: give every cell an address"
            )
        for cell in self.cells:
            if self.layout.ranks % cell.machines:
                raise ValueError(
                    f"cell {cell.name} spans {cell.machines} machines, which can't share out the "
                    f"{self.layout.ranks} ranks of cells.layout evenly"
                )
            if cell.nodes and cell.address == LOOPBACK:
                raise ValueError(
                    f"cell {cell.name} spans several machines: give it the address of its first one"
                )
        if self.policy is PolicyName.ASYNC and self.training_cells >= len(self.cells):
            raise ValueError(
                f"policy async with training_cells={self.training_cells} leaves none of the "
                f"{len(self.cells)} cells to serve rollouts"
            )
        return self


class GatewayConfig(Section):
    """The proxy between harnesses and engines."""

    host: str = setting(LOOPBACK, "Address that it listens on.", min_length=1, max_length=255)
    port: int = setting(0, "Port; 0 takes a free one.", unit="port", ge=0, le=65_535)
    body_limit_mb: float = setting(32, "Largest request body.", unit="MB", gt=0, le=4096)
    call_limit_s: float = setting(
        600, "Longest time of a model call, waiting included.", unit="seconds", ge=1, le=604_800
    )
    calls_per_execution: int = setting(
        8, "Most concurrent calls of an execution.", unit="calls", ge=1, le=1024
    )
    processes: int = setting(
        1,
        "Processes that share the executions, each with its own core. With a port they take it and "
        "those after it.",
        unit="processes",
        ge=1,
        le=64,
    )
    calls: int = setting(
        4096, "Most concurrent calls of one gateway process.", unit="calls", ge=1, le=1_048_576
    )
    key_life_s: float = setting(
        259_200,
        "Time after which an execution's key is refused, since the execution was opened, or opened "
        "again by a later attempt. It dies with its execution anyway; above the longest execution, "
        "waiting included.",
        unit="seconds",
        gt=0,
        le=31_536_000,
    )
    header_limit_kb: float = setting(
        32, "Largest headers of a request, all together.", unit="kB", gt=0, le=60
    )


class StorageConfig(Section):
    """Where the truth of a run is kept."""

    root: str = setting(
        ".gyre", "Folder or fsspec URL of runs and policies.", min_length=1, max_length=4096
    )
    keep_runs: int | None = setting(
        None,
        "Newest runs that `gyre gc` keeps, deleting the others; none deletes none for that.",
        unit="runs",
        ge=0,
        le=1_000_000,
    )
    keep_days: float | None = setting(
        None,
        "Age at which `gyre gc` deletes a run that did not change; none deletes none for that. "
        "With keep_runs only those that both name.",
        unit="days",
        ge=0,
        le=36_500,
    )
    max_gb: float | None = setting(
        None,
        "Quota of runs and policies that `gyre gc` brings them down to; none is no quota.",
        unit="GB",
        ge=0,
        le=1e9,
    )


class PrefectConfig(Section):
    """The orchestration server."""

    port: int = setting(
        4200, "Port of a server that `gyre train` starts.", unit="port", ge=1, le=65_535
    )
    work_pool: str = setting(
        "gyre", "Work pool of the deployments.", pattern=r"^[a-zA-Z0-9][a-zA-Z0-9_-]{0,63}$"
    )
    start_limit_s: float = setting(
        180, "Longest start of the server.", unit="seconds", ge=5, le=3600
    )


class DebugConfig(Section):
    """Switches for experiments; never for a real run."""

    permute_rewards: bool = setting(
        False, "Permute the rewards of each group before advantages: nothing should be learned."
    )
    evaluator_failure_share: float = setting(
        0.0, "Share of evaluations that fail at random.", unit="share", ge=0, le=1
    )
