"""What the server does by itself: a fall that is no noise, a problem set that is told of once."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows import events
from flows.aftermath import fallen
from flows.automations import SILENCE
from flows.problem_sets import tell_new
from flows.serve import HEARTBEAT_S
from storage.objects import Store
from storage.records import Evaluation


def evaluation(version: int, solved: int, problems: int = 40) -> Evaluation:
    rates = {f"p{number}": float(number < solved) for number in range(problems)}
    return Evaluation(
        version=version, problems=problems, executions=problems, excluded=0, timed_out=0,
        pass_rate=solved / problems, standard_error=0.1, rates=rates,
    )  # fmt: skip


def test_a_fall_is_one_beyond_noise_from_the_best_version_before() -> None:
    found = {0: evaluation(0, 10), 4: evaluation(4, 30), 8: evaluation(8, 12)}
    best, (low, high) = fallen(found, 8) or (None, (0.0, 0.0))
    assert best is not None and best.version == 4
    assert low < -18 / 40 < high < 0
    assert fallen(found, 4) is None
    assert fallen(found, 0) is None


def test_one_problem_less_is_noise() -> None:
    assert fallen({0: evaluation(0, 30), 4: evaluation(4, 29)}, 4) is None


def test_a_silence_is_many_heartbeats() -> None:
    assert SILENCE.total_seconds() >= 5 * HEARTBEAT_S


def test_a_problem_set_is_told_of_once_and_when_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, str, str]] = []
    monkeypatch.setattr(events, "problems_added", lambda *words: told.append(words))
    store = Store(tmp_path)
    store.write("problem_sets/half/one/instruction.md", b"")
    assert tell_new(store) == []
    store.write("problem_sets/whole/train.yaml", b"preset: smoke\n")
    assert tell_new(store) == ["whole"]
    assert tell_new(store) == []
    ((root, name, config),) = told
    assert (root, name) == (str(tmp_path), "whole")
    assert Path(config).read_text() == "preset: smoke\n"
