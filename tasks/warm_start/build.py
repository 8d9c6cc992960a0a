"""Makes the policy that a run starts from: tokenizer, demonstrations, fit, storage."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cells.process import end_group, spawn
from cells.replica.fit_plan import FitPlan
from configs.run import RunConfig
from storage.layout import policy_prefix
from storage.objects import Store
from tasks.warm_start.policies import has_policy, import_policy, keep_policy, only_maker

RECIPE = 1
"""Raise it when the same settings make another policy than before."""

_POLL_S = 0.2
_TAIL_CHARS = 2000

Progress = Callable[[str], Any]

__all__ = ["RECIPE", "WarmStartError", "build_policy", "import_policy", "policy_key"]


class WarmStartError(RuntimeError):
    """No policy was made; the text says what happened and what to change."""


def policy_key(config: RunConfig) -> str:
    """Storage key of the policy that these settings make.

    Settings that do not enter the warm start leave it unchanged, the run's seed among them: runs
    that differ in it start from the same policy.
    """
    parts = {
        "recipe": RECIPE,
        "model": config.model.model_dump(
            mode="json",
            include={"shape", "context", "renderer"},
            # Of models that the warm start does not make.
            exclude={"shape": {"family", "experts", "experts_per_token", "expert_ffn"}},
        ),
        "warm_start": config.warm_start.model_dump(mode="json", exclude={"limit_s", "processes"}),
        "problems": config.problems.specrepo.model_dump(
            mode="json", include={"files", "functions_min", "functions_max", "difficulty"}
        ),
        "harness": config.harness.model_dump(
            mode="json", include={"turns", "sub_agent_turns", "sub_agents", "context_budget"}
        ),
    }
    text = json.dumps(parts, sort_keys=True)
    return policy_prefix(f"warm-{hashlib.sha256(text.encode()).hexdigest()[:16]}")


def build_policy(store: Store, config: RunConfig, progress: Progress) -> str:
    """Fit a small policy to demonstrations unless storage has it.

    Args:
        progress: is told what happens, a line at a time.

    Returns:
        Key of its HF directory (config.json, model.safetensors, tokenizer).

    Raises:
        WarmStartError: the fit failed or took longer than ``warm_start.limit_s``.
    """
    key = policy_key(config)
    if has_policy(store, key):
        progress(f"warm start: {key} is there already")
        return key
    with only_maker(store, key, config.warm_start.limit_s):
        if has_policy(store, key):
            progress(f"warm start: {key} was made by another process meanwhile")
        else:
            _make(store, key, config, progress)
    return key


def _make(store: Store, key: str, config: RunConfig, progress: Progress) -> None:
    # Not at the top: it brings transformers, which takes seconds, and mostly nothing is to be made.
    from tasks.warm_start.outfit import make_outfit, plan_fit

    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gyre-warm-start-") as name:
        scratch = Path(name)
        policy = scratch / "policy"
        make_outfit(policy, config)
        plan = plan_fit(scratch, policy, config)
        progress(f"warm start: demonstrations made in {time.monotonic() - began:.1f} s")
        weights = run_fit(scratch, policy / "config.json", plan, config, progress)
        weights.replace(policy / weights.name)
        keep_policy(store, key, policy, f"warm start, recipe {RECIPE}")
    progress(f"warm start: {key} made in {time.monotonic() - began:.1f} s")


def run_fit(
    scratch: Path, model: Path, plan: FitPlan, config: RunConfig, progress: Progress
) -> Path:
    """Fit in processes of their own; the path of the fitted weights.

    Raises:
        WarmStartError: they failed, or did not end within ``warm_start.limit_s``.
    """
    plan_path, out, log = scratch / "plan.json", scratch / "fitted", scratch / "fit.log"
    plan_path.write_text(plan.model_dump_json(), encoding="utf-8")
    process = spawn(
        [
            *(sys.executable, "-m", "cells.replica.fit"),
            *("--model-config", str(model), "--plan", str(plan_path), "--out", str(out)),
            *("--processes", str(config.warm_start.processes)),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        log=log,
    )
    # The fit keeps its own limit; what is added covers its start and its last step.
    deadline = time.monotonic() + config.warm_start.limit_s + 60
    read = 0
    try:
        ended = False
        while not ended:
            ended = process.poll() is not None
            text = log.read_text(encoding="utf-8", errors="replace")
            whole = text.rfind("\n") + 1
            for line in text[read:whole].splitlines():
                _tell(line, progress)
            read = max(read, whole)
            if not ended and time.monotonic() > deadline:
                raise WarmStartError(
                    f"the fit did not end within warm_start.limit_s "
                    f"({config.warm_start.limit_s:g} s): raise it or lower the steps"
                )
            if not ended:
                time.sleep(_POLL_S)
    finally:
        end_group(process.pid, grace_s=2)
        process.wait()
    weights = out / "model.safetensors"
    if process.returncode or not weights.is_file():
        tail = log.read_text(encoding="utf-8", errors="replace")[-_TAIL_CHARS:]
        raise WarmStartError(f"the fit ended with code {process.returncode}:\n{tail}")
    return weights


def _tell(line: str, progress: Progress) -> None:
    """Pass a progress line of the fit on, worded for people; warnings stay in the log."""
    try:
        said = json.loads(line)
        progress(
            f"warm start: {said['phase']} {said['step']}/{said['steps']} "
            f"loss {said['loss_mean']} {said['tokens_per_s']} tokens/s"
        )
    except (ValueError, KeyError, TypeError):
        return
