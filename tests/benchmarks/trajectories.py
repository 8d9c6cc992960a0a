"""Trees, caps and packing; prints one JSON object.

    python -m tests.benchmarks.trajectories [--root ROOT --run RUN] [--queries N]

``build_s`` and ``peak_mb``: an execution of 500 calls with 20 branches, of 1e4 to 1e6 tokens, built
and selected; each in a process of its own, whose whole memory is counted. ``forward_backward_s``:
one pass of Megatron over the samples of groups, by cap and packing. The groups are the first of a
recorded run, or else come from the scripted agent in the real harness, with the settings of the
``branching`` preset. With a run, ``logprob_gap`` compares what its first policy gives in packed
rows with what was recorded.

Seconds are CPU seconds of this process, which other work on the machine does not lengthen much; the
variants take turns, and the fastest of three passes counts.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from configs.load import load_config
from configs.run import RunConfig
from configs.training import TrajectoryConfig
from storage.records import Call, CallKind, CallStatus, VersionSpan, decode, encode
from storage.run import Run, open_run
from storage.samples import Sample
from tasks.sampling.samples import make_samples
from tasks.sampling.selection import select
from tasks.sampling.tree import CallTree, build_tree
from tasks.training.packing import SampleSize, measure_shared, pack

_SIZES = (10_000, 100_000, 1_000_000)
_CALLS = 500
_BRANCHES = 20
_PASSES = 3
_MANY_PATHS = 8
_VARIANTS: dict[str, tuple[int | None, bool]] = {
    "cap1": (1, False),
    "cap3": (3, False),
    "cap5": (5, False),
    "uncapped": (None, False),
    "cap5_packed": (5, True),
    "uncapped_packed": (None, True),
}


@dataclass(frozen=True)
class Group:
    """The trees of one query's executions."""

    trees: tuple[CallTree, ...]


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.trajectories")
    parser.add_argument("--root", help="storage root of a recorded run")
    parser.add_argument("--run", help="its name")
    parser.add_argument("--queries", type=int, default=6, help="groups to pass through the model")
    given = parser.parse_args()
    result: dict[str, Any] = _built()
    with tempfile.TemporaryDirectory() as scratch:
        if given.run:
            run = open_run(str(given.root), given.run)
            config = run.config
            groups = [group for _, group in zip(range(given.queries), _recorded(run), strict=False)]
            folder = _policy_of(run)
        else:
            config = load_config("branching", environment={})
            folder = Path(scratch) / "policy"
            groups = _scripted(config, folder, given.queries)
        result["source"] = given.run or "scripted agent"
        result |= _passes(config, groups, folder, trained=bool(given.run))
        if given.run:
            result["logprob_gap"] = _gap(config, _recorded(run), folder)
    print(json.dumps(result))


def _built() -> dict[str, Any]:
    found: dict[str, dict[str, float]] = {"decode_s": {}, "build_s": {}, "peak_mb": {}}
    for tokens in _SIZES:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            for name, value in pool.submit(_build, tokens).result().items():
                found[name][f"{tokens:.0e}".replace("+0", "")] = value
    return found


def _build(tokens: int) -> dict[str, float]:
    lines = _large_execution(tokens)
    began = time.process_time()
    calls = [decode(line, Call) for line in lines]
    decoded = time.process_time()
    tree = build_tree(calls)
    selection = select(tree, TrajectoryConfig(cap=None), 1 << 30)
    built = time.process_time()
    assert len(selection.trajectories) >= _BRANCHES
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"decode_s": decoded - began, "build_s": built - decoded, "peak_mb": peak}


