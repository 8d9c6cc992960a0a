"""Keys of executions are in the one place that needs them, and in nothing that a run leaves."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard

from cells.gateway.recording import ExecutionLog
from storage.run import Run
from tests.flows.conftest import FinishedRun

_WORD = re.compile(rb"[A-Za-z0-9_-]+")
_ZSTANDARD = b"\x28\xb5\x2f\xfd"


def keys_of(run: Run) -> set[str]:
    """Keys of all executions of a run."""
    names = run.store.children(f"{run.layout.prefix}/executions")
    sessions = (ExecutionLog(run.store, run.layout, name).session() for name in names)
    return {session.api_key for session in sessions if session is not None}


def holding(keys: set[str], folder: Path) -> Iterator[Path]:
    """Files below a folder that hold one of the keys, packed or not."""
    wanted = {key.encode() for key in keys}
    (length,) = {len(key) for key in wanted}
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or path.is_symlink():
            continue
        data = path.read_bytes()
        if data.startswith(_ZSTANDARD):
            with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data)) as reader:
                data = reader.read()
        # An expression of hundreds of keys would take minutes.
        words = (word.group() for word in _WORD.finditer(data) if len(word.group()) >= length)
        parts = (word[at : at + length] for word in words for at in range(len(word) - length + 1))
        if not wanted.isdisjoint(parts):
            yield path


def test_a_key_is_found_wherever_it_is(tmp_path: Path) -> None:
    for name, data in (("plain", b"a%key-1%2F"), ("packed", zstandard.compress(b"x key-2 y"))):
        (tmp_path / name).write_bytes(data)
    (tmp_path / "other").write_bytes(b"key")
    assert [path.name for path in holding({"key-1", "key-2"}, tmp_path)] == ["packed", "plain"]


@pytest.mark.real
@pytest.mark.timeout(1000)
def test_keys_are_with_their_sessions_and_nowhere_else(smoke_run: FinishedRun) -> None:
    """Not in logs, reports, frozen workspaces, artifacts, or the database of the Prefect server."""
    run = smoke_run.run
    keys = keys_of(run)
    assert len(keys) >= run.config.rollout.queries * run.config.rollout.group_size
    root = Path(run.store.url)
    found = {path.relative_to(root) for path in holding(keys, root)}
    sessions = Path(run.layout.prefix) / "executions"
    assert found
    assert not [path for path in found if not path.is_relative_to(sessions)]
    assert {path.name for path in found} == {"session.json"}
    assert not any(key in smoke_run.output for key in keys)
    assert not list(root.glob(f"{run.layout.hosts}/*")), "tokens of daemons that have ended"
