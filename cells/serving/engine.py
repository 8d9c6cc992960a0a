"""Control of a running SGLang server: readiness, weights, and an end to what it generates.

Generations go through the gateway, not through this. Read in the source of SGLang 0.5.23:
``/pause_generation`` in mode ``abort`` answers when no request is left, and holds back new ones
until ``/continue_generation``; ``/update_weights_from_disk`` keeps the old weights where the new
ones can't be loaded, ``/update_weights_from_tensor`` does not; ``/model_info`` needs no token and
tells the weight version.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import aiohttp

from cells.tls import trust_of

POLL_S = 0.2
PROBE_LIMIT_S = 5.0
CONTINUE_LIMIT_S = 10.0
SETTLE_POLL_S = 0.05

STORAGE_PATH = "/hicache/storage-backend"
SAME_STORAGE = {"hicache_storage_backend": "mooncake"}
"""What to PUT there: it attaches what is attached, so nothing changes, and is refused until nothing
runs and all pages are written."""


class EngineError(RuntimeError):
    """The server can't do what was asked; the text names it, the call and the answer."""


class EngineGoneError(EngineError):
    """Nothing answers at its address."""


class EngineLateError(EngineError):
    """It did not answer before the deadline; whether the call took effect is not known."""


class EngineRefusedError(EngineError):
    """It answered with an error, and goes on with what it had."""


@dataclass(frozen=True)
class Bucket:
    """Some HF tensors of a policy, whole, in shared memory; free when the next one is asked for.

    Args:
        payload: where they are, as SGLang's ``MultiprocessingSerializer`` writes it, base64.
        last: all others came before.
    """

    payload: str
    last: bool


