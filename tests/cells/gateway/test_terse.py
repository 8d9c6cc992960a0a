"""The renderer for tiny contexts."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

TOOLS = [{"type": "function", "function": {"name": "write", "parameters": {"type": "object"}}}]
SYSTEM = {"role": "system", "content": "Write the module."}


def test_turns_without_schemas(codec) -> None:
    messages = [SYSTEM, {"role": "user", "content": "go"}]
    ids = codec.render(messages, TOOLS)
    assert codec.decode(ids) == (
        "<|im_start|>system\nWrite the module.<|im_end|>\n"
        "<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n"
    )
    assert not codec.tools_matter


def test_thinking_stays_and_none_is_added(codec) -> None:
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "one", "reasoning_content": "why"},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "end"},
    ]
    text = codec.decode(codec.render(messages, []))
    assert "<think>\nwhy\n</think>\n\none<|im_end|>" in text
    assert "<|im_start|>assistant\ntwo<|im_end|>" in text


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=12)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(TEXTS, st.sampled_from(["user", "tool"]), TEXTS), min_size=1, max_size=4))
def test_a_bridge_says_what_a_render_would(codec, turns) -> None:
    """For replies in canonical tokens, extending and rendering whole give the same ids."""
    messages = [SYSTEM, {"role": "user", "content": "go"}]
    ids = codec.render(messages, [])
    for answer, role, text in turns:
        reply = codec.render([*messages, {"role": "assistant", "content": answer}], [])
        header = codec.render(messages, [])
        end = len(reply) - 1 - reply[::-1].index(codec.stop_ids[0])
        output = reply[len(header) : end + 1]
        messages += [{"role": "assistant", "content": answer}, {"role": role, "content": text}]
        ids = codec.bridge(ids, output, messages[-1:], [])
        assert ids == codec.render(messages, [])


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 270), max_size=60))
def test_any_ids_are_parsed_and_bridged(codec, output) -> None:
    prompt = codec.render([{"role": "user", "content": "go"}], [])
    parsed = codec.parse(output, prompt, TOOLS)
    parsed.content.encode()
    bridged = codec.bridge(prompt, output, [{"role": "user", "content": "x"}], [])
    if bridged is not None and not set(output) & set(codec.stop_ids):
        assert bridged[: len(prompt) + len(output)] == prompt + output
