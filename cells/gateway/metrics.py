"""Counters of the gateway, in Prometheus' form."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from cells.gateway.routing import Places

LAG_EVERY_S = 0.5
_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """Everything that is counted. One registry per gateway, so that tests don't share any."""

    def __init__(self, places: Places) -> None:
        self.registry = CollectorRegistry()
        counter = {"registry": self.registry}
        self.calls = Counter("gyre_gateway_calls", "Recorded calls.", ["kind", "status"], **counter)
        self.prompt_tokens = Counter("gyre_gateway_prompt_tokens", "Tokens in.", **counter)
        self.new_tokens = Counter(
            "gyre_gateway_new_tokens", "Tokens in that no earlier call had.", **counter
        )
        self.output_tokens = Counter("gyre_gateway_output_tokens", "Tokens out.", **counter)
        self.cached_tokens = Counter(
            "gyre_gateway_cached_tokens", "Tokens in that an engine had cached.", **counter
        )
        self.reroutes = Counter(
            "gyre_gateway_reroutes",
            "Generations that went on in another request.",
            ["end"],
            **counter,
        )
        self.rerouted_tokens = Counter(
            "gyre_gateway_rerouted_tokens",
            "Tokens that these requests began with: prompt and partial answer.",
            **counter,
        )
        self.rerouted_cached_tokens = Counter(
            "gyre_gateway_rerouted_cached_tokens", "Of these, cached by the engine.", **counter
        )
        self.forks = Counter(
            "gyre_gateway_forks",
            "Calls that do not extend their agent's last.",
            ["reason"],
            **counter,
        )
        self.resends = Counter(
            "gyre_gateway_resends", "Requests answered by a call that was there.", **counter
        )
        self.refused = Counter("gyre_gateway_refused", "Error answers.", ["status"], **counter)
        self.seconds = Histogram(
            "gyre_gateway_call_seconds",
            "Time of a call, waiting included.",
            buckets=_SECONDS,
            **counter,
        )
        self.waited = Counter(
            "gyre_gateway_waited_seconds", "Calls' time without a cell.", **counter
        )
        self.lag = Gauge(
            "gyre_gateway_loop_lag_seconds",
            "How late the event loop ran its last timer.",
            **counter,
        )
        waiting = Gauge("gyre_gateway_waiting", "Executions that wait for a place.", **counter)
        waiting.set_function(places.waiting)
        live = Gauge("gyre_gateway_live", "Executions that hold a place.", **counter)
        live.set_function(places.live)
        self.total_calls = 0
        self.total_output = 0

    def text(self) -> bytes:
        return bytes(generate_latest(self.registry))

    async def watch_lag(self) -> None:
        """Measure for ever how late timers run."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_EVERY_S
            await asyncio.sleep(LAG_EVERY_S)
            self.lag.set(max(0.0, loop.time() - due))
