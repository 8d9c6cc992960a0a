"""Weights between the HF and the Megatron layout, and HF directories in and out.

``cells.replica.links`` is the one place where names are mapped; both directions follow it. A rank
reads and writes only what it holds.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from cells.replica.agreement import new_folder, together
from cells.replica.files import Files, InMemory, Source, Writer, shards
from cells.replica.links import OUTPUT, Fusion, Link, hf_shapes, links
from cells.replica.place import Place
from cells.replica.shape import PolicyShape

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000
"""Largest file of an HF directory, as transformers cuts them."""
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
    return _taken(InMemory(hf), shape, Place(), where)


def to_hf(megatron: Mapping[str, Tensor], shape: PolicyShape) -> dict[str, Tensor]:
    """The HF state dict of Megatron weights or gradients; copies, contiguous."""
    result: dict[str, Tensor] = {}
    for link in links(shape):
        parts = split(megatron[link.megatron].detach(), link, shape, Place())
        for name, part in zip(link.hf, parts, strict=True):
            result[name] = part.clone(memory_format=torch.contiguous_format)
    return result


def join(parts: list[Tensor], link: Link, shape: PolicyShape, place: Place) -> Tensor:
    """A rank's parts of the HF tensors of a link as its Megatron parameter.

    Rows of the vocabulary that no id has are zero.
    """
    if link.fusion is Fusion.GATE_UP:
        return torch.cat(parts)
    if link.fusion is Fusion.QKV:
        groups = shape.kv_heads // place.layout.tensor
        grouped = [part.reshape(groups, -1, shape.hidden) for part in parts]
        return torch.cat(grouped, dim=1).reshape(-1, shape.hidden)
    [whole] = parts
    missing = padded_rows(link, shape, place) - len(whole)
    if missing <= 0:
        return whole
    return torch.cat([whole, whole.new_zeros(missing, *whole.shape[1:])])


def split(whole: Tensor, link: Link, shape: PolicyShape, place: Place) -> list[Tensor]:
    """A rank's Megatron parameter as its parts of the HF tensors, views where possible."""
    if link.fusion is Fusion.GATE_UP:
        return list(whole.chunk(2))
    if link.fusion is Fusion.QKV:
        per_group = shape.heads // shape.kv_heads * shape.head_dim
        grouped = whole.view(shape.kv_heads // place.layout.tensor, -1, shape.hidden)
        parts = grouped.split([per_group, shape.head_dim, shape.head_dim], dim=1)
        return [part.reshape(-1, shape.hidden) for part in parts]
    if padded_rows(link, shape, place):
        return [whole[: len(place.words(shape))]]
    return [whole]


def padded_rows(link: Link, shape: PolicyShape, place: Place) -> int:
    """Rows of a parameter over the vocabulary, padding included; 0 for any other."""
    if link.megatron not in ("embedding.word_embeddings.weight", "output_layer.weight"):
        return 0
    return place.padded_vocabulary(shape) // place.layout.tensor


def read_weights(folder: Path, shape: PolicyShape, place: Place | None = None) -> dict[str, Tensor]:
    """The Megatron weights (float32) of a rank from an HF directory, sharded or not.

    Raises:
        WeightsError: no weights, a damaged file, or weights that don't fit ``shape``.
    """
    try:
        with Files(_files(folder)) as source:
            return _taken(source, shape, place or Place(), str(folder))
    except WeightsError:
        raise
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise WeightsError(f"{folder}: weights can't be read: {error}") from error


def write_policy(
    folder: Path,
    megatron: Mapping[str, Tensor],
    shape: PolicyShape,
    beside: Mapping[str, bytes],
    *,
    place: Place | None = None,
    dtype: torch.dtype = torch.float32,
    shard_bytes: int = SHARD_BYTES,
    token: str | None = None,
) -> None:
    """Make ``folder`` an HF directory of these weights and the files ``beside`` them.

    Written aside and moved, so that nobody reads half of it; what was there is replaced. All ranks
    of a replica call it, each with what it holds.

    Args:
        shard_bytes: largest file, unless a single tensor is larger.
        token: makes the name that it has until it is whole, the same in all ranks.
    """
    place = place or Place()
    aside = folder.with_name(f".{folder.name}-{token or secrets.token_hex(4)}")
    files = shards(hf_shapes(shape), dtype, shard_bytes)
    count = len(files)
    names = [WEIGHTS] if count == 1 else [f"model-{i + 1:05}-of-{count:05}" for i in range(count)]
    names = [name if name == WEIGHTS else f"{name}.safetensors" for name in names]
    with new_folder(folder, place, aside):
        writers = {
            tensor: writer
            for name, tensors in zip(names, files, strict=True)
            for writer in [Writer(aside / name, tensors, dtype)]
            for tensor in tensors
        }
        with together(place):
            if place.rank == 0:
                for name, data in beside.items():
                    (aside / name).write_bytes(data)
                for writer in dict.fromkeys(writers.values()):
                    writer.create()
                if count > 1:
                    index = {t: name for name, part in zip(names, files, strict=True) for t in part}
                    (aside / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
        with together(place):
            for link in links(shape, place):
                if writes(link, place):
                    parts = split(megatron[link.megatron].detach(), link, shape, place)
                    for piece, part in zip(link.pieces(shape, place), parts, strict=True):
                        writers[piece.name].put(piece, part)


def writes(link: Link, place: Place) -> bool:
    """Whether this rank is the one that writes what it holds of a link."""
    if link.expert:
        return place.writes_experts
    whole_elsewhere = link.cut.value == "none" and place.tensor > 0
    return place.writes_dense and not link.copy and not whole_elsewhere


def files_beside(folder: Path) -> dict[str, bytes]:
    """The small files of an HF directory: configuration and tokenizer, not the weights."""
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.is_file() and path.suffix != ".safetensors" and path.name != INDEX
    }


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if not index.is_file():
        return [folder / WEIGHTS]
    names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    return [folder / name for name in sorted(names)]


def _taken(source: Source, shape: PolicyShape, place: Place, where: str) -> dict[str, Tensor]:
    """A rank's Megatron weights, after the names and shapes of all tensors have been checked."""
    wanted, there = hf_shapes(shape), source.names()
    missing = [name for name in wanted if name not in there]
    if missing:
        raise WeightsError(f"{where}: {_some(missing)} missing")
    ignored = {OUTPUT} if shape.tied else set()
    unknown = sorted(name for name in there if name not in wanted and name not in ignored)
    if unknown:
        raise WeightsError(f"{where}: {_some(unknown)} not part of a model of config.json")
    for name, size in wanted.items():
        found = source.shape(name)
        if found != size:
            raise WeightsError(f"{where}: {name} has shape {found}, config.json says {size}")
    return {
        link.megatron: join(
            [source.read(piece).float() for piece in link.pieces(shape, place)], link, shape, place
        )
        for link in links(shape, place)
    }


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more + (" are" if len(names) > 1 else " is")
