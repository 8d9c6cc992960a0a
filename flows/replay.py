"""Sealed samples to weights once more: what the ledgers tell, in their order.

A replay starts from stored weights and repeats every micro-step and every step with the figures of
the first time. What the run's satellites had summed on their own before it was added at the core is
summed by a second replica, so that the same sums come in the same order: on the machine of the run
a replay gives its bits.
"""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from cells.checkpoint import Checkpoint, checkpoint_versions, verified_checkpoint
from cells.host.replica import ReplicaProcess, replica_settings
from configs.training import RatioReference
from storage.copies import local_copy
from storage.journal import read_journal
from storage.records import decode
from storage.run import Run
from tasks.training.anchors import Anchor, anchors_of
from tasks.training.events import (
    Accumulated,
    Event,
    Formed,
    LedgerLine,
    MicroStep,
    Opened,
    Reduced,
    Restarted,
    Returned,
    Stepped,
    Stepping,
)
from tasks.warm_start.policies import first_policy


class ReplayError(RuntimeError):
    """The run can't be replayed; the text says what is missing or differs."""


@dataclass(frozen=True)
class Share:
    """Micro-steps that came into the core's gradient together, in order."""

    satellite: bool
    """Summed by a satellite first; otherwise it is one micro-step of the core's own."""
    micro_steps: tuple[MicroStep, ...]


@dataclass(frozen=True)
class TrainedUpdate:
    """An update that changed the weights, or was skipped for its gradient."""

    step: int
    update: int
    before: int
    """Version that it was trained on."""
    version: int
    executions: int
    learning_rate: float
    shares: tuple[Share, ...]
    """In the order in which their gradients came to the core."""
    started_at: int
    """Version at the start of the step."""

    @property
    def micro_steps(self) -> tuple[MicroStep, ...]:
        """Those of all shares."""
        return tuple(one for share in self.shares for one in share.micro_steps)


@dataclass(frozen=True)
class Difference:
    """Replayed weights against those of the run."""

    share: float
    """L2 norm of the difference over that of the run's change since the start of the replay."""
    largest: float
    identical: bool
    """Bit for bit."""


@dataclass(frozen=True)
class Replayed:
    """What came out."""

    start: int
    version: int
    updates: int
    micro_steps: int
    digest: str
    """sha256 of the weights' files."""
    difference: Difference | None
    """None where the run has no checkpoint of that version any more."""


def trained_updates(run: Run) -> list[TrainedUpdate]:
    """All updates of a run that have ended and had samples, in order.

    Raises:
        RecordError: a ledger is damaged; `gyre fsck` tells what is wrong.
    """
    core = next(cell.name for cell in run.config.cells.cells if cell.core)
    found: list[TrainedUpdate] = []
    for step in range(run.config.training.steps):
        prefix = run.layout.ledger(step)
        lines = (decode(line, LedgerLine, prefix) for line in read_journal(run.store, prefix))
        found += _of_step(step, core, (line.event for line in lines))
    return found


def replay(
    run: Run, *, start: int = 0, end: int | None = None, say: Callable[[str], None]
) -> Replayed:
    """Train the updates between two versions again.

    Args:
        start: version of a checkpoint to restore, or 0 for the run's first policy.
        end: version to stop at; that of the newest checkpoint when left out.

    Raises:
        ReplayError: the run has no updates between the two, or one of them came out otherwise.
        CheckpointError: there is no whole checkpoint of ``start``.
        ReplicaCallError: the replica died, refused, or was too slow.
    """
    versions = checkpoint_versions(run)
    last = max(versions, default=0) if end is None else end
    updates = [one for one in trained_updates(run) if start <= one.before and one.version <= last]
    if not updates or updates[-1].version != last:
        there = updates[-1].version if updates else start
        raise ReplayError(f"run {run.run_id}: its ledgers go from version {start} to {there} only")
    restored = verified_checkpoint(run, start) if start else None
    with tempfile.TemporaryDirectory(prefix="gyre-replay-") as scratch:
        out = Path(scratch) / "weights"
        asyncio.run(_Replay(run, Path(scratch), restored, say).run(updates, out))
        first = _weights(run, restored)
        difference = None
        if last in versions:
            recorded = local_copy(run.store, verified_checkpoint(run, last).policy_key)
            difference = compare(first, recorded, out)
        return Replayed(
            start=start,
            version=last,
            updates=len(updates),
            micro_steps=sum(len(one.micro_steps) for one in updates),
            digest=digest_of(out),
            difference=difference,
        )


