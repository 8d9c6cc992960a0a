"""Stand-ins inside a cell host: an engine that babbles, and a replica that only counts.

All else of such a run is real: Prefect, flows, gateway, harnesses, scores, cell host, ledger.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Self

import orjson

from cells.host import replica as host_replica
from cells.host.cell import TRAINING_COMMANDS
from cells.replica.settings import ReplicaSettings
from cells.serving import process as serving
from cells.serving.engine import Bucket
from cells.serving.flags import EngineSettings
from cells.tls import Tls
from storage.objects import Store
from storage.samples import read_group
from tests.engines.scripted import Script, ScriptedEngine

_PLAIN_IDS = range(20, 200)
_REPLY_TOKENS = 8
_STATE = "state.json"
_POLL_S = 0.05
_PACE_S = 0.1
"""Of each reply and each command of training, so that a test can meet a run in the middle of it."""


class _Babble(Script):
    """A short reply of plain ids that depends on the prompt, ended by the end token."""

    def __init__(self, end: int) -> None:
        super().__init__()
        self._end = end

    def rest(self, prompt: list[int]) -> list[int]:
        drawn = random.Random(bytes(orjson.dumps(prompt)))
        return [*drawn.choices(_PLAIN_IDS, k=_REPLY_TOKENS), self._end]


class _Engine(ScriptedEngine):
    """Answers while no file named by GYRE_TEST_HOLD exists."""

    async def _generate(self, request: Any) -> Any:
        # The test that holds it is another process.
        while os.path.exists(os.environ["GYRE_TEST_HOLD"]):  # noqa: ASYNC110, ASYNC240
            await asyncio.sleep(_POLL_S)
        await asyncio.sleep(_PACE_S)
        return await super()._generate(request)


class LightEngine:
    """As ``cells.serving.process.EngineProcess``, inside this process."""

    def __init__(
        self, settings: EngineSettings, *, cpus: Sequence[int], log: Path, tls: Tls | None = None
    ) -> None:
        config = orjson.loads((settings.policy / "config.json").read_bytes())
        self.pid = os.getpid()
        self.token = settings.admin_key
        self.token_capacity = settings.kv_tokens
        self._engine = _Engine(_Babble(int(config["eos_token_id"])), version=settings.version)

    @property
    def url(self) -> str:
        return self._engine.url

    async def wait_ready(self, limit_s: float) -> None:
        await self._engine.start()

    def failure(self) -> str:
        return ""

    async def version(self) -> int:
        return self._engine.version

    async def answers(self, limit_s: float) -> None:
        """Always."""

    async def drain(self, limit_s: float) -> None:
        """The gateway has sent everything elsewhere before."""

    async def settle(self, limit_s: float) -> bool:
        return True

    async def update_weights(self, path: Path, version: int, limit_s: float) -> None:
        assert (path / "model.safetensors").exists()
        self._engine.version = version

    async def load_tensors(
        self, buckets: AsyncIterator[Bucket], version: int, limit_s: float
    ) -> None:
        assert [bucket.last async for bucket in buckets] == [True]
        self._engine.version = version

    async def close(self) -> None:
        await self._engine.stop()


class LightReplica:
    """As ``cells.host.replica.ReplicaProcess``: weights are their version, nothing else."""

    def __init__(self, root: str, policy: Path, version: int) -> None:
        self.pid = os.getpid()
        self._store = Store(root)
        self._policy = policy
        self._version = version
        self._micro_steps: list[str] = []
        self._last_step: dict[str, Any] | None = None

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
        return cls(settings.root, policy, version)

    def failure(self) -> str:
        return ""

    async def call(self, command: str, args: dict[str, Any], limit_s: float) -> dict[str, Any]:
        if command in TRAINING_COMMANDS:
            await asyncio.sleep(_PACE_S)
        answer: dict[str, Any] | None = getattr(self, f"_{command}", lambda **_: None)(**args)
        return {"version": self._version, **(answer or {})}

    async def close(self) -> None:
        """Nothing is left of it but what was saved."""

    def _status(self) -> dict[str, Any]:
        return {"micro_steps": self._micro_steps, "last_step": self._last_step}

    def _discard(self) -> None:
        self._micro_steps = []

    def _micro_step(
        self, step: int, update: int, micro_step: str, samples: list[dict[str, Any]]
    ) -> dict[str, Any]:
        targets = 0
        for row in samples:
            group = read_group(self._store, row["group_key"])
            targets += int(group.samples[row["index"]].targets.sum())
        self._micro_steps = [*self._micro_steps, micro_step]
        return {
            "micro_step": micro_step,
            "samples": len(samples),
            "target_tokens": targets,
            "tokens": targets,
            "seconds": 0.0,
            "stats": {"clipped_sum": 0.0, "logprob_gap_sum": 0.0, "logprob_gap_max": 0.0},
        }

    def _step(
        self, step: int, update: int, executions: int, learning_rate: float
    ) -> dict[str, Any]:
        self._version += 1
        self._micro_steps = []
        self._last_step = {"version": self._version, "grad_norm": 1.0, "skipped": False}
        return self._last_step

    def _freeze(self, update: int) -> dict[str, Any]:
        return {"descriptor": {"nbytes": 0}, "micro_steps": self._micro_steps}

    def _reduce(
        self, step: int, update: int, descriptor: dict[str, Any], micro_steps: list[str]
    ) -> dict[str, Any]:
        new = [name for name in micro_steps if name not in self._micro_steps]
        self._micro_steps = [*self._micro_steps, *new]
        return {"bytes": 0}

    def _release(self, update: int) -> None:
        self._micro_steps = []

    def _publish(self) -> dict[str, Any]:
        return {"descriptor": {"version": self._version, "nbytes": 0}}

    def _pull(self, descriptor: dict[str, Any]) -> dict[str, Any]:
        self._version = descriptor["version"]
        return {"version": self._version, "bytes": 0, "seconds": 0.0}

    def _share(self, first: int, limit_bytes: int) -> dict[str, Any]:
        return {"next": None, "payload": ""}

    def _export(self, path: str) -> None:
        shutil.copytree(self._policy, path, dirs_exist_ok=True)

    def _save(self, path: str) -> None:
        Path(path).mkdir(parents=True)
        (Path(path) / _STATE).write_bytes(orjson.dumps(self._version))

    def _restore(self, path: str) -> None:
        self._version = int(orjson.loads((Path(path) / _STATE).read_bytes()))
        self._micro_steps = []


def replace() -> None:
    """Put the stand-ins in the place of what a cell host would start."""
    serving.EngineProcess = LightEngine  # type: ignore[misc, assignment]
    host_replica.ReplicaProcess = LightReplica  # type: ignore[misc, assignment]
