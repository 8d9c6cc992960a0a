"""Weights in shared memory: whole HF tensors, bit for bit."""

from __future__ import annotations

import base64
import pickle

import pytest
import torch
from safetensors.torch import load_file

from cells.replica.errors import ReplicaError
from tests.cells.replica.conftest import MakeFolder

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("megatron")]
LIMIT_BYTES = 20_000
"""Of a bucket: more than most tensors have, and less than all together."""


@pytest.mark.parametrize("kind", ["qwen3", "untied"])
def test_buckets_have_every_tensor_of_the_policy_once(model_folder: MakeFolder, kind: str) -> None:
    from cells.replica.buckets import Buckets
    from cells.replica.policy import Policy

    folder = model_folder(kind)
    policy = Policy.open(folder)
    policy.commit(policy.read(folder)[0], 5)
    buckets, first = Buckets(), 0
    found: list[tuple[str, torch.Tensor]] = []
    while first is not None:
        answer = buckets.share(policy, first, LIMIT_BYTES)
        assert answer["version"] == 5
        tensors = pickle.loads(base64.b64decode(answer["payload"]))
        assert sum(tensor.nbytes for _, tensor in tensors) <= LIMIT_BYTES or len(tensors) == 1
        assert all(tensor.is_shared() for _, tensor in tensors)
        assert len(found) == first
        found += [(name, tensor.clone()) for name, tensor in tensors]
        first = answer["next"]
    expected = load_file(folder / "model.safetensors")
    assert sorted(name for name, _ in found) == sorted(expected)
    for name, tensor in found:
        assert torch.equal(tensor, expected[name]), name


def test_a_bucket_that_is_not_there_is_refused(model_folder: MakeFolder) -> None:
    from cells.replica.buckets import Buckets
    from cells.replica.policy import Policy

    with pytest.raises(ReplicaError, match="no tensor 1000"):
        Buckets().share(Policy.open(model_folder("qwen3")), 1000, LIMIT_BYTES)
