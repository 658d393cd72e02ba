"""Loads a classifier: a transformers model in float32 and eval mode, its tokenizer, and its sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)
from transformers.utils import logging as transformers_logging

from fedstrata.core.shape import ModelShape
from fedstrata.core.tensors import HEAD
from fedstrata.errors import AssetError, ModelError
from fedstrata.train.byte_tokenizer import byte_tokenizer
from fedstrata.train.config import AdapterConfig, ModelConfig
from fedstrata.train.initial import initialize
from fedstrata.train.source import Source, identity_of, resolve_source
from fedstrata.train.strata import find_blocks, shape_of, task_head_parameters

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "tokenizer.model", "spiece.model")


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A base model with a fresh task head.

    Attributes:
        model: In eval mode, float32, nothing trainable.
        shape: Its sizes and strata.
        tokenizer: None for images, or where the folder has none.
        config: What was asked for; transformers' own configuration is `model.config`.
        label_names: Class names by label number.
        missing: Parameters that the checkpoint did not contain, sorted; all of them are in the head.
        identity: SHA-256 over the files of the base.
        notes: What was done to make the model usable, in words for the record.
    """

    model: nn.Module
    shape: ModelShape
    tokenizer: Any | None
    config: ModelConfig
    label_names: tuple[str, ...]
    missing: tuple[str, ...]
    identity: str
    notes: tuple[str, ...]

    @property
    def is_image_model(self) -> bool:
        """Whether it classifies pictures."""
        return getattr(self.model, "main_input_name", "input_ids") == "pixel_values"

    @property
    def pad_id(self) -> int:
        """Id that fills short texts; 0 for images, which have none."""
        return int(getattr(getattr(self.model, "config", None), "pad_token_id", None) or 0)


def load_model(
    config: ModelConfig, adapter: AdapterConfig, *, label_names: Sequence[str], seed: int, base_dir: Path
) -> LoadedModel:
    """Loads the base model and gives it a task head.

    The head (and whatever the checkpoint lacked) is drawn from `generator(seed, "head_init", name)`. A head that the
    checkpoint brings is kept only if it was trained for the same label names. Torch's own random state is neither
    read nor changed.

    Args:
        config: Which model.
        adapter: Which of its maps carry LoRA pairs.
        label_names: Class names by label number.
        seed: The run's seed.
        base_dir: Relative paths of `config.source` start here.

    Raises:
        AssetError: If its files are missing or cannot be reached.
        ModelError: If it is not a classifier whose blocks can be found.
    """
    if len(label_names) < 2:
        raise ModelError("A classifier needs at least two labels", got=f"{len(label_names)}", where="label_names")
    source = resolve_source(config.source, base_dir, config.revision)
    notes: list[str] = []
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        asked, own_labels = _model_config(source, tuple(label_names))
        is_image = _is_image_config(asked, source)
        auto_class = AutoModelForImageClassification if is_image else AutoModelForSequenceClassification
        if source.kind == "config":
            model, missing = _from_config(auto_class, source, asked), set[str]()
            initialize(model, {n for n, _ in model.named_parameters()}, seed, "base_init")
            notes.append("random weights: the source is a configuration only")
        else:
            model, missing = _from_checkpoint(auto_class, source, asked, notes)
        tokenizer = None if is_image else _tokenizer(source, model, notes)
    model.eval().requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    _settle_padding(model, tokenizer, is_image, notes)
    head = task_head_parameters(model, find_blocks(model)).keys()
    if missing.isdisjoint(head) and source.kind != "config" and own_labels == tuple(label_names):
        notes.append("the task head of the checkpoint is kept: it knows the same labels")
        initialize(model, missing, seed, "head_init")
    else:
        initialize(model, head | missing, seed, "head_init")
    return LoadedModel(
        model=model,
        shape=shape_of(model, adapter, missing),
        tokenizer=tokenizer,
        config=config,
        label_names=tuple(label_names),
        missing=tuple(sorted(missing)),
        identity=identity_of(source, seed),
        notes=tuple(notes),
    )


def _model_config(source: Source, label_names: tuple[str, ...]) -> tuple[Any, tuple[str, ...]]:
    """The configuration with this task's labels, and the label names that the checkpoint had."""
    try:
        config = AutoConfig.from_pretrained(source.location, revision=source.revision)
    except OSError as error:
        raise _unreachable(source, error) from error
    except Exception as error:
        # Beside ValueError and KeyError, wrong types raise errors of huggingface_hub's own.
        raise _bad_config(source, error, "read") from error
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f'"{source.spec}" is an encoder-decoder ({config.model_type})',
            expected="an encoder or a decoder",
            do="choose e.g. BERT, RoBERTa, GPT-2, Llama or ViT",
        )
    own = config.id2label or {}
    own_labels = tuple(str(own[i]) for i in sorted(own))
    config.id2label = dict(enumerate(label_names))
    config.label2id = {name: i for i, name in enumerate(label_names)}
    config.problem_type = "single_label_classification"
    return config, own_labels