class EngineClient:
    """One server, by address and admin key. Use as an async context manager, or ``close``.

    Args:
        pooled: it shares its KV pages. Then new weights leave its cache as it is: pages are keyed
            by version, and to empty it would stop the threads that write them, which ends the
            server where one of them is slow.
        ca: PEM of what has signed its certificate; empty where it has none.
    """

    def __init__(self, url: str, admin_key: str, *, pooled: bool = False, ca: str = "") -> None:
        self.url = url
        self._flush = not pooled
        self.admin_key = admin_key
        # SGLang drops a connection that was idle for 5 s; a new one a call can't meet that moment.
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True, ssl=trust_of(ca)),
            headers={"authorization": f"Bearer {admin_key}"},
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.close()

    async def wait_ready(self, limit_s: float, failure: Callable[[], str]) -> None:
        """Wait until the server has answered a generation of one token, and takes our key.

        Args:
            failure: why its process ended; empty while it lives.

        Raises:
            EngineGoneError: the process ended.
            EngineLateError: not ready within ``limit_s``.
            EngineRefusedError: another server answers at this address.
        """
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    if failure():
                        raise EngineGoneError(f"{self.url}: {failure()}")
                    with suppress(EngineError):
                        await self._call("GET", "/health", None, PROBE_LIMIT_S)
                        break
                    await asyncio.sleep(POLL_S)
                await self._resume()
        except TimeoutError:
            raise EngineLateError(f"{self.url}: not ready within {limit_s:g} s") from None

    async def version(self, limit_s: float = PROBE_LIMIT_S) -> int:
        """The weight version that it serves."""
        answer = await self._call("GET", "/model_info", None, limit_s)
        text = str(answer.get("weight_version"))
        if not text.isdecimal():
            raise EngineRefusedError(f"{self.url}: weight version {text!r} is not a number")
        return int(text)

    async def token_capacity(self, limit_s: float = PROBE_LIMIT_S) -> int:
        """Tokens that its KV cache holds; on a GPU SGLang may have less than was asked for."""
        answer = await self._call("GET", "/server_info", None, limit_s)
        return int(answer["max_total_num_tokens"])

    async def drain(self, limit_s: float) -> None:
        """End every generation (its client gets the partial answer), then take new ones again."""
        try:
            await self._call("POST", "/pause_generation", {"mode": "abort"}, limit_s)
        finally:
            await self._resume()

    async def update_weights(self, path: Path, version: int, limit_s: float) -> None:
        """Serve the weights in HF directory ``path`` as ``version``.

        Running generations end with their partial answers first; calls that arrive meanwhile wait.
        """
        body: dict[str, Any] = {"model_path": str(path), "weight_version": str(version)}
        body["flush_cache"] = self._flush
        try:
            async with asyncio.timeout(limit_s):
                await self._call("POST", "/pause_generation", {"mode": "abort"}, limit_s)
                await self._accepted("/update_weights_from_disk", body, limit_s)
        except TimeoutError:
            raise EngineLateError(f"{self.url}: no new weights within {limit_s:g} s") from None
        finally:
            await self._resume()

    async def load_tensors(
        self, buckets: AsyncIterator[Bucket], ranks: int, version: int, limit_s: float
    ) -> None:
        """As ``update_weights``, with weights from shared memory of this machine.

        Args:
            ranks: processes that share the model's matrices; each is told of all tensors.

        Raises:
            EngineError: what it served before is gone too.
        """
        try:
            async with asyncio.timeout(limit_s):
                await self._call("POST", "/pause_generation", {"mode": "abort"}, limit_s)
                await self._accepted("/begin_weight_update", {}, limit_s)
                try:
                    async for bucket in buckets:
                        body = {
                            "serialized_named_tensors": [bucket.payload] * ranks,
                            "flush_cache": bucket.last and self._flush,
                            "weight_version": str(version) if bucket.last else None,
                        }
                        await self._accepted("/update_weights_from_tensor", body, limit_s)
                finally:
                    await self._accepted("/end_weight_update", {}, limit_s)
        except TimeoutError:
            raise EngineLateError(f"{self.url}: no new weights within {limit_s:g} s") from None
        finally:
            await self._resume()

    async def settle(self, limit_s: float) -> bool:
        """Wait until nothing runs and what was computed is written to the shared pool.

        Returns:
            Whether that was done within ``limit_s``.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while True:
                    with suppress(EngineRefusedError):
                        await self._call("PUT", STORAGE_PATH, SAME_STORAGE, limit_s)
                        return True
                    await asyncio.sleep(SETTLE_POLL_S)
        return False

    async def release_memory(self, limit_s: float) -> None:
        """Give the memory of weights and KV cache back. Only while nothing generates: SGLang ends
        itself otherwise. What was in it is gone."""
        await self._call("POST", "/release_memory_occupation", {}, limit_s)

    async def resume_memory(self, limit_s: float) -> None:
        """Take it again; weights have to be loaded before anything is generated."""
        await self._call("POST", "/resume_memory_occupation", {}, limit_s)

    async def _resume(self) -> None:
        """Also after a pause that failed: it may have taken effect, and calls would hang."""
        await self._call("POST", "/continue_generation", {}, CONTINUE_LIMIT_S)

    async def _accepted(self, path: str, body: dict[str, Any], limit_s: float) -> None:
        """A call whose answer tells whether it was carried out."""
        answer = await self._call("POST", path, body, limit_s)
        if not answer.get("success"):
            raise EngineRefusedError(f"{self.url}{path}: {answer.get('message')}")

    async def _call(
        self, method: str, path: str, body: dict[str, Any] | None, limit_s: float
    ) -> dict[str, Any]:
        where = f"{self.url}{path}"
        timeout = aiohttp.ClientTimeout(total=limit_s)
        try:
            async with self._http.request(method, where, json=body, timeout=timeout) as response:
                text = await response.text()
                if response.status != 200:
                    raise EngineRefusedError(f"{where}: {response.status} {text[:500]}")
                answer = await response.json() if "json" in response.content_type else {}
        except TimeoutError:
            raise EngineLateError(f"{where}: no answer within {limit_s:g} s") from None
        except aiohttp.ClientError as error:
            raise EngineGoneError(f"{where}: {error!r}") from None
        return answer if isinstance(answer, dict) else {}
