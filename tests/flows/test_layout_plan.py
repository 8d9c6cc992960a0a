"""``gyre plan --config``: the presets of clusters against arithmetic by hand."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cells.replica.memory import Machine
from configs.load import load_config
from flows.cli import app
from flows.layout_plan import plan_layout, plan_words

WORDS = 151_936


@dataclass(frozen=True)
class Hand:
    """What a GPU holds, in billions of parameters, from the sizes in the preset's file."""

    dense: float
    """Of its stage, cut by tensor ranks; with the output layer, which is in the fullest stage."""
    experts: float
    whole: float
    active: float
    optimizer_shares: tuple[int, int]
    """Ranks that share the state of the dense part, and of an expert."""
    kv: float
    """Bytes of a token, in billions, over all GPUs."""


HANDS = {
    # 36 layers: q and o of 4096 x 4096, k and v of 4096 x 1024, an MLP of 12,288. All cut by 4.
    "one-node": Hand(
        dense=(36 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 12_288) + 2 * WORDS * 4096) / 4e9,
        experts=0,
        whole=8.19,
        active=8.19,
        optimizer_shares=(1, 1),
        kv=2 * 36 * 8 * 128 * 2 / 1e9,
    ),
    # 48 layers on 4 stages: q and o of 4096 x 8192, k and v of 4096 x 512, 128 experts of 1,552, of
    # which a GPU has 8. 16 GPUs of a stage: 4 tensor ranks, whose state 4 context ranks share.
    "moe-122b": Hand(
        dense=(12 * (2 * 4096 * 8192 + 2 * 4096 * 512) + WORDS * 4096) / 4e9
        + 12 * 128 * 4096 / 1e9,
        experts=12 * 8 * 3 * 4096 * 1552 / 1e9,
        whole=121.9,
        active=12.0,
        optimizer_shares=(4, 1),
        kv=2 * 48 * 4 * 128 * 2 / 1e9,
    ),
    # 96 layers on 12 stages: q and o of 8192 x 8192, k and v of 8192 x 1024, 384 experts of 2,624,
    # of which a GPU has 12. 32 GPUs of a stage: 8 tensor ranks, 4 context ranks.
    "moe-2400b": Hand(
        dense=(8 * (2 * 8192**2 + 2 * 8192 * 1024) + WORDS * 8192) / 8e9 + 8 * 384 * 8192 / 1e9,
        experts=8 * 12 * 3 * 8192 * 2624 / 1e9,
        whole=2394.6,
        active=66.8,
        optimizer_shares=(4, 1),
        kv=2 * 96 * 8 * 128 * 2 / 1e9,
    ),
}
MEMORY = {"one-node": 80, "moe-122b": 80, "moe-2400b": 192}


@pytest.mark.parametrize("name", HANDS)
def test_a_preset_needs_what_hand_arithmetic_says(name: str) -> None:
    hand, machine = HANDS[name], Machine(memory_gb=MEMORY[name], network=40, host=20)
    config = load_config(name, environment={})
    plan = plan_layout(config, machine)
    ranks = config.cells.layout.ranks
    own = hand.dense + hand.experts
    dense_share, expert_share = hand.optimizer_shares
    optimizer = 12 * (hand.dense / dense_share + hand.experts / expert_share)
    engine = 2 * hand.whole / ranks
    expected = {
        "parameters": own,
        "weights": 2 * own,
        "gradients": 4 * own,
        "optimizer": optimizer,
        "serving_weights": engine,
        "kv": hand.kv * config.cells.kv_tokens / ranks,
        "host": 8 * own,
    }
    # 1 in 1,000: norms are left out here.
    found = plan["memory_gb"]
    assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-3)
    assert plan["parameters_b"] == pytest.approx(hand.whole, rel=1e-3)
    assert plan["active_parameters_b"] == pytest.approx(hand.active, rel=5e-3)
    assert plan["seconds"] == pytest.approx(
        {
            "pull": 2 * own / 40,
            "gradient": 4 * own / 40,
            "to_training": (2 * own + optimizer) / 20,
            "to_rollout": (2 * own + optimizer + engine) / 20,
            "checkpoint": (12 * hand.whole / ranks + engine) / 2,
        },
        rel=1e-3,
    )
    assert plan["fits"] and "It fits" in plan_words(plan)


def test_activations_of_one_node_by_hand() -> None:
    """32,768 tokens: the input of each layer, a quarter of its tokens; the parts of one layer that
    is computed again; and the logits that are there at once."""
    found = plan_layout(load_config("one-node", environment={}), Machine())["memory_gb"]
    tokens, scattered = 32_768, 8192
    inputs = 36 * scattered * 4096 * 2
    heads = tokens * (3 * 32 + 2 * 8) * 128 / 4
    layer = 2 * (scattered * 6 * 4096 + heads + tokens * 3 * 12_288 / 4)
    assert found["activations"] == pytest.approx((inputs + layer) / 1e9)
    assert found["logits"] == pytest.approx(3 * 4 * 2**27 / 1e9)


def test_what_does_not_fit_is_said() -> None:
    plan = plan_layout(load_config("moe-2400b", environment={}), Machine(memory_gb=80))
    assert not plan["fits"] and "DOES NOT FIT" in plan_words(plan)


def gyre(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


@pytest.mark.parametrize("name", [*HANDS, "smollm2"])
def test_the_commands_take_each_preset(name: str) -> None:
    checked = gyre("config", "check", "--config", name)
    assert checked.exit_code == 0 and checked.output.startswith(f"ok: {name}"), checked.output
    memory = str(MEMORY.get(name, 80))
    planned = gyre("plan", "--config", name, "--memory", memory, "--json")
    assert planned.exit_code == 0, planned.output
    plan: dict[str, Any] = json.loads(planned.output)
    assert plan["fits"] and plan["published_switch_s"]["to_training"] == 8.52


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["cells.layout.tensor=3"], "heads (32) must be a multiple of the layout's tensor (3)"),
        (["cells.layout.pipeline=5"], "layers (36) must be a multiple"),
        (["cells.layout.expert=2"], "expert is 2, and the model has no experts"),
        (["cells.layout.attention=te"], "needs training.pack flat, not tree"),
    ],
)
def test_a_misfit_is_told_by_each_command(changes: list[str], expected: str) -> None:
    chosen = [part for change in changes for part in ("--set", change)]
    for command in (("config", "check"), ("plan",)):
        refused = gyre(*command, "--config", "one-node", *chosen)
        assert refused.exit_code == 2, refused.output
        assert expected in " ".join(refused.output.split())
