"""A draft of another vocabulary: how many tokens are accepted, beside token-level intersection.

What limits the figure is how alike the two models are, and how their tokens line up. The target writes its own answers
plainly; at every third token of them both ways of drafting are asked for four tokens, which are compared with what the
target went on to say with the same noise. So no figure depends on this machine. What acceptance gains in time,
``paceline bench -m TARGET -md DRAFT`` measures.

Token-level intersection (arXiv 2502.05202) reads the text token by token in ids of its own, and proposes only tokens
that are spelled alike in both vocabularies. Here its proposals are chosen with the target's noise, too.

Standard errors are of texts, not of places: those of one text are alike.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import numpy as np
import typer

import paceline
from benchmarks.reporting import as_line
from paceline.core.arrays import Float64Array
from paceline.core.divergence import first_difference
from paceline.core.errors import InputError
from paceline.core.params import SamplingParams, StopRules
from paceline.core.request import Request
from paceline.core.tree import Evidence
from paceline.core.vocabulary import Vocabulary
from paceline.drafters.base import Commit, Drafter, DraftJob
from paceline.drafters.following import Follower, FollowingDrafter, Rows
from paceline.drafters.rows import read_row
from paceline.drafters.translated import TranslatedDrafter
from paceline.engines.base import Engine
from paceline.engines.loading import open_engine
from paceline.engines.options import DraftOptions, ModelOptions
from paceline.lab.comparison import answer, explain
from paceline.lab.replaying.recorder import record_answer
from paceline.models.embedded import HELDOUT_KINDS, heldout
from paceline.models.registry import resolve_model
from paceline.options import GenerateOptions
from paceline.planning.policies.fixed import FixedPolicy
from paceline.vocabularies.mapping import TokenMapping, check_translation

EPILOG = """[bold]Examples[/bold]

