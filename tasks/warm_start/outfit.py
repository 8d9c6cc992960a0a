"""Everything of a policy but its weights, and what these are fitted to."""

from __future__ import annotations

import json
import random
from itertools import islice
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from cells.gateway.codec import Codec
from cells.replica.corpus import write_corpus
from cells.replica.fit_plan import FitPlan, Phase
from configs.run import RunConfig
from tasks.warm_start.corpora import clean_lessons, drills, full_lessons, tokenizer_texts
from tasks.warm_start.tokenizer import (
    END_OF_TEXT,
    END_OF_TURN,
    QuickTokenizer,
    learn_tokenizer,
    save_tokenizer,
)

INITIAL_STD = 0.04
"""Spread of the fresh matrices that the learning rates below were found with."""

DRILL_SEQUENCES = 24
DRILL_MUON_RATE = 0.02
DRILL_STOP_LOSS = 0.1
FULL_DECAY_SHARE = 0.5
MOST_HISTORIES = 4000
"""Histories of a corpus; a longer phase sees them again. Making them takes time too."""

_SEED = "warm start 1"


def make_outfit(policy: Path, config: RunConfig) -> None:
    """Write config.json, generation_config.json and the tokenizer into the new folder."""
    policy.mkdir(parents=True)
    shape = config.model.shape
    tokenizer = learn_tokenizer(tokenizer_texts(config), shape.vocabulary)
    save_tokenizer(tokenizer, policy)
    pad, end = tokenizer.convert_tokens_to_ids([END_OF_TEXT, END_OF_TURN])
    model = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": len(tokenizer),
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn,
        "max_position_embeddings": config.model.context,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "tie_word_embeddings": shape.tied,
        "initializer_range": INITIAL_STD,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": pad,
        "torch_dtype": "float32",
    }
    generation = {"eos_token_id": [end, pad], "pad_token_id": pad, "do_sample": True}
    for name, content in (("config.json", model), ("generation_config.json", generation)):
        (policy / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def plan_fit(scratch: Path, policy: Path, config: RunConfig) -> FitPlan:
    """Write the corpora of all phases into ``scratch`` and say how to fit to them."""
    warm = config.warm_start
    # Loaded back from its files, as the gateway will. AutoTokenizer gives the same one, but takes
    # seconds to import.
    tokenizer = QuickTokenizer(
        PreTrainedTokenizerFast.from_pretrained(str(policy), local_files_only=True)
    )
    codec = Codec(tokenizer, config.model.renderer)
    rng = random.Random(_SEED)

    drill = Phase(
        name="drill",
        data=str(scratch / "drill.safetensors"),
        steps=warm.drill_steps,
        sequences=DRILL_SEQUENCES,
        muon_rate=DRILL_MUON_RATE,
        adam_rate=warm.adam_learning_rate,
        decay_share=0.0,
        stop_loss=DRILL_STOP_LOSS,
    )
    clean = drill.model_copy(
        update={
            "name": "clean",
            "data": str(scratch / "clean.safetensors"),
            "steps": warm.clean_steps,
            "sequences": warm.histories,
            "muon_rate": warm.muon_learning_rate,
            "stop_loss": 0.0,
        }
    )
    full = clean.model_copy(
        update={
            "name": "full",
            "data": str(scratch / "full.safetensors"),
            "steps": warm.full_steps,
            "decay_share": FULL_DECAY_SHARE,
        }
    )
    lessons = (
        (drill, drills(tokenizer, rng)),
        (clean, clean_lessons(config, codec, tokenizer, rng)),
        (full, full_lessons(config, codec, tokenizer, rng)),
    )
    for phase, histories in lessons:
        some = islice(histories, min(phase.steps * phase.sequences, MOST_HISTORIES))
        write_corpus(Path(phase.data), ((h.ids.tolist(), h.targets.tolist()) for h in some))
    return FitPlan(phases=tuple(phase for phase, _ in lessons), limit_s=warm.limit_s)
