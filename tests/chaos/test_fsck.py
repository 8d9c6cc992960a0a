"""`gyre fsck` finds whatever is done to a run's storage, and says what it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from pathlib import Path

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from configs.load import ConfigError
from flows.cli import app
from flows.fsck.check import check_run
from flows.fsck.finding import Finding, Kind
from storage.journal import append_line, read_journal
from storage.records import ExecutionResult, StepDone, VerdictRecord
from storage.run import Run, open_run
from storage.samples import SealedGroup, read_group, seal
from tests.chaos.recorded import RUN, record_run

NAME = "s00000-q0000-e000"
GROUP = "s00000-q0000"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Storage with a whole run. Read only."""
    root = tmp_path_factory.mktemp("recorded") / "root"
    record_run(root)
    shutil.rmtree(root / "workspace")
    shutil.rmtree(root / "first")
    return root


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Run:
    """A copy of it."""
    return copied(recorded, tmp_path / "root")


def copied(recorded: Path, root: Path) -> Run:
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(recorded, root)
    open_run.cache_clear()
    return open_run(str(root), RUN)


def errors(run: Run) -> list[Finding]:
    return [finding for finding in check_run(run) if finding.is_error]


def test_a_run_to_which_nothing_was_done_has_no_finding(run: Run) -> None:
    assert check_run(run) == ()


class Damage(Enum):
    """What can happen to a file."""

    FLIPPED = "a bit is another"
    CUT = "its end is missing"
    GROWN = "something was added"
    GONE = "deleted"
    EMPTY = "emptied"


TOLD = ("/levels/", "/decisions/", "/run.json")
"""Only told to people: nothing else refers to them, so that their end may be missing."""
NUMBERS = ("/epochs/", "/owners/")


def is_silent(key: str, damage: Damage) -> bool:
    """What nobody can notice, and why it does no harm."""
    if key.endswith(("/lock", "/turn")):
        return True  # their being locked counts, not what they hold
    if any(part in key for part in TOLD):
        return damage is not Damage.FLIPPED or key.endswith("/run.json")
    if any(part in key for part in NUMBERS):
        return damage is not Damage.GROWN  # the last number that was taken may as well not be
    return key.endswith("/identity")  # any random name is as good as another


@settings(max_examples=40, phases=(Phase.generate, Phase.shrink))
@given(
    which=st.floats(0, 1, exclude_max=True),
    where=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 7),
    damage=st.sampled_from(Damage),
)
def test_whatever_happens_to_a_file_is_found(
    recorded: Path,
    tmp_path_factory: pytest.TempPathFactory,
    which: float,
    where: float,
    bit: int,
    damage: Damage,
) -> None:
    root = tmp_path_factory.getbasetemp() / "damaged"
    run = copied(recorded, root)
    keys = [*run.store.keys(run.layout.prefix), *run.store.keys("policies/first")]
    key = keys[int(which * len(keys))]
    data = bytearray(run.store.read(key))
    if is_silent(key, damage) or (not data and damage is not Damage.GROWN):
        return
    match damage:
        case Damage.FLIPPED:
            data[int(where * len(data))] ^= 1 << bit
        case Damage.CUT:
            del data[int(where * len(data)) :]
        case Damage.GROWN:
            data += b"x"
        case Damage.EMPTY:
            data.clear()
        case Damage.GONE:
            run.store.delete(key)
    if damage is not Damage.GONE:
        run.store.write(key, bytes(data))
    assert noticed(run, recorded, key), f"{key}: {damage.value}"


def noticed(run: Run, recorded: Path, key: str) -> bool:
    """Whether there is a finding, or what is read from the file is what it was."""
    open_run.cache_clear()
    try:
        again = open_run(run.store.url, RUN)
    except (ConfigError, OSError, RuntimeError, ValueError):
        return True
    if check_run(again):
        return True
    # A changed comment of the settings, a space in a table of contents.
    before = Run(again.store.__class__(recorded), again.layout, again.config, again.identity)
    if key == run.layout.config:
        open_run.cache_clear()
        return open_run(str(recorded), RUN).config == again.config
    if "/groups/" in key:
        return read_group(again.store, key).header == read_group(before.store, key).header
    return False


def rewrite(run: Run, key: str, kind: type, **changes: object) -> None:
    """As somebody would who knows the format: the checksum is right again."""
    record = run.store.read_record(key, kind)
    run.store.write_record(key, record.model_copy(update=changes))


def swap_reward(run: Run) -> None:
    key = run.layout.verdict(NAME, 0)
    record = run.store.read_record(key, VerdictRecord)
    verdict = record.verdict.model_copy(update={"reward": 0.25})
    run.store.write_record(key, record.model_copy(update={"verdict": verdict}))


def train_again(run: Run) -> None:
    lines = read_journal(run.store, run.layout.ledger(0))
    (twice,) = [line for line in lines if b'"accumulated"' in line][:1]
    append_line(run.store, f"{run.layout.ledger(0)}/00000000.jsonl", twice)


def other_target(run: Run) -> None:
    key = run.layout.group(GROUP)
    group = read_group(run.store, key)
    first = group.samples[0]
    ids = first.ids.copy()
    ids[np.flatnonzero(first.targets)[0]] += 1
    run.store.delete(key)
    changed = (replace(first, ids=ids), *group.samples[1:])
    seal(run.store, key, SealedGroup(group.header, changed))