def compare(first: Path, recorded: Path, replayed: Path) -> Difference:
    """Three HF directories with the same tensors: before, after, and after the replay."""
    from safetensors import safe_open

    changed = differs = largest = 0.0
    places = [_places(folder) for folder in (first, recorded, replayed)]
    for name in sorted(places[2]):
        tensors = []
        for place in places:
            with safe_open(place[name], framework="pt") as file:
                tensors.append(file.get_tensor(name).double())
        before, after, again = tensors
        changed += float((after - before).square().sum())
        differs += float((after - again).square().sum())
        largest = max(largest, float((after - again).abs().max()))
    share = (differs / changed) ** 0.5 if changed else float(differs > 0)
    return Difference(share, largest, differs == 0.0)


class _Replay:
    """A replica in the place of the run's core, and one in that of its satellites."""

    def __init__(
        self, run: Run, scratch: Path, restored: Checkpoint | None, say: Callable[[str], None]
    ) -> None:
        self._run = run
        self._scratch = scratch
        self._restored = restored
        self._say = say
        self._satellite_version: int | None = None

    async def run(self, updates: list[TrainedUpdate], out: Path) -> None:
        """Replay ``updates`` and write the weights to ``out``."""
        shared = any(share.satellite for update in updates for share in update.shares)
        async with AsyncExitStack() as replicas:
            core = await self._start(replicas, core=True)
            satellite = await self._start(replicas, core=False) if shared else core
            if self._restored is not None:
                state = local_copy(self._run.store, self._restored.state_key)
                await self._move(core, "restore", state)
            step, anchors = -1, dict[str, Anchor]()
            for update in updates:
                if update.step != step:
                    step, anchors = update.step, await self._anchors(core, update)
                await self._train(core, satellite, update, anchors)
                self._say(f"step {update.step} update {update.update}: version {update.version}")
            await self._move(core, "export", out)

    async def _start(self, replicas: AsyncExitStack, *, core: bool) -> ReplicaProcess:
        config = self._run.config
        replica = await ReplicaProcess.start(
            replica_settings(
                config,
                root=self._run.store.url,
                cell=next(cell for cell in config.cells.cells if cell.core == core),
            ),
            policy=_weights(self._run, self._restored),
            version=self._restored.manifest.version if self._restored else 0,
            cpus=(),
            log=self._scratch / f"replica-{'core' if core else 'satellite'}.log",
            limit_s=config.cells.start_limit_s,
        )
        replicas.push_async_callback(replica.close)
        return replica

    async def _train(
        self,
        core: ReplicaProcess,
        satellite: ReplicaProcess,
        update: TrainedUpdate,
        anchors: Mapping[str, Anchor],
    ) -> None:
        training = self._run.config.training
        place = {"step": update.step, "update": update.update}
        for share in update.shares:
            replica = satellite if share.satellite else core
            if share.satellite:
                await self._join(core, satellite, update)
            for micro_step in share.micro_steps:
                await self._micro_step(replica, micro_step, place, anchors)
            if share.satellite:
                await self._reduce(core, satellite, place)
        figures = {"executions": update.executions, "learning_rate": update.learning_rate}
        answer = await core.call("step", {**place, **figures}, training.micro_step_limit_s)
        if answer["version"] != update.version:
            raise ReplayError(
                f"update {update.update} of step {update.step} ends with version "
                f"{answer['version']}, in the run with {update.version}"
            )

    async def _micro_step(
        self,
        replica: ReplicaProcess,
        micro_step: MicroStep,
        place: Mapping[str, int],
        anchors: Mapping[str, Anchor],
    ) -> None:
        samples = [
            {"group_key": self._run.layout.group(group), "index": index}
            for group, index in micro_step.samples
        ]
        args = {**place, "micro_step": micro_step.id, "samples": samples}
        if anchors:
            args["anchors"] = {name: anchor.argument() for name, anchor in anchors.items()}
        await replica.call("micro_step", args, self._run.config.training.micro_step_limit_s)

    async def _join(
        self, core: ReplicaProcess, satellite: ReplicaProcess, update: TrainedUpdate
    ) -> None:
        """Give the satellite the core's weights, where it has others."""
        if self._satellite_version == update.before:
            return
        limit_s = self._run.config.cells.switch_limit_s
        published = await core.call("publish", {}, limit_s)
        await satellite.call("pull", {"descriptor": published["descriptor"]}, limit_s)
        self._satellite_version = update.before

    async def _reduce(
        self, core: ReplicaProcess, satellite: ReplicaProcess, place: Mapping[str, int]
    ) -> None:
        """Add what the satellite has summed to the core's gradient, and empty its own."""
        limit_s = self._run.config.cells.switch_limit_s
        update = {"update": place["update"]}
        frozen = await satellite.call("freeze", update, limit_s)
        args = {
            **place,
            "descriptor": frozen["descriptor"],
            "micro_steps": frozen["micro_steps"],
        }
        await core.call("reduce", args, limit_s)
        await satellite.call("release", update, limit_s)

    async def _anchors(self, replica: ReplicaProcess, update: TrainedUpdate) -> dict[str, Anchor]:
        """As the run had them; the weights at the start of a step are still in the replica."""
        objective = self._run.config.training.objective
        proximal = objective.ratio is RatioReference.PROXIMAL
        if update.before != update.started_at or not (proximal or objective.kl):
            return anchors_of(self._run, update.started_at)
        found = anchors_of(self._run, 0) if objective.kl else {}
        if proximal:
            folder = self._scratch / f"start-{update.step}"
            await self._move(replica, "export", folder)
            found["proximal"] = Anchor(folder, update.started_at)
        return found

    async def _move(self, replica: ReplicaProcess, command: str, path: Path) -> None:
        limit_s = self._run.config.cells.switch_limit_s
        await replica.call(command, {"path": str(path)}, limit_s)


