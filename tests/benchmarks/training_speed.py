"""A replica's micro-steps against the same work in HF transformers, in one process, by turns.

The workload is fixed here: shapes, lengths and seeds. Both sides hold the same weights, see the
same samples, and compute the gradient of the same loss (``gspo``). Seconds are CPU seconds of this
process; the sides take turns, and the median over turns of a turn's ratio counts.

HF gets the best of two ways to do it: each sample by itself, and right-padded batches of as many
tokens as a micro-step has, of samples in order of length. The replica's side is its whole
``micro_step`` command, with the statistics that it reports.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from cells.replica.objective import Targets, load_objective
from cells.replica.settings import ReplicaSettings
from configs.training import ObjectiveConfig
from storage.objects import Store
from storage.records import CallKind, GroupHeader
from storage.samples import Sample, SealedGroup, seal
from tasks.training.objectives import objective_path
from tasks.training.packing import SampleSize, measure_shared, pack

SEED = 11
BUDGET = 2048
"""Tokens of a micro-step, and of a padded batch."""
OBJECTIVE = ObjectiveConfig(clip_low=0.2, clip_high=0.2)


@dataclass(frozen=True)
class Shape:
    """A policy's sizes."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int


SHAPES = {
    "quickstart": Shape(128, 3, 4, 2, 64, 384, 768),
    "small": Shape(384, 6, 6, 2, 64, 1024, 4096),
}
"""The quickstart's policy (0.8M parameters), and one of 11M."""


@dataclass(frozen=True)
class Workload:
    """Samples of one group, by lengths; ``trunk`` tokens at the start of all of them are equal."""

    lengths: tuple[int, ...]
    trunk: int = 0
    packed: bool = True
    """Several samples a micro-step; else each has its own."""


def _drawn(seed: int, low: int, high: int, count: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(low, high, count).tolist())


WORKLOADS = {
    # One sample a micro-step, on both sides.
    "unpacked": Workload(_drawn(SEED, 200, 760, 4), packed=False),
    # Many samples a row, nothing shared.
    "short": Workload(_drawn(SEED + 1, 16, 120, 32)),
    # Lengths that differ much: what padding costs most.
    "mixed": Workload(_drawn(SEED + 2, 16, 120, 20) + _drawn(SEED + 3, 300, 700, 2)),
    # Executions of a group: they begin with the same instruction.
    "shared": Workload(_drawn(SEED + 4, 150, 260, 10), trunk=140),
    # Long and all of one length: packing has nothing to gain.
    "long_equal": Workload((740,) * 3),
    # Very short ones, each by itself: overhead of a command against overhead of a call.
    "tiny_unpacked": Workload(_drawn(SEED + 5, 8, 24, 12), packed=False),
}


def speed(turns: int, shapes: Sequence[str], cases: Sequence[str]) -> dict[str, Any]:
    """Tokens of samples per CPU second on both sides, by shape and workload."""
    from cells.replica.model import start_megatron

    torch.set_num_threads(1)
    if not torch.distributed.is_initialized():
        start_megatron()
    found: dict[str, Any] = {}
    for name in shapes:
        with tempfile.TemporaryDirectory() as folder:
            sides = _Sides(Path(folder), SHAPES[name])
            found[name] = {
                title: _compare(sides, title, WORKLOADS[title], turns) for title in cases
            }
    return found


