"""A real small model through engine and replica: SmolLM2-135M learns from two steps on HumanEval.

The agent's loop is left out: the model completes the function, and its first line is run against
the problem's tests.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
import torch

from cells.replica.settings import ReplicaSettings
from cells.serving.flags import EngineSettings
from cells.serving.process import EngineProcess, free_port
from configs.cells import Device
from configs.training import ObjectiveConfig
from storage.objects import Store
from storage.records import CallKind, GroupHeader
from storage.samples import Sample, SealedGroup, seal
from tasks.problems.humaneval import tasks
from tasks.training.objectives import objective_path
from tests.smollm import make_smollm

pytestmark = [pytest.mark.long, pytest.mark.real, pytest.mark.timeout(3600)]
PROBLEM = "HumanEval/53"
MEMBERS = 12
STEPS = 2


class Line(NamedTuple):
    """A sampled first line: its ids, their log-probs, and whether it solves the problem."""

    ids: list[int]
    logprobs: list[float]
    reward: float


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """The model's HF directory, made from its wheel."""
    return make_smollm()


@pytest.fixture
async def engine(smollm2: Path, tmp_path: Path) -> AsyncIterator[EngineProcess]:
    settings = EngineSettings(
        policy=smollm2,
        version=0,
        device=Device.CPU,
        context=1024,
        kv_tokens=8192,
        requests=MEMBERS,
        seed=3,
        port=free_port(),
        admin_key=secrets.token_urlsafe(16),
    )
    process = EngineProcess(settings, cpus=(), log=tmp_path / "engine.log")
    try:
        await process.wait_ready(900)
        yield process
    finally:
        await process.close()


async def test_steps_on_humaneval(
    megatron: None, smollm2: Path, engine: EngineProcess, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    from cells.replica.commands import Commands

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    prompt: list[int] = tokenizer(tasks()[PROBLEM].prompt + "    return")["input_ids"]
    settings = ReplicaSettings(
        root=str(tmp_path / "store"),
        core=True,
        objective=objective_path("gspo"),
        objective_config=ObjectiveConfig(),
        share_prefixes=True,
    )
    commands = Commands(settings)
    commands.run("load", {"path": str(smollm2), "version": 0})
    told: list[dict[str, Any]] = []
    for step in range(STEPS):
        lines = [await _line(engine, prompt, tokenizer) for _ in range(MEMBERS)]
        rewards = torch.tensor([line.reward for line in lines])
        assert rewards.std() > 0, "it solves the problem now and then, so that there is a gradient"
        advantages = (rewards - rewards.mean()) / rewards.std()
        key = f"group-{step}"
        _seal(Store(tmp_path / "store"), key, prompt, lines, advantages.tolist(), step)
        samples = [{"group_key": key, "index": index} for index in range(MEMBERS)]
        args = {"step": step, "update": 0, "micro_step": "m", "samples": samples}
        trained = commands.run("micro_step", args)
        stepped = commands.run(
            "step", {"step": step, "update": 0, "executions": MEMBERS, "learning_rate": 1e-6}
        )
        assert trained["stats"]["logprob_gap_max"] < 1e-3
        assert stepped["grad_norm"] > 0
        told.append(
            {
                "reward": float(rewards.mean()),
                "gap_max": trained["stats"]["logprob_gap_max"],
                "grad_norm": stepped["grad_norm"],
            }
        )
        commands.run("export", {"path": str(tmp_path / f"v{step + 1}")})
        await engine.update_weights(tmp_path / f"v{step + 1}", step + 1, 300)
    print(json.dumps(told))


async def _line(engine: EngineProcess, prompt: list[int], tokenizer: Any) -> Line:
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 12, "ignore_eos": True},
        "return_logprob": True,
    }
    async with httpx.AsyncClient(base_url=engine.url, timeout=600, trust_env=False) as http:
        answer = (await http.post("/generate", json=body)).raise_for_status().json()
    found = [(one, token) for one, token, _ in answer["meta_info"]["output_token_logprobs"]]
    ends = [n for n, (_, token) in enumerate(found, 1) if "\n" in tokenizer.decode([token])]
    found = found[: ends[0]] if ends else found
    text = tokenizer.decode([token for _, token in found]).split("\n")[0]
    return Line([token for _, token in found], [one for one, _ in found], _reward(text))


def _reward(line: str) -> float:
    """1 where the line passes the problem's tests, in a process of its own."""
    task = tasks()[PROBLEM]
    code = f"{task.prompt}    return{line}\n{task.test}\ncheck({task.entry_point})\n"
    try:
        done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, timeout=20)
    except subprocess.TimeoutExpired:
        return 0.0
    return float(done.returncode == 0)


def _seal(
    store: Store,
    key: str,
    prompt: list[int],
    lines: list[Line],
    advantages: list[float],
    version: int,
) -> None:
    samples = []
    for index, (line, advantage) in enumerate(zip(lines, advantages, strict=True)):
        ids = np.array(prompt + line.ids, np.int32)
        targets = np.arange(len(ids)) >= len(prompt)
        logprobs = np.zeros(len(ids), np.float32)
        logprobs[targets] = line.logprobs
        samples.append(
            Sample(
                execution_id=f"{key}-e{index}",
                kind=CallKind.MAIN,
                ids=ids,
                targets=targets,
                logprobs=logprobs,
                versions=np.where(targets, version, -1).astype(np.int32),
                advantage=advantage,
                weight=1.0,
            )
        )
    header = GroupHeader(
        query_id=key, step=version, problem_id=PROBLEM, sealed_at=0.0, members=(), spread=True
    )
    seal(store, key, SealedGroup(header, tuple(samples)))
