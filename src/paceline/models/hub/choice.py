"""Which files of a repository are the model that is asked for.

Of GGUF files the choice is llama.cpp's (``find_best_model`` in its ``common/download.cpp``): the first file whose path
has the quant, in any case, before a dot or a dash; without a quant, Q4_K_M, then Q8_0, then the first file there is.
Where several files have the quant, llama.cpp takes the first. Here the one whose name ends in the quant is taken, as
``F16`` is also in ``BF16``, and where that leaves several, the user is asked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Final

from paceline.core.errors import InputError, ModelFileError
from paceline.models.gguf_model import part_paths
from paceline.models.hub.reference import SAFETENSORS, HubModel
from paceline.models.weight_files import INDEX, SINGLE

_USUAL_QUANTS: Final = ("Q4_K_M", "Q8_0")
"""Quants that are taken where none is asked for, the first that is there."""
HEADS: Final = ("mtp-", "eagle3-", "dflash-", "dspark-")
"""Parts of names of GGUF files with heads, which draft for a model, in lower case, as llama.cpp has them.

``-MTP-`` is in names of models that have such a head.
"""
_BESIDE_MODELS: Final = re.compile("|".join(("mmproj", "imatrix", *HEADS)))
"""Parts of names of GGUF files that belong to a model and are none, in lower case."""
_MAYBE_ADAPTERS: Final = re.compile(r"(?:^|[-_.])(?:lora|adapter)(?:[-_.]|$)", re.IGNORECASE)
"""Parts of names of adapters, and of models that one was merged into."""

_TAG: Final = re.compile(r"[-.](?P<tag>[A-Za-z0-9_]+)$")
_SHARD: Final = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_FOLDER_FILES: Final = ("*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.*", "README.md")
_TEMPLATES: Final = "additional_chat_templates"
_MAX_NAMED: Final = 12


@dataclass(frozen=True, slots=True)
class ChosenFiles:
    """The files that make up a model.

    Attributes:
        is_folder: whether the model is the folder that these files lie in, rather than the first of them.
    """

    paths: tuple[str, ...]
    is_folder: bool


def choose_files(reference: HubModel, paths: Iterable[str]) -> ChosenFiles:
    """Return the files of a repository that are the model asked for."""
    there_are = sorted(paths)
    models = _find_models(reference, there_are)
    if reference.file is not None:
        return _add_parts(reference, _find_named_file(reference, there_are), there_are)
    if not models and "config.json" not in there_are and (heads := gguf_heads(there_are)):
        way_out = "none drafts here" if reference.heads else "name their model, and this as its draft (`draft_repo`)"
        raise InputError(f"{reference.repo} has no model but heads that draft for one, {_list_names(heads)}: {way_out}")
    if reference.quant.lower() == SAFETENSORS or not (models or reference.quant):
        return ChosenFiles(_folder_files(reference, there_are), True)
    found = _match_quant(reference, models)
    if not found:
        raise InputError(_explain_no_such_quant(reference, models, there_are))
    if len(found) > 1:
        raise InputError(
            f"{reference} is the name of {len(found)} files, {_list_names(found)}: name one of them (`file`), or by "
            "more of its name instead of the quant"
        )
    return _add_parts(reference, found[0], there_are)


def is_ambiguous(reference: HubModel, paths: Iterable[str]) -> bool:
    """Return whether several files of a repository match what is asked for."""
    named_otherwise = reference.file is not None or reference.quant.lower() == SAFETENSORS
    return not named_otherwise and len(_match_quant(reference, _find_models(reference, paths))) > 1


def choose_head(model: str, paths: Iterable[str], kinds: Sequence[str], quant: str = "") -> str | None:
    """Return the head that lies beside a model, of the first kind of which there is any; ``None`` if there is none.

    The choice is llama.cpp's (``find_best_sibling``): a file in the model's folder or above it, the nearer the better,
    then one of the quant that was asked for, then that of the most similar number of bits.

    Args:
        model: its path among these.
        paths: of a repository's files.
        kinds: parts of names, such as ``mtp-``, the best kind first.
        quant: that was asked for; empty for none.
    """
    folder = PurePosixPath(model).parent
    there_are = [path for path in sorted(paths) if PurePosixPath(path).parent in (folder, *folder.parents)]
    bits = _count_bits(quant or parse_quant(model))

    def distance(path: str) -> tuple[int, bool, int]:
        is_other = not quant or f"-{quant}.".upper() not in path.upper()
        return -len(PurePosixPath(path).parts), is_other, abs(_count_bits(parse_quant(path)) - bits)

    return min(_find_heads(there_are, kinds), key=distance, default=None)


def gguf_models(paths: Iterable[str]) -> list[str]:
    """Return the GGUF files that are models, of split ones the first part."""
    return [
        path
        for path in paths
        if path.lower().endswith(".gguf")
        and not _BESIDE_MODELS.search(PurePosixPath(path).stem)
        and model_parts(path)[0] == path
    ]


def gguf_heads(paths: Iterable[str], kinds: Sequence[str] = HEADS) -> list[str]:
    """Return the GGUF files that are heads of these kinds, parts of names."""
    return [
        path
        for path in paths
        if path.lower().endswith(".gguf")
        and any(kind in PurePosixPath(path).stem for kind in kinds)
        and model_parts(path) == (path,)
    ]


def model_parts(path: str) -> tuple[str, ...]:
    """Return the paths of all parts of the model that a file of a repository belongs to, the first part first."""
    folder, slash, name = path.rpartition("/")
    return tuple(f"{folder}{slash}{part.name}" for part in part_paths(Path(name)))


def parse_quant(path: str) -> str:
    """Return the quant that the name of a GGUF file ends in, such as ``Q8_0``; empty where there is none."""
    stem = PurePosixPath(path).stem
    found = _TAG.search(re.sub(r"-\d{5}-of-\d{5}$", "", stem))
    return "" if found is None else found["tag"].upper()


def _find_models(reference: HubModel, paths: Iterable[str]) -> list[str]:
    """Return the models of a repository, or where it has none the heads that are as good."""
    there_are = list(paths)
    return gguf_models(there_are) or _find_heads(there_are, reference.heads)


def _find_heads(paths: Sequence[str], kinds: Sequence[str]) -> list[str]:
    """Return the heads of the first kind of which there are any."""
    return next(filter(None, (gguf_heads(paths, (kind,)) for kind in kinds)), [])


def _count_bits(quant: str) -> int:
    found = re.search(r"\d+", quant)
    return 0 if found is None else int(found[0])


def _match_quant(reference: HubModel, models: Sequence[str]) -> list[str]:
    """Return the models that a quant, or its absence, stands for: one, none, or several that it does not tell apart."""
    # A file that may be an adapter by its name is one where there is a model beside it.
    for among in ([path for path in models if not _MAYBE_ADAPTERS.search(PurePosixPath(path).stem)], models):
        for quant in (reference.quant,) if reference.quant else _USUAL_QUANTS:
            if found := _filter_by_quant(quant, among):
                return found
        if among and not reference.quant:
            return list(among[:1])
    return []


def _filter_by_quant(quant: str, models: Sequence[str]) -> list[str]:
    pattern = re.compile(re.escape(quant) + "[.-]", re.IGNORECASE)
    found = [path for path in models if pattern.search(path)]
    exact = [path for path in found if parse_quant(path) == quant.upper()]
    return exact if len(found) > 1 and exact else found


def _find_named_file(reference: HubModel, paths: Sequence[str]) -> str:
    assert reference.file is not None
    if reference.file in paths and reference.file.lower().endswith(".gguf"):
        return model_parts(reference.file)[0]
    there_are = [path for path in paths if path.lower().endswith(".gguf")]
    choice = f"it has {_list_names(there_are)}" if there_are else "it has none"
    raise InputError(f"{reference.repo} has no GGUF file {reference.file} (`file`): {choice}")


def _add_parts(reference: HubModel, first: str, paths: Sequence[str]) -> ChosenFiles:
    parts = model_parts(first)
    missing = [part for part in parts if part not in paths]
    if missing:
        raise ModelFileError(
            f"{reference.repo} lacks {missing[0]}, a part of a model of {len(parts)} parts: choose another quant"
        )
    return ChosenFiles(parts, False)


def _folder_files(reference: HubModel, paths: Sequence[str]) -> tuple[str, ...]:
    """Return the files that a Hugging Face model is loaded from, weights last; subfolders have other formats."""
    root = [path for path in paths if "/" not in path]
    weights = [SINGLE] if SINGLE in root else [path for path in root if _SHARD.fullmatch(path)] if INDEX in root else []
    if not weights or "config.json" not in root:
        if "adapter_config.json" in root:
            raise ModelFileError(
                f"{reference.repo} is a LoRA adapter, which changes a model: merge it into that model and give the "
                "result"
            )
        raise ModelFileError(
            f"{reference.repo} has no {'safetensors' if reference.quant else 'GGUF file and no safetensors'} model "
            "that generates text: choose another repository"
        )
    others = [path for path in root if path != INDEX and any(fnmatchcase(path, kind) for kind in _FOLDER_FILES)]
    templates = [path for path in paths if path.startswith(f"{_TEMPLATES}/") and path.count("/") == 1]
    index = [INDEX] if INDEX in root and weights != [SINGLE] else []
    return (*others, *templates, *index, *weights)


def _explain_no_such_quant(reference: HubModel, models: Sequence[str], paths: Sequence[str]) -> str:
    quants = sorted({quant for quant in map(parse_quant, models) if quant})
    if quants:
        return f"{reference.repo} has no {reference.quant}: choose from {', '.join(quants)}"
    if models:
        return (
            f"{reference.repo} has no {reference.quant}: its files name no quants, so choose one (`file`): "
            f"{_list_names(models)}"
        )
    has_folder = "config.json" in paths and (SINGLE in paths or INDEX in paths)
    way_out = f"leave out :{reference.quant} for its safetensors" if has_folder else "choose another repository"
    return f"{reference.repo} has no GGUF file, of {reference.quant} or otherwise: {way_out}"


def _list_names(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - _MAX_NAMED} more" if len(paths) > _MAX_NAMED else ""
    return ", ".join(paths[:_MAX_NAMED]) + more
