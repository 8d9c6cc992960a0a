"""Ids from remembered words, and texts from the bytes of tokens: the tokenizer's own, exactly."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.normalizers import NFC, Lowercase
from transformers import PreTrainedTokenizerFast

from cells.gateway.tokens import LightTokenizer
from cells.gateway.words import find_words

QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {"gpt2": None, "qwen": QWEN, "gpt4o": GPT4O, "inverted": GPT4O}
MARKS = ("<|im_start|>", "<|im_end|>", "<|im_end", "<tool_call>")
TEXT = "def run(self, path):\n        return 'x' + path.name[12] # it's DON'T\n\n\tÄé ✓ \r\n" * 9
SOME = st.characters(codec="utf-8")
ODD = ["e\u0301", "\u0301", "\u017f", "\u212a", "\xa0", "\u3000", "\x85", *"Ⅷ²٣中ʰǅ"]
PIECES = st.sampled_from(
    [*MARKS, *ODD, " ", "  ", "\n", "\r\n", "\t", "'s", "'RE", "x", "Run", "123", "/", "()", "é"]
)
texts = st.lists(
    st.one_of(PIECES, st.text(st.characters(codec="ascii"), max_size=6), st.text(SOME, max_size=4)),
    max_size=20,
)


@cache
def backend(kind: str) -> Any:
    inner = Tokenizer(models.BPE())
    pattern = PATTERNS[kind]
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    inner.pre_tokenizer = whole
    if pattern is not None:
        inner.normalizer = NFC()
        inverted = kind == "inverted"
        between = "removed" if inverted else "isolated"
        split = pre_tokenizers.Split(Regex(pattern), between, invert=inverted)
        inner.pre_tokenizer = pre_tokenizers.Sequence([split, whole])
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=alphabet, special_tokens=list(MARKS), show_progress=False
    )
    inner.train_from_iterator([TEXT], trainer)
    inner.add_tokens([AddedToken("two words", normalized=False)])
    return inner


@cache
def light(kind: str) -> LightTokenizer:
    return LightTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend(kind)))


@pytest.mark.parametrize("kind", PATTERNS)
@settings(max_examples=150, deadline=None)
@given(parts=texts)
def test_texts_have_the_ids_that_the_tokenizer_gives_them(kind: str, parts: list[str]) -> None:
    text = "".join(parts)
    for said in (text, text * 8):  # short texts are remembered whole
        expected = backend(kind).encode(said, add_special_tokens=False).ids
        assert light(kind).encode(said, add_special_tokens=False) == expected
        ids = find_words_of(kind).ids(said)
        assert ids == expected or (ids is None and not said.isascii())


@cache
def find_words_of(kind: str) -> Any:
    return find_words(backend(kind))


@pytest.mark.parametrize("kind", PATTERNS)
def test_common_signs_and_letters_are_not_left_to_the_tokenizer(kind: str) -> None:
    text = "✓ passed … │ café – “naïve” → 3 × ‘x’\u00a0🎈 ÄÖÜ"
    assert find_words_of(kind).ids(text) == backend(kind).encode(text).ids


@pytest.mark.parametrize("kind", PATTERNS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_ids_have_the_text_that_the_tokenizer_gives_them(kind: str, data: st.DataObject) -> None:
    # Beyond the vocabulary too, and halves of characters as a policy can sample them.
    size = backend(kind).get_vocab_size()
    ids = data.draw(st.lists(st.integers(0, size + 3), max_size=30))
    assert light(kind).decode(ids) == backend(kind).decode(ids, skip_special_tokens=False)


def test_words_are_forgotten_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cells.gateway.words.WORDS", 9)
    words = find_words(backend("gpt2"))
    assert words is not None
    for number in range(20):
        text = f"x{number} y{number} {'long' * 40} z"
        assert words.ids(text) == backend("gpt2").encode(text, add_special_tokens=False).ids
        assert len(words._known) <= 9


def _other(change: str) -> Any:
    made = Tokenizer.from_str(backend("gpt2").to_str())
    if change == "lower":
        made.normalizer = Lowercase()
    elif change == "prefix":
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    elif change == "metaspace":
        made.pre_tokenizer = pre_tokenizers.Metaspace()
    elif change == "stripping mark":
        made.add_special_tokens([AddedToken("<pad>", lstrip=True)])
    elif change == "unknown class":
        split = pre_tokenizers.Split(Regex(r"\p{Greek}|.+"), "isolated")
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    return made


@pytest.mark.parametrize(
    "change", ["lower", "prefix", "metaspace", "stripping mark", "unknown class"]
)
def test_other_kinds_of_tokenizers_are_left_alone(change: str) -> None:
    other = _other(change)
    assert find_words(other) is None
    wrapped = LightTokenizer(PreTrainedTokenizerFast(tokenizer_object=other))
    text = "Some <pad> text that is longer than what is short"
    expected = other.encode(text, add_special_tokens=False).ids
    assert wrapped.encode(text, add_special_tokens=False) == expected
