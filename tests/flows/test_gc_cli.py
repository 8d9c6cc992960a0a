"""``gyre gc`` on a root with runs, policies and remains."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cells import leftovers
from cells.host.exports import LOCK
from cells.leftovers import find_leftovers
from flows import gc_cli
from flows.cli import app
from storage.objects import Store
from storage.records import CheckpointManifest, StepDone
from storage.run import Run
from tasks.warm_start.policies import has_policy, keep_policy, remember_policy
from tests.conftest import make_run
from tests.storage.test_hold import start_holder

DAY = 86_400.0


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(gc_cli, "find_leftovers", lambda: [])


def collect(root: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["gc", "--root", str(root), *arguments])


def policy(store: Store, tmp_path: Path, name: str) -> str:
    folder = tmp_path / name
    folder.mkdir()
    for file in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / file).write_text(name * 1000)
    keep_policy(store, f"policies/{name}", folder, "a test")
    return f"policies/{name}"


def finished(root: Path, days: float, first_policy: str = "policies/used") -> Run:
    """A finished run with a workspace of 10 kB and two checkpoints of 20 kB, of some days ago."""
    run = make_run(root)
    store, layout = run.store, run.layout
    remember_policy(run, first_policy)
    store.write(layout.frozen_workspace("ab12"), b"w" * 10_000)
    for version in (4, 8):
        key = layout.checkpoint(version)
        store.write(f"{key}/state/state.safetensors", b"c" * 20_000)
        manifest = CheckpointManifest(version=version, step=0, update=version, files={})
        store.write_record(f"{key}/manifest.json", manifest)
    last = run.config.training.steps - 1
    store.write_record(layout.step_done(last), StepDone(step=last, policy_version=8, seconds=1))
    age(root / layout.prefix, days)
    return run


def age(folder: Path, days: float) -> None:
    then = time.time() - days * DAY
    for path in [folder, *folder.rglob("*")]:
        os.utime(path, (then, then))


def names(root: Path) -> list[str]:
    return Store(root).children("runs")


def test_a_dry_run_shows_bytes_and_deletes_nothing(tmp_path: Path) -> None:
    root = tmp_path / "root"
    old, new = finished(root, 9), finished(root, 2)
    before = old.store.keys("")
    result = collect(root, "--keep", "1", "--dry-run")
    assert result.exit_code == 0
    assert f"run {old.run_id}" in result.output and "unchanged for 9.0 days" in result.output
    assert "0.05 MB would be freed" in result.output
    assert old.store.keys("") == before
    assert names(root) == sorted([old.run_id, new.run_id])


def test_old_runs_go_and_new_ones_stay(tmp_path: Path) -> None:
    root = tmp_path / "root"
    old, new = finished(root, 9), finished(root, 2)
    result = collect(root, "--older-than", "1w")
    assert (result.exit_code, names(root)) == (0, [new.run_id]), result.output
    assert "0.05 MB freed" in result.output
    assert not old.store.keys(old.layout.prefix)


def test_a_quota_takes_workspaces_and_old_checkpoints_first(tmp_path: Path) -> None:
    root = tmp_path / "root"
    run = finished(root, 9)
    unused = policy(run.store, tmp_path, "unused")
    used = policy(run.store, tmp_path, "used")
    age(root / "policies", 9)
    assert collect(root, "--keep", "1", "--max-gb", "1").exit_code == 0
    assert run.store.exists(run.layout.frozen_workspace("ab12"))
    result = collect(root, "--keep", "1", "--max-gb", "0.00007")
    assert result.exit_code == 0, result.output
    assert not run.store.exists(run.layout.frozen_workspace("ab12"))
    assert run.store.children(f"{run.layout.prefix}/checkpoints") == ["00000008"]
    assert has_policy(run.store, unused)
    result = collect(root, "--keep", "1", "--max-gb", "0")
    assert result.exit_code == 1
    assert "The quota can't be kept" in result.output
    assert not has_policy(run.store, unused)
    assert has_policy(run.store, used), "the run that stays started from it"
    assert names(root) == [run.run_id]


def test_a_run_that_somebody_holds_stays(tmp_path: Path) -> None:
    root = tmp_path / "root"
    run = finished(root, 9)
    holder = start_holder(run)
    age(root / run.layout.prefix, 9)
    result = collect(root, "--keep", "0")
    assert (result.exit_code, names(root)) == (0, [run.run_id])
    assert "in use: a flow or a command" in result.output
    holder.kill()
    holder.communicate(timeout=30)
    assert (collect(root, "--keep", "0").exit_code, names(root)) == (0, [])


def test_one_that_is_taken_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "root"
    run = finished(root, 9)
    asked = iter(["", "gateway"])  # nobody for the table, then a daemon has come
    monkeypatch.setattr("flows.inventory.living_daemon", lambda store, layout: next(asked))
    result = collect(root, "--keep", "0")
    assert f"{run.run_id} stays: daemon gateway uses it now" in result.output
    assert names(root) == [run.run_id]


def test_remains_of_killed_processes_go_when_they_are_old(tmp_path: Path) -> None:
    root = tmp_path / "root"
    run = finished(root, 0.5)
    halves = [
        "runs/half-made/identity",
        "policies/warm-1/model.safetensors",
        f"{run.layout.prefix}/checkpoints/.writing-00000012/state/state.safetensors",
    ]
    for key in halves:
        path = root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half")
    collect(root)
    assert all((root / key).exists() for key in halves), "they may be under way"
    age(root / "runs", 1)
    age(root / "policies", 1)
    result = collect(root)
    assert result.exit_code == 0, result.output
    assert not [key for key in halves if (root / key).exists()]
    assert names(root) == [run.run_id]


def test_limits_that_can_not_be_read(tmp_path: Path) -> None:
    result = collect(tmp_path, "--older-than", "soon")
    assert (result.exit_code, "like 30d" in result.output) == (2, True)


def test_files_of_dead_processes_outside_the_root(tmp_path: Path) -> None:
    memory, temporary = tmp_path / "shm", tmp_path / "tmp"
    dead = memory / "gyre-run-a-1234abcd"
    dead.mkdir(parents=True)
    (dead / LOCK).touch()
    (dead / "weights").write_bytes(b"x" * 500)
    temporary.mkdir()
    for name in ("gyre-engine-abcd1234", "gyre-replica-used1234", "gyre-my-data", "other"):
        (temporary / name).mkdir()
    quiet = time.time() + 2 * leftovers.QUIET_S
    here = Path.cwd()
    os.chdir(temporary / "gyre-replica-used1234")
    try:
        young = find_leftovers(memory=memory, temporary=temporary)
        found = find_leftovers(memory=memory, temporary=temporary, now=quiet)
    finally:
        os.chdir(here)
    assert [one.path for one in young] == [dead], "its lock is free: its owner is dead"
    assert {one.path for one in found} == {dead, temporary / "gyre-engine-abcd1234"}
    assert found[0].size >= 500
    for one in found:
        leftovers.remove_leftover(one)
    assert sorted(path.name for path in temporary.iterdir()) == [
        "gyre-my-data",
        "gyre-replica-used1234",
        "other",
    ]