def _is_image_config(config: Any, source: Source) -> bool:
    if type(config) in AutoModelForSequenceClassification._model_mapping:
        return False
    if type(config) in AutoModelForImageClassification._model_mapping:
        return True
    raise ModelError(
        f'transformers has no classifier for "{source.spec}"',
        expected="a model type with a sequence or image classification head",
        got=str(config.model_type),
    )


def _from_config(auto_class: Any, source: Source, config: Any) -> Any:
    try:
        return auto_class.from_config(config, dtype=torch.float32)
    except Exception as error:
        # Sizes that do not fit together fail with whatever the model's own code raises.
        raise _bad_config(source, error, "used") from error


def _from_checkpoint(auto_class: Any, source: Source, config: Any, notes: list[str]) -> tuple[Any, set[str]]:
    try:
        model, info = auto_class.from_pretrained(
            source.location,
            config=config,
            revision=source.revision,
            dtype=torch.float32,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except OSError as error:
        raise _unreachable(source, error) from error
    except (ValueError, RuntimeError, SafetensorError, AssertionError, TypeError) as error:
        raise ModelError(
            f'The weights of "{source.spec}" cannot be loaded',
            where=source.location,
            got=_first_line(error),
            do="the file is damaged or belongs to another configuration: download or save the model again",
        ) from error
    known = {n for n, _ in model.named_parameters()}
    other_size = {entry[0] for entry in info["mismatched_keys"]}
    if other_size:
        notes.append(f"weights of another size were drawn afresh: {', '.join(sorted(other_size))}")
    missing = (set(info["missing_keys"]) | other_size) & known
    if missing:
        notes.append(f"new, because the checkpoint has none; trained as the {HEAD}: {', '.join(sorted(missing))}")
    return model, missing


def _tokenizer(source: Source, model: Any, notes: list[str]) -> Any | None:
    if any((source.folder / name).is_file() for name in TOKENIZER_FILES) or source.kind == "hub":
        location = str(source.folder) if source.kind == "config" else source.location
        try:
            return AutoTokenizer.from_pretrained(location, revision=source.revision)
        except Exception as error:
            # transformers and tokenizers raise many unrelated kinds of error for a damaged file.
            raise ModelError(
                f'The tokenizer of "{source.spec}" cannot be read',
                where=str(source.folder),
                got=_first_line(error),
                do="download or save the tokenizer again (tokenizer.save_pretrained(folder))",
            ) from error
    if source.kind == "config":
        notes.append("built-in byte tokenizer: one token per byte")
        limit = getattr(model.config, "max_position_embeddings", None)
        return byte_tokenizer(model.config.vocab_size, pad_id=model.config.pad_token_id, max_length=limit)
    notes.append("the model's folder holds no tokenizer")
    return None


def _settle_padding(model: Any, tokenizer: Any | None, is_image: bool, notes: list[str]) -> None:
    """Makes tokenizer and model agree on a padding token; decoders often come without one."""
    if is_image:
        return
    config, size = model.config, int(model.config.vocab_size)
    if tokenizer is not None:
        if tokenizer.pad_token_id is None:
            name = tokenizer.eos_token or tokenizer.unk_token or tokenizer.convert_ids_to_tokens(0)
            tokenizer.pad_token = name
            notes.append(f"no padding token: texts are padded with {name!r}")
        pad = tokenizer.pad_token_id
    else:
        eos = config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id
        pad = next((i for i in (config.pad_token_id, eos) if i is not None and 0 <= i < size), 0)
        if config.pad_token_id != pad:
            notes.append(f"no padding token: texts are padded with token {pad}")
    if not 0 <= pad < size:
        raise ModelError(
            "The tokenizer does not belong to this model",
            expected=f"a padding token below the model's vocabulary size {size}",
            got=str(pad),
        )
    config.pad_token_id = pad


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silences progress bars and load reports; what matters is said in `notes`."""
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]


def _bad_config(source: Source, error: Exception, verb: str) -> ModelError:
    return ModelError(
        f'The configuration of "{source.spec}" cannot be {verb}',
        where=source.location,
        got=" ".join(str(error).split())[:300],
        do="mend the configuration, or name a model type that transformers knows (BERT, RoBERTa, GPT-2, Llama, …)",
    )


def _unreachable(source: Source, error: OSError) -> AssetError:
    hub = "check the name and the network, set HF_HUB_OFFLINE=1 to use only what is cached, or name a local folder"
    saved = "save the model again as safetensors (model.save_pretrained(folder))"
    return AssetError(
        f'The model "{source.spec}" cannot be loaded',
        got=_first_line(error),
        where=source.location,
        do=hub if source.kind == "hub" else "mend the file" if source.kind == "config" else saved,
    )
