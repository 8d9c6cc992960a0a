"""What can be known of a run's problems before any work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from configs.model import ModelSource
from configs.problems import SandboxKind
from configs.run import RunConfig
from storage.records import Split
from tasks.problems.harbor.source import Harbor
from tasks.problems.listed import ListedSource
from tasks.problems.mixture import Mixture
from tasks.problems.source import ProblemSource, ProblemSourceError, make_source, step_problems

_HARNESS_TOKENS = 32
"""At least, of the system prompt and the marks around messages."""
_SMALL_VOCABULARY = 4096
_SHOWN = 5


def check_problems(config: RunConfig) -> str:
    """See that the problems can be loaded, trained on, evaluated, and fit the model's context.

    Returns:
        What there is, in a few words.

    Raises:
        ProblemSourceError: says what is wrong, in which file where it is one.
    """
    source = make_source(config.problems)
    for label, part in _parts(source):
        _check_part(config, label, part)
    first = step_problems(source, 0, config.rollout.queries, config.seed)
    held_out = source.ids(Split.HELD_OUT, config.evaluation.problems, config.evaluation.seed)
    return f"{config.problems.source}: {len(set(first))} in a step, {len(held_out)} held out"


def _parts(source: ProblemSource) -> Iterator[tuple[str, ProblemSource]]:
    if isinstance(source, Mixture):
        yield from source.sources.items()
    else:
        yield "", source


def _check_part(config: RunConfig, label: str, source: ProblemSource) -> None:
    where = f"problems.mixture {label}: " if label else ""
    if isinstance(source, Harbor):
        if config.rollout.sandbox is SandboxKind.PROCESS:
            raise ProblemSourceError(
                f"{where}harbor tasks need a sandbox that can mount folders: set "
                f"rollout.sandbox=bubblewrap"
            )
        task, seconds = source.longest_tests()
        if seconds > config.scoring.limit_s:
            raise ProblemSourceError(
                f"{where}the tests of task {task} may take {seconds:g} s (verifier.timeout_sec), "
                f"but scoring.limit_s ends them after {config.scoring.limit_s:g} s: raise it"
            )
    if isinstance(source, ListedSource):
        _check_context(config, where, source)


def _check_context(config: RunConfig, where: str, source: ListedSource) -> None:
    """Problems whose instruction alone fills the history until it is compacted."""
    count = _token_counter(config)
    room = config.harness.context_budget - _HARNESS_TOKENS
    long = [
        f"{name} (about {tokens} tokens)"
        for split in Split
        for name in source.names(split)
        if (tokens := count(source.load(name).instruction)) > room
    ]
    if long:
        more = f" and {len(long) - _SHOWN} more" if len(long) > _SHOWN else ""
        raise ProblemSourceError(
            f"{where}the instructions of these problems do not fit harness.context_budget "
            f"({config.harness.context_budget}): {', '.join(long[:_SHOWN])}{more}. Raise it, and "
            f"model.context with it, or leave the problems out (problems.exclude)"
        )


def _token_counter(config: RunConfig) -> Callable[[str], int]:
    """Exact where the policy's tokenizer is at hand, otherwise by what tokenizers of that size
    usually make of code."""
    path = Path(config.model.path or "") / "tokenizer.json"
    if config.model.source is ModelSource.HF_DIRECTORY and path.is_file():
        from tokenizers import Tokenizer

        tokenizer: Any = Tokenizer.from_file(str(path))
        return lambda text: len(tokenizer.encode(text).ids)
    small = (
        config.model.source is ModelSource.WARM_START
        and config.model.shape.vocabulary < _SMALL_VOCABULARY
    )
    return lambda text: len(text) // (2 if small else 4)
