"""A real gateway, scripted engines and real clients in real sandboxes."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from configs.run import RunConfig
from configs.training import TrajectoryConfig
from storage.records import Call, CallKind, CallStatus, ExecutionResult, ExecutionSpec, Split
from tasks.problems.source import Problem
from tasks.rollout.execution import Surroundings
from tasks.rollout.snapshot import thaw
from tasks.sampling.selection import select
from tasks.sampling.tree import build_tree
from tests.cells.gateway.conftest import SPECIALS, Bench, prompts
from tests.engines.scripted import Script, ScriptedEngine

ROOT = Path(__file__).parents[2]
VOCABULARY = 6000
_ASKED_WITHIN_S = 300.0
_TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?=<\|im_end\|>|$)", re.DOTALL)
_PIECE = re.compile("|".join(re.escape(text) for text in SPECIALS) + r"|\w+|.", re.DOTALL)


@lru_cache(maxsize=1)
def tokenizer() -> PreTrainedTokenizerFast:
    """A small tokenizer that was fitted to English and Python."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    files = [*(ROOT / "docs").glob("*.md"), *(ROOT / "configs").glob("*.py")]
    inner.train([str(path) for path in sorted(files)], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )


def call(tool: str, **arguments: Any) -> str:
    """A tool call as the policy writes it."""
    return malformed(json.dumps({"name": tool, "arguments": arguments}))


def malformed(text: str) -> str:
    """A tool call of any text."""
    return f"<tool_call>\n{text}\n</tool_call>"


@dataclass(frozen=True)
class Prompt:
    """A prompt as the policy reads it."""

    text: str
    turns: tuple[tuple[str, str], ...]
    """Role and text; the last one is the assistant's, still empty."""

    @classmethod
    def of(cls, text: str) -> Prompt:
        return cls(text, tuple(_TURN.findall(text)))

    @property
    def steps(self) -> int:
        """Turns of the assistant so far."""
        return sum(role == "assistant" for role, _ in self.turns) - 1

    @property
    def last(self) -> str:
        """What was said last."""
        return self.turns[-2][1]


ENDLESS = "word "
"""A line that goes on until the limit of tokens."""

Line = str | Callable[[Prompt], str]
"""What the policy says, or how it finds it in its prompt."""


@dataclass(frozen=True)
class Part:
    """What the policy says where ``when`` holds: the line of its turn, counted in the prompt.

    Args:
        counted: whether each request takes the next line instead, for clients that leave turns out
            or carry them over.
    """

    when: Callable[[Prompt], bool]
    lines: Sequence[Line]
    counted: bool = False

    def line(self, prompt: Prompt, before: int) -> str:
        """The line for a prompt, after so many others."""
        number = before if self.counted else prompt.steps
        line = self.lines[min(number, len(self.lines) - 1)]
        return line if isinstance(line, str) else line(prompt)


class Play(Script):
    """The policy says the lines of the first part that fits a prompt."""

    def __init__(self, *parts: Part) -> None:
        super().__init__()
        self.parts = parts
        self.seen: list[Prompt] = []
        self.replies: dict[tuple[int, ...], list[list[int]]] = {}
        """All that was said to a prompt."""
        self._said: Counter[int] = Counter()

    def rest(self, prompt: list[int]) -> list[int]:
        for known, replies in self.replies.items():
            done, reply = len(prompt) - len(known), replies[-1]
            if 0 < done < len(reply) and prompt == [*known, *reply[:done]]:
                return reply[done:]
        read = Prompt.of(tokenizer().decode(prompt, skip_special_tokens=False))
        self.seen.append(read)
        number, part = next((n, one) for n, one in enumerate(self.parts) if one.when(read))
        line = part.line(read, self._said[number])
        self._said[number] += 1
        reply = ids(line) * 10_000 if line is ENDLESS else ids(line + "<|im_end|>")
        self.replies.setdefault(tuple(prompt), []).append(reply)
        return reply


def ids(text: str) -> list[int]:
    """Ids as a policy would sample them: word by word, which no tokenizer writes like this."""
    pieces = _PIECE.findall(text)
    return [one for piece in pieces for one in tokenizer().encode(piece, add_special_tokens=False)]


def is_empty(one: Call) -> bool:
    """Whether the policy said nothing but that it is done."""
    return list(one.output_ids) == ids("<|im_end|>") and one.finish_reason == "stop"


def has(*texts: str) -> Callable[[Prompt], bool]:
    """Whether all of these are somewhere in a prompt."""
    return lambda prompt: all(text in prompt.text for text in texts)


