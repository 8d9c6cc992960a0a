"""Demonstrations: the ids are those that the gateway would record, and the script is as imperfect
as its settings say."""

import random
from array import array
from functools import lru_cache
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cells.gateway.codec import Codec
from cells.gateway.forms import ChatRequest, Sampling
from cells.gateway.matching import Branches, Node, plan_call
from cells.replica.corpus import read_corpus, write_corpus
from configs import load_config
from tasks.problems.specrepo.operations import OPERATIONS
from tasks.problems.specrepo.words import WORDS
from tasks.rollout.harnesses import loop
from tasks.warm_start.corpora import (
    clean_lessons,
    drills,
    full_lessons,
    specifications,
    tokenizer_texts,
)
from tasks.warm_start.demonstrations import (
    MemoryWorkspace,
    demonstrate,
    harness_settings,
)
from tasks.warm_start.drill import drill
from tasks.warm_start.mistakes import written
from tasks.warm_start.script import CLEAN, Habits, ScriptedAgent, imperfect
from tasks.warm_start.tokenizer import CHAT_TOKENS, QuickTokenizer, learn_tokenizer, save_tokenizer

RENDERER = "cells.gateway.terse:TerseRenderer"


@lru_cache(maxsize=1)
def config():
    return load_config("quickstart", environment={})


@lru_cache(maxsize=1)
def tokenizer():
    return learn_tokenizer(tokenizer_texts(config()), config().model.shape.vocabulary)


@lru_cache(maxsize=1)
def quick():
    return QuickTokenizer(tokenizer())


@lru_cache(maxsize=1)
def codec():
    return Codec(quick(), RENDERER)


def a_specification(rng):
    return next(specifications(config().problems.specrepo, rng))


def scripted(seed, habits=None, budget=None):
    rng = random.Random(seed)
    limits = harness_settings(config().harness)
    if budget is not None:
        limits.context_budget = budget
    specification = a_specification(rng)
    made = demonstrate(specification, rng, habits or Habits(), limits, codec(), quick())
    return specification, made


class GatewayModel:
    """The same script behind the gateway's own matching and planning, with nothing left out."""

    def __init__(self, script):
        self.script = script
        self.codec = Codec(tokenizer(), RENDERER)
        self.branches = Branches()
        self.leaves = []
        self.calls = 0

    def __call__(self, messages, tools, *, agent, call):
        request = ChatRequest("policy", list(messages), tools, Sampling(), False, False)
        node = self.branches.match(request.messages, agent)
        plan = plan_call(self.branches, node, request, agent, "", self.codec)
        assert node is None or plan.fork is None
        said = self.script.summary(agent) if call == "summary" else self.script.turn(agent)
        output = tokenizer().encode(said + "<|im_end|>", add_special_tokens=False)
        parsed = self.codec.parse(output, plan.new_ids, tools)
        self.calls += 1
        reply = {"role": "assistant", "content": parsed.content}
        if parsed.calls:
            reply["tool_calls"] = [
                {
                    "id": f"issued-{self.calls}-{index}",
                    "type": "function",
                    "function": {"name": name, "arguments": arguments},
                }
                for index, (name, arguments) in enumerate(parsed.calls)
            ]
        new = Node(
            call_id=f"c{self.calls}",
            agent=agent,
            parent=plan.parent,
            kept=plan.kept,
            new_ids=array("i", plan.new_ids),
            output_ids=array("i", output),
            messages=plan.messages,
            reply=reply,
            tools=plan.tools,
            depth=plan.depth,
            length=plan.tokens + len(output),
        )
        if plan.parent in self.leaves:
            self.leaves[self.leaves.index(plan.parent)] = new
        else:
            self.leaves.append(new)
        self.branches.add(new)
        return loop.Reply(reply, plan.tokens + len(output))


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([60, 120, 175, 9999]))
def test_ids_equal_those_that_the_gateway_records(seed, budget):
    limits = harness_settings(config().harness)
    limits.context_budget = budget
    rng = random.Random(seed)
    specification = a_specification(rng)
    state = rng.getstate()
    ours = demonstrate(specification, rng, Habits(), limits, codec(), quick())
    rng.setstate(state)
    model = GatewayModel(ScriptedAgent(specification, rng, Habits()))
    loop.run_agent(specification.text, model, MemoryWorkspace(), limits)
    recorded = [leaf.ids().tolist() for leaf in model.leaves]
    assert [document.ids.tolist() for document in ours.documents] == recorded


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32))
def test_targets_are_what_the_script_said(seed):
    _, made = scripted(seed)
    start, end = tokenizer().convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assistant = tokenizer().encode("assistant\n", add_special_tokens=False)
    for document in made.documents:
        ids, targets = document.ids, document.targets
        assert not targets[0]
        starts = np.flatnonzero(targets & ~np.roll(targets, 1))
        for at in starts:
            assert ids[at - len(assistant) - 1 : at].tolist() == [start, *assistant]
        ends = np.flatnonzero(targets & ~np.append(targets[1:], False))
        assert (ids[ends] == end).all()
        text = tokenizer().decode(ids.tolist())
        assert tokenizer().encode(text, add_special_tokens=False) == ids.tolist()


