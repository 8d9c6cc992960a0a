"""What a configuration's layout needs of each GPU, and how long a switch takes: arithmetic."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from cells.replica.memory import USABLE, Machine, Moves, Needs, moves, needs, total_parameters
from cells.replica.planned import check_model, planned_shape
from configs.run import RunConfig

COLUMNS = ("part of a GPU", "GB")
PUBLISHED_SWITCH_S = {"to_training": 8.52, "to_rollout": 3.46}
"""Means that the published system reports for its 2.4T model; its bandwidths are not published."""


def plan_layout(config: RunConfig, machine: Machine) -> dict[str, Any]:
    """Sizes, memory of the fullest GPU in each role, and seconds of what moves.

    Raises:
        ShapeError, LayoutError: the model can't be trained, or the layout does not fit.
    """
    layout = config.cells.layout
    shape, where = planned_shape(config.model)
    check_model(config)
    found = needs(
        shape,
        layout,
        row_tokens=config.training.micro_step_tokens,
        kv_tokens=config.cells.kv_tokens,
    )
    whole, active = total_parameters(shape)
    room = machine.memory_gb * USABLE
    # Without release_memory both lie side by side.
    resident = 0.0 if config.cells.release_memory else found.serving
    roles = {"core": found.core, "satellite": found.satellite, "rollout": found.serving}
    fullest = max(found.core + resident, found.satellite + resident, found.serving)
    return {
        "model": where,
        "parameters_b": whole / 1e9,
        "active_parameters_b": active / 1e9,
        "cells": len(config.cells.cells),
        "gpus_per_cell": layout.ranks,
        "gpus": len(config.cells.cells) * layout.ranks,
        "row_tokens": config.training.micro_step_tokens,
        "memory_gb": asdict(found),
        "roles_gb": roles,
        "usable_gb": room,
        "fits": fullest <= room,
        "seconds": asdict(moves(shape, layout, machine, found)),
        "published_switch_s": PUBLISHED_SWITCH_S,
    }


def plan_rows(plan: dict[str, Any]) -> list[tuple[str, str]]:
    """Of a table: what takes how much."""
    memory = Needs(**plan["memory_gb"])
    parts = {
        "weights": memory.weights,
        "gradients, fp32": memory.gradients,
        "optimizer, in the core": memory.optimizer,
        f"activations, micro-steps of {plan['row_tokens']:,} tokens": memory.activations,
        "logits": memory.logits,
        "core, training": memory.core,
        "satellite, training": memory.satellite,
        "engine: weights": memory.serving_weights,
        "engine: KV cache": memory.kv,
        "usable": plan["usable_gb"],
        "main memory, for each GPU": memory.host,
    }
    return [(name, f"{value:.2f}") for name, value in parts.items()]


def plan_words(plan: dict[str, Any]) -> str:
    """The rest of a plan, in sentences."""
    seconds = Moves(**plan["seconds"])
    published = plan["published_switch_s"]
    sizes = (
        f"{plan['parameters_b']:.1f}B parameters, {plan['active_parameters_b']:.1f}B of them "
        f"active (sizes from {plan['model']}); {plan['cells']} cells of "
        f"{plan['gpus_per_cell']} GPUs, {plan['gpus']} in all. "
    )
    return (
        f"{sizes}It {'fits' if plan['fits'] else 'DOES NOT FIT'}.\n"
        f"Seconds by bytes and bandwidth alone: rollout to training {seconds.to_training:.2f} "
        f"(published {published['to_training']}), training to rollout {seconds.to_rollout:.2f} "
        f"(published {published['to_rollout']}), a satellite's pull {seconds.pull:.2f}, its "
        f"gradient {seconds.gradient:.2f}, a checkpoint {seconds.checkpoint:.1f}.\n"
        f"Nothing of this was measured on a GPU."
    )