python -m benchmarks translation target.gguf draft.gguf
"""

DEPTH: Final = 4
"""Tokens asked for at each place."""

STRIDE: Final = 3
"""Tokens from one place to the next."""

_PROMPT_CHARACTERS: Final = 500
_RESAMPLES: Final = 2000
_CONTEXT: Final = 1024


class IntersectionDrafter(FollowingDrafter[Follower]):
    """Token-level intersection: proposes tokens that are spelled alike in both vocabularies, and no others."""

    def __init__(self, engine: Engine, mapping: TokenMapping) -> None:
        super().__init__(engine, end_ids=mapping.target.vocabulary.end_ids)
        self._mapping = mapping
        self._read: dict[int, int] = {}
        target, draft = mapping.target.vocabulary, mapping.draft.vocabulary
        pairs = [
            (draft_id, token_ids[0])
            for draft_id in range(draft.size)
            if (piece := draft.token_bytes(draft_id))
            and len(token_ids := mapping.target_tokens(draft_id)) == 1
            and target.token_bytes(token_ids[0]) == piece
        ]
        self._draft_ids = np.array([draft_id for draft_id, _ in pairs])
        self._target_ids = np.array([target_id for _, target_id in pairs])
        self._own = {target_id: draft_id for draft_id, target_id in pairs}

    def begin(self, request: Request) -> None:
        super().begin(request)
        self._read[request.id] = 0

    def _follow(self, request: Request) -> Follower:
        return Follower(list(self._mapping.draft.opening_ids))

    def _catch_up_text(self, follower: Follower, request: Request) -> bool:
        for token_id in request.token_ids[self._read[request.id] :]:
            own = self._own.get(token_id, self._mapping.control_id(token_id))
            piece = self._mapping.target.vocabulary.token_bytes(token_id)
            follower.text += [own] if own is not None else self._mapping.draft.continuation(piece) or []
        self._read[request.id] = len(request.token_ids)
        return len(follower.text) > 0

    def _num_kept(self, follower: Follower, commit: Commit) -> int:
        return 0

    def _propose(self, job: DraftJob, follower: Follower, rows: Rows) -> bool:
        row = self._mapping.gather(self._draft_ids, self._target_ids, rows.last[self._draft_ids])
        proposals, _ = read_row(job, follower.frontier, row.logits)
        if not proposals:
            return False
        follower.frontier = job.tree.add(follower.frontier, proposals[0].token_id, self.name, Evidence())
        follower.drafted = row.likeliest(proposals[0].token_id)
        return True


@dataclass(frozen=True, slots=True)
class Text:
    kind: str
    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    params: SamplingParams


@dataclass(slots=True)
class Acceptance:
    """How many tokens of a draft were right, text by text.

    Attributes:
        places: asked at, by text.
        accepted: tokens accepted at them.
        first: of these, first tokens.
    """

    places: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    first: list[int] = field(default_factory=list)


def translation(
    target: Annotated[str, typer.Argument(help="A GGUF file, a folder or a name.", metavar="TARGET")],
    draft: Annotated[str, typer.Argument(help="A model with another vocabulary.", metavar="DRAFT")],
    texts: Annotated[int, typer.Option("--texts", help="Texts of each kind.")] = 7,
    tokens: Annotated[int, typer.Option("-n", "--tokens", help="Tokens of each answer.")] = 72,
    temps: Annotated[str, typer.Option("--temps", help="Temperatures, parted by commas.")] = "0,0.8",
    compared: Annotated[
        int, typer.Option("--compared", help="Of each kind, texts that are written with drafts too.")
    ] = 2,
    exact: Annotated[
        bool, typer.Option("--exact", help="Compare them to the last bit, if TARGET's weights can.")
    ] = False,
    threads: Annotated[int | None, typer.Option("-t", "--threads", help="CPU threads.")] = None,
) -> None:
    """Measure how many tokens of a draft with another vocabulary are accepted."""
    if texts < 1 or tokens <= DEPTH:
        raise InputError(f"{texts} texts of {tokens} tokens: the least is 1 text, and {DEPTH + 1} tokens")
    temperatures = [_temperature(word) for word in temps.split(",")]
    models = [
        ModelOptions(resolve_model(name), context_length=_CONTEXT, threads=threads, model_defaults=False)
        for name in (target, draft)
    ]
    models[0] = dataclasses.replace(models[0], exact=exact)
    prompts = [(kind, text[:_PROMPT_CHARACTERS]) for kind in HELDOUT_KINDS for text in heldout(kind)[:texts]]
    figures: dict[str, Any] = {}
    for temperature in temperatures:
        answers, verdicts = _answers(models, prompts, tokens, temperature, compared)
        figures[f"temperature {temperature:g}"] = {**_accepted(models, answers), "texts": verdicts}
    print(as_line("translation", figures))


def _temperature(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise InputError(f"--temps {word!r} is no temperature: give numbers, such as 0,0.8") from None


def _answers(
    models: Sequence[ModelOptions],
    prompts: Sequence[tuple[str, str]],
    tokens: int,
    temperature: float,
    compared: int,
) -> tuple[list[Text], dict[str, int]]:
    """Return the target's plain answers, and how many of those compared came out the same with the translated draft."""
    target, draft = models
    found: list[Text] = []
    verdicts: Counter[str] = Counter()
    with paceline.load(target, draft=_draft_of(draft), policy=FixedPolicy(DEPTH), drafters=["draft"]) as model:
        for seed, (kind, prompt) in enumerate(prompts):
            options = _options(tokens, temperature, seed)
            plain = answer(model, prompt, options, speculate=False)
            if sum(text.kind == kind for text in found) < compared:
                spoken = answer(model, prompt, options, speculate=True)
                divergence = explain(model, prompt, options, plain, spoken)
                verdicts["equal" if divergence is None else divergence.verdict] += 1
            prompt_ids = model.worker.call(functools.partial(model.target.vocabulary.tokenize, prompt))
            found.append(Text(kind, prompt_ids, plain.token_ids, SamplingParams(temperature=temperature, seed=seed)))
    shown = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
    print(f"temperature {temperature:g}: {verdicts.total()} texts with and without drafts: {shown}", flush=True)
    return found, dict(verdicts)


def _draft_of(draft: ModelOptions) -> DraftOptions:
    return DraftOptions(draft.path, vocab="translate")


def _options(tokens: int, temperature: float, seed: int) -> GenerateOptions:
    return {"max_tokens": tokens, "temperature": temperature, "seed": seed, "ignore_end": True}