def repeat_call(run: Run) -> None:
    key = f"{run.layout.calls(NAME)}/00000000.jsonl"
    append_line(run.store, key, read_journal(run.store, run.layout.calls(NAME))[0])


def lose_segment(run: Run) -> None:
    folder = run.layout.ledger(0)
    data = run.store.read(f"{folder}/00000000.jsonl")
    run.store.write(f"{folder}/00000001.jsonl", data)
    run.store.delete(f"{folder}/00000000.jsonl")


def swap_workspaces(run: Run) -> None:
    first, second = run.store.keys(f"{run.layout.prefix}/workspaces")[:2]
    run.store.write(first, run.store.read(second))


def half_checkpoint(run: Run) -> None:
    run.store.delete(f"{run.layout.checkpoint(2)}/manifest.json")


CHANGES: dict[str, tuple[Callable[[Run], object], Kind, str]] = {
    "a verdict with another reward": (
        swap_reward,
        Kind.CONTRADICTION,
        "a reward that none of its verdicts has",
    ),
    "a micro-step that counts twice": (
        train_again,
        Kind.CONTRADICTION,
        "would break the order of states",
    ),
    "a target that nobody sampled": (other_target, Kind.CONTRADICTION, "1 targets are in none"),
    "a call that is there twice": (repeat_call, Kind.REPEATED, "call c000 is recorded 2 times"),
    "a lost segment": (lose_segment, Kind.MISSING, "segment 0 is not there"),
    "a workspace of another execution": (swap_workspaces, Kind.DAMAGED, "named after"),
    "a checkpoint without its manifest": (
        half_checkpoint,
        Kind.MISSING,
        "newest whole checkpoint has 0",
    ),
    "a lost group": (
        lambda run: run.store.delete(run.layout.group(GROUP)),
        Kind.MISSING,
        "trains it",
    ),
    "a lost result": (
        lambda run: run.store.delete(run.layout.execution_result(NAME)),
        Kind.MISSING,
        "sealed with a reward",
    ),
    "calls that were answered and lost": (
        lambda run: rewrite(run, run.layout.execution_result(NAME), ExecutionResult, calls=9),
        Kind.MISSING,
        "9 calls were answered, 3 found",
    ),
    "a step that ends with another version": (
        lambda run: rewrite(run, run.layout.step_done(0), StepDone, policy_version=1),
        Kind.CONTRADICTION,
        "it ends with version 1, its ledger with 2",
    ),
    "an update that is told twice": (
        lambda run: append_line(
            run.store, run.layout.metrics, run.store.read(run.layout.metrics).split(b"\n")[0]
        ),
        Kind.REPEATED,
        "update 0 of step 0 has 2 lines",
    ),
    "a policy that is gone": (
        lambda run: run.store.delete("policies/first"),
        Kind.MISSING,
        "has started from this policy",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_contradicts_is_explained(run: Run, change: str) -> None:
    do, kind, text = CHANGES[change]
    do(run)
    found = [one for one in errors(run) if one.kind is kind and text in one.text]
    assert found, check_run(run)


def test_what_a_killed_writer_leaves_is_noted_and_no_error(run: Run) -> None:
    folder = run.store.local_path(run.layout.calls(NAME))
    with open(folder / "00000000.jsonl", "ab") as journal:
        journal.write(b'{"record":"Call","for')
    (run.store.local_path(run.layout.prefix) / ".writing-report.html-1").write_bytes(b"<html")
    checkpoint = run.store.local_path(run.layout.checkpoint(3))
    checkpoint.mkdir()
    (checkpoint / "config.yaml").write_text("{}")
    findings = check_run(run)
    assert [one.kind for one in findings] == [Kind.LEFT_OVER] * 3
    assert {one.text.split(":")[0] for one in findings} == {
        "line 4 is torn",
        "half-written by somebody who was killed; gyre gc deletes it",
        "without a manifest it does not exist",
    }


def test_a_run_that_has_just_begun_is_whole(run: Run) -> None:
    """Nothing that is not there yet is missing."""
    layout = run.layout
    for key in (layout.step(0), f"{layout.prefix}/groups", layout.evaluations, layout.metrics):
        run.store.delete(key)
    for key in (f"{layout.prefix}/checkpoints", f"{layout.prefix}/executions"):
        run.store.delete(key)
    assert errors(run) == []


def test_the_command_tells_people_and_programs(run: Run) -> None:
    arguments = ["fsck", RUN, "--root", run.store.url]
    runner = CliRunner()
    clean = runner.invoke(app, arguments)
    assert clean.exit_code == 0 and "r: no errors, 0 notes" in clean.output
    swap_reward(run)
    found = runner.invoke(app, arguments)
    assert found.exit_code == 1 and "contradiction" in found.output
    told = runner.invoke(app, [*arguments, "--json"])
    body = json.loads(told.output)
    assert told.exit_code == 1 and body["errors"] == 1 and body["findings"][0]["error"]
    assert runner.invoke(app, ["fsck", "no-such", "--root", run.store.url]).exit_code == 2
