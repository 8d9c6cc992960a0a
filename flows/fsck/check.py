"""Everything that a run has in storage, held against itself."""

from __future__ import annotations

import hashlib
import io
import re
from hashlib import blake2b

import yaml
import zstandard

from cells.checkpoint import CONFIG, CheckpointError, verified_checkpoint
from cells.decisions import Decision
from cells.levels import Level
from configs.run import RunConfig
from flows.fsck.executions import check_execution
from flows.fsck.finding import Finding, Kind
from flows.fsck.reader import Reader
from flows.fsck.steps import check_steps
from storage.errors import StorageError
from storage.records import (
    CheckpointManifest,
    Evaluation,
    RecordError,
    StepDone,
    check_record,
)
from storage.run import Run
from tasks.warm_start.policies import MANIFEST, FirstPolicy, PolicyManifest

_HELD_OUT = re.compile(r"(v(\d{5}).*-q\d{4,})-e\d{3,}")
_IDENTITY = re.compile(rb"[0-9a-f]{16}")
_BLOCK = 1 << 20


def check_run(run: Run) -> tuple[Finding, ...]:
    """All that is wrong with a run's storage, in order of its keys.

    What is not finished is not wrong: a run may be checked while it goes on. Something that is
    written at that moment can be told as missing; look again.
    """
    reader = Reader(run)
    _check_settings(reader)
    planned = check_steps(reader)
    _check_other_executions(reader, planned)
    _check_evaluations(reader)
    for prefix, kind in ((run.layout.decisions, Decision), (run.layout.levels, Level)):
        reader.journal(prefix, kind)
    for prefix in (run.layout.epochs, run.layout.owners):
        _check_numbers(reader, prefix)
    _check_workspaces(reader)
    _check_policy(reader)
    _check_checkpoints(reader)
    _check_rest(reader)
    return tuple(sorted(reader.findings, key=lambda one: (not one.is_error, one.key)))


def _check_settings(reader: Reader) -> None:
    layout, store = reader.layout, reader.store
    whole = _IDENTITY.fullmatch(store.read(layout.identity)) is not None
    if not whole:
        reader.note(Kind.DAMAGED, layout.identity, "not the random name that a run is made with")
    for version in _versions(reader):
        key = f"{layout.checkpoint(version)}/{CONFIG}"
        if key in reader.keys and not _same_settings(reader, store.read(key)):
            text = f"its settings are not those of checkpoint {version}: one of them was changed"
            reader.note(Kind.CONTRADICTION, layout.config, text)
    reader.checked |= {layout.config, layout.identity}


def _same_settings(reader: Reader, text: bytes) -> bool:
    try:
        return RunConfig.model_validate(yaml.safe_load(text)) == reader.run.config
    except (ValueError, yaml.YAMLError):
        return True  # the checkpoint is damaged, which is told where its files are checked


def _check_other_executions(reader: Reader, planned: set[str]) -> None:
    """Those of evaluations, and any that nobody planned."""
    prefix = f"{reader.layout.prefix}/executions"
    there = {key.removeprefix(f"{prefix}/").split("/")[0] for key in reader.below(prefix)}
    for name in sorted(there - planned):
        match = _HELD_OUT.fullmatch(name)
        if match is None:
            reader.note(Kind.LEFT_OVER, f"{prefix}/{name}", "no plan tells of this execution")
        else:
            check_execution(reader, name, match.group(1))
    groups = f"{reader.layout.prefix}/groups"
    for key in reader.below(groups):
        if key not in reader.checked:
            reader.note(Kind.LEFT_OVER, key, "no plan tells of this group")
            reader.group(key)


def _check_evaluations(reader: Reader) -> None:
    layout = reader.layout
    for key in reader.below(layout.evaluations):
        record = reader.record(key, Evaluation)
        name = key.rsplit("/", 1)[1].removesuffix(".json")
        if record is None:
            continue
        reader.require(name[:8] == f"{record.version:08d}", key, f"it is of {record.version}")
        prefix = layout.execution(f"v{record.version:05d}{name[8:]}-q")
        own = [one for one in reader.keys if one.startswith(prefix)]
        judged = {one.split("/verdicts/")[0] for one in own if "/verdicts/" in one}
        if own and record.samples is not None:
            text = f"{record.executions} executions have a reward there, {len(judged)} a verdict"
            reader.require(record.executions <= len(judged), key, text)
    done = [
        reader.record(layout.step_done(step), StepDone)
        for step in range(reader.run.config.training.steps)
    ]
    last = done[-1] if done else None
    if last is not None and not reader.below(layout.hosts):
        key = layout.evaluation(last.policy_version)
        if key not in reader.keys:
            reader.note(Kind.MISSING, key, "the run has ended without the evaluation of its end")


