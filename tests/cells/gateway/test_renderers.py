"""Every family of templates: rendered, read, streamed, and extended on exact ids."""

from __future__ import annotations

import re
from array import array
from functools import cache, lru_cache
from typing import Any

import pytest
import renderers.gpt_oss
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from cells.gateway.codec import Codec, Parsed
from cells.gateway.forms import ChatRequest, Sampling
from cells.gateway.matching import Branches, Fork, Node, Plan, plan_call
from cells.gateway.streaming import TextStream

WORDS = (
    "<|endoftext|> <|im_start|> <|im_end|> <tool_call> </tool_call> <tool_response> "
    "</tool_response> <think> </think> <|vision_start|> <|vision_end|> <|image_pad|> "
    "<|video_pad|> [gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> <arg_key> "
    "</arg_key> <arg_value> </arg_value> <|start|> <|end|> <|return|> <|call|> <|channel|> "
    "<|message|> <|constrain|>"
)
MARKS = tuple(WORDS.split())
CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "run",
            "description": "Run it.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
]
CALL = Parsed("look", "hm", (("run", '{"path": "a.py"}'),))
HERMES = '<tool_call>\n{"name": "run", "arguments": {"path": "a.py"}}\n</tool_call><|im_end|>'
XML = "<tool_call>\n<function=run>\n<parameter=path>\na.py\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>run{0}<arg_key>path</arg_key>{0}<arg_value>a.py</arg_value>{0}</tool_call>"
HARMONY = "<|end|><|start|>assistant<|channel|>final<|message|>"
TO_RUN = "<|end|><|start|>assistant<|channel|>commentary to=functions.run <|constrain|>json"
SAYS = {
    # How each policy thinks, speaks and calls, and how it ends an answer that calls nothing.
    "qwen3": ("<think>\nhm\n</think>\n\nlook\n" + HERMES, "done<|im_end|>"),
    "qwen3.5": (f"hm\n</think>\n\nlook\n\n{XML}<|im_end|>", "hm\n</think>\n\ndone<|im_end|>"),
    "qwen3.6": (f"hm\n</think>\n\nlook\n\n{XML}<|im_end|>", "hm\n</think>\n\ndone<|im_end|>"),
    "glm-4.5": (
        f"\n<think>hm</think>\nlook\n{GLM.format(chr(10))}<|observation|>",
        "\n<think>hm</think>\ndone<|user|>",
    ),
    "glm-5": (f"hm</think>look{GLM.format('')}<|observation|>", "hm</think>done<|user|>"),
    "gpt-oss": (f'hm{TO_RUN}<|message|>{{"path": "a.py"}}<|call|>', f"hm{HARMONY}done<|return|>"),
    "default": ("<think>\nhm\n</think>\n\nlook\n" + HERMES, "done<|im_end|>"),
}
FAMILIES = list(SAYS)


