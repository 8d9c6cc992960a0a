"""Weights between the HF and the Megatron layout, and HF directories in and out.

``cells.replica.links`` is the one place where names are mapped; both directions follow it.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from cells.replica.links import OUTPUT, Fusion, hf_shapes, links
from cells.replica.shape import PolicyShape

WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_NAMES_SHOWN = 5


class WeightsError(ValueError):
    """Weights that don't fit the model; the text names the file, the tensors and the shapes."""


def to_megatron(hf: Mapping[str, Tensor], shape: PolicyShape, where: str) -> dict[str, Tensor]:
    """Megatron weights (float32) of an HF state dict.

    Args:
        where: what to call the origin in an error.

    Raises:
        WeightsError: a tensor is missing, unknown, or of another shape.
    """
    wanted = hf_shapes(shape)
    missing = [name for name in wanted if name not in hf]
    if missing:
        raise WeightsError(f"{where}: {_some(missing)} missing")
    ignored = {OUTPUT} if shape.tied else set()
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
