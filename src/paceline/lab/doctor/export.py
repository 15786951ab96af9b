"""The flags of other programs for a pair, by today's names, and what each of these programs refuses.

Every program checks a draft in a way of its own, and some say nothing where they do not use it. So each export comes
with the reasons to expect, from the models' files where these tell them.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, get_args

from paceline.core.errors import InputError, PacelineError

if TYPE_CHECKING:
    from paceline.models.description import ModelDescription
    from paceline.vocabularies.relation import VocabularyRelation

Program: TypeAlias = Literal["llama-server", "ik_llama", "vllm", "sglang", "transformers", "lmstudio"]
PROGRAMS: tuple[Program, ...] = get_args(Program)
"""Every :data:`Program`."""
ALL: Final = "all"
"""Stands for all programs."""

_DEFAULT_LENGTH: Final = 3
"""Draft tokens of a round where nothing was measured: llama-server's own default."""


@dataclass(frozen=True, slots=True)
class Pair:
    """What an export needs to know.

    Attributes:
        relation: of the vocabularies; ``None`` where these could not be compared.
        draft_max: most draft tokens of a round; ``None`` where no length was found.
        p_min: least probability of a draft token, with that length.
        has_devices: whether there is a GPU that layers could be put on.
    """

    target: ModelDescription
    draft: ModelDescription
    relation: VocabularyRelation | None
    draft_max: int | None
    p_min: float = 0.0
    has_devices: bool = False

    @property
    def length(self) -> int:
        """Draft tokens of a round."""
        return self.draft_max or _DEFAULT_LENGTH


@dataclass(frozen=True, slots=True)
class Export:
    """How one program is told of a pair.

    Attributes:
        command: what to start it with, or what to write; may have several lines.
        refuses: why it will not draft with this pair; empty where nothing is known that would keep it.
    """

    program: Program
    command: str
    refuses: tuple[str, ...]
    notes: tuple[str, ...]


def check_program(name: str) -> tuple[Program, ...]:
    """Return the programs that a name stands for."""
    if name == ALL:
        return PROGRAMS
    for program in PROGRAMS:
        if program == name:
            return (program,)
    raise InputError(f"--export {name}: choose from {', '.join((*PROGRAMS, ALL))}")


def export(program: Program, pair: Pair) -> Export:
    return _EXPORTS[program](pair)


def _llama_server(pair: Pair) -> Export:
    flags = [
        *("llama-server", "-m", str(pair.target.path), "-md", str(pair.draft.path), "--spec-type", "draft-simple"),
        *("--spec-draft-n-max", str(pair.length)),
        *(("--spec-draft-p-min", f"{pair.p_min:g}") if pair.p_min else ()),
        *(("-ngl", "all", "-ngld", "all") if pair.has_devices else ()),
    ]
    notes = [
        "--spec-type must be given: without it the draft is loaded and never used, and nothing is said",
        "leave the draft's cache as it is: -ctkd q4_0 was seen to halve acceptance (llama.cpp #15039)",
    ]
    if pair.has_devices:
        notes.append("without -ngld all the draft's layers may stay on the CPU")
    return Export("llama-server", shlex.join(flags), _gguf_reasons(pair, "llama-server"), tuple(notes))


def _ik_llama(pair: Pair) -> Export:
    spec = f"draft:n_max={pair.length}" + (f",p_min={pair.p_min:g}" if pair.p_min else "")
    flags = [
        *("llama-server", "-m", str(pair.target.path), "-md", str(pair.draft.path), "--spec-type", spec),
        *(("-ngl", "99", "-ngld", "99") if pair.has_devices else ()),
    ]
    gguf = _reasons_not_gguf(pair, "ik_llama.cpp")
    notes = ["the flags with --spec-draft- of llama.cpp are rejected"]
    if not gguf and (why := _llama_cpp_refusal(pair)) is not None:
        notes.append(f"drafts are translated as text, greedily, as {why}; --spec-replace maps control tokens")
    return Export("ik_llama", shlex.join(flags), gguf, tuple(notes))


def _vllm(pair: Pair) -> Export:
    differ = pair.relation is not None and not _has_same_tokens(pair)
    settings = f'{{"method":"draft_model","model":"{pair.draft.path}","num_speculative_tokens":{pair.length}'
    settings += ',"use_heterogeneous_vocab":true}' if differ else "}"
    reasons = list(_reasons_not_folders(pair, "vLLM"))
    notes = []
    if differ:
        notes.append("the tokens that both have are drafted alone (use_heterogeneous_vocab), and greedily")
    else:
        notes.append('"draft_sample_method":"probabilistic" samples from the draft, too')
    sizes = pair.target.vocabulary_size, pair.draft.vocabulary_size
    if not differ and None not in sizes and sizes[0] != sizes[1]:
        reasons.append(f"vocab_size is {sizes[0]} and {sizes[1]}, padding included, and must be equal")
    command = f"vllm serve {shlex.quote(str(pair.target.path))} --speculative-config {shlex.quote(settings)}"
    return Export("vllm", command, tuple(reasons), tuple(notes))


