"""Policies in storage: whole when their manifest is there."""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from configs.run import RunConfig
from storage.errors import refused
from storage.hold import HeldError, alone
from storage.layout import policy_prefix
from storage.objects import Store
from storage.records import Record, encode
from storage.run import Run

MANIFEST = "manifest.json"
_NEEDED = ("config.json", "tokenizer.json")
_SUFFIXES = (".json", ".safetensors", ".jinja", ".txt", ".model")
_FILES = 256
_PUBLISH_LIMIT_S = 600.0


class PolicyError(ValueError):
    """A folder that holds no policy; the text names what is missing."""


class PolicyManifest(Record):
    """Written last: a policy without it does not exist."""

    origin: str
    """How it came to be, for people."""
    files: dict[str, str]
    """Name to sha256."""


class FirstPolicy(Record):
    """The policy that a run starts from."""

    key: str


def has_policy(store: Store, key: str) -> bool:
    """Whether a whole policy lies at ``key``."""
    return store.exists(f"{key}/{MANIFEST}")


def keep_policy(store: Store, key: str, folder: Path, origin: str) -> None:
    """Put the HF directory ``folder`` at ``key``; whoever comes first is kept.

    On a local store the files become visible all at once, so that two at a time never mix theirs.

    Raises:
        PolicyError: it is not an HF directory.
        StorageError: it can't be written; nothing is visible then.
    """
    digests = policy_files(folder)
    manifest = PolicyManifest(origin=origin, files=digests)
    if has_policy(store, key):
        return
    if store.is_local:
        with alone(store, f"{key}.lock", _PUBLISH_LIMIT_S):
            if not has_policy(store, key):
                _publish(store, key, folder, manifest)
        return
    for name in digests:
        store.write(f"{key}/{name}", (folder / name).read_bytes())
    store.write_record_once(f"{key}/{MANIFEST}", manifest)


def _publish(store: Store, key: str, folder: Path, manifest: PolicyManifest) -> None:
    target = store.local_path(key)
    aside = target.with_name(f".writing-{target.name}-{secrets.token_hex(4)}")
    try:
        aside.mkdir(parents=True)
        for name in manifest.files:
            shutil.copyfile(folder / name, aside / name)
        (aside / MANIFEST).write_bytes(encode(manifest))
        shutil.rmtree(target, ignore_errors=True)  # one without a manifest: a writer was killed
        aside.rename(target)
    except OSError as error:
        raise refused(target, error) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def only_maker(store: Store, key: str, limit_s: float) -> Iterator[None]:
    """Makes others that would make the policy at ``key`` wait, as it takes minutes and processors.

    Raises:
        PolicyError: another process has been at it for ``limit_s`` seconds.
    """
    try:
        with alone(store, f"{key}.making", limit_s):
            yield
    except HeldError as error:
        raise PolicyError(
            f"{error}: it has been making the policy {key} for {limit_s:g} s; end it, or raise "
            f"warm_start.limit_s"
        ) from None


def import_policy(store: Store, config: RunConfig) -> str:
    """Copy the HF directory ``model.path`` into storage. Its key follows from its content.

    Raises:
        PolicyError: the folder lacks what a policy needs.
    """
    folder = model_folder(config)
    text = json.dumps(policy_files(folder), sort_keys=True)
    key = policy_prefix(f"hf-{hashlib.sha256(text.encode()).hexdigest()[:16]}")
    keep_policy(store, key, folder, f"HF directory {folder}")
    return key


def model_folder(config: RunConfig) -> Path:
    """``model.path`` as an absolute path."""
    return Path(str(config.model.path)).expanduser().resolve()


def first_policy(run: Run) -> str | None:
    """Key of the policy that a run was started from; None before its first start."""
    if not run.store.exists(run.layout.first_policy):
        return None
    key = run.store.read_record(run.layout.first_policy, FirstPolicy).key
    return key if has_policy(run.store, key) else None


def remember_policy(run: Run, key: str) -> None:
    """Record which policy a run starts from: it is not deleted as long as the run is there."""
    run.store.write_record_once(run.layout.first_policy, FirstPolicy(key=key))


def policy_files(folder: Path, *, digests: bool = True) -> dict[str, str]:
    """Name and sha256 of each file of an HF directory that belongs to the policy.

    Args:
        digests: False leaves the sha256 empty and reads nothing.

    Raises:
        PolicyError: weights, config or tokenizer are missing, or there are too many files.
    """
    try:
        files = sorted(
            path
            for path in folder.iterdir()
            if path.is_file() and path.suffix in _SUFFIXES and path.name != MANIFEST
        )
    except OSError as error:
        raise PolicyError(f"model.path {folder}: can't be read: {error.strerror}") from error
    names = [path.name for path in files]
    missing = [name for name in _NEEDED if name not in names]
    if not any(name.endswith(".safetensors") for name in names):
        missing.append("*.safetensors")
    if missing:
        raise PolicyError(
            f"model.path {folder}: not an HF directory, it lacks {', '.join(missing)}"
        )
    if len(files) > _FILES:
        raise PolicyError(f"model.path {folder}: {len(files)} files, more than {_FILES}")
    return {path.name: _sha256(path) if digests else "" for path in files}


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
