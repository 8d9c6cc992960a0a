"""One line of code for each sample: a model completes a function of HumanEval, and its first line
is run against the problem's tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np

from storage.objects import Store
from storage.records import CallKind, GroupHeader
from storage.samples import Sample, SealedGroup, seal
from tasks.problems.humaneval import tasks

PROBLEM = "HumanEval/53"
MEMBERS = 8
GROUPS = 4
"""Most groups until one has spread. The model solves the problem four times in five."""


class Line(NamedTuple):
    """A sampled first line: its ids, their log-probs, and whether it solves the problem."""

    ids: list[int]
    logprobs: list[float]
    reward: float


class Lines:
    """Samples of the problem from the engine at ``url``."""

    def __init__(self, url: str, policy: Path) -> None:
        from transformers import AutoTokenizer

        self._url = url
        self._tokenizer: Any = AutoTokenizer.from_pretrained(policy)
        start = tasks()[PROBLEM].prompt + "    return"
        self.prompt: list[int] = self._tokenizer(start)["input_ids"]

    async def group(self) -> list[Line]:
        """Members of a group in which some solve the problem and some don't.

        Raises:
            AssertionError: there was none in ``GROUPS`` tries.
        """
        for _ in range(GROUPS):
            lines = [await self._line() for _ in range(MEMBERS)]
            if 0 < sum(line.reward for line in lines) < MEMBERS:
                return lines
        raise AssertionError(f"{GROUPS} groups of {MEMBERS} without spread")

    async def _line(self) -> Line:
        body = {
            "input_ids": self.prompt,
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 12, "ignore_eos": True},
            "return_logprob": True,
        }
        async with httpx.AsyncClient(base_url=self._url, timeout=600, trust_env=False) as http:
            answer = (await http.post("/generate", json=body)).raise_for_status().json()
        found = [(one, token) for one, token, _ in answer["meta_info"]["output_token_logprobs"]]
        ends = [n for n, (_, token) in enumerate(found, 1) if "\n" in self._tokenizer.decode(token)]
        found = found[: ends[0]] if ends else found
        text = self._tokenizer.decode([token for _, token in found]).split("\n")[0]
        return Line([token for _, token in found], [one for one, _ in found], reward(text))


def reward(line: str) -> float:
    """1 where the line passes the problem's tests, in a process of its own."""
    task = tasks()[PROBLEM]
    code = f"{task.prompt}    return{line}\n{task.test}\ncheck({task.entry_point})\n"
    try:
        done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, timeout=20)
    except subprocess.TimeoutExpired:
        return 0.0
    return float(done.returncode == 0)


def seal_lines(store: Store, key: str, prompt: list[int], lines: list[Line], version: int) -> None:
    """Seal the group ``key``, with the usual advantages."""
    rewards = np.array([line.reward for line in lines])
    samples = []
    for index, line in enumerate(lines):
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
                advantage=float((line.reward - rewards.mean()) / rewards.std()),
                weight=1.0,
            )
        )
    header = GroupHeader(
        query_id=key, step=version, problem_id=PROBLEM, sealed_at=0.0, members=(), spread=True
    )
    seal(store, key, SealedGroup(header, tuple(samples)))
