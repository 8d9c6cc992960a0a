"""How a configuration comes together, and how a wrong one is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from configs.load import ConfigError, absolute_source, dump_config, load_config
from configs.run import RunConfig
from configs.text import parse


def _load(*overrides: str, **environment: str) -> RunConfig:
    return load_config("quickstart", overrides, environment)


def _refusal(*overrides: str, **environment: str) -> str:
    with pytest.raises(ConfigError) as caught:
        _load(*overrides, **environment)
    return str(caught.value)


def _file(folder: Path, text: str, name: str = "own.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_later_sources_win(tmp_path: Path) -> None:
    path = _file(tmp_path, "preset: quickstart\ntraining: {steps: 3, learning_rate: 1.0e-4}\n")
    environment = {"GYRE_SET_TRAINING__STEPS": "4", "GYRE_SET_ROLLOUT__QUERIES": "10"}
    config = load_config(path, ["training.steps=5"], environment)
    assert config.training.steps == 5
    assert config.rollout.queries == 10
    assert config.training.learning_rate == 1e-4
    assert config.training.objective.clip_low == _load().training.objective.clip_low


def test_a_file_may_stand_on_a_file_that_stands_on_a_preset(tmp_path: Path) -> None:
    base = _file(tmp_path, "preset: quickstart\ntraining: {steps: 3}\nseed: 7\n", "base.yaml")
    top = _file(tmp_path, f"preset: {base}\nseed: 8\n", "top.yaml")
    config = load_config(top, environment={})
    assert (config.seed, config.training.steps, config.name) == (8, 3, "quickstart")


def test_files_and_folders_mean_the_same_in_other_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run's processes, and workers of Prefect, have folders of their own."""
    _file(tmp_path, "preset: smoke\nseed: 7\n", "base.yaml")
    chosen = "model: {source: hf_directory, path: policy}\nharness: {folder: clients}\n"
    _file(tmp_path, f"preset: base.yaml\nproblems: {{source: harbor, path: p}}\n{chosen}", "a.yaml")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    there, config = absolute_source("a.yaml"), load_config("a.yaml", environment={})
    assert absolute_source("smoke") == "smoke"
    assert config.seed == 7
    assert config.model.path == str(tmp_path / "policy")
    assert config.problems.path == str(tmp_path / "p")
    assert config.harness.folder == str(tmp_path / "clients")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load_config(there, environment={}).seed == 7
    assert RunConfig.model_validate(parse(dump_config(config))) == config


def test_the_home_of_nobody_is_refused() -> None:
    with pytest.raises(ConfigError, match="~nobody-here is nobody's home on this machine"):
        load_config("smoke", ["model.path=~nobody-here/policy"], environment={})


def test_a_circle_of_files_beside_each_other_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _file(tmp_path, f"preset: ../{tmp_path.name}/second.yaml\n", "first.yaml")
    _file(tmp_path, f"preset: ../{tmp_path.name}/first.yaml\n", "second.yaml")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="circle"):
        load_config("first.yaml", environment={})


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("rollout.queries=9", r"rollout.queries \(9\) must be a multiple of .* \(4\)"),
        ("training.shuffle=global", "training.shuffle must be arrival, got global"),
    ],
)
def test_groups_that_are_carried_over_have_an_order_of_their_own(setting: str, said: str) -> None:
    settings = ("rollout.queries=8", "training.updates_per_step=4", "cells.policy=adaptive")
    assert _load(*settings).cells.policy == "adaptive"
    with pytest.raises(ConfigError, match=said):
        _load(*settings, setting)


def test_a_circle_of_presets_is_refused(tmp_path: Path) -> None:
    first = _file(tmp_path, f"preset: {tmp_path / 'second.yaml'}\n", "first.yaml")
    _file(tmp_path, f"preset: {first}\n", "second.yaml")
    with pytest.raises(ConfigError, match="circle"):
        load_config(first, environment={})


def test_a_folder_does_not_hide_a_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "quickstart").mkdir()
    monkeypatch.chdir(tmp_path)
    assert _load().name == "quickstart"


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("trajectory.cap=0", ["trajectory.cap", "got 0", "greater than or equal to 1"]),
        (
            "trajectory.caps=3",
            ["trajectory.caps", "unknown key", "did you mean cap?", "within_kind"],
        ),
        ("cells.policy=fastest", ["cells.policy", "got 'fastest'", "'colocate'", "'elastic'"]),
        ("cells={policy: async, training_cells: 2}", ["leaves none of the 2 cells to serve"]),
        ("cells.cells=[{name: a, core: true, cpu: [1]}]", ["cells.cells.0.cpu", "cpus"]),
        ("cells.cells=[{core: true}]", ["cells.cells.0.name", "must be given", ": 1 error(s)"]),
        ("cells.cells=[{name: a}]", ["exactly one cell must be the core"]),
        ("training.steps=yes", ["training.steps", "got True"]),
        ("training.learning_rate=.nan", ["training.learning_rate", "finite"]),
        ("training.learning_rate=.inf", ["training.learning_rate", "finite"]),
        ("model.shape.heads=3", ["model.shape", "heads (3)", "kv_heads (2)"]),
        ("model=3", ["model", "got 3"]),
        ("model.source=hf_directory", ["path must be given"]),
        ("seed.deep=3", ["'seed' is a value", "no keys below"]),
        ("trajectory", ["dotted.key=value"]),
        ("=3", ["dotted.key=value"]),
        ("rollout.queries={a: 1", ["not valid YAML"]),
        ("=".join(["storage.root", "x" * 5000]), ["storage.root", "at most 4096 characters"]),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(override: str, parts: Sequence[str]) -> None:
    text = _refusal("seed=3", override)
    for part in parts:
        assert part in text
    assert len(text) < 6000


