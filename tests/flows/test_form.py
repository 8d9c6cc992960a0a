"""The form of the settings: the same bounds as the settings, and nothing changed where it is
empty."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from configs.load import load_config, preset_names
from flows.form import EMPTY, Preset, Settings, overrides_of


def test_presets_are_a_choice() -> None:
    assert [one.value for one in Preset] == preset_names()


@pytest.mark.parametrize("preset", preset_names())
def test_an_empty_form_changes_nothing(preset: str) -> None:
    assert overrides_of(EMPTY) == []
    assert load_config(preset, overrides_of(Settings())) == load_config(preset)


def test_what_is_filled_is_set() -> None:
    form = Settings.model_validate(
        {
            "seed": 7,
            "training": {"steps": 3, "learning_rate": 1e-5, "objective": {"name": "grpo"}},
            "trajectory": {"within_kind": "latest", "cap": 2},
            "problems": {"path": "/a, b: [c]"},
        }
    )
    config = load_config("smoke", [*overrides_of(form), "problems.source=harbor"])
    assert (config.seed, config.training.steps, config.training.learning_rate) == (7, 3, 1e-5)
    assert config.training.objective.name == "grpo"
    assert (config.trajectory.cap, config.trajectory.within_kind) == (2, "latest")
    assert config.problems.path == "/a, b: [c]"
    assert config.rollout == load_config("smoke").rollout


@pytest.mark.parametrize(
    "wrong",
    [{"training": {"steps": 0}}, {"rollout": {"sandbox": "none"}}, {"training": {"stpes": 1}}],
)
def test_bounds_and_names_are_those_of_the_settings(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Settings.model_validate(wrong)


def test_inputs_are_plain() -> None:
    """An input that may be null would be a switch and two inputs in the UI."""
    schema = Settings.model_json_schema()
    training = schema["$defs"]["OfTraining"]["properties"]
    assert training["steps"] == {
        "title": "Steps",
        "type": "integer",
        "minimum": 1,
        "maximum": 1_000_000,
        "description": "RL steps of the run.",
    }
    for section in schema["$defs"].values():
        for field in section.get("properties", {}).values():
            assert "anyOf" not in field
