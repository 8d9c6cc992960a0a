"""``gyre config``: exit codes, and one clear block where something is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from configs.load import load_config
from configs.schema import markdown
from flows.cli import app


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_show_prints_what_can_be_loaded_again(tmp_path: Path) -> None:
    result = _run("config", "show", "--set", "trajectory.cap=3", "--set", "seed=9")
    assert result.exit_code == 0
    path = tmp_path / "own.yaml"
    path.write_text(result.output, encoding="utf-8")
    config = load_config(path, environment={})
    assert (config.trajectory.cap, config.seed) == (3, 9)
    assert config == load_config("quickstart", ["trajectory.cap=3", "seed=9"], {})


def test_show_as_json() -> None:
    result = _run("config", "show", "--json")
    assert json.loads(result.output) == yaml.safe_load(_run("config", "show").output)


def test_check_of_a_good_configuration() -> None:
    result = _run("config", "check", "--config", "quickstart")
    assert result.exit_code == 0
    assert result.output.startswith("ok: quickstart: ")


@pytest.mark.parametrize("command", ["show", "check"])
def test_a_bad_configuration_is_one_block_and_exit_code_2(command: str) -> None:
    result = _run("config", command, "--set", "trajectory.cap=0")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "trajectory.cap" in result.stderr and "got 0" in result.stderr
    assert "Traceback" not in result.output
    assert len(result.stderr.splitlines()) == 3


def test_text_with_brackets_is_printed_as_it_is() -> None:
    result = _run("config", "check", "--set", "cells.cells=[{name: a, core: true, oops: 1}]")
    assert result.exit_code == 2
    assert "[{name: a" in result.stderr or "cells.cells.0.oops" in result.stderr


def test_schema_as_a_table_of_one_section() -> None:
    result = _run("config", "schema", "training.objective")
    assert result.exit_code == 0
    assert "training.objective.clip_low" in result.output
    assert "training.steps" not in result.output
    assert _run("config", "schema", "trainings").exit_code == 2


def test_schema_for_programs() -> None:
    schema = json.loads(_run("config", "schema", "--json").output)
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["TrainingConfig"]["properties"]["steps"]["unit"] == "steps"


def test_schema_as_the_page_of_settings() -> None:
    assert _run("config", "schema", "--markdown").output == markdown()


@pytest.mark.parametrize(
    "arguments",
    [(), ("config",), ("config", "show"), ("config", "check"), ("config", "schema"), ("train",)],
)
def test_help_teaches_with_examples(arguments: tuple[str, ...]) -> None:
    output = _run(*arguments, "--help").output
    assert "Usage: gyre" in output
    if arguments != ("config",):
        assert "  gyre " in output or " gyre config" in output or " gyre train" in output


def test_version() -> None:
    assert _run("--version").output.startswith("gyre 0.")
