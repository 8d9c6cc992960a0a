"""What the server does by itself: a fall that is no noise, a problem set that is told of once."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from prefect.events.schemas.automations import AutomationCore
from prefect.server.events.schemas.automations import AutomationUpdate

from flows import automations, events
from flows.aftermath import fallen
from flows.automations import SILENCE, make_automations
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


def test_made_again_they_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefect's client sends of an update only what was set, and the server fills in the rest."""
    sent: list[dict[str, Any]] = []

    def update(_: object, automation: AutomationCore) -> None:
        sent.append(automation.model_dump(mode="json", exclude_unset=True))

    there = SimpleNamespace(id=uuid4(), enabled=False)
    client = SimpleNamespace(read_automations_by_name=lambda _: [there], update_automation=update)
    monkeypatch.setattr(automations, "get_client", lambda **_: nullcontext(client))
    made = make_automations({"evaluate": uuid4(), "train": uuid4()}, pause_on_alarm=True)
    assert len(made) == len(sent) == 4
    for asked, body in zip(made, sent, strict=True):
        held = AutomationUpdate.model_validate(body)
        assert held.enabled is asked.enabled
        assert [one.type for one in held.actions] == [one.type for one in asked.actions]
        assert held.trigger.type == asked.trigger.type


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