def test_the_origin_of_a_wrong_value_is_named() -> None:
    assert "(--set trajectory.cap=0)" in _refusal("trajectory.cap=0")
    text = _refusal(GYRE_SET_TRAJECTORY__CAP="0")
    assert "(environment variable GYRE_SET_TRAJECTORY__CAP)" in text


def test_every_fault_is_reported_at_once() -> None:
    text = _refusal("trajectory.cap=0", "seed=-1", "rollout.sizes=3")
    assert "3 error(s)" in text
    assert all(key in text for key in ("trajectory.cap", "seed", "rollout.sizes"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1\n- 2\n", "top level must be keys and values"),
        ("seed: [1\n", "can't be read"),
        ("seed: 1\nseed: 2\n", "'seed' is given twice"),
        ("training: {steps: 1, steps: 2}\n", "'steps' is given twice"),
        ("seed: !!python/object/apply:os.getcwd []\n", "can't be read"),
        ("{}: 1\n", "a key must be a text or a number"),
        ("seed: !!bool 3\n", "a value is not what its tag (!!...) says"),
        ("seed: !!timestamp x\n", "a value is not what its tag (!!...) says"),
        ("3: 4\n", "3"),
        ("training:\n", "training"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    path = _file(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, environment={})
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["[" * 5000, "{a: " * 5000, "- " * 5000])
def test_depth_is_refused_like_any_other_fault(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="nested too deeply"):
        load_config(str(path))


def test_aliases_can_not_blow_up(tmp_path: Path) -> None:
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    with pytest.raises(ConfigError, match="more than"):
        load_config(_file(tmp_path, "\n".join(levels)), environment={})


def test_a_huge_or_missing_file_is_refused(tmp_path: Path) -> None:
    path = _file(tmp_path, "#" * (1 << 21))
    with pytest.raises(ConfigError, match="larger than"):
        load_config(path, environment={})
    with pytest.raises(ConfigError, match="quickstart"):
        load_config("no-such-preset", environment={})


def test_overrides_do_not_reach_through_an_alias(tmp_path: Path) -> None:
    text = "scoring: &limits {limit_s: 9}\nharness: {}\nrollout: *limits\n"
    config = load_config(_file(tmp_path, text), ["rollout.limit_s=30"], {})
    assert (config.scoring.limit_s, config.rollout.limit_s) == (9, 30)


def test_none_is_written_as_text_or_null(tmp_path: Path) -> None:
    assert _load("trajectory.cap=none").trajectory.cap is None
    assert _load("trajectory.cap=null").trajectory.cap is None
    path = _file(tmp_path, "trajectory: {cap: none}\n")
    assert load_config(path, environment={}).trajectory.cap is None


def test_numbers_may_be_written_as_people_write_them() -> None:
    config = _load(
        "training.learning_rate=5e-4", "training.weight_decay=0", "cells.kv_tokens=32_768"
    )
    assert config.training.learning_rate == 5e-4
    assert config.cells.kv_tokens == 32_768


def test_a_configuration_is_frozen() -> None:
    with pytest.raises(ValidationError):
        _load().seed = 3  # type: ignore[misc]


def _flow(value: object) -> str:
    return yaml.safe_dump(value, default_flow_style=True)


def _cells(names: list[str]) -> list[dict[str, object]]:
    return [{"name": name, "core": not i, "cpus": [i]} for i, name in enumerate(names)]


_names = st.from_regex(r"[a-z][a-z0-9-]{0,31}", fullmatch=True).filter(lambda name: name != "none")
_overrides = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**31 - 1),
        "trajectory.cap": st.none() | st.integers(1, 1_000_000),
        "training.learning_rate": st.floats(1e-12, 1, exclude_min=True),
        "training.objective.clip_high": st.floats(0, 100),
        "rollout.limit_s": st.floats(0.5, 604_800),
        "rollout.clock": st.sampled_from(["work", "wall"]),
        "debug.permute_rewards": st.booleans(),
        "storage.root": st.text(min_size=1, max_size=60).filter(lambda text: text != "none"),
        "cells.cells": st.lists(_names, min_size=1, max_size=5, unique=True).map(_cells),
    }
)


@settings(max_examples=25)
@given(_overrides)
def test_what_is_dumped_loads_to_an_equal_configuration(values: dict[str, object]) -> None:
    texts = [
        f"{key}={yaml.safe_dump(value, default_flow_style=True)}" for key, value in values.items()
    ]
    config = load_config("quickstart", texts, {})
    again = RunConfig.model_validate(parse(dump_config(config)))
    assert again == config
    assert config.seed == values["seed"]
    assert config.storage.root == values["storage.root"]
    assert config.training.learning_rate == values["training.learning_rate"]


@pytest.mark.parametrize("root", ["\x85", "\u2028", "caf\u00e9", "a\nb", " x "])
def test_a_root_with_odd_characters_survives_the_file(root: str) -> None:
    config = RunConfig.model_validate({"storage": {"root": root}})
    assert RunConfig.model_validate(parse(dump_config(config))) == config
