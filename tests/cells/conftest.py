"""Parts that tests of several parts of a cell share."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import TINY_CONTEXT, EngineAddress
from tests.engines.pooled import pooled_servers


@pytest.fixture(scope="package")
def pooled_pair(
    tiny_policy: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[EngineAddress, ...]]:
    """Two real SGLang servers with ``tiny_policy`` that share a pool of KV pages."""
    servers = pooled_servers(tiny_policy, TINY_CONTEXT, tmp_path_factory.mktemp("pooled"))
    with asyncio.Runner() as runner:
        engines = runner.run(servers.__aenter__())
        yield tuple(EngineAddress(engine.url, engine.token) for engine in engines)
        runner.run(servers.__aexit__(None, None, None))
