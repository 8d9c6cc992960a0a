"""A cell on fake processes: order of what is done, refusals, deaths, epochs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cells.daemon import StaleEpochError
from cells.host import cell as cell_module
from cells.host.cell import SwitchLateError, UnknownCommandError
from cells.host.handover import VersionAbsentError
from cells.host.roles import HostRole, WrongRoleError
from cells.replica.client import ReplicaRefusedError
from cells.serving.engine import EngineGoneError, EngineLateError, EngineRefusedError
from tests.cells.host.fakes import FakeCell

ROLLOUT, TRAINING = HostRole.ROLLOUT, HostRole.TRAINING


@pytest.fixture
async def fake(tmp_path: Path) -> FakeCell:
    fake = FakeCell(tmp_path)
    await fake.cell.start()
    fake.take()
    return fake


async def test_starts_in_rollout_with_the_replica_asleep(tmp_path: Path) -> None:
    fake = FakeCell(tmp_path)
    assert fake.cell.roles.role is HostRole.STARTING
    await fake.cell.start()
    assert fake.cell.roles.role is ROLLOUT
    assert fake.take() == ["replica sleep"]


async def test_there_and_back(fake: FakeCell) -> None:
    await fake.cell.change_role(1, TRAINING, None)
    assert fake.cell.roles.role is TRAINING
    assert fake.take() == ["engine drain", "engine settle", "replica wake"]
    await fake.cell.command(1, "step", {})
    assert fake.cell.replica_version == 1
    fake.take()
    await fake.cell.change_role(1, ROLLOUT, 1)
    assert fake.take() == ["replica export", "engine update", "replica sleep"]
    assert (fake.cell.roles.role, fake.cell.engine_version) == (ROLLOUT, 1)
    assert [(switch.to, set(switch.parts)) for switch in fake.cell.roles.switches] == [
        (TRAINING, {"drain", "backup", "memory", "replica"}),
        (ROLLOUT, {"memory", "weights", "replica"}),
    ]
    assert [path.name for path in fake.exports.folder.glob("v*")] == ["v1"]


async def test_memory_is_given_back_and_the_weights_are_loaded_again(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"first weights")
    fake = FakeCell(tmp_path, release_memory=True)
    await fake.cell.start()
    fake.take()
    await fake.cell.change_role(1, TRAINING, None)
    assert fake.take() == ["engine drain", "engine settle", "engine release", "replica wake"]
    await fake.cell.change_role(1, ROLLOUT, 0)
    assert fake.take() == ["engine resume", "engine update", "replica sleep"], "of the same version"
    await fake.cell.change_role(1, TRAINING, None)
    await fake.cell.command(1, "step", {})
    fake.take()
    await fake.cell.change_role(1, ROLLOUT, 1)
    assert fake.take() == ["engine resume", "replica export", "engine update", "replica sleep"]


async def test_memory_after_a_refused_switch(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"first weights")
    fake = FakeCell(tmp_path, release_memory=True)
    await fake.cell.start()
    fake.replica.refuse["wake"] = ReplicaRefusedError("wake", "Error", "no")
    fake.take()
    with pytest.raises(ReplicaRefusedError):
        await fake.cell.change_role(1, TRAINING, None)
    assert fake.take()[4:] == ["engine version", "engine resume", "engine update", "replica sleep"]
    await fake.cell.change_role(1, TRAINING, None)
    fake.engine.refuse["update"] = EngineRefusedError("bad weights")
    fake.take()
    with pytest.raises(EngineRefusedError):
        await fake.cell.change_role(1, ROLLOUT, 0)
    assert fake.take()[2:] == ["engine version", "engine release", "replica wake"]
    await fake.cell.change_role(1, ROLLOUT, 0)
    assert fake.take() == ["engine resume", "engine update", "replica sleep"]


async def test_nothing_is_done_twice(fake: FakeCell) -> None:
    await fake.cell.change_role(1, ROLLOUT, 0)
    await fake.cell.set_version(1, 0)
    await fake.cell.change_role(1, TRAINING, None)
    fake.take()
    await fake.cell.change_role(1, TRAINING, None)
    assert fake.take() == []
    await fake.cell.change_role(1, ROLLOUT, 0)
    assert fake.take() == ["replica sleep"], "the engine has these weights: no export"


async def test_a_new_version_in_role_rollout(fake: FakeCell) -> None:
    await fake.cell.command(1, "pull", {"descriptor": {"version": 4}})
    await fake.cell.change_role(1, ROLLOUT, 4)
    assert fake.cell.engine_version == 4
    assert (fake.cell.moved.reads, fake.cell.moved.read_bytes) == (1, 1000)
    await fake.cell.command(1, "pull", {"descriptor": {"version": 5}})
    await fake.cell.set_version(1, 5)
    assert fake.cell.engine_version == 5
    assert [path.name for path in fake.exports.folder.glob("v*")] == ["v5"], (
        "older ones are removed"
    )


async def test_a_version_that_the_replica_lacks_is_refused(fake: FakeCell) -> None:
    await fake.cell.change_role(1, TRAINING, None)
    with pytest.raises(VersionAbsentError, match=r"serve version 3, the replica holds 0"):
        await fake.cell.change_role(1, ROLLOUT, 3)
    assert fake.cell.roles.role is TRAINING
    assert fake.said[-1] == "replica wake", "it trains on"
    assert "VersionAbsent" not in fake.cell.roles.detail
    assert "version 3" in fake.cell.roles.detail


async def test_training_commands_need_the_role(fake: FakeCell) -> None:
    for command in ("micro_step", "freeze", "reduce", "step"):
        with pytest.raises(WrongRoleError, match=f"{command} needs role training"):
            await fake.cell.command(1, command, {})
    for command in ("sleep", "wake", "exec"):
        with pytest.raises(UnknownCommandError):
            await fake.cell.command(1, command, {})
    assert fake.take() == []
    assert await fake.cell.command(1, "status", {}) == {"said": "status", "version": 0}


@pytest.mark.parametrize("target", [ROLLOUT, TRAINING])
async def test_a_refused_switch_ends_where_it_began(fake: FakeCell, target: HostRole) -> None:
    if target is ROLLOUT:
        await fake.cell.change_role(1, TRAINING, None)
        await fake.cell.command(1, "step", {})
        fake.engine.refuse["update"] = EngineRefusedError("bad weights")
    else:
        fake.engine.refuse["drain"] = EngineLateError("no answer")
    before = fake.cell.roles.role
    with pytest.raises((EngineRefusedError, EngineLateError)):
        await fake.cell.change_role(1, target, 1 if target is ROLLOUT else None)
    assert fake.cell.roles.role is before
    assert fake.cell.engine_version == 0
    await fake.cell.change_role(1, target, 1 if target is ROLLOUT else None)
    assert fake.cell.roles.role is target


async def test_a_late_update_that_took_effect_is_noticed(fake: FakeCell) -> None:
    await fake.cell.command(1, "pull", {"descriptor": {"version": 2}})
    fake.engine.refuse["update"] = EngineLateError("no answer")
    fake.engine.served = 2
    with pytest.raises(EngineLateError):
        await fake.cell.set_version(1, 2)
    assert fake.cell.engine_version == 2


async def test_a_switch_has_a_deadline(tmp_path: Path) -> None:
    fake = FakeCell(tmp_path, switch_limit_s=0.2)
    await fake.cell.start()
    fake.engine.hold.clear()
    with pytest.raises(SwitchLateError, match=r"not in training within 0\.2 s"):
        await fake.cell.change_role(1, TRAINING, None)
    assert fake.cell.roles.role is ROLLOUT
    fake.engine.hold.set()
    await fake.cell.change_role(1, TRAINING, None)
    assert fake.cell.roles.role is TRAINING


async def test_an_engine_that_is_gone_fails_the_cell(fake: FakeCell) -> None:
    fake.engine.refuse = {"drain": EngineGoneError("gone"), "version": EngineGoneError("refused")}
    with pytest.raises(EngineGoneError):
        await fake.cell.change_role(1, TRAINING, None)
    assert fake.cell.roles.role is HostRole.FAILED
    with pytest.raises(WrongRoleError, match="gone"):
        await fake.cell.change_role(1, TRAINING, None)


@pytest.mark.parametrize("part", ["engine", "replica"])
async def test_a_dead_process_fails_the_cell_with_its_last_words(fake: FakeCell, part: str) -> None:
    watch = asyncio.create_task(fake.cell.watch())
    getattr(fake, part).dead = "ended with exit code 9; the log ends: no memory"
    await asyncio.wait_for(watch, 10)
    assert fake.cell.roles.role is HostRole.FAILED
    assert "no memory" in fake.cell.roles.detail


async def test_an_engine_that_says_nothing_any_more_fails_the_cell(
    fake: FakeCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cell_module, "PROBE_EVERY_S", 0.001)
    monkeypatch.setattr(cell_module, "WATCH_S", 0.001)
    watch = asyncio.create_task(fake.cell.watch())
    while fake.engine.probed < 2 * cell_module.SILENT_PROBES:  # noqa: ASYNC110 - a figure
        await asyncio.sleep(0.001)
    assert fake.cell.roles.role is ROLLOUT
    await fake.cell.change_role(1, TRAINING, None)
    fake.engine.silent = True
    before = fake.engine.probed
    await asyncio.sleep(0.05)
    assert fake.engine.probed <= before + 1, "asleep, it owes no answer"
    fake.engine.silent = False
    await fake.cell.change_role(1, ROLLOUT, None)
    fake.engine.silent = True
    await asyncio.wait_for(watch, 10)
    assert fake.cell.roles.detail == "SGLang has not answered 8 times in a row: no answer"


async def test_older_epochs_are_refused(fake: FakeCell) -> None:
    await fake.cell.command(5, "status", {})
    for call in (
        fake.cell.change_role(4, TRAINING, None),
        fake.cell.set_version(4, 1),
        fake.cell.command(4, "status", {}),
    ):
        with pytest.raises(StaleEpochError):
            await call
    assert fake.cell.roles.role is ROLLOUT


async def test_a_switch_that_waited_is_refused_after_a_newer_epoch(fake: FakeCell) -> None:
    fake.engine.hold.clear()
    first = asyncio.create_task(fake.cell.change_role(1, TRAINING, None))
    await fake.engine.draining.wait()
    second = asyncio.create_task(fake.cell.change_role(1, ROLLOUT, None))
    await asyncio.sleep(0)
    third = asyncio.create_task(fake.cell.change_role(2, TRAINING, None))
    await asyncio.sleep(0)
    fake.engine.hold.set()
    await first
    with pytest.raises(StaleEpochError):
        await second
    await third
    assert fake.cell.roles.role is TRAINING


async def test_closing_ends_both_and_removes_the_weights(fake: FakeCell) -> None:
    await fake.cell.command(1, "pull", {"descriptor": {"version": 1}})
    await fake.cell.set_version(1, 1)
    fake.take()
    await fake.cell.close()
    assert sorted(fake.take()) == ["engine close", "replica close"]
    assert not fake.exports.folder.exists()
