"""Checkpoints of a run: written aside, verified, visible when their manifest is there."""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from cells.client import DaemonClient
from configs.load import dump_config
from storage.copies import local_copy, send_copy
from storage.objects import Store
from storage.records import CheckpointManifest
from storage.run import Run

MANIFEST = "manifest.json"
POLICY = "policy"
STATE = "state"
CONFIG = "config.yaml"


class CheckpointError(RuntimeError):
    """A checkpoint that can't be used; the text names the file and what is wrong."""


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint."""

    manifest: CheckpointManifest
    key: str

    @property
    def policy_key(self) -> str:
        """HF directory of its weights."""
        return f"{self.key}/{POLICY}"

    @property
    def state_key(self) -> str:
        """Weights, optimizer and random state, as the replica saves them."""
        return f"{self.key}/{STATE}"


def save_checkpoint(
    run: Run, core: DaemonClient, *, epoch: int, step: int, update: int
) -> Checkpoint:
    """Save what the core holds after ``update`` updates of ``step``; found again if it is there.

    Weights, optimizer and random state, an HF directory of the weights, and the run's settings are
    written aside, checked, and on the disk before the manifest makes them visible. The manifest
    tells the position in the ledgers: the step, and how many of its updates are in the weights.

    Raises:
        DaemonError: the core refused or died.
        CheckpointError: what it wrote is not whole, or of another version.
        StorageError: the run's storage refuses.

    Nothing is visible then. On an object store the core has to be on this machine.
    """
    limit = run.config.cells.switch_limit_s
    status = core.call("GET", "/status")
    version = int(status["replica"]["version"])
    found = find_checkpoint(run, version)
    if found is not None:
        return found
    key = run.layout.checkpoint(version)
    target = run.store.local_file(key)
    aside = target.with_name(f".writing-{target.name}")
    shutil.rmtree(aside, ignore_errors=True)
    shutil.rmtree(target, ignore_errors=True)  # one without a manifest: a writer was killed
    aside.mkdir(parents=True)
    for command, name in (("save", STATE), ("export", POLICY)):
        args = {"path": str(aside / name)}
        answer = core.call(
            "POST", f"/replica/{command}", {"epoch": epoch, "args": args}, limit_s=limit
        )
        if answer["version"] != version:
            raise CheckpointError(f"{core.name}: version moved from {version} during {command}")
    (aside / CONFIG).write_text(dump_config(run.config), encoding="utf-8")
    _check_written(aside)
    manifest = CheckpointManifest(version=version, step=step, update=update, files=_digests(aside))
    _to_disk(aside)
    aside.rename(target)
    send_copy(run.store, key)
    run.store.write_record(f"{key}/{MANIFEST}", manifest)
    return Checkpoint(manifest, key)


def find_checkpoint(run: Run, version: int) -> Checkpoint | None:
    """The whole checkpoint of a version, or None."""
    key = run.layout.checkpoint(version)
    if not run.store.exists(f"{key}/{MANIFEST}"):
        return None
    manifest = run.store.read_record(f"{key}/{MANIFEST}", CheckpointManifest)
    return Checkpoint(manifest, key)


def latest_checkpoint(run: Run) -> Checkpoint | None:
    """The whole checkpoint of the highest version, its files verified.

    Raises:
        CheckpointError: a file is missing or differs from the manifest.
    """
    versions = checkpoint_versions(run)
    return verified_checkpoint(run, versions[-1]) if versions else None


def verified_checkpoint(run: Run, version: int) -> Checkpoint:
    """The whole checkpoint of a version, its files verified.

    Raises:
        CheckpointError: there is none, or a file is missing or differs from the manifest.
    """
    checkpoint = find_checkpoint(run, version)
    if checkpoint is None:
        raise CheckpointError(f"run {run.run_id}: no checkpoint of version {version}")
    _verify(run.store, checkpoint)
    return checkpoint


def checkpoint_versions(run: Run) -> list[int]:
    """Versions of all whole checkpoints, in order."""
    names = run.store.children(run.layout.checkpoint(0).rsplit("/", 1)[0])
    versions = sorted(int(name) for name in names if name.isdigit())
    return [version for version in versions if find_checkpoint(run, version)]


def prune_checkpoints(run: Run, keep: int) -> None:
    """Delete all but the newest ``keep`` whole checkpoints."""
    for version in checkpoint_versions(run)[:-keep]:
        key = run.layout.checkpoint(version)
        # The manifest goes first: what is half deleted does not exist.
        run.store.delete(f"{key}/{MANIFEST}")
        run.store.delete(key)


def _check_written(folder: Path) -> None:
    """Each file of tensors has all the bytes that its head tells of."""
    for path in folder.rglob("*.safetensors"):
        try:
            with safe_open(path, framework="numpy") as file:
                empty = not file.keys()
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: was not written whole: {error}") from error
        if empty:
            raise CheckpointError(f"{path}: was written without tensors")


def _to_disk(folder: Path) -> None:
    """A manifest must not outlive the files that it lists when the machine loses its power."""
    for path in (*folder.rglob("*"), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): _sha256(path) for path in files}


def _verify(store: Store, checkpoint: Checkpoint) -> None:
    folder = local_copy(store, checkpoint.key)
    for name, expected in checkpoint.manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path}: missing; delete {folder} to resume from an older one")
        if _sha256(path) != expected:
            raise CheckpointError(f"{path}: damaged; delete {folder} to resume from an older one")


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
