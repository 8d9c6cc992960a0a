"""A byte-level BPE tokenizer with Qwen3's chat tokens, learned from the demonstrations' text."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
START_OF_TURN = "<|im_start|>"
END_OF_TURN = "<|im_end|>"
CHAT_TOKENS = (END_OF_TEXT, START_OF_TURN, END_OF_TURN, "<tool_call>", "</tool_call>",
               "<tool_response>", "</tool_response>", "<think>", "</think>")  # fmt: skip

# A word, a number, a line end and the two characters \n of a JSON text each stay apart from what is
# around them, so that a name is the same token in a specification and inside a tool call.
_PIECES = r"\\n|\p{L}+|\p{N}+|\n|[^\p{L}\p{N}\\\n]+|\\"

CHAT_TEMPLATE = """\
{%- for message in messages %}
{%- if message.role == "tool" %}
{%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{ "<|im_start|>user" }}{% endif %}
{{- "\\n<tool_response>\\n" + message.content + "\\n</tool_response>" }}
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{ "<|im_end|>\\n" }}{% endif %}
{%- else %}
{{- "<|im_start|>" + message.role + "\\n" + (message.content or "") }}
{%- for call in message.tool_calls or [] %}
{%- set function = call.function or call %}
{%- if not loop.first or message.content %}{{ "\\n" }}{% endif %}
{{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
{%- if function.arguments is string %}{{ function.arguments }}{% else %}
{{- function.arguments | tojson }}{% endif %}
{{- "}\\n</tool_call>" }}
{%- endfor %}
{{- "<|im_end|>\\n" }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}
"""
"""Qwen3's turns without the schemas of the tools, as the terse renderer writes them."""


def learn_tokenizer(texts: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A tokenizer of at most ``vocabulary`` tokens; fewer when the texts hold fewer pieces."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=vocabulary,
        special_tokens=list(CHAT_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write the files that ``AutoTokenizer`` reads."""
    tokenizer.save_pretrained(str(folder))


class QuickTokenizer:
    """The same ids as the tokenizer, quicker: demonstrations say the same few texts thousands of
    times. It offers what a renderer needs and no offsets, which would be computed in vain."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._encode = lru_cache(maxsize=100_000)(self._ids)
        self.unk_token_id = tokenizer.unk_token_id
        self.name_or_path = tokenizer.name_or_path

    def encode(self, text: str, **_: Any) -> list[int]:
        """Ids of a text, special tokens in it recognised and none added."""
        return list(self._encode(text))

    def decode(self, ids: list[int] | int, **options: Any) -> str:
        """The text of ids."""
        numbers = [ids] if isinstance(ids, int) else list(ids)
        skip = bool(options.get("skip_special_tokens", False))
        return str(self._backend.decode(numbers, skip_special_tokens=skip))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        return self._tokenizer.convert_tokens_to_ids(tokens)

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._backend.encode(text, add_special_tokens=False).ids)
