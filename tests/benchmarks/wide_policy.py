"""A policy that says what another one says and costs more: its MLPs have features without effect.

Where training is to be a large part of a step, the policy has to be larger than one that a warm
start makes in minutes. The new rows of the gate and up projections are random, the new columns of
the down projections zero, so that the logits are the same (Chen et al., Net2Net, arXiv 1511.05641).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

_CONFIG, _WEIGHTS = "config.json", "model.safetensors"
_WIDER = ("gate_proj.weight", "up_proj.weight")


def widen(source: Path, target: Path, features: int) -> None:
    """Write the HF directory ``source`` to ``target``, with MLPs of so many features.

    Raises:
        ValueError: they have more.
    """
    config = json.loads((source / _CONFIG).read_text(encoding="utf-8"))
    more = features - config["intermediate_size"]
    if more < 0:
        raise ValueError(f"the MLPs of {source} have {-more} features more than {features}")
    random = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in sorted(load_file(source / _WEIGHTS).items()):
        if name.endswith(_WIDER):
            rows = torch.randn(more, tensor.shape[1], generator=random)
            tensor = torch.cat([tensor, rows * config["initializer_range"]])
        elif name.endswith("down_proj.weight"):
            tensor = torch.cat([tensor, tensor.new_zeros(tensor.shape[0], more)], dim=1)
        tensors[name] = tensor.contiguous()
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.name not in (_CONFIG, _WEIGHTS, "manifest.json"):
            shutil.copyfile(file, target / file.name)
    save_file(tensors, target / _WEIGHTS, metadata={"format": "pt"})
    config["intermediate_size"] = features
    (target / _CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
