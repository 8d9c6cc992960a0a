"""Supervised fitting: it learns, and processes that share a step make the same policy."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from cells.replica.corpus import write_corpus
from cells.replica.fit_plan import FitPlan, Phase
from cells.replica.place import Place
from configs.layout import LayoutConfig

REPOSITORY = Path(__file__).parents[3]
STEPS = 20


@pytest.fixture
def copy_task(tmp_path: Path, hf_folder: Callable[..., Path]) -> Path:
    """A folder with config.json and a plan of two phases: repeat one token of a few."""
    random = np.random.default_rng(0)
    documents = []
    for _ in range(60):
        token = int(random.integers(1, 9))
        ids = [token] * int(random.integers(3, 12))
        documents.append((ids, [False, *[True] * (len(ids) - 1)]))
    write_corpus(tmp_path / "copy.safetensors", documents)
    phase = {"data": str(tmp_path / "copy.safetensors"), "sequences": 10, "warmup": 3}
    plan = FitPlan(
        phases=(
            Phase(name="first", steps=STEPS, muon_rate=0.02, adam_rate=0.01, **phase),
            Phase(name="second", steps=STEPS, stop_loss=50.0, **phase),
        ),
        micro_tokens=40,
        report_every=5,
    )
    (tmp_path / "plan.json").write_text(plan.model_dump_json())
    config = json.loads((hf_folder(tied=False) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "initializer_range": 0.04}))
    return tmp_path


def run_fit(folder: Path, out: str, *more: str) -> subprocess.CompletedProcess[str]:
    command = [
        *(sys.executable, "-m", "cells.replica.fit"),
        *("--model-config", str(folder / "config.json"), "--plan", str(folder / "plan.json")),
        *("--out", str(folder / out), *more),
    ]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=280, cwd=REPOSITORY, check=False
    )


def lines(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.real
def test_one_process_and_two_fit_the_same_policy(copy_task: Path) -> None:
    one, two = run_fit(copy_task, "one"), run_fit(copy_task, "two", "--processes", "2")
    reports = lines(one)
    steps = [report for report in reports if report["event"] == "step"]
    assert [step["step"] for step in steps if step["phase"] == "first"] == [5, 10, 15, 20]
    assert steps[3]["loss"] < steps[0]["loss"] / 3
    assert [step["step"] for step in steps if step["phase"] == "second"] == [1], "stopped early"
    assert reports[-1]["event"] == "done"
    for first, second in zip(steps, lines(two), strict=False):
        # Losses, not weights: where a gradient vanishes, Muon makes directions of rounding errors.
        assert first["loss"] == pytest.approx(second["loss"], abs=5e-4), first
        assert first["tokens"] == second["tokens"]
    for name in ("one", "two"):
        weights = load_file(copy_task / name / "model.safetensors")
        assert all(weight.isfinite().all() for weight in weights.values())

    plan = json.loads((copy_task / "plan.json").read_text())
    [phase, _] = plan["phases"]
    plan["phases"] = [{**phase, "steps": 5, "muon_rate": 0, "adam_rate": 1e-4}]
    (copy_task / "plan.json").write_text(json.dumps(plan))
    [further, *_] = lines(run_fit(copy_task, "further", "--start", str(copy_task / "one")))
    assert further["loss_mean"] < steps[0]["loss"] / 3, "it goes on from there, by AdamW alone"


@pytest.mark.real
def test_a_failed_fit_says_why_and_writes_nothing(copy_task: Path) -> None:
    plan = json.loads((copy_task / "plan.json").read_text())
    plan["phases"][1]["data"] = str(copy_task / "missing.safetensors")
    (copy_task / "plan.json").write_text(json.dumps(plan))
    done = run_fit(copy_task, "out")
    assert done.returncode == 1
    assert "missing.safetensors: can't be read" in done.stderr
    assert not (copy_task / "out").exists()
    (copy_task / "plan.json").write_text('{"phases": []}')
    done = run_fit(copy_task, "out")
    assert done.returncode == 2
    assert "plan.json" in done.stderr


@given(st.lists(st.integers(1, 60), max_size=30), st.integers(1, 4))
def test_every_document_has_one_process(lengths: list[int], world: int) -> None:
    from cells.replica.fitter import share

    documents = [
        (np.full(length, index, np.int32), np.zeros(length, np.bool_))
        for index, length in enumerate(lengths)
    ]
    shares = [share(documents, Place(LayoutConfig(data=world), rank)) for rank in range(world)]
    found = sorted(int(ids[0]) for mine in shares for ids, _ in mine)
    assert found == list(range(len(lengths)))
    loads = [sum(len(ids) for ids, _ in mine) for mine in shares]
    assert max(loads) - min(loads) <= max(lengths, default=0)


@given(st.integers(1, 400), st.integers(0, 50), st.floats(0, 1), st.floats(0, 1))
def test_rates_rise_hold_and_fall(steps: int, warmup: int, decay: float, floor: float) -> None:
    phase = Phase(
        name="p", data="d", steps=steps, sequences=1, warmup=warmup, decay_share=decay, floor=floor
    )
    factors = [phase.rate_factor(step) for step in range(steps)]
    assert all(0 < factor <= 1 for factor in factors)
    if warmup == 0:
        assert factors == sorted(factors, reverse=True)


@pytest.mark.parametrize("size", [(3, 20, 8), (2, 8, 20), (1, 6, 6)])
def test_orthogonal_matrices_keep_their_directions(size: tuple[int, int, int]) -> None:
    from cells.replica.muon import orthogonal

    given_ = torch.randn(size, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonal(given_))
    assert values.max() < 1.3
    assert values.median() > 0.6
    left, _, right = torch.linalg.svd(given_, full_matrices=False)
    cosine = torch.cosine_similarity(orthogonal(given_).flatten(1), (left @ right).flatten(1))
    assert cosine.min() > 0.95


@pytest.mark.usefixtures("megatron")
def test_muon_takes_every_matrix_of_the_blocks_part_by_part(
    hf_folder: Callable[..., Path],
) -> None:
    from cells.replica.muon import Muon
    from cells.replica.policy import Policy
    from cells.replica.weights import read_weights, to_hf

    folder = hf_folder(tied=True)
    policy = Policy.open(folder)
    policy.commit(read_weights(folder, policy.shape), 0)
    flat = policy.flat
    before = to_hf(flat.split(flat.weights), policy.shape)
    flat.gradients.normal_(generator=torch.Generator().manual_seed(0))
    rate = 0.1
    muon = Muon(flat.split(flat.weights), flat.split(flat.gradients), policy.shape)
    muon.step(rate)
    after = to_hf(flat.split(flat.weights), policy.shape)
    for name, old in before.items():
        moved = (after[name] - old) / rate
        if "_proj" not in name:
            assert not moved.any(), f"{name} is not Muon's"
            continue
        # Every HF matrix by itself: singular values near one, times the growth of tall ones.
        scale = max(1.0, old.shape[0] / old.shape[1]) ** 0.5
        values = torch.linalg.svdvals(moved) / scale
        assert values.max() < 1.3, name
        assert values.median() > 0.6, name
