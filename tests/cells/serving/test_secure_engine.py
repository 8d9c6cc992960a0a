"""A real engine that listens wider than the loopback address: TLS, and a key for everything."""

from __future__ import annotations

import secrets
from pathlib import Path

import httpx
import orjson
import pytest

from cells.gateway.wire import Wire
from cells.ports import free_port
from cells.serving.flags import EngineSettings
from cells.serving.process import EngineProcess
from cells.tls import Tls, trusting
from configs.cells import Device
from configs.tls import TlsConfig
from storage.layout import RunLayout
from storage.objects import Store
from tests.conftest import TINY_CONTEXT


@pytest.mark.real
@pytest.mark.timeout(400)
async def test_who_has_no_key_or_does_not_know_the_authority(
    tiny_policy: Path, tmp_path: Path
) -> None:
    tls = Tls(Store(tmp_path / "root"), RunLayout("r1"), TlsConfig())
    settings = EngineSettings(
        policy=tiny_policy,
        version=0,
        device=Device.CPU,
        context=TINY_CONTEXT,
        kv_tokens=4096,
        requests=4,
        seed=1,
        host="0.0.0.0",
        port=free_port("0.0.0.0"),
        admin_key=secrets.token_urlsafe(16),
    )
    engine = EngineProcess(settings, cpus=(), log=tmp_path / "log", tls=tls)
    try:
        await engine.wait_ready(300)
        assert engine.url.startswith("https://")
        body = orjson.dumps({"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 2}})
        wire = Wire(trusting(tls.ca()))
        got: list[bytes] = []
        status, said = await wire.post(engine.url, "/generate", engine.token, [body], got.append)
        assert status == 200 and orjson.loads(b"".join(got))["output_ids"], said
        for key in (None, "other"):
            status, _ = await wire.post(engine.url, "/generate", key, [body], got.append)
            assert status == 401
        wire.close()
        async with httpx.AsyncClient(trust_env=False, timeout=30) as http:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await http.post(f"{engine.url}/generate", content=body)
            with pytest.raises(httpx.RemoteProtocolError):
                await http.get(engine.url.replace("https", "http"))
    finally:
        await engine.close()
