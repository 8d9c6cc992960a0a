"""The form of the settings: the same bounds as the settings, and nothing changed where it is
empty."""

from __future__ import annotations

import pytest
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import validate
from pydantic import BaseModel, ValidationError

from configs.load import load_config, preset_names
from flows.form import EMPTY, Preset, Settings, overrides_of
from flows.train import train


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


def untouched(section: type[BaseModel]) -> dict[str, object]:
    """What the UI sends for a form in which nothing was filled."""
    below = {key: field.annotation for key, field in section.model_fields.items()}
    return {
        key: untouched(one) if isinstance(one, type) and issubclass(one, BaseModel) else None
        for key, one in below.items()
    }


def test_a_form_that_nobody_touched_is_accepted() -> None:
    values = {"preset": "smoke", "settings": untouched(Settings)}
    assert validate(values, parameter_schema(train).model_dump()) == []
    assert overrides_of(Settings.model_validate(values["settings"])) == []


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
