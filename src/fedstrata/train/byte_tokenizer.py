"""A tokenizer that needs no files: one token per byte, for tiny models that come as a configuration only."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from fedstrata.errors import ModelError

SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[UNK]")
NUM_BYTES = 256


def byte_tokenizer(vocab_size: int, *, pad_id: int | None = None, max_length: int | None = None) -> Any:
    """A byte-level tokenizer: `[CLS]` bytes `[SEP]`, pairs joined by another `[SEP]`.

    Args:
        vocab_size: Size of the model's embedding table; at least 260.
        pad_id: Id of the padding token where the model fixes it; the other special tokens take the lowest free ids,
            then the bytes follow in the order of their printable stand-ins.
        max_length: The model's longest input.

    Raises:
        ModelError: If the vocabulary does not fit.
    """
    if vocab_size < NUM_BYTES + len(SPECIAL):
        raise ModelError(
            "The model's vocabulary is too small for the built-in byte tokenizer",
            expected=f"vocab_size of at least {NUM_BYTES + len(SPECIAL)}",
            got=str(vocab_size),
            do="enlarge vocab_size in the configuration, or put a tokenizer.json next to it",
        )
    pad = pad_id if pad_id is not None and 0 <= pad_id < vocab_size else 0
    free = (i for i in range(vocab_size) if i != pad)
    vocab = {SPECIAL[0]: pad} | {t: next(free) for t in (*SPECIAL[1:], *sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(t, vocab[t]) for t in ("[CLS]", "[SEP]")],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        unk_token="[UNK]",
        model_input_names=["input_ids", "attention_mask"],
        **({} if max_length is None else {"model_max_length": max_length}),
    )