def make_policy(folder: Path, shape: Shape) -> Path:
    """An HF directory of random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(SEED)
    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        dtype="float32",
    )
    Qwen3ForCausalLM(config).float().save_pretrained(folder / "policy")
    (folder / "policy" / "tokenizer.json").write_text("{}")
    return folder / "policy"


class _Sides:
    """The same weights in a replica and in HF transformers."""

    def __init__(self, folder: Path, shape: Shape) -> None:
        from transformers import Qwen3ForCausalLM

        from cells.replica.commands import Commands

        self.shape = shape
        policy = make_policy(folder, shape)
        self.hf = Qwen3ForCausalLM.from_pretrained(policy, dtype=torch.float32).train()
        self.hf.config.use_cache = False
        self.store = Store(folder / "store")
        settings = ReplicaSettings(
            root=self.store.url,
            core=True,
            objective=objective_path("gspo"),
            objective_config=OBJECTIVE,
            share_prefixes=True,
        )
        self.objective = load_objective(settings.objective, OBJECTIVE)
        self.replica = Commands(settings)
        self.replica.run("load", {"path": str(policy), "version": 0})

    def samples(self, title: str, workload: Workload) -> list[Sample]:
        """Sealed under ``title``: random ids, the last third of each are targets."""
        random = np.random.default_rng(SEED)
        trunk = random.integers(0, self.shape.vocabulary, workload.trunk)
        made = []
        for number, length in enumerate(workload.lengths):
            own = random.integers(0, self.shape.vocabulary, length - len(trunk))
            targets = np.arange(length) >= max(len(trunk), length - max(1, length // 3))
            logprob = -float(np.log(self.shape.vocabulary))
            made.append(
                Sample(
                    execution_id=f"{title}-e{number}",
                    kind=CallKind.MAIN,
                    ids=np.append(trunk, own).astype(np.int32),
                    targets=targets,
                    logprobs=np.where(targets, logprob, 0).astype(np.float32),
                    versions=np.where(targets, 0, -1).astype(np.int32),
                    advantage=1.0 if number % 2 else -1.0,
                    weight=1.0,
                )
            )
        header = GroupHeader(
            query_id=title, step=0, problem_id="p", sealed_at=0.0, members=(), spread=True
        )
        seal(self.store, title, SealedGroup(header, tuple(made)))
        return made

    def by_replica(self, rows: Sequence[Sequence[int]], title: str) -> int:
        """Micro-steps; returns the tokens that were computed."""
        self.replica.run("discard", {})
        tokens = 0
        for number, row in enumerate(rows):
            samples = [{"group_key": title, "index": index} for index in row]
            args = {"step": 0, "update": 0, "micro_step": f"m{number}", "samples": samples}
            tokens += int(self.replica.run("micro_step", args)["tokens"])
        return tokens

    def by_hf(self, batches: Sequence[Sequence[Sample]]) -> int:
        """Forward and backward of batches, right-padded; returns the tokens that were computed."""
        tokens = 0
        self.hf.zero_grad(set_to_none=False)
        for batch in batches:
            longest = max(len(one.ids) for one in batch)
            ids = torch.zeros(len(batch), longest, dtype=torch.long)
            for row, one in zip(ids, batch, strict=True):
                row[: len(one.ids)] = torch.from_numpy(one.ids.astype(np.int64))
            lengths = torch.tensor([len(one.ids) for one in batch])
            mask = None
            if len(batch) > 1:
                mask = (torch.arange(longest)[None] < lengths[:, None]).long()
            logits = self.hf(input_ids=ids, attention_mask=mask).logits
            total = torch.zeros((), dtype=torch.float64)
            for row, one in zip(range(len(batch)), batch, strict=True):
                at = torch.from_numpy(np.flatnonzero(one.targets))
                logprobs = torch.log_softmax(logits[row, at - 1], dim=-1)
                own = logprobs.gather(1, ids[row, at][:, None])[:, 0].double()
                behaviour = torch.from_numpy(one.logprobs[one.targets]).double()
                loss, _ = self.objective(Targets(own, behaviour, one.advantage))
                total = total + one.weight * loss
            total.backward()
            tokens += ids.numel()
        return tokens


def _compare(sides: _Sides, title: str, workload: Workload, turns: int) -> dict[str, Any]:
    samples = sides.samples(title, workload)
    rows = _rows(title, samples) if workload.packed else [[n] for n in range(len(samples))]
    alone = [[one] for one in samples]
    ways: dict[str, Callable[[], int]] = {
        "replica": lambda: sides.by_replica(rows, title),
        "hf_alone": lambda: sides.by_hf(alone),
    }
    if workload.packed:
        padded = _padded(samples)
        ways["hf_padded"] = lambda: sides.by_hf(padded)
    computed = {name: way() for name, way in ways.items()}  # also warms up
    _same_gradient(sides, title)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(turns):
        for name, way in ways.items():
            began = time.process_time()
            way()
            seconds[name].append(time.process_time() - began)
    tokens = sum(workload.lengths)
    others = [name for name in ways if name != "replica"]
    best = min(others, key=lambda name: median(seconds[name]))
    ratios = [a / b for a, b in zip(seconds[best], seconds["replica"], strict=True)]
    return {
        "tokens_per_s_over_hf": round(median(ratios), 3),
        "over": best,
        "tokens_per_s": {name: round(tokens / median(own)) for name, own in seconds.items()},
        "tokens": tokens,
        "rows": len(rows),
        "padding_share": {
            name: round(max(0.0, 1 - tokens / count), 4) for name, count in computed.items()
        },
        "computed_over_tokens": round(computed["replica"] / tokens, 3),
    }


def _same_gradient(sides: _Sides, title: str) -> None:
    """Both sides have just computed the same: a comparison of different work would say nothing."""
    from cells.replica.weights import to_hf

    policy = sides.replica._loaded()[0]
    found = to_hf(policy.flat.split(policy.flat.gradients), policy.shape)
    for name, parameter in sides.hf.named_parameters():
        assert parameter.grad is not None
        error = (found[name] - parameter.grad).norm() / (parameter.grad.norm() + 1e-12)
        if not error < 1e-3:
            raise AssertionError(f"{title}: gradients of {name} differ by {error:.1e}")


def _rows(title: str, samples: Sequence[Sample]) -> list[list[int]]:
    """As the stream packs them."""
    sizes = [
        SampleSize(title, number, len(one.ids), int(one.targets.sum()))
        for number, one in enumerate(samples)
    ]
    sizes = measure_shared(sizes, [one.ids for one in samples])
    return [[one.index for one in row] for row in pack(sizes, BUDGET)]


def _padded(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Batches of samples of about one length, at most ``BUDGET`` tokens with their padding."""
    batches: list[list[Sample]] = []
    for one in sorted(samples, key=lambda sample: -len(sample.ids)):
        if batches and len(batches[-1][0].ids) * (len(batches[-1]) + 1) <= BUDGET:
            batches[-1].append(one)
        else:
            batches.append([one])
    return batches