def _of_step(step: int, core: str, events: Iterator[Event]) -> Iterator[TrainedUpdate]:
    formed: dict[str, MicroStep] = {}
    own: dict[str, list[str]] = {}
    """Micro-steps that each satellite has summed and not brought to the core yet."""
    home: list[tuple[bool, tuple[str, ...]]] = []
    """What is in the core's gradient, in order: whether of a satellite, and its micro-steps."""
    stepping: Stepping | None = None
    ended: dict[int, TrainedUpdate] = {}
    version = started_at = 0
    for event in events:
        match event:
            case Opened():
                version = started_at = event.version
            case Formed():
                formed |= {one.id: one for one in event.micro_steps}
            case Accumulated() if event.replica == core:
                home.append((False, (event.micro_step,)))
            case Accumulated():
                own.setdefault(event.replica, []).append(event.micro_step)
            case Reduced() if event.replica in own:
                home.append((True, tuple(own.pop(event.replica))))
            case Returned():
                own.pop(event.replica, None)
            case Restarted():
                own.clear()
                home = [one for one in home if formed[one[1][0]].update != event.update]
                if event.update in ended:
                    version = ended.pop(event.update).before
            case Stepping():
                stepping = event
            case Stepped():
                its = [one for one in home if formed[one[1][0]].update == event.update]
                home = [one for one in home if one not in its]
                if its and stepping is not None:
                    ended[event.update] = TrainedUpdate(
                        step=step,
                        update=event.update,
                        before=version,
                        version=event.version,
                        executions=stepping.executions,
                        learning_rate=stepping.learning_rate,
                        shares=tuple(
                            Share(satellite, tuple(formed[name] for name in names))
                            for satellite, names in its
                        ),
                        started_at=started_at,
                    )
                version = event.version
    yield from (ended[update] for update in sorted(ended))


def _weights(run: Run, restored: Checkpoint | None) -> Path:
    if restored is not None:
        return local_copy(run.store, restored.policy_key)
    key = first_policy(run)
    if key is None:
        raise ReplayError(f"run {run.run_id}: the policy that it started from is gone")
    return local_copy(run.store, key)


def _places(folder: Path) -> dict[str, Path]:
    """The file of each tensor."""
    from safetensors import safe_open

    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found.update(dict.fromkeys(file.keys(), path))
    return found


def digest_of(folder: Path) -> str:
    """sha256 of the weights' files in an HF directory, in the order of their names."""
    found = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()
