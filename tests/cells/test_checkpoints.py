"""A checkpoint is there whole or not at all, whoever dies while it is written."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from cells.checkpoint import (
    CheckpointError,
    checkpoint_versions,
    find_checkpoint,
    latest_checkpoint,
    prune_checkpoints,
    save_checkpoint,
    verified_checkpoint,
)
from cells.client import DaemonError
from configs.load import load_config
from storage.copies import local_copy
from storage.objects import Store
from storage.run import Run, create_run


class Core:
    """A cell host whose replica writes small files; it can die, lie, or write half of one."""

    name = "cell-a"

    def __init__(self) -> None:
        self.version = 4
        self.dies_in = ""
        self.cuts = ""
        self.moves_in = ""

    def call(self, method, path, body=None, *, limit_s=20.0):
        if path == "/status":
            return {"replica": {"version": self.version}}
        command, folder = path.rsplit("/", 1)[-1], Path(body["args"]["path"])
        folder.mkdir(parents=True)
        name = {"save": "state.safetensors", "export": "model.safetensors"}[command]
        save_file({"w": np.full(64, self.version, np.float32)}, folder / name)
        if command == self.cuts:
            whole = (folder / name).read_bytes()
            (folder / name).write_bytes(whole[:-10])
        if command == self.dies_in:
            raise DaemonError(f"{self.name}: dead")
        (folder / "index.json").write_text(json.dumps({"version": self.version}))
        return {"version": self.version + (command == self.moves_in)}


@pytest.fixture
def run(tmp_path) -> Run:
    return create_run(str(tmp_path), "r", load_config("smoke", environment={}))


def save(run, core, update=1):
    return save_checkpoint(run, core, epoch=1, step=2, update=update)


def test_it_holds_weights_state_settings_and_the_position(run):
    made = save(run, Core(), update=3)
    folder = run.store.local_path(made.key)
    assert (made.manifest.version, made.manifest.step, made.manifest.update) == (4, 2, 3)
    assert set(made.manifest.files) == {
        "config.yaml",
        "policy/index.json",
        "policy/model.safetensors",
        "state/index.json",
        "state/state.safetensors",
    }
    assert load_config(str(folder / "config.yaml"), environment={}) == run.config
    assert verified_checkpoint(run, 4) == latest_checkpoint(run) == find_checkpoint(run, 4) == made
    again = Core()
    again.dies_in = "save"
    assert save(run, again) == made, "what is there is not written again"


@pytest.mark.parametrize("command", ["save", "export"])
@pytest.mark.parametrize(
    ("fault", "error"),
    [("dies_in", DaemonError), ("cuts", CheckpointError), ("moves_in", CheckpointError)],
)
def test_what_was_not_written_whole_is_never_seen(run, command, fault, error):
    core = Core()
    before = save(run, core)
    core.version = 5
    setattr(core, fault, command)
    with pytest.raises(error):
        save(run, core)
    assert checkpoint_versions(run) == [4] and latest_checkpoint(run) == before
    setattr(core, fault, "")
    assert save(run, core).manifest.version == 5
    assert latest_checkpoint(run).manifest.version == 5


def test_a_writer_that_was_killed_before_the_manifest_left_nothing(run):
    """The kill between the move and the manifest: the folder is there and does not count."""
    core = Core()
    made = save(run, core)
    run.store.delete(f"{made.key}/manifest.json")
    stray = run.store.local_path(made.key) / "policy" / "half.safetensors"
    stray.write_bytes(b"x")
    assert latest_checkpoint(run) is None and checkpoint_versions(run) == []
    assert save(run, core).manifest.files == made.manifest.files
    assert not stray.exists()


@pytest.mark.parametrize("damage", ["flip", "remove"])
def test_damage_is_named(run, damage):
    made = save(run, Core())
    path = run.store.local_path(made.state_key) / "state.safetensors"
    if damage == "remove":
        path.unlink()
    else:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"state/state\.safetensors: (damaged|missing)"):
        latest_checkpoint(run)


def test_the_newest_are_kept(run):
    core = Core()
    for core.version in (3, 4, 11, 5):
        save(run, core)
    assert checkpoint_versions(run) == [3, 4, 5, 11]
    prune_checkpoints(run, 2)
    assert checkpoint_versions(run) == [5, 11]
    folder = run.store.local_path(run.layout.checkpoint(4))
    assert not folder.exists()


def test_an_object_store_gets_it_and_another_machine_fetches_it(run, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "here"))
    elsewhere = Run(Store("memory://checkpoints"), run.layout, run.config, run.identity)
    core = Core()
    for core.version in (4, 5):
        made = save(elsewhere, core)
    folder = local_copy(elsewhere.store, made.key)
    assert folder.is_relative_to(tmp_path / "here")
    written = {path.name: path.read_bytes() for path in folder.rglob("*.safetensors")}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    weights = local_copy(elsewhere.store, made.policy_key) / "model.safetensors"
    assert weights.is_relative_to(tmp_path / "another")
    assert weights.read_bytes() == written["model.safetensors"]
    assert latest_checkpoint(elsewhere) == made, "the rest is fetched, and all of it verified"
    prune_checkpoints(elsewhere, 1)
    assert checkpoint_versions(elsewhere) == [5]
    elsewhere.store.delete(made.key)
    assert not weights.exists() and latest_checkpoint(elsewhere) is None


def test_one_that_an_object_store_lost_a_part_of_is_refused(run, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    elsewhere = Run(Store("memory://damaged"), run.layout, run.config, run.identity)
    made = save(elsewhere, Core())
    elsewhere.store.delete(f"{made.state_key}/state.safetensors")
    with pytest.raises(CheckpointError, match=r"state/state\.safetensors: missing"):
        latest_checkpoint(elsewhere)
