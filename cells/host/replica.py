"""The replica of a cell: its process with a policy in it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Self

from cells.reason import exit_words, log_since, log_size, reason
from cells.replica.client import ReplicaClient
from cells.replica.settings import ReplicaSettings
from configs.cells import CellConfig
from configs.run import RunConfig
from configs.training import PackKind

OBJECTIVE_NAMES = "tasks.training.objectives:objective_path"
"""What turns the name of an objective into its import path. Losses live above the cells."""


def replica_settings(
    config: RunConfig, *, root: str, cell: CellConfig, meeting: str = ""
) -> ReplicaSettings:
    """What the replica of a run's cell is started with.

    Args:
        meeting: HOST:PORT where the ranks of the cell's further machines join, if it has some.

    Raises:
        ValueError: ``training.objective.name`` is not an objective.
    """
    training = config.training
    module, _, function = OBJECTIVE_NAMES.partition(":")
    return ReplicaSettings(
        root=root,
        layout=config.cells.layout,
        nodes=cell.machines,
        meeting=meeting,
        ranks_limit_s=training.micro_step_limit_s,
        core=cell.core,
        objective=getattr(import_module(module), function)(training.objective.name),
        objective_config=training.objective,
        beta1=training.beta1,
        beta2=training.beta2,
        weight_decay=training.weight_decay,
        share_prefixes=training.pack is PackKind.TREE,
        clip_norm=training.clip_norm,
        transfer_host=cell.address,
        transfer_limit_s=config.cells.switch_limit_s,
    )


class ReplicaProcess:
    """A replica that has loaded a policy. Make it with ``start``."""

    def __init__(self, client: ReplicaClient, log: Path, logged: int) -> None:
        self._client = client
        self._log = log
        self._logged = logged

    @classmethod
    async def start(
        cls,
        settings: ReplicaSettings,
        *,
        policy: Path,
        version: int,
        cpus: Sequence[int],
        log: Path,
        limit_s: float,
        ranks_token: str = "",
    ) -> Self:
        """Start the process and load the HF directory ``policy`` as ``version``.

        Args:
            ranks_token: secret that ranks of other machines join with, where there are some.

        Raises:
            ReplicaCallError: it ended, refused, or was too slow; nothing is left of it.
        """
        logged = log_size(log)
        client = await ReplicaClient.start(
            settings, log=log, limit_s=limit_s, cpus=cpus, ranks_token=ranks_token
        )
        try:
            await client.call("load", {"path": str(policy), "version": version}, limit_s)
        except BaseException:
            await client.close()
            raise
        return cls(client, log, logged)

    @property
    def pid(self) -> int:
        return self._client.pid

    def failure(self) -> str:
        """How the process ended and why, from its log; empty while it lives."""
        if self._client.alive:
            return ""
        code = self._client.process.poll()
        ended = "closed its socket" if code is None else exit_words(code)
        why = reason(log_since(self._log, self._logged))
        return f"the replica {ended}: {why}\nlog: {self._log}"

    async def call(self, command: str, args: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """See ``ReplicaClient.call``."""
        return await self._client.call(command, args, limit_s)

    async def close(self) -> None:
        """End the process."""
        await self._client.close()
