"""Policies that stand still beside the trained one are what they should be, wherever they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cells.replica.errors import ReplicaError
from storage.objects import Store
from storage.samples import SealedGroup, read_group, seal
from tests.cells.replica.conftest import seal_group
from tests.cells.replica.test_commands import RATE, Replica

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("megatron")]

REFS = (("g", 0), ("g", 2))


def logprobs(replica: Replica, store: Store) -> list[np.ndarray]:
    """What the replica's own weights give to the targets of each sample of the group."""
    from cells.replica.groups import document
    from cells.replica.model import target_logprobs
    from cells.replica.packing import pack

    model = replica.commands._loaded()[0].model
    with torch.no_grad():
        return [
            target_logprobs(model, pack([document(sample)])).numpy()
            for sample in read_group(store, "g").samples
        ]


def anchors(proximal: tuple[Path, int], reference: tuple[Path, int]) -> dict[str, Any]:
    named = {"proximal": proximal, "reference": reference}
    return {name: {"path": str(path), "version": v} for name, (path, v) in named.items()}


def micro(replica: Replica, wanted: dict[str, Any], key: str = "g") -> dict[str, float]:
    samples = [{"group_key": key, "index": index} for _, index in REFS]
    answer = replica(
        "micro_step", step=1, update=1, micro_step="m", samples=samples, anchors=wanted
    )
    stats: dict[str, float] = answer["stats"]
    return stats


def test_proximal_and_reference_are_of_their_own_weights(
    tmp_path: Path, hf_folder: Callable[..., Path]
) -> None:
    """The reference is version 0, the step begins with version 1, version 2 is trained: by the core
    that made all of them, and by a satellite that has seen only the last."""
    store, root = Store(tmp_path / "store"), tmp_path / "store"
    seal_group(store, "g", seed=3)
    core = Replica(root, core=True, loss="ToAnchors")
    satellite = Replica(root, core=False, loss="ToAnchors", share_prefixes=True)
    first = hf_folder(tied=True)
    for replica in (core, satellite):
        replica("load", path=str(first), version=0)
    expected = [logprobs(core, store)]
    start = tmp_path / "start"
    for update in range(2):
        # The weights that are trained are those that are asked for: nothing to read.
        here = anchors((tmp_path / "absent", update), (tmp_path / "absent", update))
        samples = [{"group_key": key, "index": index} for key, index in REFS]
        stats = core(
            "micro_step", step=0, update=update, micro_step="m", samples=samples, anchors=here
        )["stats"]
        assert stats["ratio_sum"] == len(REFS)
        core("step", update=update, executions=1, learning_rate=RATE)
        expected.append(logprobs(core, store))
        if update == 0:
            core("export", path=str(start))
    satellite("pull", **core("publish"))
    weights = core.weights

    wanted = anchors((start, 1), (first, 0))
    for replica in (core, satellite):
        stats = micro(replica, wanted)
        for name, version in (("proximal", 1), ("reference", 0)):
            total = sum(float(expected[version][index].sum(dtype=np.float64)) for _, index in REFS)
            assert stats[f"{name}_sum"] == pytest.approx(total, rel=1e-6)
        assert torch.equal(replica.weights, weights), "the trained weights are back"
    assert abs(expected[1][0] - expected[0][0]).max() > 1e-3, "the policies do differ"
    assert abs(expected[2][0] - expected[1][0]).max() > 1e-3

    # The gradient is that of a group whose recorded log-probs are version 1's.
    sealed = read_group(store, "g")
    samples = []
    for sample, found in zip(sealed.samples, expected[1], strict=True):
        recorded = sample.logprobs.copy()
        recorded[sample.targets] = found
        samples.append(replace(sample, logprobs=recorded))
    seal(store, "recorded", SealedGroup(sealed.header, tuple(samples)))
    plain = Replica(root, core=False)
    plain("load", path=str(first), version=0)
    plain("pull", **core("publish"))
    micro(plain, {}, "recorded")
    for replica in (core, satellite):
        assert (replica.gradients - plain.gradients).norm() < 1e-5 * plain.gradients.norm()

    core("discard")
    with pytest.raises(ReplicaError, match="absent"):
        micro(core, anchors((tmp_path / "absent", 7), (first, 0)))
    assert torch.equal(core.weights, weights)
    core("sleep")
    core("wake")
    assert micro(core, wanted)["ratio_sum"] == pytest.approx(stats["ratio_sum"], rel=1e-6)


def test_entropy_effective_samples_and_gaps_by_version(
    tmp_path: Path, hf_folder: Callable[..., Path]
) -> None:
    """Against HF, whose model gives the whole distributions."""
    from transformers import AutoModelForCausalLM

    store = Store(tmp_path / "store")
    seal_group(store, "g", seed=3)
    sealed = read_group(store, "g")
    mixed = []
    for sample in sealed.samples:
        versions = sample.versions.copy()
        versions[np.flatnonzero(sample.targets)[::2]] = 4
        mixed.append(replace(sample, versions=versions))
    seal(store, "mixed", SealedGroup(sealed.header, tuple(mixed)))
    replica = Replica(tmp_path / "store", core=True)
    replica("load", path=str(hf_folder(tied=True)), version=4)
    stats = micro(replica, {}, "mixed")

    model = AutoModelForCausalLM.from_pretrained(hf_folder(tied=True), dtype=torch.float32).eval()
    entropy, weights, gaps = 0.0, [], {0: [], 4: []}
    for _, index in REFS:
        sample = mixed[index]
        at = np.flatnonzero(sample.targets)
        ids = torch.from_numpy(sample.ids.astype(np.int64))
        with torch.no_grad():
            rows = model(ids[None]).logits[0].double().log_softmax(-1)[at - 1]
        entropy += float(-(rows.exp() * rows).sum())
        away = rows[range(len(at)), ids[at]].numpy() - sample.logprobs[at]
        weights += np.exp(away).tolist()
        for version, gap in zip(sample.versions[at].tolist(), abs(away).tolist(), strict=True):
            gaps[version].append(gap)
    assert stats["entropy_sum"] == pytest.approx(entropy, rel=1e-4)
    assert stats["importance_sum"] == pytest.approx(sum(weights), rel=1e-3)
    assert stats["importance_square_sum"] == pytest.approx(sum(w * w for w in weights), rel=1e-3)
    for version, its in gaps.items():
        assert stats[f"targets@{version}"] == len(its) > 0
        assert stats[f"logprob_gap_sum@{version}"] == pytest.approx(sum(its), rel=1e-4)
