"""Streamed equals one-shot, with Megatron processes that come, go and are killed at random."""

from __future__ import annotations

import numpy as np
import pytest

from tests.tasks.training.disturbances import Bench, Plan, Trained, distance, weights_in
from tests.tasks.training.processes import EventLoop, Replica

pytestmark = pytest.mark.real

WEIGHTS, GRADIENT = 1e-3, 1e-5
"""Most that may differ: of the change of the weights, and of a gradient."""


@pytest.fixture(scope="module")
def bench(tmp_path_factory, tiny_policy, other_policy):
    folder = tmp_path_factory.mktemp("bench")
    with EventLoop() as loop:

        def make(name, *, core):
            return Replica(loop, folder / "store", folder / "replicas.log", name, core=core)

        made = Bench(make, folder / "store", tiny_policy, other_policy)
        yield made
        made.close()


@pytest.fixture(scope="module")
def figures(pytestconfig):
    """What the runs of this file found; the worst is printed at the end."""
    found: list[tuple[float, float, int, int]] = []
    yield found
    if not found:
        return
    weights, gradients, deaths, satellites = zip(*found, strict=True)
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(
            f"\n{len(found)} disturbed runs, {sum(deaths)} deaths, {sum(satellites)} micro-steps "
            f"by satellites. Worst difference of the weights / their change {max(weights):.2e} "
            f"(at most {WEIGHTS:g}), of a gradient {max(gradients):.2e} (at most {GRADIENT:g})"
        )


def compare(bench: Bench, plan: Plan, figures) -> Trained:
    found = bench.disturbed(plan)
    expected = bench.alone(plan, found.order)
    weights, gradient = distance(found, expected, weights_in(bench.policy))
    figures.append((weights, gradient, len(found.died), found.by_satellites))
    assert len(found.order) == len(set(found.order)) == len(plan.groups)
    assert np.isfinite(found.weights).all()
    assert weights <= WEIGHTS and gradient <= GRADIENT, (plan, found.died)
    return found


@pytest.mark.parametrize("seed", range(3))
def test_joins_leaves_and_kills_change_nothing(bench, figures, seed):
    compare(bench, Plan.draw(seed, ["left", "right", "core"]), figures)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(100, 120))
def test_a_kill_of_any_replica_at_a_random_moment_changes_nothing(bench, figures, seed):
    killed = ("core", "left", "right")[seed % 3]
    compare(
        bench, Plan.draw(seed, [killed, *(["core"] if seed % 2 else ["left", "right"])]), figures
    )
