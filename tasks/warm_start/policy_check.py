"""Whether an HF directory can be the policy of a run, seen from its files alone, in no time.

SGLang fills a missing tensor with random numbers and serves nonsense, and a tokenizer of another
model is first noticed when nothing is learned: both are refused here, before anything starts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from cells.replica.links import OUTPUT, hf_shapes
from cells.replica.shape import PolicyShape, ShapeError, read_shape
from configs.model import ModelConfig
from tasks.warm_start.policies import PolicyError, policy_files

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SHOWN = 4
_LEAST_COVERED = 0.5
"""Embeddings are padded up to a round number, but never to twice the tokenizer's size."""

_TURNS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_TOOLS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "</think>")
_QWEN3_RENDERERS = ("qwen3", "cells.gateway.terse:TerseRenderer")


def check_policy(folder: Path, model: ModelConfig) -> None:
    """See that weights, config and tokenizer of an HF directory fit each other and the settings.

    Raises:
        PolicyError: they don't; the text names the file, what it holds, and what to do.
    """
    policy_files(folder, digests=False)
    try:
        shape = read_shape(folder / "config.json")
    except ShapeError as error:
        raise PolicyError(f"{error}; model.path must be one of these models") from None
    if model.context > shape.context:
        raise PolicyError(
            f"{folder / 'config.json'}: max_position_embeddings is {shape.context}, model.context "
            f"({model.context}) is more: lower it with --set model.context={shape.context}"
        )
    _check_weights(folder, shape)
    _check_tokenizer(folder, shape, model.renderer)


def _check_weights(folder: Path, shape: PolicyShape) -> None:
    found: dict[str, tuple[int, ...]] = {}
    for path in _weight_files(folder):
        try:
            with safe_open(path, framework="np") as file:
                for name in file.keys():  # noqa: SIM118 - not a dictionary
                    found[name] = tuple(file.get_slice(name).get_shape())
        except (OSError, SafetensorError) as error:
            size = f", {path.stat().st_size:,} bytes" if path.is_file() else ""
            raise PolicyError(
                f"{path}: not a whole safetensors file ({error}{size}): copy or download it again"
            ) from None
    wanted = hf_shapes(shape)
    if missing := [name for name in wanted if name not in found]:
        raise PolicyError(
            f"{folder}: the weights lack {_some(missing)}: copy or download all of its safetensors "
            f"files, with the config.json that belongs to them"
        )
    ignored = {OUTPUT} if shape.tied else set()
    if unknown := [name for name in found if name not in wanted and name not in ignored]:
        raise PolicyError(
            f"{folder}: the weights hold {_some(unknown)}, which a model of its config.json does "
            f"not have: take the config.json that belongs to them"
        )
    for name, wished in wanted.items():
        if found[name] != wished:
            raise PolicyError(
                f"{folder}: {name} has shape {list(found[name])}, config.json says {list(wished)}: "
                f"take the config.json that belongs to the weights"
            )


def _weight_files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if not index.is_file():
        return [folder / _WEIGHTS]
    listed = _json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise PolicyError(f"{index}: it has no weight_map: copy or download it again")
    files = sorted({str(name) for name in listed.values()})
    if missing := [name for name in files if not (folder / name).is_file()]:
        raise PolicyError(
            f"{folder}: {index.name} names {_some(missing)}, which is not there: copy or download "
            f"the folder again"
        )
    return [folder / name for name in files]


def _check_tokenizer(folder: Path, shape: PolicyShape, renderer: str) -> None:
    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises nothing more special
        raise PolicyError(f"{path}: not a tokenizer ({error}): copy or download it again") from None
    vocabulary: Mapping[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    advice = "take the tokenizer that belongs to these weights"
    largest = max(vocabulary.values(), default=-1)
    if largest >= shape.vocabulary:
        raise PolicyError(
            f"{path}: its largest id is {largest}, the weights have {shape.vocabulary} embeddings: "
            f"{advice}"
        )
    if len(vocabulary) < _LEAST_COVERED * shape.vocabulary:
        raise PolicyError(
            f"{path}: it knows {len(vocabulary)} tokens, the weights have {shape.vocabulary} "
            f"embeddings: {advice}"
        )
    needed = (*_TURNS, *_TOOLS) if renderer in _QWEN3_RENDERERS else ()
    if missing := [token for token in needed if token not in vocabulary]:
        raise PolicyError(
            f"{path}: it lacks {_some(missing)}, which model.renderer={renderer} writes turns "
            f"with: {advice}, or another renderer"
        )
    _check_special_ids(folder, vocabulary, shape.vocabulary, advice)


def _check_special_ids(
    folder: Path, vocabulary: Mapping[str, int], embeddings: int, advice: str
) -> None:
    """A policy whose end-of-text id is another token's never stops, or stops in mid-sentence."""
    ends: dict[int, str] = {}
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        settings = _json(path) if path.is_file() else {}
        for key in ("eos_token_id", "pad_token_id", "bos_token_id"):
            for number in _numbers(settings.get(key)):
                if not 0 <= number < embeddings:
                    raise PolicyError(
                        f"{path}: {key} is {number}, the weights have {embeddings} embeddings: "
                        f"take the {name} that belongs to them"
                    )
                if key == "eos_token_id":
                    ends[number] = name
    named = folder / "tokenizer_config.json"
    eos = _json(named).get("eos_token") if named.is_file() else None
    eos = eos.get("content") if isinstance(eos, dict) else eos
    if eos is None or not ends:
        return
    if eos not in vocabulary:
        raise PolicyError(f"{named}: eos_token {eos!r} is not in tokenizer.json: {advice}")
    if vocabulary[eos] not in ends:
        told = ", ".join(f"{number} ({name})" for number, name in sorted(ends.items()))
        raise PolicyError(
            f"{named}: eos_token {eos!r} has id {vocabulary[eos]}, the model ends at "
            f"eos_token_id {told}: {advice}"
        )


def _numbers(value: Any) -> Iterable[int]:
    values = value if isinstance(value, list) else [value]
    return [number for number in values if type(number) is int]


def _json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PolicyError(f"{path}: can't be read as JSON ({error}): copy it again") from None
    if not isinstance(data, dict):
        raise PolicyError(f"{path}: the top level must be an object: copy it again")
    return data


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