def _check_numbers(reader: Reader, prefix: str) -> None:
    """One empty object for each number from one on."""
    keys = reader.below(prefix)
    reader.checked.update(keys)
    for number, key in enumerate(keys, 1):
        if key != f"{prefix}/{number:08d}":
            reader.note(Kind.MISSING, f"{prefix}/{number:08d}", "later numbers are taken")
            break
        if reader.store.read_from(key, 0, 1):
            reader.note(Kind.DAMAGED, key, "an empty object, with something in it")


def _check_workspaces(reader: Reader) -> None:
    prefix = f"{reader.layout.prefix}/workspaces"
    for key in reader.below(prefix):
        reader.checked.add(key)
        named = key.rsplit("/", 1)[1].removesuffix(".tar.zst")
        content = blake2b(digest_size=20)
        try:
            stream = io.BytesIO(reader.store.read(key))
            with zstandard.ZstdDecompressor().stream_reader(stream) as plain:
                while block := plain.read(_BLOCK):
                    content.update(block)
        except (StorageError, zstandard.ZstdError) as error:
            reader.note(Kind.DAMAGED, key, str(error))
            continue
        if content.hexdigest() != named or key != reader.layout.frozen_workspace(named):
            reader.note(Kind.DAMAGED, key, "its content is not that which it is named after")


def _check_policy(reader: Reader) -> None:
    """The policy that the run started from; it lies outside the run, and others may share it."""
    first = reader.record(reader.layout.first_policy, FirstPolicy)
    if first is None:
        if reader.layout.first_policy not in reader.keys and reader.below(reader.layout.owners):
            reader.note(Kind.MISSING, reader.layout.first_policy, "the run has been started")
        return
    key = f"{first.key}/{MANIFEST}"
    if not reader.store.exists(key):
        reader.note(Kind.MISSING, key, "the run has started from this policy")
        return
    try:
        manifest = reader.store.read_record(key, PolicyManifest)
    except (RecordError, StorageError) as error:
        reader.note(Kind.DAMAGED, key, str(error))
        return
    for name, expected in manifest.files.items():
        file = f"{first.key}/{name}"
        if not reader.store.exists(file):
            reader.note(Kind.MISSING, file, "the policy's manifest lists it")
        elif hashlib.sha256(reader.store.read(file)).hexdigest() != expected:
            reader.note(Kind.DAMAGED, file, "its checksum is not that of the policy's manifest")


def _versions(reader: Reader) -> list[int]:
    """Of all checkpoints whose manifest can be read."""
    prefix = f"{reader.layout.prefix}/checkpoints"
    names = {key.removeprefix(f"{prefix}/").split("/")[0] for key in reader.below(prefix)}
    return sorted(
        int(name)
        for name in names
        if name.isdigit()
        and reader.record(f"{prefix}/{name}/{MANIFEST}", CheckpointManifest) is not None
    )


def _check_checkpoints(reader: Reader) -> None:
    run, layout = reader.run, reader.layout
    prefix = f"{layout.prefix}/checkpoints"
    versions = _versions(reader)
    for version in versions:
        key = layout.checkpoint(version)
        try:
            verified_checkpoint(run, version)
        except (CheckpointError, StorageError, RecordError) as error:
            reader.note(Kind.DAMAGED, key, str(error))
    for name in sorted(
        {key.removeprefix(f"{prefix}/").split("/")[0] for key in reader.below(prefix)}
    ):
        own = set(reader.below(f"{prefix}/{name}"))
        reader.checked |= own
        if not name.isdigit() or int(name) not in versions:
            text = "without a manifest it does not exist: its writer was killed"
            reader.note(Kind.LEFT_OVER, f"{prefix}/{name}", text)
    trained = [
        done.policy_version
        for step in range(run.config.training.steps)
        if (done := reader.record(layout.step_done(step), StepDone)) is not None
    ]
    newest = max(versions, default=0)
    if trained and trained[-1] > newest:
        text = f"a step ended with version {trained[-1]}, the newest whole checkpoint has {newest}"
        reader.note(Kind.MISSING, layout.checkpoint(trained[-1]), text)


def _check_rest(reader: Reader) -> None:
    """What no other check has read, and what a killed writer left."""
    for key in sorted(reader.keys - reader.checked):
        if key.endswith(".json") and key != reader.layout.manifest:
            try:
                check_record(reader.store.read(key), key)
            except (RecordError, StorageError) as error:
                reader.note(Kind.DAMAGED, key, str(error).removeprefix(f"{key}: "))
    for entry in reader.store.entries(reader.layout.prefix):
        if "/.writing-" in entry.key:
            text = "half-written by somebody who was killed; gyre gc deletes it"
            reader.note(Kind.LEFT_OVER, entry.key, text)
