"""Shapes and weights of HF directories: exact both ways, refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from cells.replica.links import hf_shapes, links
from cells.replica.place import Place
from cells.replica.shape import Experts, PolicyShape, ShapeError, read_shape
from cells.replica.weights import (
    WeightsError,
    files_beside,
    read_weights,
    to_hf,
    to_megatron,
    write_policy,
    writes,
)
from configs.layout import LayoutConfig
from tests.cells.replica.conftest import MakeFolder


@st.composite
def shapes(draw: st.DrawFn) -> PolicyShape:
    kv_heads = draw(st.integers(1, 3))
    return PolicyShape(
        layers=draw(st.integers(1, 3)),
        hidden=draw(st.integers(1, 5)),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 4)),
        ffn=draw(st.integers(1, 6)),
        vocabulary=draw(st.integers(1, 9)),
        context=8,
        norm_epsilon=1e-6,
        rope_theta=1e4,
        tied=draw(st.booleans()),
        initial_std=0.02,
        qk_norm=draw(st.booleans()),
        experts=draw(st.none() | st.builds(Experts, *(st.integers(1, 3),) * 3, st.booleans())),
    )


@given(shapes())
@settings(deadline=None, max_examples=40)
def test_every_value_survives_both_ways(shape: PolicyShape) -> None:
    """All values differ, so that any wrong place shows."""
    hf, next_value = {}, 0
    for link in links(shape):
        for name, size in zip(link.hf, link.shapes, strict=True):
            count = int(torch.Size(size).numel())
            hf[name] = torch.arange(next_value, next_value + count, dtype=torch.float32).view(size)
            next_value += count
    megatron = to_megatron(hf, shape, "test")
    assert sum(weight.numel() for weight in megatron.values()) == next_value
    back = to_hf(megatron, shape)
    assert back.keys() == hf.keys()
    assert all(torch.equal(back[name], hf[name]) for name in hf)


@pytest.mark.parametrize("tied", [True, False])
def test_a_directory_round_trip_is_exact(hf_folder: MakeFolder, tmp_path: Path, tied: bool) -> None:
    source = hf_folder(tied=tied)
    shape = read_shape(source / "config.json")
    write_policy(tmp_path / "out", read_weights(source, shape), shape, files_beside(source))
    first, second = (load_file(at / "model.safetensors") for at in (source, tmp_path / "out"))
    first.pop("lm_head.weight", None) if tied else None
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"], "nothing is left aside"


def test_writing_again_replaces_the_directory(hf_folder: MakeFolder, tmp_path: Path) -> None:
    source = hf_folder(tied=True)
    shape = read_shape(source / "config.json")
    weights = read_weights(source, shape)
    for factor in (1.0, 2.0):
        scaled = {name: weight * factor for name, weight in weights.items()}
        write_policy(tmp_path / "out", scaled, shape, {"config.json": b"{}"})
    found = load_file(tmp_path / "out" / "model.safetensors")["model.norm.weight"]
    assert torch.equal(found, weights["decoder.final_layernorm.weight"] * 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_a_large_model_is_written_in_several_files(
    model_folder: MakeFolder, tmp_path: Path
) -> None:
    source = model_folder("moe")
    shape = read_shape(source / "config.json")
    weights = read_weights(source, shape)
    write_policy(tmp_path / "out", weights, shape, {}, shard_bytes=20_000)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3 and files[0].endswith(f"-of-{len(files):05}.safetensors")
    whole = load_file(source / "model.safetensors")
    found = {k: v for name in files for k, v in load_file(tmp_path / "out" / name).items()}
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    again = read_weights(tmp_path / "out", shape)
    assert all(torch.equal(again[name], weights[name]) for name in weights)


LAYOUTS = [
    LayoutConfig(tensor=tensor, pipeline=pipeline, data=data, context=context, expert=expert)
    for tensor, pipeline, data, context, expert in product(
        (1, 2), (1, 2), (1, 2, 3), (1, 2), (1, 2)
    )
    if tensor * data * context % expert == 0
]


@given(st.sampled_from(LAYOUTS), st.booleans(), st.booleans())
@settings(deadline=None)
def test_ranks_that_write_cover_every_value_once(
    layout: LayoutConfig, tied: bool, experts: bool
) -> None:
    """And what all ranks hold covers it as well; a vocabulary need not be a multiple of them."""
    shape = PolicyShape(
        layers=2,
        hidden=4,
        heads=4,
        kv_heads=2,
        head_dim=2,
        ffn=6,
        vocabulary=7,
        context=8,
        norm_epsilon=1e-6,
        rope_theta=1e4,
        tied=tied,
        initial_std=0.02,
        experts=Experts(4, 2, 6, True) if experts else None,
    )
    times = {name: torch.zeros(size) for name, size in hf_shapes(shape).items()}
    for rank in range(layout.ranks):
        place = Place(layout, rank)
        for link in links(shape, place):
            for piece in link.pieces(shape, place):
                part = times[piece.name].narrow(piece.dim, piece.start, piece.stop - piece.start)
                part += writes(link, place)
    assert all((count == 1).all() for count in times.values())


def test_sharded_weights_are_read(hf_folder: MakeFolder, tmp_path: Path) -> None:
    source = hf_folder(tied=False)
    shape = read_shape(source / "config.json")
    tensors = load_file(source / "model.safetensors")
    names = sorted(tensors)
    halves = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, some in halves.items():
        save_file({name: tensors[name] for name in some}, tmp_path / file)
    index = {name: file for file, some in halves.items() for name in some}
    text = json.dumps({"weight_map": index})
    (tmp_path / "model.safetensors.index.json").write_text(text)
    whole, sharded = read_weights(source, shape), read_weights(tmp_path, shape)
    assert all(torch.equal(whole[name], sharded[name]) for name in whole)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda t: t.pop("model.norm.weight"), r"model\.norm\.weight is missing"),
        (lambda t: t.update(extra=torch.ones(1)), "extra is not part of a model"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(3)}),
            r"model\.norm\.weight has shape \(3,\), config\.json says \(48,\)",
        ),
    ],
)
def test_weights_that_do_not_fit_are_named(
    hf_folder: MakeFolder,
    tmp_path: Path,
    change: Callable[[dict[str, torch.Tensor]], object],
    expected: str,
) -> None:
    source = hf_folder(tied=False)
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=expected) as caught:
        read_weights(tmp_path, read_shape(source / "config.json"))
    assert str(tmp_path) in str(caught.value)


def test_missing_and_damaged_files_are_named(hf_folder: MakeFolder, tmp_path: Path) -> None:
    shape = read_shape(hf_folder(tied=True) / "config.json")
    with pytest.raises(WeightsError, match=r"weights can't be read"):
        read_weights(tmp_path, shape)
    (tmp_path / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(WeightsError, match=r"weights can't be read"):
        read_weights(tmp_path, shape)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("model_type", "llama", "only qwen3|only Qwen3ForCausalLM"),
        ("model_type", "gemma3", "LlamaForCausalLM .model_type llama. can be trained"),
        ("mlp_only_layers", [0], r"mlp_only_layers is \[0\]"),
        ("architectures", ["Qwen3MoeForCausalLM"], "only Qwen3ForCausalLM"),
        ("attention_bias", True, "attention_bias is True"),
        ("use_sliding_window", True, "use_sliding_window is True"),
        ("hidden_act", "gelu", "hidden_act is 'gelu'"),
        ("rope_parameters", {"rope_type": "yarn"}, "rope_type is 'yarn'"),
        ("hidden_size", None, "'hidden_size' is missing"),
    ],
)
def test_other_architectures_are_refused(
    hf_folder: MakeFolder, tmp_path: Path, key: str, value: object, expected: str
) -> None:
    config = json.loads((hf_folder(tied=True) / "config.json").read_text())
    if value is None:
        del config[key]
    else:
        config[key] = value
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(ShapeError, match=expected):
        read_shape(path)


def test_both_spellings_of_the_rope_base_are_read(hf_folder: MakeFolder, tmp_path: Path) -> None:
    config = json.loads((hf_folder(tied=True) / "config.json").read_text())
    assert read_shape(hf_folder(tied=True) / "config.json").rope_theta == 50_000
    del config["rope_parameters"]
    config["rope_theta"] = 1e6
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_shape(tmp_path / "config.json").rope_theta == 1e6
