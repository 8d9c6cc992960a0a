"""``gyre export``: which weights it writes, and what it refuses."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from configs.load import load_config
from flows.cli import app
from storage.layout import policy_prefix
from storage.records import CheckpointManifest
from storage.run import Run, create_run
from tasks.warm_start.policies import keep_policy, remember_policy

RUN = "exported"


def policy(folder: Path, weights: bytes) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run with its first policy and the checkpoints of versions 4 and 12."""
    made = create_run(str(tmp_path / "root"), RUN, load_config("smoke", environment={}))
    key = policy_prefix("first")
    keep_policy(made.store, key, policy(tmp_path / "warm", b"version 0"), "a test")
    remember_policy(made, key)
    for version in (4, 12):
        folder = made.store.local_path(made.layout.checkpoint(version))
        policy(folder / "policy", f"version {version}".encode())
        files = {
            str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in folder.rglob("*")
            if path.is_file()
        }
        made.store.write_record(
            f"{made.layout.checkpoint(version)}/manifest.json",
            CheckpointManifest(version=version, step=0, update=1, files=files),
        )
    return made


def export(run: Run, *arguments: str) -> Result:
    root = str(run.store.local_path(""))
    return CliRunner().invoke(app, ["export", RUN, *arguments, "--root", root])


@pytest.mark.parametrize(("options", "version"), [((), 12), (("-v", "4"), 4), (("-v", "0"), 0)])
def test_an_hf_directory_of_a_version_is_written(
    run: Run, tmp_path: Path, options: tuple[str, ...], version: int
) -> None:
    out = tmp_path / "deep" / "out"
    result = export(run, str(out), *options)
    assert result.exit_code == 0, result.output
    assert f"version {version} of run {RUN}, 3 files" in " ".join(result.output.split())
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (out / "model.safetensors").read_bytes() == f"version {version}".encode()
    assert json.loads((out / "config.json").read_text()) == {}
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_a_version_that_is_not_there_names_those_that_are(run: Run, tmp_path: Path) -> None:
    result = export(run, str(tmp_path / "out"), "--version", "5")
    assert result.exit_code == 2
    assert "has no version 5; there are: 0, 4, 12" in result.output
    assert not (tmp_path / "out").exists()


def test_damaged_weights_are_not_exported(run: Run, tmp_path: Path) -> None:
    weights = run.store.local_path(run.layout.checkpoint(12)) / "policy" / "model.safetensors"
    weights.write_bytes(b"version 1?")
    result = export(run, str(tmp_path / "out"))
    assert result.exit_code == 2
    assert "damaged" in result.output
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten(run: Run, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    result = export(run, str(tmp_path / "out"))
    assert result.exit_code == 2
    assert "exists already" in result.output
