"""Policies in storage: whole when their manifest is there."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from configs.run import RunConfig
from storage.layout import policy_prefix
from storage.objects import Store
from storage.records import Record

MANIFEST = "manifest.json"
_NEEDED = ("config.json", "tokenizer.json")
_SUFFIXES = (".json", ".safetensors", ".jinja", ".txt", ".model")
_FILES = 256


class PolicyError(ValueError):
    """A folder that holds no policy; the text names what is missing."""


class PolicyManifest(Record):
    """Written last: a policy without it does not exist."""

    origin: str
    """How it came to be, for people."""
    files: dict[str, str]
    """Name to sha256."""


def has_policy(store: Store, key: str) -> bool:
    """Whether a whole policy lies at ``key``."""
    return store.exists(f"{key}/{MANIFEST}")


def keep_policy(store: Store, key: str, folder: Path, origin: str) -> None:
    """Put the HF directory ``folder`` at ``key``; whoever comes first is kept.

    Raises:
        PolicyError: it is not an HF directory.
    """
    digests = policy_files(folder)
    if has_policy(store, key):
        return
    for name in digests:
        store.write(f"{key}/{name}", (folder / name).read_bytes())
    store.write_record_once(f"{key}/{MANIFEST}", PolicyManifest(origin=origin, files=digests))


def import_policy(store: Store, config: RunConfig) -> str:
    """Copy the HF directory ``model.path`` into storage. Its key follows from its content.

    Raises:
        PolicyError: the folder lacks what a policy needs.
    """
    folder = Path(str(config.model.path)).expanduser().resolve()
    text = json.dumps(policy_files(folder), sort_keys=True)
    key = policy_prefix(f"hf-{hashlib.sha256(text.encode()).hexdigest()[:16]}")
    keep_policy(store, key, folder, f"HF directory {folder}")
    return key


def policy_files(folder: Path) -> dict[str, str]:
    """Name and sha256 of each file of an HF directory that belongs to the policy.

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
        raise PolicyError(f"model.path {folder}: can't be read: {error}") from error
    names = [path.name for path in files]
    missing = [name for name in _NEEDED if name not in names]
    if not any(name.endswith(".safetensors") for name in names):
        missing.append("*.safetensors")
    if missing:
        raise PolicyError(f"model.path {folder}: not an HF directory, it lacks {missing}")
    if len(files) > _FILES:
        raise PolicyError(f"model.path {folder}: {len(files)} files, more than {_FILES}")
    return {path.name: _sha256(path) for path in files}


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
