"""HF directories that can't be a policy are refused from their files, each with its reason."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from configs.model import ModelConfig, ModelSource
from tasks.warm_start.policies import PolicyError
from tasks.warm_start.policy_check import check_policy

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def settings(folder: Path, **changed: Any) -> ModelConfig:
    given = {"source": ModelSource.HF_DIRECTORY, "path": str(folder), **changed}
    return ModelConfig(**given)


@pytest.fixture
def folder(tiny_policy: Path, tmp_path: Path) -> Path:
    """A good HF directory, for a test to spoil."""
    return Path(shutil.copytree(tiny_policy, tmp_path / "policy"))


def change(folder: Path, name: str, **values: Any) -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def shard(folder: Path) -> None:
    """Split the weights into two files with an index, as large models have them."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    placed: dict[str, str] = {}
    for number in range(2):
        name = f"model-{number + 1:05d}-of-00002.safetensors"
        part = dict(list(tensors.items())[number::2])
        save_file(part, folder / name)
        placed |= dict.fromkeys(part, name)
    (folder / INDEX).write_text(json.dumps({"weight_map": placed}))


def test_a_good_policy_passes(folder: Path) -> None:
    check_policy(folder, settings(folder))
    shard(folder)
    check_policy(folder, settings(folder, renderer="qwen3"))


def _without_tensor(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors.pop("model.layers.1.mlp.down_proj.weight")
    save_file(tensors, folder / WEIGHTS)


def _with_tensor(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors["model.layers.0.self_attn.q_proj.bias"] = tensors["model.norm.weight"]
    save_file(tensors, folder / WEIGHTS)


def _truncated(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])


def _without_shard(folder: Path) -> None:
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def _larger_tokenizer(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    size = len(tokenizer["model"]["vocab"])
    tokenizer["model"]["vocab"] |= {f"more{n}": size + n for n in range(50)}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def _without_turns(folder: Path) -> None:
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace("<|im_start|>", "[INST]"))


CASES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no folder": (shutil.rmtree, "No such file"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "lacks tokenizer.json"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), r"lacks \*\.safetensors"),
    "missing tensor": (_without_tensor, r"lack model\.layers\.1\.mlp\.down_proj\.weight: copy"),
    "unknown tensor": (_with_tensor, r"hold model\.layers\.0\.self_attn\.q_proj\.bias.*config"),
    "truncated": (_truncated, r"model\.safetensors: not a whole safetensors file .* bytes"),
    "missing shard": (_without_shard, r"names model-00002-of-00002\.safetensors"),
    "another shape": (
        lambda f: change(f, "config.json", intermediate_size=96),
        r"(gate|up|down)_proj\.weight has shape .*config\.json says .*96",
    ),
    "more layers": (
        lambda f: change(f, "config.json", num_hidden_layers=3),
        r"lack model\.layers\.2\..* and 7 more",
    ),
    "another architecture": (
        lambda f: change(f, "config.json", model_type="llama"),
        "model_type 'llama'.*Qwen3",
    ),
    "damaged config": (lambda f: (f / "config.json").write_text("{"), r"config\.json.*JSON"),
    "short context": (
        lambda f: change(f, "config.json", max_position_embeddings=512),
        r"512, model\.context \(768\).*--set model\.context=512",
    ),
    "larger tokenizer": (_larger_tokenizer, r"largest id is \d+, the weights have \d+ embeddings"),
    "tokenizer without turns": (_without_turns, r"lacks <\|im_start\|>.*another renderer"),
    "damaged tokenizer": (
        lambda f: (f / "tokenizer.json").write_text("{}"),
        "not a tokenizer",
    ),
    "end beyond the embeddings": (
        lambda f: change(f, "generation_config.json", eos_token_id=[2, 151_645]),
        r"generation_config\.json: eos_token_id is 151645",
    ),
    "another end": (
        lambda f: change(f, "tokenizer_config.json", eos_token="<|endoftext|>"),
        r"'<\|endoftext\|>' has id 0, the model ends at eos_token_id 2",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_does_not_fit_is_one_clear_error(name: str, folder: Path) -> None:
    spoil, message = CASES[name]
    spoil(folder)
    with pytest.raises(PolicyError, match=message) as caught:
        check_policy(folder, settings(folder))
    text = str(caught.value)
    assert str(folder) in text
    assert "\n" not in text and len(text) < 600


def test_a_tokenizer_far_smaller_than_the_embeddings_is_refused(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    name = "model.embed_tokens.weight"
    tensors[name] = tensors[name].repeat(3, axis=0)
    save_file(tensors, folder / WEIGHTS)
    change(folder, "config.json", vocab_size=len(tensors[name]))
    with pytest.raises(PolicyError, match=r"knows \d+ tokens"):
        check_policy(folder, settings(folder))


def test_a_renderer_of_other_turns_needs_no_turns_of_qwen3(folder: Path) -> None:
    _without_turns(folder)
    check_policy(folder, settings(folder, renderer="own.module:Renderer"))


def test_the_check_needs_no_torch() -> None:
    code = "import sys, tasks.warm_start.policy_check as _; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr
