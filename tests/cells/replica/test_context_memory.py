"""What a row keeps for the backward pass, measured: it follows length over context ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from cells.replica.attention import ChainParams, ContextShare
from cells.replica.errors import ReplicaError
from cells.replica.memory import activation_bytes
from cells.replica.packing import PackedRow, pack, padded
from cells.replica.place import MASK_ELEMENTS, Place
from cells.replica.shape import read_shape
from configs.layout import LayoutConfig
from tests.cells.replica.conftest import MakeFolder, random_documents
from tests.cells.replica.ranks import run_ranks

TOKENS = 128
CONTEXT = LayoutConfig(context=2, recompute=True)


def row_of(tokens: int, place: Place) -> PackedRow:
    return padded(pack(random_documents(3, (tokens,))), tokens)


def kept(place: Place, folder: Path, out: Path) -> None:
    """Bytes that the layers keep for the backward pass, for a row of each length."""
    from cells.replica.model import run_stage
    from cells.replica.policy import Policy

    policy = Policy.open(folder, place)
    weights = {parameter.untyped_storage().data_ptr() for parameter in policy.model.parameters()}
    found = {}
    for tokens in (TOKENS, 2 * TOKENS):
        sizes: dict[int, int] = {}

        def keep(tensor: torch.Tensor, sizes: dict[int, int] = sizes) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            held = run_stage(policy.model, row_of(tokens, place), place)
        found[tokens] = sum(sizes.values())
        del held
    (out / f"kept-{place.layout.context}-{place.rank}.json").write_text(json.dumps(found))


@pytest.mark.real
def test_a_row_twice_as_long_on_twice_the_ranks_keeps_as_much(
    model_folder: MakeFolder, tmp_path: Path
) -> None:
    folder = model_folder("qwen3")
    run_ranks(LayoutConfig(recompute=True), tmp_path / "one", kept, folder, tmp_path)
    run_ranks(CONTEXT, tmp_path / "two", kept, folder, tmp_path)
    [one] = [json.loads(path.read_text()) for path in tmp_path.glob("kept-1-*.json")]
    both = [json.loads(path.read_text()) for path in tmp_path.glob("kept-2-*.json")]
    short, long = str(TOKENS), str(2 * TOKENS)
    assert one[long] == pytest.approx(2 * one[short], rel=0.1)
    for rank in both:
        assert rank[long] == pytest.approx(one[short], rel=0.1)


def test_without_recomputation_each_layer_keeps_the_keys_of_the_whole_row(
    model_folder: MakeFolder,
) -> None:
    shape = read_shape(model_folder("qwen3") / "config.json")
    keys = 2 * TOKENS * shape.kv_heads * shape.head_dim * 4
    alone = activation_bytes(shape, Place(), 4, TOKENS / 2)
    shared = activation_bytes(shape, Place(LayoutConfig(context=2)), 4, TOKENS)
    assert shared == pytest.approx(alone + shape.layers * keys)
    light = activation_bytes(shape, Place(LayoutConfig(recompute=True)), 4, TOKENS / 2)
    assert activation_bytes(shape, Place(CONTEXT), 4, TOKENS) == pytest.approx(light + keys)


def test_a_dense_mask_above_the_stated_length_is_refused(megatron: None) -> None:
    place = Place(LayoutConfig(context=2))
    for tokens, fits in ((1024, True), (8192, False)):
        chains = row_of(tokens, place).chains
        params = ChainParams(chains=chains, share=ContextShare.of(tokens, place))
        assert (tokens * tokens // 2 <= MASK_ELEMENTS) is fits
        if fits:
            assert params.mask.shape == (tokens // 2, tokens)
            continue
        with pytest.raises(ReplicaError, match=r"needs a dense mask of 33554432 elements on a CPU"):
            _ = params.mask
