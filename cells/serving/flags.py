"""How an SGLang server is started: its command line and environment."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cells.kv_pool.pool import METADATA
from cells.serving.launch import ADMIN_KEY, API_KEY
from cells.tls import Identity
from configs.cells import Device
from configs.layout import Precision
from configs.tls import is_loopback

_DTYPES = {Precision.FP32: "float32", Precision.BF16: "bfloat16"}
PAGE = 16
"""Tokens of a page of KV that engines share."""

_LOOK_UP = {
    # Tokens that must be missing before the pool is asked. SGLang's 256 spares a GPU look-ups that
    # cost it more than computing; a session that comes to another engine lost all that way.
    "prefetch_threshold": PAGE,
    # A pool that hangs holds a request up for so long, then its prefix is computed.
    "prefetch_timeout_base": 5,
    "prefetch_timeout_per_ki_token": 1,
}

_MOONCAKE_TCP = {
    # Otherwise each half of a page is a connection of its own: on a busy machine hundreds of pages
    # took many seconds, in which the engine stood still, and ports ran out.
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    "MC_TCP_LANES_PER_PEER": "4",
}


@dataclass(frozen=True)
class EngineSettings:
    """One server.

    Args:
        policy: HF directory with the first weights and the tokenizer.
        version: their weight version; SGLang calls it so in ``meta_info.weight_versions``.
        context: longest prompt and answer together, tokens.
        kv_tokens: tokens of the KV cache.
        requests: most requests that run at once; further ones queue.
        seed: of the sampling. Servers of a run need different ones: with the same, members of a
            group that run on two cells could draw the same numbers.
        admin_key: bearer token of the control calls; generations need it on other than loopback
            addresses only.
        release_memory: it will be asked to give its memory back.
        gpus: that share the model's matrices, on ``cuda`` or on several machines.
        nodes: machines that they are on, as many on each.
        node: number of this machine; the first one takes the requests.
        meeting: HOST:PORT on the first machine where the others join it.
        kv_pool: host:port of the Mooncake master whose KV pages it shares; None keeps its own to
            itself.
    """

    policy: Path
    version: int
    device: Device
    context: int
    kv_tokens: int
    requests: int
    seed: int
    port: int
    admin_key: str
    release_memory: bool = False
    gpus: int = 1
    kv_pool: str | None = None
    host: str = "127.0.0.1"
    nodes: int = 1
    node: int = 0
    meeting: str = ""
    precision: Precision = Precision.FP32
    """Of a CPU's engine; a GPU's computes in that of its policy."""

    @property
    def ranks(self) -> int:
        """Processes that share the model's matrices."""
        return 1 if self.device is Device.CPU and self.nodes == 1 else self.gpus

    def url(self, *, secure: bool) -> str:
        """Where it is reached, with TLS or without."""
        return f"{'https' if secure else 'http'}://{self.host}:{self.port}"


def engine_argv(settings: EngineSettings, identity: Identity | None = None) -> list[str]:
    """The command that serves ``settings``. On ``cuda`` (not run on a GPU) SGLang chooses more.

    Args:
        identity: its certificate, where it is to speak TLS.
    """
    flags = {
        "model-path": str(settings.policy),
        "weight-version": str(settings.version),
        "context-length": str(settings.context),
        "max-total-tokens": str(settings.kv_tokens),
        "max-running-requests": str(settings.requests),
        "random-seed": str(settings.seed),
        "page-size": "1",  # a prefix is reused to its last token
        "host": settings.host,
        "port": str(settings.port),
        "log-level": "warning",
    }
    # A resident engine of a cell that trains must not take the trainer's processors.
    # Streamed chunks hold what is new: repeating all of it costs the square of the answer.
    switches = ["sleep-on-idle", "skip-server-warmup", "incremental-streaming-output"]
    if settings.kv_pool is not None:
        switches.append("enable-hierarchical-cache")
        flags |= {
            "page-size": str(PAGE),
            "hicache-ratio": "2",
            "hicache-io-backend": "direct",
            "hicache-mem-layout": "page_first_direct",
            "hicache-storage-backend": "mooncake",
            # Everything, and at once: the session may move at any time.
            "hicache-write-policy": "write_through",
            "hicache-storage-prefetch-policy": "timeout",
            "hicache-storage-backend-extra-config": json.dumps(_LOOK_UP),
        }
    if identity is not None:
        flags |= {
            "ssl-certfile": str(identity.certificate),
            "ssl-keyfile": str(identity.key),
        }
    if settings.ranks > 1:
        flags["tp-size"] = str(settings.ranks)
    if settings.nodes > 1:
        flags |= {
            "nnodes": str(settings.nodes),
            "node-rank": str(settings.node),
            "dist-init-addr": settings.meeting,
        }
    if settings.device is Device.CPU:
        flags |= {
            "device": "cpu",
            "dtype": _DTYPES[settings.precision],
            "attention-backend": "torch_native",
            "sampling-backend": "pytorch",
        }
        switches.append("disable-overlap-schedule")  # overlaps a GPU's work with the CPU's
    elif settings.release_memory:
        switches.append("enable-memory-saver")
    argv = [sys.executable, "-m", "cells.serving.launch"]
    for name, value in flags.items():
        argv += [f"--{name}", value]
    return argv + [f"--{name}" for name in switches]


def engine_environment(settings: EngineSettings, base: Mapping[str, str]) -> dict[str, str]:
    """Variables of the server's process, from those of ``base``.

    Byte code may be written, whatever ``base`` says: compiling SGLang and torch again in each start
    takes longer than everything else in it.
    """
    env = {name: value for name, value in base.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env |= {
        ADMIN_KEY: settings.admin_key,
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if not is_loopback(settings.host):
        env[API_KEY] = settings.admin_key
    if settings.nodes > 1:
        env |= {
            "SGLANG_HOST_IP": settings.host,
            # By /dev/shm, which containers may share, it takes machines for one, and has its parts
            # wait for each other at 127.0.0.1; without its queue it broadcasts over the network.
            "SGLANG_USE_MESSAGE_QUEUE_BROADCASTER": "0",
        }
    if settings.kv_pool is not None:
        env |= {
            "MOONCAKE_MASTER": settings.kv_pool,
            "MOONCAKE_LOCAL_HOSTNAME": settings.host,
            "MOONCAKE_TE_META_DATA_SERVER": METADATA,
            "MOONCAKE_PROTOCOL": "tcp" if settings.device is Device.CPU else "rdma",
            # No page lies in an engine: what dies with one is only its own work.
            "MOONCAKE_GLOBAL_SEGMENT_SIZE": "0",
            **_MOONCAKE_TCP,
        }
    if settings.device is Device.CPU:
        # More threads were tens of times slower where several servers share a few cores.
        env |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        # Spares the import of some hundred architectures, a fifth of the start.
        env["SGLANG_EXTERNAL_MODEL_PACKAGE"] = "cells.serving.cpu_support.models"
        if settings.ranks > 1:
            env |= {
                # It refuses more ranks than memory nodes unless it is told the cores of each.
                "SGLANG_CPU_OMP_THREADS_BIND": "|".join([_all_cores()] * settings.ranks),
                # Of a shared embedding it compiles a few lines, which takes C++ and a minute.
                "TORCHDYNAMO_DISABLE": "1",
            }
    return env


def _all_cores() -> str:
    return f"0-{(os.cpu_count() or 1) - 1}"