class Harmony:
    """Stands for gpt-oss' own encoder, whose vocabulary is fetched from a network: the same frames
    over the small tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer

    def render(self, message: Any) -> list[int]:
        data = message.to_dict()
        head = data["role"] if not data.get("name") else data["name"]
        if data.get("recipient"):
            head += f" to={data['recipient']}"
        if data.get("channel"):
            head += f"<|channel|>{data['channel']}"
        content = data["content"]
        text = content if isinstance(content, str) else "".join(str(one) for one in content)
        whole = f"<|start|>{head}<|message|>{text}<|end|>"
        return list(self._tokenizer.encode(whole, add_special_tokens=False))

    def render_conversation(self, conversation: Any, *_: Any, **__: Any) -> list[int]:
        return [one for message in conversation.messages for one in self.render(message)]


@lru_cache(maxsize=1)
def tokenizer() -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=450, special_tokens=list(MARKS), initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(
        ["system user assistant look done run a.py name path\n\n"] * 9, trainer
    )
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>")
    made.chat_template = CHATML
    return made


@cache
def codec(family: str) -> Codec:
    if family == "gpt-oss":
        with pytest.MonkeyPatch.context() as patch:
            encoder = Harmony(tokenizer())
            patch.setattr(renderers.gpt_oss, "load_harmony_encoding", lambda _: encoder)
            return Codec(tokenizer(), family)
    return Codec(tokenizer(), family)


def sampled(text: str) -> list[int]:
    """Letter by letter, as no tokenizer would write it."""
    parts = re.findall("|".join(map(re.escape, MARKS)) + "|.", text, re.DOTALL)
    return [one for part in parts for one in tokenizer().encode(part, add_special_tokens=False)]


class Talk:
    """One agent's calls, matched and planned as the gateway does it."""

    def __init__(self, family: str) -> None:
        self.codec = codec(family)
        self.branches = Branches()
        self.prompts: list[list[int]] = []
        self.nodes: list[Node] = []

    def ask(self, messages: list[dict]) -> Plan:
        request = ChatRequest("m", messages, TOOLS, Sampling(), False, False)
        node = self.branches.match(messages, "main")
        plan = plan_call(self.branches, node, request, "main", "t", self.codec)
        before = plan.parent.ids().tolist() if plan.parent else []
        self.prompts.append(before + plan.new_ids)
        assert [int(one) for one in b",".join(plan.parts()).split(b",")] == self.prompts[-1]
        return plan

    def answer(self, plan: Plan, output: list[int], reply: dict) -> None:
        node = Node(
            call_id=f"c{len(self.nodes)}",
            agent="main",
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
        self.nodes.append(node)
        self.branches.add(node)

    def turn(self, messages: list[dict], said: str) -> tuple[Plan, dict]:
        plan = self.ask(messages)
        output = sampled(said)
        parsed = self.codec.parse(output, plan.new_ids, TOOLS)
        reply: dict[str, Any] = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning:
            reply["reasoning_content"] = parsed.reasoning
        if parsed.calls:
            reply["tool_calls"] = [
                {"id": f"i{number}", "type": "function", "function": {"name": n, "arguments": a}}
                for number, (n, a) in enumerate(parsed.calls)
            ]
        self.answer(plan, output, reply)
        return plan, reply


def opening() -> list[dict]:
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "go"}]


def result(text: str = "yes") -> dict:
    return {"role": "tool", "tool_call_id": "i0", "content": text}


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_read(family) -> None:
    calls, ends = SAYS[family]
    prompt = codec(family).render(opening(), TOOLS)
    parsed = codec(family).parse(sampled(calls), prompt, TOOLS)
    said = "" if family == "gpt-oss" else CALL.content  # a call is all that it says there
    assert (parsed.content.strip(), (parsed.reasoning or "").strip()) == (said, "hm")
    assert parsed.calls == CALL.calls
    assert codec(family).parse(sampled(ends), prompt, TOOLS).content.strip() == "done"
    assert {sampled(one)[-1] for one in (calls, ends)} <= set(codec(family).stop_ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_tool_cycles_extend_what_was_sampled(family) -> None:
    talk = Talk(family)
    messages = opening()
    calls, ends = SAYS[family]
    for _ in range(3):
        plan, reply = talk.turn(messages, calls)
        messages = [*messages, reply, result()]
    plan, _ = talk.turn(messages, ends)
    assert plan.fork is None
    for parent, prompt in zip(talk.nodes, talk.prompts[1:], strict=False):
        before = parent.ids().tolist()
        assert prompt[: len(before)] == before
    assert tokenizer().decode(talk.prompts[-1]).count("yes") == 3


@pytest.mark.parametrize("family", FAMILIES)
def test_more_words_extend_or_fork_with_a_reason(family) -> None:
    talk = Talk(family)
    _, reply = talk.turn(opening(), SAYS[family][1])
    plan = talk.ask([*opening(), reply, {"role": "user", "content": "and more"}])
    if plan.fork is None:
        assert plan.parent is talk.nodes[0]
        assert family == "default" or "all" in codec(family)._renderer.effective_thinking_retention
    else:
        assert plan.fork is Fork.BRIDGE_REFUSED
        assert plan.detail == "thinking is dropped when the user says more, after c0"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cut_off_turn_is_closed_behind_what_was_sampled(family) -> None:
    talk = Talk(family)
    calls, _ = SAYS[family]
    output = sampled(calls)[:-1]
    plan = talk.ask(opening())
    call = {"id": "i0", "type": "function", "function": {"name": "run", "arguments": "{}"}}
    reply = {"role": "assistant", "content": "look", "tool_calls": [call]}
    talk.answer(plan, output, reply)
    plan = talk.ask([*opening(), reply, result()])
    assert plan.fork is None and plan.parent is talk.nodes[0]
    assert talk.prompts[1][: plan.kept] == talk.prompts[0] + output


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=25, deadline=None)
@given(texts=st.lists(st.text(max_size=20) | st.sampled_from(MARKS), min_size=1, max_size=3))
def test_the_newest_part_of_a_prompt_bridges_as_the_whole(family, texts) -> None:
    talk = Talk(family)
    messages = opening()
    for text in texts:
        _, reply = talk.turn(messages, SAYS[family][0])
        messages = [*messages, reply, result(text)]
    plan = talk.ask(messages)
    node = plan.parent
    assert node is not None and plan.fork is None
    named = [{**result(texts[-1]), "name": "run"}]
    whole = node.ids().tolist()
    cut = len(whole) - len(node.output_ids)
    assert talk.codec.bridge(whole[:cut], whole[cut:], named, TOOLS) == whole + plan.new_ids