def asked(pattern: str) -> Callable[[Prompt], bool]:
    """Whether the last words match."""
    return lambda prompt: re.search(pattern, prompt.last, re.IGNORECASE) is not None


@dataclass
class Tasks:
    """A source of problems by their instructions."""

    instructions: dict[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)

    def load(self, problem_id: str) -> Problem:
        return Problem(problem_id, Split.TRAIN, self.instructions[problem_id], self.files)


@dataclass(frozen=True)
class Performed:
    """What came of an execution."""

    result: ExecutionResult
    calls: list[Call]
    files: dict[str, str]
    """Text files of the workspace it left."""

    def of(self, agent: str) -> list[Call]:
        return [one for one in self.calls if one.agent == agent]

    @property
    def kinds(self) -> list[tuple[str, str]]:
        """Agent and kind of each call, in order, equal neighbours once."""
        found: list[tuple[str, str]] = []
        for one in self.calls:
            if not found or found[-1] != (one.agent, one.kind.value):
                found.append((one.agent, one.kind.value))
        return found


@dataclass
class Stage:
    """Where executions are performed."""

    bench: Bench
    engines: list[ScriptedEngine]
    play: Play
    tasks: Tasks
    around: Surroundings
    config: RunConfig
    folder: Path

    def spec(self, number: int, problem: str) -> ExecutionSpec:
        return ExecutionSpec(
            execution_id=f"s00000-q0000-e{number:03d}",
            query_id="s00000-q0000",
            member=number,
            problem_id=problem,
            split=Split.TRAIN,
            policy_version=0,
            temperature=1.0,
            seed=1,
        )

    def performed(self, result: ExecutionResult) -> Performed:
        """What an execution left."""
        files: dict[str, str] = {}
        if result.workspace_key is not None:
            kept = self.folder / f"kept-{result.execution_id}"
            thaw(self.around.store.read(result.workspace_key), kept, 1 << 26)
            for path in kept.rglob("*"):
                if path.is_file():
                    files[str(path.relative_to(kept))] = path.read_text(errors="replace")
        return Performed(result, self.bench.calls(result.execution_id), files)

    async def played(self, count: int) -> None:
        """Until the policy has been asked so often."""
        async with asyncio.timeout(_ASKED_WITHIN_S):
            while len(self.play.seen) < count:  # noqa: ASYNC110  (another process asks)
                await asyncio.sleep(0.05)

    def check(self, done: Performed) -> None:
        """What holds for every execution: what was recorded is what the engine was sent and said,
        every call that does not extend the one before says why, and what was delivered is trained.
        """
        sent = {tuple(one["input_ids"]) for engine in self.engines for one in engine.requests}
        whole = prompts(done.calls)
        for one in done.calls:
            prompt = tuple(whole[one.call_id])
            assert prompt in sent
            self._check_output(one, self.play.replies[prompt])
        self.check_tree(done)

    def check_tree(self, done: Performed) -> None:
        """As ``check``, without the engine's side."""
        ends = {
            one.call_id: one.kept + len(one.new_ids) + len(one.output_ids) for one in done.calls
        }
        answered: set[str] = set()
        for one in done.calls:
            assert len(one.output_logprobs) == len(one.output_ids)
            if one.fork_reason is None:
                continues = one.parent is not None and one.kept == ends[one.parent]
                assert continues or one.agent not in answered, f"unexplained: {one.call_id}"
            if one.status is CallStatus.COMPLETE:
                answered.add(one.agent)
        self._check_targets(done)

    def _check_output(self, one: Call, said: list[list[int]]) -> None:
        output = list(one.output_ids)
        cut = one.status is not CallStatus.COMPLETE or one.finish_reason == "length"
        assert any(output == (reply[: len(output)] if cut else reply) for reply in said)

    def _check_targets(self, done: Performed) -> None:
        tree = build_tree(done.calls)
        selected = select(tree, TrajectoryConfig(cap=None), self.config.model.context)
        owned = [number for path in selected.trajectories for number in path.targets]
        assert len(set(owned)) == len(owned)
        trained = {tree.segments[number].call for number in owned}
        assert trained == {
            number
            for number, placed in enumerate(tree.calls)
            if placed.call.output_ids
            and placed.call.status is CallStatus.COMPLETE
            and placed.call.kind is not CallKind.BACKGROUND
        }
        assert (selected.dropped_tokens, selected.cut_tokens) == (0, 0)
        assert selected.target_tokens == sum(
            len(placed.call.output_ids)
            for number, placed in enumerate(tree.calls)
            if number in trained
        )
