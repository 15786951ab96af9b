"""What a model says about itself: shape, size, licence, origin. Read from headers, never from weights."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from paceline.core.errors import ModelFileError
from paceline.models.files import explain_damaged_entries, read_json
from paceline.models.gguf_header import Value
from paceline.models.gguf_model import GgufModel, read_gguf_model
from paceline.models.weight_files import check_model_folder, head_kind, read_safetensors_header, weight_files

ModelFormat: TypeAlias = Literal["gguf", "huggingface"]

PROVENANCE_PREFIX: Final = "paceline."
"""Metadata keys under which paceline's commands write how they made a file."""

CARD_NAMES: Final = ("MODEL_CARD.md", "README.md")
"""Names of a model card's file; the first that is there counts."""
_LICENSE_NAMES: Final = ("LICENSE", "LICENSE.txt", "LICENSE.md")
"""Names of a licence's file; the first that is there counts."""


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What is known of a model without loading it; ``None`` where the model does not say.

    Attributes:
        num_bytes: size of the file, of all parts of a split model, or of the folder's files.
        num_parts: GGUF files that the model is split into; 1 for a model in one file or in a folder.
        feed_forward: inner width of the feed-forward blocks.
        experts: feed-forward blocks to choose from in a mixture. Of counts that vary from layer to layer, this one and
            those above have the largest.
        file_type: the weights' type, by the usual name, such as ``"Q4_K_M"`` or ``"bfloat16"``.
        context_length: tokens it was trained to see.
        vocabulary_size: rows of its output, unused ids included.
        license: its identifier, or the file that holds it.
        summary: one line on what it is.
        provenance: how paceline made it, by key.
        metadata: everything it says, long lists as their lengths.
    """

    path: Path
    format: ModelFormat
    num_bytes: int
    num_parts: int = 1
    architecture: str | None = None
    layers: int | None = None
    width: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_size: int | None = None
    feed_forward: int | None = None
    experts: int | None = None
    num_parameters: int | None = None
    file_type: str | None = None
    context_length: int | None = None
    vocabulary_size: int | None = None
    license: str | None = None
    summary: str | None = None
    card: Path | None = None
    provenance: Mapping[str, Value] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def embeds(self) -> bool:
        """Whether it was made for vectors or scores of texts: tokens see those behind them, or it says how to pool."""
        said = self.metadata
        is_pooled = said.get(f"{self.architecture}.pooling_type") not in (None, 0)
        return is_pooled or said.get(f"{self.architecture}.attention.causal") is False


def describe(path: Path, *, may_be_head: bool = False) -> ModelDescription:
    """Read the description of a GGUF file or a Hugging Face folder."""
    try:
        if not path.is_dir():
            return _describe_gguf(path, may_be_head)
        with explain_damaged_entries(path):
            return _describe_folder(path, may_be_head)
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}") from None


# --- GGUF -------------------------------------------------------------------------------------------------------------


def _describe_gguf(path: Path, may_be_head: bool) -> ModelDescription:
    model = read_gguf_model(path, may_be_head=may_be_head)
    header = model.header
    said = header.metadata
    architecture = said["general.architecture"]

    def number(key: str) -> int | None:
        return _largest(said.get(f"{architecture}.{key}"))

    width, heads = number("embedding_length"), number("attention.head_count")
    card = path.with_suffix(".md")
    if not card.is_file():
        card = path.with_name(CARD_NAMES[0])
    return ModelDescription(
        path=path,
        format="gguf",
        num_bytes=model.num_bytes,
        num_parts=len(model.paths),
        architecture=_text(architecture),
        layers=number("block_count"),
        width=width,
        heads=heads,
        kv_heads=number("attention.head_count_kv") or heads,
        head_size=number("attention.key_length") or _quotient(width, heads),
        feed_forward=number("feed_forward_length"),
        experts=number("expert_count"),
        num_parameters=model.num_parameters,
        file_type=_file_type(model),
        context_length=number("context_length"),
        vocabulary_size=header.array_lengths.get("tokenizer.ggml.tokens") or number("vocab_size"),
        license=_text(said.get("general.license")) or _text(said.get("general.license.name")),
        summary=_text(said.get("general.description")) or _text(said.get("general.name")),
        card=card if card.is_file() else None,
        provenance={
            key.removeprefix(PROVENANCE_PREFIX): value
            for key, value in said.items()
            if key.startswith(PROVENANCE_PREFIX)
        },
        metadata={**said, **{key: f"({length} items)" for key, length in header.array_lengths.items()}},
    )


def _file_type(model: GgufModel) -> str | None:
    """Return the type that the file names for its mix of types, else its commonest one."""
    from gguf.constants import LlamaFileType

    number = model.header.metadata.get("general.file_type")
    names = {int(kind): str(kind.name).removeprefix("ALL_").removeprefix("MOSTLY_") for kind in LlamaFileType}
    return names.get(number, model.tensor_type) if isinstance(number, int) else model.tensor_type


# --- Hugging Face folders ---------------------------------------------------------------------------------------------


def _describe_folder(folder: Path, may_be_head: bool) -> ModelDescription:
    check_model_folder(folder, may_be_head=may_be_head)
    config = read_json(folder / "config.json")
    config = config.get("text_config") or config.get("transformer_layer_config") or config
    parameters, dtype = _count_safetensors(folder)
    cards = [folder / name for name in CARD_NAMES if (folder / name).is_file()]
    front_matter, summary = _read_card(cards[0]) if cards else ({}, None)
    licenses = [name for name in _LICENSE_NAMES if (folder / name).is_file()]
    width, heads = _largest(config.get("hidden_size")), _largest(config.get("num_attention_heads"))
    return ModelDescription(
        path=folder,
        format="huggingface",
        num_bytes=sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
        architecture=(head_kind(folder) if may_be_head else None) or _text(config.get("model_type")),
        layers=_largest(config.get("num_hidden_layers")),
        width=width,
        heads=heads,
        kv_heads=_largest(config.get("num_key_value_heads")) or heads,
        head_size=_largest(config.get("head_dim")) or _quotient(width, heads),
        feed_forward=_largest(config.get("intermediate_size")),
        experts=_largest(config.get("num_local_experts")) or _largest(config.get("num_experts")),
        num_parameters=parameters,
        file_type=_text(config.get("dtype")) or _text(config.get("torch_dtype")) or dtype,
        context_length=_largest(config.get("max_position_embeddings")),
        vocabulary_size=_largest(config.get("vocab_size")),
        license=front_matter.get("license") or (f"see {licenses[0]}" if licenses else None),
        summary=summary,
        card=cards[0] if cards else None,
        metadata=config,
    )


def _count_safetensors(folder: Path) -> tuple[int | None, str | None]:
    """Return the number of weights and their commonest type; ``None`` for pickled files."""
    weights_by_type: Counter[str] = Counter()
    for path in weight_files(folder):
        for tensor in read_safetensors_header(path).values():
            weights_by_type[tensor.dtype] += prod(tensor.shape)
    if not weights_by_type:
        return None, None
    return weights_by_type.total(), weights_by_type.most_common(1)[0][0]


def _read_card(card: Path) -> tuple[dict[str, str], str | None]:
    """Return the plain entries of a card's front matter, and the first line of its text."""
    text = card.read_text(encoding="utf-8-sig", errors="replace")
    matter = re.match(r"---\n(.*?)\n---\s*\n", text, re.DOTALL)
    entries = dict(re.findall(r"^(\w+): *[\"']?([^\"'\n]+?)[\"']? *$", matter[1], re.MULTILINE)) if matter else {}
    body = text[matter.end() :] if matter else text
    prose = (line.strip() for line in body.splitlines())
    return entries, next((line for line in prose if line and line[0] not in "#<|![-="), None)


# --- values -----------------------------------------------------------------------------------------------------------


def _text(value: object) -> str | None:
    return value.strip() or None if isinstance(value, str) else None


def _largest(value: object) -> int | None:
    """Return a count; of a list, its largest."""
    counts = [item for item in (value if isinstance(value, list) else [value]) if type(item) is int]
    return max(counts, default=None)


def _quotient(width: int | None, heads: int | None) -> int | None:
    return width // heads if width and heads else None
