"""SmolLM2-135M on a real SGLang server drives real clients for a few turns. It can't use tools;
whatever it says, the recording is exact and nothing breaks. It also learns: two steps of one group
each go through engine and replica. The whole run is in tests/flows/test_smollm2_run.py."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cells.gateway.codec import load_codec
from cells.ports import free_port
from cells.replica.settings import ReplicaSettings
from cells.serving.engine import EngineClient
from cells.serving.flags import EngineSettings
from cells.serving.process import EngineProcess
from configs.cells import Device
from configs.training import ObjectiveConfig
from storage.objects import Store
from storage.records import Call, ExecutionOutcome
from tasks.rollout.execution import carry_out
from tasks.training.objectives import objective_path
from tests.cells.gateway.conftest import prompts
from tests.harnesses.conftest import MakeStage
from tests.harnesses.lines import MEMBERS, Lines, seal_lines
from tests.harnesses.stage import Performed, Play
from tests.smollm import make_smollm

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

CONTEXT = 8192
START_S = 600
HARNESS = {"max_tokens": 24, "context_budget": 6000}


@dataclass(frozen=True)
class Served:
    """The model and where it is served."""

    policy: Path
    url: str
    token: str


@pytest.fixture(scope="module")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    policy = make_smollm()
    settings = EngineSettings(
        policy=policy,
        version=0,
        device=Device.CPU,
        context=CONTEXT,
        kv_tokens=2 * CONTEXT,
        requests=4,
        seed=1,
        port=free_port(),
        admin_key=secrets.token_urlsafe(16),
    )
    log = tmp_path_factory.mktemp("sglang") / "server.log"

    async def serve() -> EngineProcess:
        engine = EngineProcess(settings, cpus=(), log=log)
        try:
            await engine.wait_ready(START_S)
        except BaseException:
            await engine.close()
            raise
        return engine

    with asyncio.Runner() as runner:
        engine = runner.run(serve())
        try:
            yield Served(policy, engine.url, engine.token)
        finally:
            runner.run(engine.close())


async def perform(make_stage: MakeStage, served: Served, name: str) -> Performed:
    """An execution that the real model plays."""
    codec = load_codec(served.policy, "default")
    settings = {"harness": {"name": name, **HARNESS}, "engines": 0, "context": CONTEXT}
    async with make_stage(Play(), codec=codec, **settings) as stage:
        body = {"epoch": 1, "url": served.url, "token": served.token, "capacity": 4, "version": 0}
        await stage.bench.admin("PUT", "/admin/cells/smollm", {**body, "state": "serving"})
        stage.tasks.instructions["p"] = "Write a.py, which prints the product of 6 and 7."
        done = stage.performed(await carry_out(stage.spec(0, "p"), stage.around))
        stage.check_tree(done)
    return done


def forward(policy: Path, calls: list[Call]) -> list[tuple[list[float], list[float]]]:
    """Recorded log-probs of each call beside those of a forward in fp32."""
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(policy, dtype=torch.float32)
    whole = prompts(calls)
    pairs = []
    for one in calls:
        ids = [*whole[one.call_id], *one.output_ids]
        kept = len(one.output_ids) + 1
        with torch.no_grad():
            logits = model(torch.tensor([ids]), logits_to_keep=kept).logits[0, :-1]
        rows = torch.log_softmax(logits, -1)
        expected = [float(row[token]) for row, token in zip(rows, one.output_ids, strict=True)]
        pairs.append((list(one.output_logprobs), expected))
    return pairs


async def test_mini_swe_agent(make_stage: MakeStage, smollm: Served) -> None:
    """It asks three times for a tool call and gives up."""
    done = await perform(make_stage, smollm, "mini-swe-agent")
    assert done.result.outcome is ExecutionOutcome.COMPLETED, done.result.detail
    assert len(done.calls) == 3
    assert {one.agent for one in done.calls} == {"main"}
    for recorded, expected in forward(smollm.policy, done.calls):
        assert recorded == pytest.approx(expected, abs=1e-3)


async def test_claude_code(make_stage: MakeStage, smollm: Served) -> None:
    """It asks the policy to go on after each reply that was cut off."""
    done = await perform(make_stage, smollm, "claude-code")
    assert done.result.outcome is ExecutionOutcome.COMPLETED, done.result.detail
    main = done.of("main")
    assert {one.finish_reason for one in main[:-1]} <= {"length"}
    assert len(main) > 1
    for recorded, expected in forward(smollm.policy, main):
        assert recorded == pytest.approx(expected, abs=1e-3)


async def test_two_steps_of_training(smollm: Served, tmp_path: Path) -> None:
    """The last test here: the engine has other weights afterwards."""
    import torch

    from cells.replica.commands import Commands
    from cells.replica.model import start_megatron

    torch.set_num_threads(1)
    if not torch.distributed.is_initialized():
        start_megatron()
    root = tmp_path / "store"
    settings = ReplicaSettings(
        root=str(root),
        core=True,
        objective=objective_path("gspo"),
        objective_config=ObjectiveConfig(),
        share_prefixes=True,
    )
    replica = Commands(settings)
    replica.run("load", {"path": str(smollm.policy), "version": 0})
    lines = Lines(smollm.url, smollm.policy)
    async with EngineClient(smollm.url, smollm.token) as engine:
        for version in range(2):
            if version:
                replica.run("export", {"path": str(tmp_path / "policy")})
                await engine.update_weights(tmp_path / "policy", version, START_S)
            seal_lines(Store(root), f"g{version}", lines.prompt, await lines.group(), version)
            samples = [{"group_key": f"g{version}", "index": index} for index in range(MEMBERS)]
            key = {"step": version, "update": 0}
            trained = replica.run("micro_step", {**key, "micro_step": "m", "samples": samples})
            stepped = replica.run("step", {**key, "executions": MEMBERS, "learning_rate": 1e-6})
            assert trained["stats"]["logprob_gap_max"] < 1e-3
            assert stepped["grad_norm"] > 0
