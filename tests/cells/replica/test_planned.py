"""What is said of a layout before anything is started."""

from __future__ import annotations

import pytest

from cells.replica.links import hf_shapes
from cells.replica.memory import Machine, moves, needs, total_parameters
from cells.replica.place import LayoutError
from cells.replica.planned import check_model, planned_shape
from configs.load import ConfigError, load_config

PRESETS = {
    "one-node": (8.19, 8, 80),
    "moe-122b": (121.9, 256, 80),
    "moe-2400b": (2394.6, 1536, 192),
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_of_clusters_fit_their_gpus(name: str) -> None:
    parameters, gpus, memory = PRESETS[name]
    config = load_config(name, environment={})
    check_model(config)
    layout = config.cells.layout
    shape, _ = planned_shape(config.model)
    assert total_parameters(shape)[0] / 1e9 == pytest.approx(parameters, rel=1e-3)
    assert layout.ranks * len(config.cells.cells) == gpus
    found = needs(
        shape,
        layout,
        row_tokens=config.training.micro_step_tokens,
        kv_tokens=config.cells.kv_tokens,
    )
    assert found.satellite < found.core < 0.9 * memory
    assert found.serving < 0.9 * memory
    seconds = moves(shape, layout, Machine(memory_gb=memory), found)
    assert 0 < seconds.pull < seconds.gradient < seconds.to_training < 8.52


def test_memory_follows_length_over_context_ranks() -> None:
    config = load_config("moe-122b", environment={})
    layout = config.cells.layout
    shape, _ = planned_shape(config.model)

    def activations(tokens: int, context: int) -> float:
        wider = layout.model_copy(update={"context": context})
        return needs(shape, wider, row_tokens=tokens, kv_tokens=1).activations

    assert activations(1 << 20, 4) == pytest.approx(2 * activations(1 << 19, 4))
    assert activations(1 << 20, 8) < 0.53 * activations(1 << 20, 4)


def test_parameters_are_those_of_the_tensors() -> None:
    shape, where = planned_shape(load_config("quickstart", environment={}).model)
    counted = sum(rows * (size[0] if size else 1) for rows, *size in hf_shapes(shape).values())
    assert total_parameters(shape) == (counted, counted)
    assert where == "model.shape"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["cells.layout.tensor=4"], r"model.shape: kv_heads \(2\) must be a multiple"),
        (
            ["cells.layout.context=2", "training.micro_step_tokens=8192"],
            r"a dense mask of 33554432 elements, at most 16777216",
        ),
        (["cells.layout.attention=te"], "which needs cells.device cuda, not cpu"),
        (
            ["cells.layout.attention=te", "cells.device=cuda", "cells.layout.precision=bf16"],
            r"which needs training.pack flat, not tree",
        ),
    ],
)
def test_a_layout_that_can_not_run_is_refused(changes: list[str], expected: str) -> None:
    with pytest.raises(LayoutError, match=expected):
        check_model(load_config("quickstart", changes, environment={}))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("model.shape.family=llama", "the warm start makes qwen3 models, not llama"),
        ("model.shape.experts=4", "family qwen3 with 4 experts"),
    ],
)
def test_a_model_that_contradicts_itself_is_refused(change: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load_config("quickstart", [change], environment={})