def test_the_quick_tokenizer_changes_no_id():
    specification = a_specification(random.Random(3))
    limits = harness_settings(config().harness)
    plain = Codec(tokenizer(), RENDERER)
    slow, fast = (
        demonstrate(specification, random.Random(4), Habits(), limits, *how).documents
        for how in ((plain, tokenizer()), (codec(), quick()))
    )
    for one, other in zip(slow, fast, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        assert one.targets.tolist() == other.targets.tolist()


def test_memory_answers_as_a_real_workspace(tmp_path):
    real, memory = loop.Workspace(str(tmp_path)), MemoryWorkspace()
    rng = random.Random(5)
    for _ in range(5):
        specification = a_specification(rng)
        for file in specification.files:
            for index, function in enumerate(file.functions):
                text = written(function, rng, 1.0)
                name = "append" if index else "write"
                answers = {getattr(w, name)(file.path, text) for w in (real, memory)}
                assert answers == {f"ok {file.path}"}
            assert real.run(file.path) == memory.run(file.path)
    assert real.run("nothing.py") == memory.run("nothing.py")


def right_share(specification, files):
    right = 0
    for file in specification.files:
        scope = {}
        exec(files.get(file.path, ""), scope)
        for function in file.functions:
            inputs = function.operation.inputs
            expected = function.operation.expected(function.constant)
            if function.name in scope:
                right += [scope[function.name](value) for value in inputs] == expected
    return right / len(specification.functions)


def test_flawless_without_mistakes():
    for seed in range(40):
        specification, made = scripted(seed, imperfect(0.0))
        assert right_share(specification, made.files) == 1.0


def test_usual_demonstrations_leave_room_to_learn():
    rewards = [right_share(*_spec_and_files(seed)) for seed in range(150)]
    assert 0.35 < np.mean(rewards) < 0.6


def _spec_and_files(seed):
    specification, made = scripted(seed)
    return specification, made.files


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_every_operation_can_be_got_wrong(operation):
    rng = random.Random(1)
    made = next(
        f
        for f in iter(lambda: _any_function(rng), None)
        if f.operation is operation and f.constant not in (1, 2)
    )
    right = written(made, rng, 0.0)
    wrong = next(text for text in iter(lambda: written(made, rng, 1.0), None) if text != right)
    results = []
    for text in (right, wrong):
        scope = {}
        exec(text, scope)
        results.append([_value(scope[made.name], value) for value in operation.inputs])
    assert results[0] == operation.expected(made.constant) != results[1]


def _any_function(rng):
    level = config().problems.specrepo.model_copy(update={"difficulty": 3})
    return rng.choice(next(specifications(level, rng)).functions)


def _value(function, argument):
    try:
        return function(argument)
    except ZeroDivisionError:
        return None


def test_about_two_in_five_compact_and_some_delegate():
    compacted = delegated = 0
    for seed in range(200):
        _, made = scripted(seed)
        texts = [tokenizer().decode(d.ids.tolist()) for d in made.documents]
        compacted += any(loop.CONTINUATION in text for text in texts)
        delegated += any('"task"' in text for text in texts)
    assert 0.3 < compacted / 200 < 0.5
    assert 0.05 < delegated / 200 < 0.25


def test_larger_packages_work_too():
    larger = load_config(
        "quickstart",
        ["problems.specrepo.files=3", "problems.specrepo.difficulty=3", "harness.turns=40"],
        environment={},
    )
    limits = harness_settings(larger.harness)
    rng = random.Random(2)
    for _ in range(20):
        specification = next(specifications(larger.problems.specrepo, rng))
        made = demonstrate(specification, rng, imperfect(0.0), limits, codec(), quick())
        assert set(made.files) == {file.path for file in specification.files}
        assert right_share(specification, made.files) == 1.0


def test_drills_repeat_what_they_show():
    rng = random.Random(6)
    for _ in range(50):
        exercise = drill(tokenizer(), rng)
        targets = exercise.ids[exercise.targets].tolist()
        context = exercise.ids[~exercise.targets].tolist()
        assert context[1:-1] == targets


def test_lessons_survive_the_corpus(tmp_path):
    rng = random.Random(7)
    documents = [
        *islice(drills(quick(), rng), 5),
        *islice(clean_lessons(config(), codec(), quick(), rng), 5),
        *islice(full_lessons(config(), codec(), quick(), rng), 5),
    ]
    path = tmp_path / "corpus.safetensors"
    pairs = [(d.ids.tolist(), d.targets.tolist()) for d in documents]
    assert write_corpus(path, pairs) == 15
    corpus = read_corpus(path, vocabulary=len(tokenizer()))
    for index, (ids, targets) in enumerate(pairs):
        found_ids, found_targets = corpus.document(index)
        assert (found_ids.tolist(), found_targets.tolist()) == (ids, targets)


def test_clean_lessons_never_compact_or_fail():
    rng = random.Random(8)
    for document in islice(clean_lessons(config(), codec(), quick(), rng), 10):
        text = tokenizer().decode(document.ids.tolist())
        assert loop.SUMMARY_REQUEST not in text
    _, made = scripted(9, CLEAN, budget=9999)
    assert len(made.documents) == 1


def test_words_and_chat_tokens_are_one_token_each():
    single = sum(len(tokenizer().encode(word, add_special_tokens=False)) == 1 for word in WORDS)
    assert single > 120
    for token in CHAT_TOKENS:
        assert len(tokenizer().encode(token, add_special_tokens=False)) == 1


def test_the_saved_tokenizer_is_loaded_as_it_was(tmp_path):
    from transformers import AutoTokenizer

    save_tokenizer(tokenizer(), tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    loaded = AutoTokenizer.from_pretrained(str(tmp_path), local_files_only=True)
    text = '<|im_start|>user\nbafe(x): x plus 3\n{"content": "def a(x):\\n    return x"}<|im_end|>'
    assert loaded.encode(text) == tokenizer().encode(text)
    assert loaded.decode(loaded.encode(text)) == text
    assert (loaded.eos_token, loaded.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_the_chat_template_says_what_the_renderer_says():
    call = {"name": "write", "arguments": {"path": "a.py", "content": "x = 1\n"}}
    messages = [
        {"role": "system", "content": loop.SYSTEM},
        {"role": "user", "content": "file: a.py"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": call}],
        },
        {"role": "tool", "content": "ok a.py"},
        {"role": "tool", "content": "ok b.py"},
        {"role": "assistant", "content": "so", "tool_calls": [{"function": call}] * 2},
        {"role": "user", "content": "more"},
    ]
    template = tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    for message in messages:
        for each in message.get("tool_calls", ()):
            each["function"] = {**call, "arguments": '{"path": "a.py", "content": "x = 1\\n"}'}
    assert codec().decode(codec().render(messages, [])) == template