def _accepted(models: Sequence[ModelOptions], texts: Sequence[Text]) -> dict[str, Any]:
    """Ask both ways of drafting at every place of the texts; print and return what was right."""
    target = open_engine(models[0])
    figures: dict[str, Any] = {}
    found: dict[str, list[Acceptance]] = {}
    ways: dict[str, Callable[[Engine, TokenMapping], Drafter]] = {
        "intersection": IntersectionDrafter,
        "translated": TranslatedDrafter,
    }
    try:
        for name, make in ways.items():
            engine = open_engine(models[1])
            mapping = TokenMapping(target.vocabulary, engine.vocabulary)
            check_translation(mapping)
            drafter = make(engine, mapping)
            try:
                found[name] = [_of_text(drafter, target.vocabulary, text) for text in texts]
                if isinstance(drafter, TranslatedDrafter):
                    figures["levels"] = dict(drafter.cases)
            finally:
                drafter.close()
    finally:
        target.close()
    kinds = [text.kind for text in texts]
    for name, of_texts in found.items():
        by_kind = {
            kind: _mean([one for one, of in zip(of_texts, kinds, strict=True) if of == kind])
            for kind in dict.fromkeys(kinds)
        }
        figures[name] = {"all": _mean(of_texts), **by_kind}
        print(
            f"  {name:13} {_shown(figures[name]['all'])}   "
            + "  ".join(f"{kind} {_shown(figure)}" for kind, figure in by_kind.items()),
            flush=True,
        )
    ratio = _ratio(found["translated"], found["intersection"])
    print(f"  translated over intersection: {ratio['ratio']:.2f} +- {ratio['error']:.2f}; {figures['levels']}")
    return {**figures, "over_intersection": ratio}


def _of_text(drafter: Drafter, vocabulary: Vocabulary, text: Text) -> Acceptance:
    """Ask for drafts at every place of one text."""
    recording = record_answer(
        [drafter],
        vocabulary,
        text.prompt_ids,
        text.token_ids,
        params=text.params,
        rules=StopRules(len(text.token_ids), ignore_end=True),
        finish_reason="length",
        depth=DEPTH,
        siblings=1,
    )
    (trace,) = recording.traces
    places = accepted = first = 0
    for start in range(1, len(text.token_ids) - DEPTH + 1, STRIDE):
        said = text.token_ids[start : start + DEPTH]
        drafted = [level.token_ids[0] for level in trace.chains[start - 1]]
        right = first_difference(said, drafted)
        count = len(said) if right is None else right
        places, accepted, first = places + 1, accepted + count, first + (count > 0)
    return Acceptance([places], [accepted], [first])


def _mean(of_texts: Sequence[Acceptance]) -> dict[str, float]:
    """Return the mean number accepted at a place, its standard error over texts, and the share of first tokens."""
    places, accepted, first = _arrays(of_texts)
    return {
        "accepted": float(accepted.sum() / places.sum()),
        "error": float(np.std([sample[1].sum() / sample[0].sum() for sample in _resampled(places, accepted)])),
        "first": float(first.sum() / places.sum()),
        "places": int(places.sum()),
        "texts": len(of_texts),
    }


def _ratio(ours: Sequence[Acceptance], theirs: Sequence[Acceptance]) -> dict[str, float]:
    _, accepted, _ = _arrays(ours)
    _, other, _ = _arrays(theirs)
    ratios = [sample[0].sum() / max(sample[1].sum(), 1) for sample in _resampled(accepted, other)]
    return {"ratio": float(accepted.sum() / max(other.sum(), 1)), "error": float(np.std(ratios))}


def _arrays(of_texts: Sequence[Acceptance]) -> tuple[Float64Array, Float64Array, Float64Array]:
    places, accepted, first = (
        np.array([sum(getattr(one, name)) for one in of_texts], dtype=np.float64)
        for name in ("places", "accepted", "first")
    )
    return places, accepted, first


def _resampled(*figures: Float64Array) -> list[tuple[Float64Array, ...]]:
    """Return the figures of texts drawn anew with replacement, the same texts of each."""
    rng = np.random.default_rng(0)
    draws = rng.integers(0, len(figures[0]), (_RESAMPLES, len(figures[0])))
    return [tuple(figure[draw] for figure in figures) for draw in draws]


def _shown(figure: dict[str, float]) -> str:
    return f"{figure['accepted']:.2f} +- {figure['error']:.2f} ({figure['first']:.0%} first)"