def _large_execution(tokens: int) -> list[bytes]:
    """Stored calls; every 25th begins a branch somewhere in an earlier history."""
    draw = np.random.default_rng(1)
    sampled = tokens // _CALLS // 5
    new = tokens // _CALLS - sampled
    lengths: list[int] = []
    lines: list[bytes] = []
    for number in range(_CALLS):
        branches = number % (_CALLS // _BRANCHES) == 0
        parent = int(draw.integers(number)) if branches and number else number - 1
        kept = lengths[parent] if number else 0
        kept = int(kept * draw.random()) if branches else kept
        call = _call(
            number,
            parent=f"c{parent:04d}" if number else None,
            kept=kept,
            new=tuple(draw.integers(0, 150_000, new).tolist()),
            output=tuple(draw.integers(0, 150_000, sampled).tolist()),
            logprobs=tuple((-draw.random(sampled)).tolist()),
            kind=CallKind.MAIN if number % 2 else CallKind.SUB_AGENT,
        )
        lengths.append(kept + new + sampled)
        lines.append(encode(call))
    return lines


def _call(
    number: int,
    *,
    parent: str | None,
    kept: int,
    new: tuple[int, ...],
    output: tuple[int, ...],
    logprobs: tuple[float, ...],
    kind: CallKind,
) -> Call:
    return Call(
        call_id=f"c{number:04d}",
        execution_id="e",
        index=number,
        parent=parent,
        kept=kept,
        new_ids=new,
        output_ids=output,
        output_logprobs=logprobs,
        spans=(VersionSpan(version=0, start=0, end=len(output)),),
        kind=kind,
        kind_reason="benchmark",
        agent="main",
        status=CallStatus.COMPLETE,
        finish_reason="stop",
        fork_reason=None,
        started_at=0.0,
        waited_s=0.0,
        seconds=0.0,
        cell="a",
        cached_tokens=0,
    )


def _recorded(run: Run) -> Iterator[Group]:
    """What the first policy sampled: groups of step 0, and of its evaluation."""
    from tasks.sampling.group import read_calls

    names = sorted(run.store.children(f"{run.layout.prefix}/executions"))
    firsts = [name for name in names if name.startswith(("s00000-", "v00000-"))]
    for _, members in groupby(firsts, key=lambda name: name.rpartition("-")[0]):
        calls = [read_calls(run.store, run.layout, name) for name in members]
        yield Group(tuple(build_tree(one) for one in calls if one))


def _policy_of(run: Run) -> Path:
    from tasks.warm_start.policies import first_policy

    return Path(run.store.local_path(str(first_policy(run))))


def _scripted(config: RunConfig, folder: Path, queries: int) -> list[Group]:
    """What the scripted agent does: the harness, renderer and tokenizer of a run."""
    from transformers import PreTrainedTokenizerFast

    from cells.gateway.codec import Codec
    from tasks.rollout.harnesses.loop import run_agent
    from tasks.warm_start.corpora import specifications
    from tasks.warm_start.demonstrations import MemoryWorkspace, ScriptedModel, harness_settings
    from tasks.warm_start.outfit import make_outfit
    from tasks.warm_start.script import ScriptedAgent, imperfect
    from tasks.warm_start.tokenizer import QuickTokenizer

    class Recording(ScriptedModel):
        """Keeps its calls as the gateway would."""

        def __init__(self, *parts: Any) -> None:
            super().__init__(*parts)
            self.recorded: list[Call] = []
            self.last: dict[int, tuple[str, int]] = {}

        def __call__(self, messages: Any, tools: Any, *, agent: str, call: str) -> Any:
            reply = super().__call__(messages, tools, agent=agent, call=call)
            history = self._current[agent]
            parent, kept = self.last.get(id(history), (None, 0))
            main, turn = agent == "main", call == "turn"
            kinds = (CallKind.MAIN, CallKind.MAIN_SUMMARY, CallKind.SUB_AGENT)
            kind = kinds[not turn] if main else kinds[2] if turn else CallKind.SUB_AGENT_SUMMARY
            one = _call(
                len(self.recorded),
                parent=parent,
                kept=kept,
                new=tuple(history.prompt[kept:]),
                output=tuple(history.output),
                logprobs=(-1.0,) * len(history.output),
                kind=kind,
            )
            self.recorded.append(one)
            self.last[id(history)] = (one.call_id, len(history.prompt) + len(history.output))
            return reply

    make_outfit(folder, config)
    tokenizer = QuickTokenizer(
        PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    )
    codec = Codec(tokenizer, config.model.renderer)
    limits, warm = harness_settings(config.harness), config.warm_start
    habits = imperfect(warm.error_share, warm.delegate_share)
    rng = random.Random(1)
    groups = []
    for _, specification in zip(
        range(queries), specifications(config.problems.specrepo, rng), strict=False
    ):
        trees = []
        for _ in range(config.rollout.group_size):
            script = ScriptedAgent(specification, rng, habits, limits.sub_agents)
            model = Recording(codec, tokenizer, script)
            run_agent(specification.text, model, MemoryWorkspace(), limits)
            trees.append(build_tree(model.recorded))
        groups.append(Group(tuple(trees)))
    return groups


def _samples(group: Group, config: RunConfig, cap: int | None) -> list[Sample]:
    rule = config.trajectory.model_copy(update={"cap": cap})
    return [
        sample
        for number, tree in enumerate(group.trees)
        for sample in make_samples(
            tree,
            select(tree, rule, config.model.context),
            execution_id=str(number),
            advantage=1.0,
            mean=config.training.objective.execution_mean,
        )
    ]


def _rows(groups: Sequence[Group], config: RunConfig, cap: int | None, share: bool) -> list[Any]:
    """Micro-steps as training forms them, packed as a replica packs them."""
    from cells.replica.packing import pack as pack_row

    samples: dict[tuple[str, int], Sample] = {}
    sizes: list[SampleSize] = []
    for number, group in enumerate(groups):
        own = _samples(group, config, cap)
        samples |= {(str(number), index): sample for index, sample in enumerate(own)}
        found = [
            SampleSize(str(number), index, len(sample.ids), int(sample.targets.sum()))
            for index, sample in enumerate(own)
        ]
        sizes += measure_shared(found, [sample.ids for sample in own]) if share else found
    micro_steps = pack(sizes, config.training.micro_step_tokens)
    chosen = [[samples[size.group, size.index] for size in step] for step in micro_steps]
    return [(pack_row([(one.ids, one.targets) for one in row], share=share), row) for row in chosen]


def _model(config: RunConfig, folder: Path, *, trained: bool) -> Any:
    import torch

    from cells.replica.model import initialise, start_megatron
    from cells.replica.policy import Policy
    from cells.replica.weights import read_weights

    torch.set_num_threads(1)
    if not torch.distributed.is_initialized():
        start_megatron()
    policy = Policy.open(folder)
    if trained:
        policy.commit(read_weights(folder, policy.shape), 0)
    else:
        initialise(policy.model, 0.04, 1)
    return policy


def _passes(
    config: RunConfig, groups: Sequence[Group], folder: Path, *, trained: bool
) -> dict[str, Any]:
    from cells.replica.model import target_logprobs

    policy = _model(config, folder, trained=trained)
    rows = {name: _rows(groups, config, *variant) for name, variant in _VARIANTS.items()}
    seconds = dict.fromkeys(rows, float("inf"))
    for _ in range(_PASSES):
        for name, packed in rows.items():
            began = time.process_time()
            for row, _ in packed:
                target_logprobs(policy.model, row).sum().backward()
            seconds[name] = min(seconds[name], time.process_time() - began)
            policy.flat.zero_gradients()
    trees = [tree for group in groups for tree in group.trees]
    rule = config.trajectory.model_copy(update={"cap": None})
    paths = [select(tree, rule, config.model.context).paths for tree in trees]
    uncapped = seconds["uncapped"]
    return {
        "executions": len(trees),
        "paths_mean": float(np.mean(paths)),
        "share_with_eight_paths": float(np.mean([one >= _MANY_PATHS for one in paths])),
        "forward_backward_s": seconds,
        "saved_of_uncapped": {name: 1 - one / uncapped for name, one in seconds.items()},
        "tokens": {name: sum(len(row.ids) for row, _ in some) for name, some in rows.items()},
    }


def _gap(config: RunConfig, groups: Iterator[Group], folder: Path) -> dict[str, Any]:
    """|Megatron's log-prob in a packed row - the recorded one| over all targets, uncapped."""
    import torch

    from cells.replica.model import target_logprobs

    policy = _model(config, folder, trained=True)
    gaps: list[torch.Tensor] = []
    kinds: dict[str, int] = {}
    executions = flat = computed = 0
    with torch.no_grad():
        for group in groups:
            executions += len(group.trees)
            for row, samples in _rows([group], config, None, True):
                own = torch.from_numpy(np.concatenate([s.logprobs[s.targets] for s in samples]))
                gaps.append((target_logprobs(policy.model, row) - own).abs())
                computed += len(row.ids)
                for sample in samples:
                    flat += len(sample.ids)
                    kinds[sample.kind.value] = kinds.get(sample.kind.value, 0) + 1
    joined = torch.cat(gaps)
    return {
        "executions": executions,
        "targets": len(joined),
        "mean": float(joined.mean()),
        "max": float(joined.max()),
        "trajectories": kinds,
        "computed_of_flat_tokens": computed / flat,
    }


if __name__ == "__main__":
    main()
