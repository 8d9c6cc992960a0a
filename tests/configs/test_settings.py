"""Every setting tells what it is: description, unit, bounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.load import load_config, preset_names
from configs.run import RunConfig
from configs.schema import SettingRow, markdown, section_of, setting_rows

ROWS = list(setting_rows())
SETTINGS_PAGE = Path(__file__).parents[2] / "docs" / "settings.md"


def _ids(row: SettingRow) -> str:
    return row.key


@pytest.mark.parametrize("row", ROWS, ids=_ids)
def test_setting_has_a_description(row: SettingRow) -> None:
    assert len(row.description) >= 10
    assert row.description[0].isalnum() and row.description.endswith(".")


@pytest.mark.parametrize("row", [row for row in ROWS if row.kind == "number"], ids=_ids)
def test_number_has_a_unit_and_two_bounds(row: SettingRow) -> None:
    assert row.unit
    assert ">" in row.allowed and "<" in row.allowed


@pytest.mark.parametrize("row", [row for row in ROWS if row.kind == "choice"], ids=_ids)
def test_choice_lists_its_values(row: SettingRow) -> None:
    assert row.default in row.allowed.split(", ")


@pytest.mark.parametrize("row", [row for row in ROWS if row.kind == "text"], ids=_ids)
def test_text_is_limited(row: SettingRow) -> None:
    assert "characters" in row.allowed or "`^" in row.allowed


def test_rows_cover_the_whole_model() -> None:
    dumped = RunConfig().model_dump()
    keys = {row.key for row in ROWS}
    todo = [("", dumped)]
    while todo:
        prefix, values = todo.pop()
        for name, value in values.items():
            key = prefix + name
            if isinstance(value, dict) and key not in keys:
                todo.append((f"{key}.", value))
            else:
                assert key in keys
    assert section_of(RunConfig.model_fields["cells"].annotation) is not None


def test_every_preset_loads_under_its_own_name() -> None:
    names = preset_names()
    assert "quickstart" in names
    for name in names:
        assert load_config(name, environment={}).name == name


def test_the_page_of_settings_is_up_to_date() -> None:
    assert SETTINGS_PAGE.read_text(encoding="utf-8") == markdown(), (
        "run: gyre config schema --markdown > docs/settings.md"
    )
