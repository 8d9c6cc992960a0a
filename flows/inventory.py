"""What lies in a storage root, with sizes and who works on what; and how parts are deleted."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cells.checkpoint import MANIFEST as CHECKPOINT_MANIFEST
from cells.living import living_daemon
from configs.load import ConfigError
from storage.errors import StorageError
from storage.hold import HeldError, alone
from storage.layout import RunLayout
from storage.objects import Entry, Store
from storage.records import RecordError
from storage.retention import Part, Remains, Removal, StoredPolicy, StoredRun
from storage.run import open_run
from tasks.warm_start.policies import MANIFEST as POLICY_MANIFEST
from tasks.warm_start.policies import FirstPolicy

SOMEBODY = "a flow or a command"

_WORKSPACE = re.compile(r"^runs/[^/]+/workspaces/[^/]+/[^/]+\.tar\.zst$")
_CHECKPOINT = re.compile(r"^runs/[^/]+/checkpoints/(\d+)/")
_ASIDE = re.compile(r"^(?:.*/)?\.writing-[^/]+")
_LOCKS = re.compile(r"^policies/[^/]+\.(?:lock|making)$")


@dataclass(frozen=True)
class Inventory:
    """Everything below ``runs`` and ``policies``."""

    runs: tuple[StoredRun, ...]
    policies: tuple[StoredPolicy, ...]
    remains: tuple[Remains, ...]


def take_inventory(store: Store) -> Inventory:
    """List the root, and see who works on each run."""
    runs: list[StoredRun] = []
    policies: list[StoredPolicy] = []
    remains: list[Remains] = []
    for prefix, entries in _by_prefix(store).items():
        keys = {entry.key for entry in entries}
        size = sum(entry.size for entry in entries)
        changed_at = max(entry.changed_at for entry in entries)
        if f"{prefix}/{POLICY_MANIFEST}" in keys and prefix.startswith("policies/"):
            policies.append(StoredPolicy(prefix, changed_at, size))
        elif prefix.startswith("runs/") and RunLayout(prefix[5:]).config in keys:
            runs.append(_run(store, RunLayout(prefix[5:]), entries))
        else:
            remains.append(Remains(prefix, changed_at, size))
    return Inventory(tuple(runs), tuple(policies), tuple(remains))


def user_of(store: Store, layout: RunLayout) -> str:
    """Who works on a run: a process that holds it, or a daemon that lives; empty when nobody."""
    try:
        if store.exists(layout.lock):
            with alone(store, layout.lock):
                pass
    except HeldError:
        return SOMEBODY
    daemon = living_daemon(store, layout)
    return f"daemon {daemon}" if daemon else ""


def remove(store: Store, removal: Removal) -> str:
    """Delete what ``removal`` names. Returns who uses it by now, with nothing deleted; else "".

    What makes a thing a thing goes first: a run's settings, a policy's or checkpoint's manifest. A
    deletion that is broken off leaves remains, which the next one finds.
    """
    if removal.part is Part.REMAINS:
        store.delete(removal.name)
        return ""
    if removal.part is Part.POLICY:
        store.delete(f"{removal.name}/{POLICY_MANIFEST}")
        store.delete(removal.name)
        return ""
    layout = RunLayout(removal.name)
    try:
        with alone(store, layout.lock):
            if daemon := living_daemon(store, layout):
                return f"daemon {daemon}"
            _remove_part(store, layout, removal.part)
    except HeldError:
        return SOMEBODY
    return ""


def _remove_part(store: Store, layout: RunLayout, part: Part) -> None:
    if part is Part.RUN:
        store.delete(layout.config)
        store.delete(layout.prefix)
        return
    entries = store.entries(layout.prefix)
    if part is Part.WORKSPACES:
        for entry in entries:
            if _WORKSPACE.match(entry.key):
                store.delete(entry.key)
        return
    for version in _versions(entries)[:-1]:
        store.delete(f"{layout.checkpoint(version)}/{CHECKPOINT_MANIFEST}")
        store.delete(layout.checkpoint(version))


def _by_prefix(store: Store) -> Mapping[str, list[Entry]]:
    """Objects by the run, the policy, or the half-written thing that they belong to."""
    found: dict[str, list[Entry]] = {}
    for entry in (*store.entries("runs"), *store.entries("policies")):
        if _LOCKS.match(entry.key):
            continue
        aside = _ASIDE.match(entry.key)
        prefix = aside.group() if aside else "/".join(entry.key.split("/")[:2])
        found.setdefault(prefix, []).append(entry)
    return found


def _run(store: Store, layout: RunLayout, entries: Sequence[Entry]) -> StoredRun:
    old = {str(version) for version in _versions(entries)[:-1]}
    return StoredRun(
        run_id=layout.run_id,
        changed_at=max(entry.changed_at for entry in entries),
        finished=_finished(store, layout),
        in_use=user_of(store, layout),
        size=sum(entry.size for entry in entries),
        workspaces=sum(entry.size for entry in entries if _WORKSPACE.match(entry.key)),
        checkpoints=sum(
            entry.size
            for entry in entries
            if (found := _CHECKPOINT.match(entry.key)) and str(int(found.group(1))) in old
        ),
        policy=_policy(store, layout),
    )


def _versions(entries: Iterable[Entry]) -> list[int]:
    """Versions of the whole checkpoints of a run, the last one last."""

    def whole() -> Iterator[int]:
        for entry in entries:
            found = _CHECKPOINT.match(entry.key)
            if found and entry.key.endswith(f"{found.group(1)}/{CHECKPOINT_MANIFEST}"):
                yield int(found.group(1))

    return sorted(whole())


def _finished(store: Store, layout: RunLayout) -> bool:
    try:
        config = open_run(store.url, layout.run_id).config
    except (StorageError, ConfigError):
        return False
    return store.exists(layout.step_done(config.training.steps - 1))


def _policy(store: Store, layout: RunLayout) -> str | None:
    try:
        return store.read_record(layout.first_policy, FirstPolicy).key
    except (StorageError, RecordError):
        return None