def _sglang(pair: Pair) -> Export:
    flags = [
        *("python", "-m", "sglang.launch_server", "--model-path", str(pair.target.path)),
        *("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", str(pair.draft.path)),
        *("--speculative-num-steps", str(pair.length), "--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", str(pair.length + 1)),
    ]
    reasons = list(_reasons_not_folders(pair, "SGLang"))
    if pair.relation is not None and not _has_same_tokens(pair):
        reasons.append("the vocabularies differ, and must be equal token by token, padding included")
    return Export(
        "sglang",
        shlex.join(flags),
        tuple(reasons),
        ("older versions take such a draft without a word, and write nonsense (SGLang #24051)",) if reasons else (),
    )


def _transformers(pair: Pair) -> Export:
    fits = pair.relation is None or pair.relation.fits
    tokenizers = "" if fits else ", tokenizer=tokenizer, assistant_tokenizer=draft_tokenizer"
    lines = [
        f"target = AutoModelForCausalLM.from_pretrained({_from(pair.target)})",
        f"draft = AutoModelForCausalLM.from_pretrained({_from(pair.draft)})",
        *([] if fits else [f"draft_tokenizer = AutoTokenizer.from_pretrained({_from(pair.draft)})"]),
        f"draft.generation_config.num_assistant_tokens = {pair.length}",
        'draft.generation_config.num_assistant_tokens_schedule = "constant"',
        f"draft.generation_config.assistant_confidence_threshold = {pair.p_min:g}",
        f"target.generate(**inputs, assistant_model=draft{tokenizers})",
    ]
    notes = (
        ["nothing is checked: a draft of other tokens than the tokenizer's gives slow text and no error"]
        if fits
        else []
    )
    if "gguf" in (pair.target.format, pair.draft.format):
        notes.append("weights of GGUF files are made whole again, so passes cost what the unquantised model's do")
    return Export("transformers", "\n".join(lines), (), tuple(notes))


def _lmstudio(pair: Pair) -> Export:
    command = f'model.respond(prompt, config={{"draftModel": "{pair.draft.path.stem}"}})'
    return Export(
        "lmstudio",
        command,
        _gguf_reasons(pair, "LM Studio"),
        (
            "draftModel is the key that lms ls lists; the sidebar has it under Speculative Decoding",
            "there is no draft length to set, and its own check of compatibility must pass, which is not published",
        ),
    )


_EXPORTS: Final[Mapping[Program, Callable[[Pair], Export]]] = {
    "llama-server": _llama_server,
    "ik_llama": _ik_llama,
    "vllm": _vllm,
    "sglang": _sglang,
    "transformers": _transformers,
    "lmstudio": _lmstudio,
}


def _has_same_tokens(pair: Pair) -> bool:
    """Return whether both have the same tokens, and as many."""
    relation = pair.relation
    return relation is not None and not (
        relation.num_differing or relation.num_target_only or relation.num_draft_only or relation.unshared_ids
    )


def _gguf_reasons(pair: Pair, program: str) -> tuple[str, ...]:
    reasons = _reasons_not_gguf(pair, program)
    if reasons:
        return reasons
    why = _llama_cpp_refusal(pair)
    return (
        () if why is None else (f"{why} (llama.cpp's own check; llama-server serves all the same, and drafts nothing)",)
    )


def _llama_cpp_refusal(pair: Pair) -> str | None:
    try:
        from paceline.engines.llama_cpp.draft_check import explain_refusal
    except PacelineError:
        # Without llama.cpp its check cannot be made.
        return None
    return explain_refusal(Path(pair.target.path), Path(pair.draft.path))


def _reasons_not_gguf(pair: Pair, program: str) -> tuple[str, ...]:
    return tuple(
        f"{program} runs GGUF files, and the {role} is a Hugging Face folder: convert it with paceline convert"
        for role, what in (("target", pair.target), ("draft", pair.draft))
        if what.format != "gguf"
    )


def _reasons_not_folders(pair: Pair, program: str) -> tuple[str, ...]:
    return tuple(
        f"{program} is given Hugging Face models, and the {role} is a GGUF file: name the model that it was made of"
        for role, what in (("target", pair.target), ("draft", pair.draft))
        if what.format == "gguf"
    )


def _from(what: ModelDescription) -> str:
    if what.format == "gguf":
        return f"{str(what.path.parent)!r}, gguf_file={what.path.name!r}"
    return repr(str(what.path))
