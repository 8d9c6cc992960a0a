"""Weights from a replica to its engine in shared memory, and what happens where that is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cells.host.handover import VersionAbsentError
from cells.host.roles import HostRole
from cells.replica.client import ReplicaRefusedError
from cells.serving.engine import EngineRefusedError
from tests.cells.host.fakes import FakeCell

BY_TENSORS = [
    "replica share",
    "engine begin",
    "engine take bucket 0",
    "replica share",
    "engine take bucket 1",
    "replica unshare",
]


@pytest.fixture
async def fake(tmp_path: Path) -> AsyncIterator[FakeCell]:
    """A cell in training whose core has made version 1."""
    (tmp_path / "model.safetensors").write_bytes(b"first weights")
    made = FakeCell(tmp_path, bucket_bytes=100)
    await made.cell.start()
    await made.cell.change_role(1, HostRole.TRAINING, None)
    await made.cell.command(1, "step", {})
    made.take()
    yield made


async def test_the_engine_takes_bucket_after_bucket(fake: FakeCell) -> None:
    await fake.cell.change_role(1, HostRole.ROLLOUT, 1)
    assert fake.take() == [*BY_TENSORS, "replica sleep"]
    assert fake.cell.engine_version == fake.engine.served == 1
    assert not list(fake.exports.folder.glob("v*"))


@pytest.mark.parametrize("where", ["begin", "take bucket 0", "take bucket 1"])
async def test_what_the_engine_refuses_goes_by_files(fake: FakeCell, where: str) -> None:
    fake.engine.refuse[where] = EngineRefusedError("no")
    await fake.cell.change_role(1, HostRole.ROLLOUT, 1)
    assert fake.take()[-3:] == ["replica export", "engine update", "replica sleep"]
    assert (fake.cell.engine_version, fake.cell.roles.role) == (1, HostRole.ROLLOUT)


async def test_what_the_replica_refuses_goes_by_files(fake: FakeCell) -> None:
    fake.replica.refuse["share"] = ReplicaRefusedError("share", "ReplicaError", "no memory")
    await fake.cell.change_role(1, HostRole.ROLLOUT, 1)
    assert fake.take() == [
        "replica share",
        "replica unshare",
        "replica export",
        "engine update",
        "replica sleep",
    ]


async def test_half_new_weights_never_count_as_the_old_ones(fake: FakeCell) -> None:
    await fake.cell.change_role(1, HostRole.ROLLOUT, 1)
    await fake.cell.change_role(1, HostRole.TRAINING, None)
    await fake.cell.command(1, "step", {})
    fake.engine.refuse["take bucket 1"] = EngineRefusedError("no")
    fake.engine.refuse["update"] = EngineRefusedError("not that way either")
    with pytest.raises(EngineRefusedError):
        await fake.cell.change_role(1, HostRole.ROLLOUT, 2)
    assert fake.cell.roles.role is HostRole.TRAINING
    with pytest.raises(VersionAbsentError, match="the engine has lost version 1"):
        await fake.cell.change_role(1, HostRole.ROLLOUT, 1)
    await fake.cell.change_role(1, HostRole.ROLLOUT, 2)
    assert fake.cell.engine_version == 2


async def test_the_first_weights_come_back_from_their_files(fake: FakeCell) -> None:
    fake.engine.refuse["take bucket 1"] = EngineRefusedError("no")
    fake.engine.refuse["update"] = EngineRefusedError("not that way either")
    with pytest.raises(EngineRefusedError):
        await fake.cell.change_role(1, HostRole.ROLLOUT, 1)
    fake.take()
    await fake.cell.change_role(1, HostRole.ROLLOUT, 0)
    assert fake.take() == ["engine update", "replica sleep"]


async def test_a_version_that_the_replica_lacks_leaves_the_engine_alone(fake: FakeCell) -> None:
    with pytest.raises(VersionAbsentError, match="serve version 7, the replica holds 1"):
        await fake.cell.change_role(1, HostRole.ROLLOUT, 7)
    assert "engine begin" not in fake.take()


async def test_memory_is_given_back_when_the_weights_can_be_had_again(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"first weights")
    fake = FakeCell(tmp_path, bucket_bytes=100, release_memory=True)
    await fake.cell.start()
    await fake.cell.change_role(1, HostRole.TRAINING, None)
    assert "replica export" not in fake.take(), "the first ones are in files"
    await fake.cell.command(1, "step", {})
    await fake.cell.change_role(1, HostRole.ROLLOUT, 1)
    fake.take()
    await fake.cell.change_role(1, HostRole.TRAINING, None)
    assert fake.take() == [
        "engine drain",
        "engine settle",
        "replica export",
        "engine release",
        "replica wake",
    ]
    await fake.cell.change_role(1, HostRole.ROLLOUT, 1)
    assert fake.take() == ["engine resume", "engine update", "replica sleep"]
