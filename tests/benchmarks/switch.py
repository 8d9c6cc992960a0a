"""What a cell's switch costs, part by part: real engines, replicas and Mooncake.

Prints one JSON object with medians over rounds. In each round two cells serve running generations
through a real gateway; cell b goes to training while they run, then the core; the core makes an
update; both come back with the new version, b over Mooncake. ``resident`` is the quickstart's model
with everything kept in memory; ``offloaded`` is a model of 135M parameters whose engine gives its
memory back while its cell trains (on a CPU the calls are made and nothing is freed).

``weights_over_socket`` is the time of the pull over that of a plain socket for the same bytes, and
``weights_over_memcpy`` the time from the replica to the engine over that of one copy in memory.
Run it with ``python -m tests.benchmarks.switch``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np

from cells.client import DaemonClient
from cells.launch import DaemonSpec, LeaseKeeper, ensure_daemons, stop_daemons
from cells.moves import Mover, Parts
from configs.load import load_config
from configs.model import ModelShape
from storage.records import CallKind, GroupHeader
from storage.run import Run, create_run
from storage.samples import Sample, SealedGroup, seal

CELLS = ("a", "b")
GENERATIONS = 8
"""Running calls when a cell leaves, half of them on it."""
START_LIMIT_S = 900.0
LIMIT_S = 300.0


@dataclass(frozen=True)
class Kind:
    """What is measured.

    Args:
        answer_tokens: of each running call: enough that none ends before its cell leaves, and few,
            as every round waits for their ends.
        rounds: unless another number is asked for.
    """

    shape: ModelShape
    answer_tokens: int
    rounds: int


KINDS = {
    "resident": Kind(ModelShape(), answer_tokens=400, rounds=5),
    # The sizes of the smallest published models of this kind.
    "offloaded": Kind(
        ModelShape(
            layers=30, hidden=576, heads=9, kv_heads=3, head_dim=64, ffn=1536, vocabulary=49_152
        ),
        answer_tokens=40,
        rounds=3,
    ),
}


def make_policy(folder: Path, shape: ModelShape, context: int) -> Path:
    """A random policy of that shape, with a byte-level tokenizer."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    marks = "<|endoftext|> <|im_start|> <|im_end|> <tool_call> </tool_call> <tool_response>"
    trainer = trainers.BpeTrainer(
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[*marks.split(), "</tool_response>", "<think>", "</think>"],
        show_progress=False,
    )
    raw.train_from_iterator(["def f(x): return x + 1\n"], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        intermediate_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    Qwen3ForCausalLM(config).float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class Bench:
    """Two cells and a gateway of one run."""

    def __init__(self, run: Run, daemons: dict[str, DaemonClient], answer_tokens: int) -> None:
        self.run = run
        self.answer_tokens = answer_tokens
        self.gateway = daemons["gateway"]
        self.cells = {name: daemons[f"cell-{name}"] for name in CELLS}
        self.mover = Mover(
            store=run.store,
            layout=run.layout,
            config=run.config,
            cells=self.cells,
            core="a",
            gateway=self.gateway,
            epoch=1,
        )
        self.version = int(self.mover.status("a")["engine"]["version"])
        for name in CELLS:
            self.mover.announce(name, "serving", self.version, GENERATIONS)

    def round(self) -> dict[str, Parts]:
        """One switch of each cell there and back; the parts of each, with their total."""
        found: dict[str, Parts] = {}
        with self.generating():
            found["b to training"] = timed(lambda: self.mover.to_training("b"))
        found["a to training"] = timed(lambda: self.mover.to_training("a"))
        self.update()
        for name in CELLS:
            found[f"{name} to rollout"] = timed(
                lambda name=name: self.mover.to_rollout(name, self.version, GENERATIONS)
            )
        return found

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Calls that run on both cells; they end undisturbed, whatever happens meanwhile."""
        started = threading.Thread(target=lambda: asyncio.run(self._generate()))
        before = self._calls()
        started.start()
        while sum(cell["in_flight"] for cell in self._state()["cells"].values()) < GENERATIONS:
            assert started.is_alive() and self._calls() == before, "they ended too soon"
            time.sleep(0.01)
        yield
        started.join(LIMIT_S)
        assert self._calls() == before + GENERATIONS

    async def _generate(self) -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=LIMIT_S) as http:
            await asyncio.gather(*(self._call(http, number) for number in range(GENERATIONS)))

    async def _call(self, http: httpx.AsyncClient, number: int) -> None:
        name = f"v{self.version}-{number}"
        body = {"temperature": 1.0, "policy_version": self.version}
        opened = await asyncio.to_thread(
            self.gateway.call, "PUT", f"/admin/executions/{name}", body
        )
        answer = await http.post(
            f"{opened['base_url']}/chat/completions",
            headers={"authorization": f"Bearer {opened['api_key']}"},
            json={
                "model": "m",
                "messages": [{"role": "user", "content": f"say a lot about {number}"}],
                "max_tokens": self.answer_tokens,
                "stream": True,
            },
        )
        assert answer.status_code == 200 and "error" not in answer.text, answer.text
        await asyncio.to_thread(self.gateway.call, "DELETE", f"/admin/executions/{name}")

    def update(self) -> None:
        """An optimizer step of the core on one sample."""
        sample = {"group_key": self._group(), "index": 0}
        where = {"step": self.version, "update": 0}
        args: dict[str, Any] = {**where, "micro_step": "m", "samples": [sample]}
        self.command("a", "micro_step", args)
        stepped = self.command("a", "step", {**where, "executions": 1, "learning_rate": 1e-3})
        self.version = stepped["version"]

    def command(self, cell: str, name: str, args: dict[str, Any]) -> dict[str, Any]:
        body = {"epoch": 1, "args": args}
        return self.cells[cell].call("POST", f"/replica/{name}", body, limit_s=LIMIT_S)

    def _group(self) -> str:
        query = f"s{self.version:05d}-q0000"
        key = self.run.layout.group(query)
        if not self.run.store.exists(key):
            targets = np.arange(32) >= 16
            sample = Sample(
                execution_id=f"{query}-e000",
                kind=CallKind.MAIN,
                ids=np.arange(20, 52, dtype=np.int32),
                targets=targets,
                logprobs=np.where(targets, -5.0, 0).astype(np.float32),
                versions=np.where(targets, self.version, -1).astype(np.int32),
                advantage=1.0,
                weight=1.0,
            )
            header = GroupHeader(
                query_id=query,
                step=self.version,
                problem_id="p",
                sealed_at=0,
                members=(),
                spread=True,
            )
            seal(self.run.store, key, SealedGroup(header, (sample,)))
        return key

    def _state(self) -> dict[str, Any]:
        return self.gateway.call("GET", "/admin/state")

    def _calls(self) -> int:
        return int(self._state()["calls"])


def timed(switch: Callable[[], Parts]) -> Parts:
    began = time.monotonic()
    parts = switch()
    return {**parts, "total": time.monotonic() - began}


@contextmanager
def bench(kind: str, chosen: list[str], folder: Path) -> Iterator[tuple[Bench, int]]:
    """A bench with a policy of that kind, and the bytes of its weights."""
    settings = [
        "cells.cells=[{name: a, core: true, cpus: [0]}, {name: b, cpus: [1]}]",
        f"cells.start_limit_s={START_LIMIT_S}",
        f"cells.release_memory={str(kind == 'offloaded').lower()}",
        f"storage.root={folder}",
        *chosen,
    ]
    config = load_config("quickstart", settings, environment={})
    policy = make_policy(folder / kind, KINDS[kind].shape, config.model.context)
    run = create_run(str(folder), kind, config)
    arguments = ("--policy", str(policy))
    specs = [
        DaemonSpec("gateway", "cells.gateway.server", arguments, START_LIMIT_S),
        *(
            DaemonSpec(f"cell-{name}", "cells.host", (*arguments, "--version", "0"), START_LIMIT_S)
            for name in CELLS
        ),
    ]
    keeper = LeaseKeeper(config.cells.lease_s)
    try:
        daemons = ensure_daemons(run.store, run.layout, specs, keeper, lambda _: None)
        weights = sum(file.stat().st_size for file in policy.glob("*.safetensors"))
        yield Bench(run, daemons, KINDS[kind].answer_tokens), weights
    finally:
        keeper.close()
        stop_daemons(keeper.clients(), 15)


def measure(kind: str, rounds: int, chosen: list[str], folder: Path) -> dict[str, Any]:
    with bench(kind, chosen, folder) as (made, weights):
        made.round()  # the first one loads and compiles what later ones have
        found = []
        for number in range(rounds):
            found.append(made.round())
            print(json.dumps({"kind": kind, "round": number, **found[-1]}), file=sys.stderr)
        medians = {
            switch: {
                part: round(median(one[switch].get(part, 0.0) for one in found), 4)
                for part in found[0][switch]
            }
            for switch in found[0]
        }
        pulled = medians["b to rollout"]["pull"]
        loaded = medians["a to rollout"]["weights"]
        return {
            "to_training_s": medians["b to training"]["total"],
            "to_rollout_s": medians["b to rollout"]["total"],
            "weights_mb": round(weights / 1e6, 1),
            "weights_over_socket": round(pulled / socket_seconds(weights, rounds), 2),
            "weights_over_memcpy": round(loaded / memcpy_seconds(weights, rounds), 2),
            "parts": medians,
            "mooncake": {name: made.mover.status(name)["mooncake"] for name in CELLS},
        }


def socket_seconds(size: int, rounds: int) -> float:
    """Median time of so many bytes over a socket of this machine."""
    data, into = bytes(size), bytearray(size)

    def send(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.sendall(data)

    def receive() -> float:
        with socket.create_server(("127.0.0.1", 0)) as server:
            sender = threading.Thread(target=send, args=(server,))
            sender.start()
            began = time.perf_counter()
            view = memoryview(into)
            with socket.create_connection(server.getsockname()) as connection:
                while view:
                    view = view[connection.recv_into(view) :]
            seconds = time.perf_counter() - began
            sender.join()
            return seconds

    return median(receive() for _ in range(rounds))


def memcpy_seconds(size: int, rounds: int) -> float:
    """Median time of one copy of so many bytes in memory."""
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)

    def copy() -> float:
        began = time.perf_counter()
        np.copyto(target, source)
        return time.perf_counter() - began

    copy()
    return median(copy() for _ in range(rounds))


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", default=list(KINDS), help="resident, offloaded")
    parser.add_argument("--rounds", type=int, help="of each, instead of its own number")
    parser.add_argument(
        "--set", dest="chosen", action="append", default=[], help="a setting, as in gyre train"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gyre-switch-") as folder:
        found = {
            kind: measure(
                kind, given.rounds or KINDS[kind].rounds, given.chosen, Path(folder) / kind
            )
            for kind in given.kinds
        }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