class Heavy:
    """The tokenizer of transformers, which the codec takes as it is."""

    def __init__(self, inner: PreTrainedTokenizerFast) -> None:
        self._inner = inner

    def __call__(self, *args: Any, **more: Any) -> Any:
        return self._inner(*args, **more)

    def __getattr__(self, name: str) -> Any:
        if name == "backend_tokenizer":
            raise AttributeError(name)
        return getattr(self._inner, name)


@pytest.mark.parametrize("family", [one for one in FAMILIES if one != "gpt-oss"])
@settings(max_examples=30, deadline=None)
@given(text=st.text(max_size=200) | st.lists(st.sampled_from([*MARKS, "word ", "\n"])).map("".join))
def test_the_light_tokenizer_changes_no_id(family, text) -> None:
    light, heavy = codec(family), Codec(Heavy(tokenizer()), family)
    messages = [{"role": "system", "content": text}, {"role": "user", "content": text * 2}]
    prompt = heavy.render(messages, TOOLS)
    assert light.render(messages, TOOLS) == prompt
    output = sampled(SAYS[family][0])
    new = [result(text), result(text[:40])]
    assert light.bridge(prompt, output, new, TOOLS) == heavy.bridge(prompt, output, new, TOOLS)
    assert light.parse(output, prompt, TOOLS) == heavy.parse(output, prompt, TOOLS)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("step", [1, 3, 16])
def test_a_stream_says_what_the_whole_says(family, step) -> None:
    calls, ends = SAYS[family]
    long = ends.replace("done", "done, \n and 🎈 " * 20 + "over")
    for said in (calls, ends, long):
        prompt = codec(family).render(opening(), TOOLS)
        output = sampled(said)
        pieces: list[tuple[str, str]] = []
        stream = TextStream(
            codec(family), prompt, TOOLS, (), lambda *piece, to=pieces: to.append(piece)
        )
        for at in range(0, len(output), step):
            stream.feed(output[at : at + step])
        early = len(pieces)
        whole = codec(family).parse(output, prompt, TOOLS)
        texts = (whole.reasoning or "").strip(), whole.content.strip()
        reasoning, content = stream.finish(*texts)
        assert (reasoning, content) == texts
        for field, text in (("reasoning_content", reasoning), ("content", content)):
            assert "".join(piece for name, piece in pieces if name == field) == text
        if said is long:
            assert early > 2


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([*MARKS[:9], "a", " ", "\n", "🎈", "{"]), max_size=40))
def test_what_is_streamed_of_any_output_stands(parts) -> None:
    output = sampled("".join(parts))
    prompt = codec("qwen3").render(opening(), TOOLS)
    sent: dict[str, str] = {"content": "", "reasoning_content": ""}

    def emit(field: str, text: str) -> None:
        sent[field] += text

    stream = TextStream(codec("qwen3"), prompt, TOOLS, (), emit)
    for one in output:
        stream.feed([one])
    whole = codec("qwen3").parse(output, prompt, TOOLS)
    assert stream.finish(whole.reasoning or "", whole.content) == (
        sent["reasoning_content"],
        sent["content"],
    )


def test_a_template_that_is_not_plain_is_refused() -> None:
    made = tokenizer()
    try:
        made.chat_template = CHATML.replace(
            "{{ m.content }}", "{{ m.content if loop.last else '' }}"
        )
        odd = Codec(made, "default")
        prompt = odd.render(opening(), [])
        assert odd.bridge(prompt, sampled("x<|im_end|>"), [result()], []) is None
        assert odd.refusal([result()]) == "the chat template is not plain"
    finally:
        made.chat_template = CHATML
