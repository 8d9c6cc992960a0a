"""What one layout has saved another goes on with, and every layout trains the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cells.replica.place import Place
from cells.replica.settings import ReplicaSettings
from configs.layout import LayoutConfig
from storage.objects import Store
from tests.cells.replica.conftest import MakeFolder, seal_group
from tests.cells.replica.ranks import run_ranks

pytestmark = pytest.mark.real
RATE = 1e-2
ALONE: dict[str, Any] = {}
PAIRS = {
    "data to tensor": ("untied", {"data": 2, "distributed_optimizer": True}, {"tensor": 2}),
    "tensor to pipeline": ("qwen3", {"tensor": 2}, {"pipeline": 2}),
    "experts to one": ("moe", {"data": 2, "expert": 2, "distributed_optimizer": True}, ALONE),
}


def train(place: Place, root: Path, start: Path, state: Path | None, updates: range) -> None:
    """Updates from an HF directory, or from a saved state; then a state and an HF directory."""
    from cells.replica.commands import Commands

    settings = ReplicaSettings(
        root=str(root / "store"),
        core=True,
        layout=place.layout,
        objective="tests.cells.replica.losses:SequenceRatio",
        weight_decay=0.1,
    )
    commands = Commands(settings, place)
    if state is None:
        commands.run("load", {"path": str(start), "version": 0})
    else:
        commands.run("restore", {"path": str(state)})
    for update in updates:
        for number in range(2):
            samples = [{"group_key": f"g{number}", "index": index} for index in range(3)]
            key = {"step": 0, "update": update, "micro_step": f"m{number}"}
            commands.run("micro_step", {**key, "samples": samples})
        commands.run("step", {"step": 0, "update": update, "executions": 4, "learning_rate": RATE})
    commands.run("save", {"path": str(start.parent / "state")})
    commands.run("export", {"path": str(start.parent / "policy")})


def placed(scratch: Path, folder: Path) -> Path:
    """A name for the start whose folder takes what is written."""
    scratch.mkdir(parents=True)
    (scratch / "start").symlink_to(folder)
    return scratch / "start"


@pytest.mark.parametrize("name", PAIRS)
def test_a_state_goes_on_in_another_layout(
    model_folder: MakeFolder, tmp_path: Path, name: str
) -> None:
    kind, first, second = PAIRS[name]
    folder = model_folder(kind)
    store = Store(tmp_path / "store")
    for seed in range(2):
        seal_group(store, f"g{seed}", seed)
    steps = (
        ("before", first, None, range(0, 2)),
        ("after", second, tmp_path / "before" / "state", range(2, 3)),
        ("one", ALONE, None, range(0, 3)),
    )
    for at, sizes, state, updates in steps:
        start = placed(tmp_path / at, folder)
        run_ranks(LayoutConfig(**sizes), tmp_path / at, train, tmp_path, start, state, updates)
    assert distance(tmp_path, folder) < 1e-4
    for moment in ("exp_avg", "exp_avg_sq"):
        found, expected = (
            load_file(tmp_path / at / "state" / "state.safetensors") for at in ("after", "one")
        )
        names = [key for key in expected if key.startswith(f"{moment}/")]
        assert names and found.keys() == expected.keys()
        for key in names:
            assert (found[key] - expected[key]).norm() < 1e-4 * expected[key].norm(), key


def distance(scratch: Path, folder: Path) -> float:
    """Of the weights after both layouts to those of one process, over their change."""
    after, one = (
        load_file(scratch / at / "policy" / "model.safetensors") for at in ("after", "one")
    )
    before = load_file(folder / "model.safetensors")
    difference = sum(float((after[key] - one[key]).square().sum()) for key in one)
    change = sum(float((one[key] - before[key]).square().sum()) for key in one)
    return float((difference / change) ** 0.5)


def bf16(place: Place, root: Path, start: Path) -> None:
    """bf16 weights over fp32 ones that a state keeps exactly."""
    train(place, root, start, None, range(0, 2))
    saved = load_file(start.parent / "state" / "state.safetensors")
    train(place, root, start, start.parent / "state", range(2, 2))
    again = load_file(start.parent / "state" / "state.safetensors")
    assert all(torch.equal(saved[key], again[key]) for key in saved)
    exported = load_file(start.parent / "policy" / "model.safetensors")
    for key, weight in exported.items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, saved[f"weights/{key}"].bfloat16())
    masters = [saved[f"weights/{key}"] for key in exported]
    assert any((master != master.bfloat16().float()).any() for master in masters)


def test_bf16_weights_keep_their_fp32_masters(model_folder: MakeFolder, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    for seed in range(2):
        seal_group(store, f"g{seed}", seed)
    start = placed(tmp_path / "one", model_folder("qwen3"))
    layout = LayoutConfig(precision="bf16")
    run_ranks(layout, tmp_path / "one", bf16, tmp_path, start)
