"""What the policy is fitted to, in order: drills, clean lessons, demonstrations of the task."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

from cells.gateway.codec import Codec
from configs.problems import SpecRepoConfig
from configs.run import RunConfig
from storage.records import Split
from tasks.problems.specrepo.specification import Specification, draw_specification
from tasks.rollout.harnesses import loop
from tasks.warm_start.demonstrations import Document, demonstrate, harness_settings
from tasks.warm_start.drill import drill
from tasks.warm_start.script import ALL_WRITTEN, CLEAN, Habits, ScriptedAgent, imperfect

_TEXT_SAMPLES = 1500
_CLEAN_FUNCTIONS = 2


def specifications(
    config: SpecRepoConfig, rng: random.Random, most_functions: int | None = None
) -> Iterator[Specification]:
    """Endless specifications of the training split; small ones with ``most_functions``."""
    least, most = config.functions_min, config.functions_max
    if most_functions is not None:
        least, most = 1, min(most, most_functions)
    while True:
        functions = rng.randint(least, most)
        yield draw_specification(rng, Split.TRAIN, config.difficulty, functions, config.files)


def tokenizer_texts(config: RunConfig) -> Iterator[str]:
    """Every kind of text that a demonstration holds."""
    rng = random.Random(0)
    yield from (loop.SYSTEM, loop.SUMMARY_REQUEST, loop.CONTINUATION + ALL_WRITTEN, loop.BAD_CALL)
    yield from (
        loop.NO_SUCH_TOOL,
        "system user assistant",
        "sub-agent finished",
        "ok defines error",
    )
    for specification in islice(specifications(config.problems.specrepo, rng), _TEXT_SAMPLES):
        yield specification.text
        script = ScriptedAgent(specification, rng, Habits())
        for agent in ("main", "main", "main", "task-1"):
            yield script.turn(agent)


def drills(tokenizer: Any, rng: random.Random) -> Iterator[Document]:
    """Endless copy drills."""
    while True:
        yield drill(tokenizer, rng)


def clean_lessons(
    config: RunConfig, codec: Codec, tokenizer: Any, rng: random.Random
) -> Iterator[Document]:
    """Endless histories of flawless work on specifications of one or two functions."""
    settings = harness_settings(config.harness)
    settings.context_budget = config.model.context
    for specification in specifications(config.problems.specrepo, rng, _CLEAN_FUNCTIONS):
        yield from demonstrate(specification, rng, CLEAN, settings, codec, tokenizer).documents


def full_lessons(
    config: RunConfig, codec: Codec, tokenizer: Any, rng: random.Random
) -> Iterator[Document]:
    """Endless histories of the scripted agent on problems as a run has them."""
    settings = harness_settings(config.harness)
    habits = imperfect(config.warm_start.error_share, config.warm_start.delegate_share)
    for specification in specifications(config.problems.specrepo, rng):
        yield from demonstrate(specification, rng, habits, settings, codec, tokenizer).documents
