"""Parts that tests of several folders share. The real ones are made once a session."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil
import pytest

from cells.ports import free_port
from cells.serving.flags import EngineSettings
from cells.serving.process import EngineProcess
from configs.cells import Device
from configs.load import load_config
from storage.run import Run, create_run

if TYPE_CHECKING:
    from tests.flows.conftest import FinishedRun

TINY_CONTEXT = 1024
TINY_SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)


class EngineAddress(NamedTuple):
    """The session's SGLang server; ``token`` is for its control calls."""

    url: str
    token: str


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """A bucket of an s3 server, which libraries find by the environment alone; its URL."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    environment = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "a-key",
        "AWS_SECRET_ACCESS_KEY": "a-secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket="gyre")
        yield "s3://gyre"
    server.stop()


def make_tiny_policy(folder: Path, seed: int, context: int = TINY_CONTEXT) -> Path:
    """A random Qwen3 in fp32 with 2 layers of width 64, and a byte-level tokenizer."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    text = ["def f(x): return x + 1\n", "file: lib/a.py\nalpha(x): x plus 3\n", "assistant user"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=alphabet,
        special_tokens=list(TINY_SPECIAL_TOKENS),
        show_progress=False,
    )
    raw.train_from_iterator(text * 20, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    generator = torch.random.get_rng_state()
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        initializer_range=0.1,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config).float()
    torch.random.set_rng_state(generator)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """HF directory of a tiny policy. Read only."""
    return make_tiny_policy(tmp_path_factory.mktemp("policy") / "tiny", seed=0)


@pytest.fixture(scope="session")
def other_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As ``tiny_policy``, with other weights."""
    return make_tiny_policy(tmp_path_factory.mktemp("policy") / "other", seed=1)


@pytest.fixture(scope="session")
def smoke_run(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """`gyre train --config smoke` under colocate, to its end. Read only."""
    from tests.flows.conftest import run_smoke

    return run_smoke(tmp_path_factory.mktemp("smoke"))


@pytest.fixture(scope="session")
def sglang_server(
    tiny_policy: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineAddress]:
    """A real SGLang server with ``tiny_policy`` as version 0; who changes that changes it back."""
    settings = EngineSettings(
        policy=tiny_policy,
        version=0,
        device=Device.CPU,
        context=TINY_CONTEXT,
        kv_tokens=16_384,
        requests=64,
        seed=1,
        port=free_port(),
        admin_key="-" + secrets.token_urlsafe(16),  # the worst that chance can make
    )
    log = tmp_path_factory.mktemp("sglang") / "server.log"

    async def serve() -> EngineProcess:
        engine = EngineProcess(settings, cpus=(), log=log)
        try:
            await engine.wait_ready(280)
        except BaseException:
            await engine.close()
            raise
        return engine

    with asyncio.Runner() as runner:
        engine = runner.run(serve())
        try:
            yield EngineAddress(engine.url, engine.token)
        finally:
            family = psutil.Process(engine.pid).children(recursive=True)
            runner.run(engine.close())
            _, alive = psutil.wait_procs(family, timeout=5)
            assert not [process for process in alive if process.status() != "zombie"]


def make_run(folder: Path, *overrides: str) -> Run:
    """A new run in ``folder`` with cells a (core) and b that are not pinned."""
    settings = (
        "cells.cells=[{name: a, core: true}, {name: b}]",
        f"model.context={TINY_CONTEXT}",
        f"storage.root={folder}",
        *overrides,
    )
    config = load_config("quickstart", settings, environment={})
    return create_run(str(folder), f"run-{secrets.token_hex(4)}", config)


@pytest.fixture
def run_store(tmp_path: Path) -> Run:
    """A new run: store, keys and settings."""
    return make_run(tmp_path)
