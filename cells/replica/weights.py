"""Weights between the HF and the Megatron layout, and HF directories in and out.

``links`` is the one place where names are mapped; both directions follow it.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from cells.replica.shape import PolicyShape

WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_OUTPUT = "lm_head.weight"
_NAMES_SHOWN = 5


class WeightsError(ValueError):
    """Weights that don't fit the model; the text names the file, the tensors and the shapes."""


class Fusion(Enum):
    """How the HF tensors of a link lie in the Megatron one."""

    NONE = "none"
    GATE_UP = "gate_up"
    """Two matrices above each other."""
    QKV = "qkv"
    """Per key-value group: its queries, its key, its value."""


@dataclass(frozen=True)
class Link:
    """One Megatron parameter and the HF tensors that it is made of."""

    megatron: str
    hf: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    """Of the HF tensors."""
    fusion: Fusion = Fusion.NONE


def links(shape: PolicyShape) -> list[Link]:
    """Every weight of a model of that shape."""
    wide, query, value = shape.hidden, shape.heads, shape.kv_heads
    vocabulary, norm, head = (shape.vocabulary, wide), (wide,), (shape.head_dim,)
    query_rows, value_rows = query * shape.head_dim, value * shape.head_dim
    found = [
        Link("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), (vocabulary,)),
        Link("decoder.final_layernorm.weight", ("model.norm.weight",), (norm,)),
    ]
    if not shape.tied:
        found.append(Link("output_layer.weight", (_OUTPUT,), (vocabulary,)))
    for index in range(shape.layers):
        here, there = f"decoder.layers.{index}.", f"model.layers.{index}."
        plain = {
            ("input_layernorm", "input_layernorm"): norm,
            ("pre_mlp_layernorm", "post_attention_layernorm"): norm,
            ("self_attention.q_layernorm", "self_attn.q_norm"): head,
            ("self_attention.k_layernorm", "self_attn.k_norm"): head,
            ("self_attention.linear_proj", "self_attn.o_proj"): (wide, query_rows),
            ("mlp.linear_fc2", "mlp.down_proj"): (wide, shape.ffn),
        }
        found += [
            Link(f"{here}{megatron}.weight", (f"{there}{hf}.weight",), (size,))
            for (megatron, hf), size in plain.items()
        ]
        found += [
            Link(
                f"{here}self_attention.linear_qkv.weight",
                tuple(f"{there}self_attn.{part}_proj.weight" for part in "qkv"),
                ((query_rows, wide), (value_rows, wide), (value_rows, wide)),
                Fusion.QKV,
            ),
            Link(
                f"{here}mlp.linear_fc1.weight",
                (f"{there}mlp.gate_proj.weight", f"{there}mlp.up_proj.weight"),
                ((shape.ffn, wide), (shape.ffn, wide)),
                Fusion.GATE_UP,
            ),
        ]
    return found


def to_megatron(hf: Mapping[str, Tensor], shape: PolicyShape, where: str) -> dict[str, Tensor]:
    """Megatron weights (float32) of an HF state dict.

    Args:
        where: what to call the origin in an error.

    Raises:
        WeightsError: a tensor is missing, unknown, or of another shape.
    """
    wanted = {
        name: size for link in links(shape) for name, size in zip(link.hf, link.shapes, strict=True)
    }
    missing = [name for name in wanted if name not in hf]
    if missing:
        raise WeightsError(f"{where}: {_some(missing)} missing")
    ignored = {_OUTPUT} if shape.tied else set()
    unknown = [name for name in hf if name not in wanted and name not in ignored]
    if unknown:
        raise WeightsError(f"{where}: {_some(unknown)} not part of a model of config.json")
    for name, size in wanted.items():
        if tuple(hf[name].shape) != size:
            raise WeightsError(
                f"{where}: {name} has shape {tuple(hf[name].shape)}, config.json says {size}"
            )
    return {
        link.megatron: join([hf[name].float() for name in link.hf], link.fusion, shape)
        for link in links(shape)
    }


def to_hf(megatron: Mapping[str, Tensor], shape: PolicyShape) -> dict[str, Tensor]:
    """The HF state dict of Megatron weights or gradients; copies, contiguous."""
    result: dict[str, Tensor] = {}
    for link in links(shape):
        parts = split(megatron[link.megatron].detach(), link.fusion, shape)
        for name, part in zip(link.hf, parts, strict=True):
            result[name] = part.clone(memory_format=torch.contiguous_format)
    return result


def join(parts: list[Tensor], fusion: Fusion, shape: PolicyShape) -> Tensor:
    """HF tensors as the Megatron one."""
    if fusion is Fusion.NONE:
        return parts[0]
    if fusion is Fusion.GATE_UP:
        return torch.cat(parts)
    groups = [part.view(shape.kv_heads, -1, shape.hidden) for part in parts]
    return torch.cat(groups, dim=1).reshape(-1, shape.hidden)


def split(whole: Tensor, fusion: Fusion, shape: PolicyShape) -> list[Tensor]:
    """The Megatron tensor as its HF ones, as views where the layout allows."""
    if fusion is Fusion.NONE:
        return [whole]
    if fusion is Fusion.GATE_UP:
        return list(whole.chunk(2))
    per_group = shape.heads // shape.kv_heads * shape.head_dim
    grouped = whole.view(shape.kv_heads, -1, shape.hidden)
    parts = grouped.split([per_group, shape.head_dim, shape.head_dim], dim=1)
    return [part.reshape(-1, shape.hidden) for part in parts]


def read_weights(folder: Path, shape: PolicyShape) -> dict[str, Tensor]:
    """Megatron weights (float32) of an HF directory, sharded or not.

    Raises:
        WeightsError: no weights, a damaged file, or weights that don't fit ``shape``.
    """
    index = folder / _INDEX
    try:
        if index.is_file():
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        else:
            files = [WEIGHTS]
        hf: dict[str, Tensor] = {}
        for name in files:
            hf.update(load_file(folder / name))
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise WeightsError(f"{folder}: weights can't be read: {error}") from error
    return to_megatron(hf, shape, str(folder))


def write_policy(
    folder: Path, megatron: Mapping[str, Tensor], shape: PolicyShape, beside: Mapping[str, bytes]
) -> None:
    """Make ``folder`` an HF directory of these weights and the files ``beside`` them.

    Written aside and moved, so that nobody reads half of it; what was there is replaced.
    """
    aside = folder.with_name(f".{folder.name}-{secrets.token_hex(4)}")
    aside.mkdir(parents=True)
    try:
        for name, data in beside.items():
            (aside / name).write_bytes(data)
        save_file(to_hf(megatron, shape), aside / WEIGHTS, metadata={"format": "pt"})
        if folder.exists():
            old = aside.with_name(f"{aside.name}-old")
            folder.rename(old)
            aside.rename(folder)
            shutil.rmtree(old)
        else:
            aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def files_beside(folder: Path) -> dict[str, bytes]:
    """The small files of an HF directory: configuration and tokenizer, not the weights."""
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.is_file() and path.suffix != ".safetensors" and path.name != _INDEX
    }


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more + (" are" if len(names) > 1 else " is")
