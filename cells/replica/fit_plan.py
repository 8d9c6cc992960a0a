"""What a supervised fit does: its phases, each with its own data and rates."""

from __future__ import annotations

from configs.field import Section, setting


class Phase(Section):
    """A stretch of steps on one corpus. Each phase starts with fresh optimizer state."""

    name: str = setting(..., "Name in progress lines.", pattern=r"^[a-z0-9][a-z0-9_-]{0,63}$")
    data: str = setting(..., "Corpus file (cells.replica.corpus).", min_length=1, max_length=4096)
    steps: int = setting(..., "Optimizer steps.", unit="steps", ge=1, le=1_000_000)
    sequences: int = setting(
        ...,
        "Sequences of a step, taken in the order of the file, which starts again at its end.",
        unit="sequences",
        ge=1,
        le=1_000_000,
    )
    muon_rate: float = setting(
        0.015, "Muon step of the blocks' matrices; 0 leaves them to AdamW.", unit="1", ge=0, le=1
    )
    adam_rate: float = setting(3e-3, "AdamW step of all other weights.", unit="1", gt=0, le=1)
    warmup: int = setting(20, "Steps over which the rates rise.", unit="steps", ge=0, le=1_000_000)
    decay_share: float = setting(
        0.4, "Last share of the steps, over which the rates fall.", unit="share", ge=0, le=1
    )
    floor: float = setting(0.03, "Lowest factor of the falling rates.", unit="1", ge=0, le=1)
    stop_loss: float = setting(
        0.0,
        "End the phase when the running mean of the loss is below this; 0 never does.",
        unit="nats",
        ge=0,
        le=100,
    )

    def rate_factor(self, step: int) -> float:
        """Factor of both rates at ``step``, which counts from 0."""
        factor = min(1.0, (step + 1) / (self.warmup + 1))
        if self.decay_share:
            left = (1 - step / self.steps) / self.decay_share
            factor *= max(self.floor, min(1.0, left))
        return factor


class FitPlan(Section):
    """Phases, in order."""

    phases: tuple[Phase, ...] = setting(..., "The phases.", min_length=1, max_length=64)
    seed: int = setting(1, "Seed of the first weights.", unit="1", ge=0, le=2**31 - 1)
    micro_tokens: int = setting(
        1536, "Tokens of one packed row.", unit="tokens", ge=16, le=16_777_216
    )
    report_every: int = setting(
        10, "Steps between two progress lines.", unit="steps", ge=1, le=1_000_000
    )
    limit_s: float = setting(
        1800, "Longest time of the whole fit.", unit="seconds", ge=1, le=604_800
    )
