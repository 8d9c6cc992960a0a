"""A cell's host that is started elsewhere, and what it starts with; the process is a stand-in."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cells.wanted import Wanted, find_wanted, want, want_newer, want_no_more
from flows import cell_host
from flows.cell_host import keep_host
from tests.conftest import make_run


def test_one_that_failed_begins_again_with_the_newest_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that it began with may be deleted since."""
    run = make_run(tmp_path, "cells.cells=[{name: a, core: true}, {name: b, elsewhere: true}]")
    want(run, Wanted(attempt=1, policy_key="checkpoints/00000004/policy", version=4))
    started: list[Sequence[str]] = []

    def fails_once(argv: Sequence[str], **_: Any) -> subprocess.Popen[bytes]:
        started.append(argv)
        if len(started) == 1:
            want_newer(run, "checkpoints/00000008/policy", 8)
        return subprocess.Popen([sys.executable, "-c", f"raise SystemExit({2 - len(started)})"])

    monkeypatch.setattr(cell_host, "spawn", fails_once)
    monkeypatch.setattr(cell_host, "_RESTART_DELAYS_S", (0.0,))
    keep_host(run, "b", 0.1, say=lambda _: None)
    assert [argv[argv.index("--version") + 1] for argv in started] == ["4", "8"]
    assert started[1][started[1].index("--policy") + 1].endswith("00000008/policy")


def test_nothing_is_wanted_of_an_attempt_that_has_ended(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    want(run, Wanted(attempt=1, policy_key="policies/x", version=0))
    want_no_more(run)
    want_newer(run, "checkpoints/00000008/policy", 8)
    assert find_wanted(run) is None
