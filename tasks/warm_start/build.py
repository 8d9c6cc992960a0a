"""Makes the policy that a run starts from: tokenizer, demonstrations, fit, storage."""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from cells.gateway.codec import Codec
from cells.process import end_group, spawn
from cells.replica.corpus import write_corpus
from cells.replica.fit_plan import FitPlan, Phase
from configs.run import RunConfig
from storage.layout import policy_prefix
from storage.objects import Store
from tasks.warm_start.corpora import clean_lessons, drills, full_lessons, tokenizer_texts
from tasks.warm_start.policies import has_policy, import_policy, keep_policy
from tasks.warm_start.tokenizer import (
    END_OF_TEXT,
    END_OF_TURN,
    QuickTokenizer,
    learn_tokenizer,
    save_tokenizer,
)

RECIPE = 1
"""Raise it when the same settings make another policy than before."""

INITIAL_STD = 0.04
DRILL_SEQUENCES = 24
DRILL_MUON_RATE = 0.02
DRILL_STOP_LOSS = 0.1
MOST_HISTORIES = 4000
"""Histories of a corpus; a longer phase sees them again. Making them takes time too."""

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
        "model": config.model.model_dump(mode="json", include={"shape", "context", "renderer"}),
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
    return key


def make_outfit(policy: Path, config: RunConfig) -> None:
    """Write everything of an HF directory but the weights."""
    policy.mkdir(parents=True)
    shape = config.model.shape
    tokenizer = learn_tokenizer(tokenizer_texts(config), shape.vocabulary)
    save_tokenizer(tokenizer, policy)
    pad, end = tokenizer.convert_tokens_to_ids([END_OF_TEXT, END_OF_TURN])
    model = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": len(tokenizer),
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn,
        "max_position_embeddings": config.model.context,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "tie_word_embeddings": shape.tied,
        "initializer_range": INITIAL_STD,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": pad,
        "torch_dtype": "float32",
    }
    generation = {"eos_token_id": [end, pad], "pad_token_id": pad, "do_sample": True}
    for name, content in (("config.json", model), ("generation_config.json", generation)):
        (policy / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def plan_fit(scratch: Path, policy: Path, config: RunConfig) -> FitPlan:
    """Write the corpora of all phases and say how to fit to them."""
    warm = config.warm_start
    # Loaded back from its files, as the gateway will load it.
    tokenizer = QuickTokenizer(AutoTokenizer.from_pretrained(str(policy), local_files_only=True))
    codec = Codec(tokenizer, config.model.renderer)
    rng = random.Random(f"warm start {RECIPE}")
    lessons = (
        ("drill", warm.drill_steps, DRILL_SEQUENCES, drills(tokenizer, rng)),
        (
            "clean",
            warm.clean_steps,
            warm.histories,
            clean_lessons(config, codec, tokenizer, rng),
        ),
        ("full", warm.full_steps, warm.histories, full_lessons(config, codec, tokenizer, rng)),
    )
    phases = []
    for name, steps, sequences, histories in lessons:
        if not steps:
            continue
        path = scratch / f"{name}.safetensors"
        count = min(steps * sequences, MOST_HISTORIES)
        write_corpus(path, ((h.ids.tolist(), h.targets.tolist()) for h in islice(histories, count)))
        drill = name == "drill"
        phases.append(
            Phase(
                name=name,
                data=str(path),
                steps=steps,
                sequences=sequences,
                muon_rate=DRILL_MUON_RATE if drill else warm.muon_learning_rate,
                adam_rate=warm.adam_learning_rate,
                decay_share=0.0 if name != "full" else 0.5,
                stop_loss=DRILL_STOP_LOSS if drill else 0.0,
            )
        )
    return FitPlan(phases=tuple(phases), limit_s=warm.limit_s)


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
                progress(f"warm start: {_said(line)}")
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


def _said(line: str) -> str:
    """A progress line of the fit, for people."""
    try:
        found = json.loads(line)
        return (
            f"{found['phase']} {found['step']}/{found['steps']} loss {found['loss_mean']} "
            f"{found['tokens_per_s']} tokens/s"
        )
    except (ValueError, KeyError, TypeError):
        return line
