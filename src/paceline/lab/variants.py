"""The variants that are compared with plain decoding: every static setting, the other policies, and ``auto``.

Sweeping more than a hundred static settings live on every workload would take days. So each workload's texts are
recorded once, every setting is replayed on them in virtual time with this machine's measured costs, and only the best
few run live. A policy other than ``auto``, which decides by itself whom to ask, is replayed with each set of drafters
and runs live with the best, so that none is held back by a drafter that its rule does not suit.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from paceline.core.errors import InputError
from paceline.lab.replaying.recording import Recording
from paceline.lab.replaying.replay import ReplayResult, replay
from paceline.planning.auto.learned import Learned
from paceline.planning.base import Policy, RoundCosts
from paceline.planning.costs.profile import CostProfile
from paceline.planning.policies.fixed import NO_SPECULATION, FixedPolicy
from paceline.planning.registry import ADAPTIVE_POLICIES, build_policy

Kind: TypeAlias = Literal["plain", "server", "static", "policy", "auto"]

STATIC: Final = "static"
"""Name of the static settings that replay finds fastest."""
AUTO: Final = "auto"
"""Name of the policy that plans by costs."""
VARIANT_NAMES: Final[tuple[str, ...]] = (STATIC, *ADAPTIVE_POLICIES)
"""Names of all variants that can be asked for."""

DRAFT_LENGTHS: Final = (1, 2, 3, 4, 5, 6, 8, 12, 16)
"""Most draft tokens of a round, of the static settings that are replayed."""
P_MINS: Final = (0.0, 0.4, 0.75)
"""Least probabilities of a draft token, of the static settings that are replayed."""
COARSE_LENGTHS: Final = (1, 2, 3, 5, 7, 12)
"""Most draft tokens of a round, where there is time for few static settings."""
COARSE_P_MINS: Final = (0.0, 0.4)
"""Least probabilities of a draft token, where there is time for few static settings."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to decode. Variants of kind ``"server"`` are run by another program, with drafters of its own."""

    name: str
    kind: Kind
    drafters: tuple[str, ...] = ()
    policy: str = "fixed"
    fixed: FixedPolicy | None = NO_SPECULATION

    def build(self, costs: RoundCosts, learned: Learned | None = None) -> Policy:
        """Return a new policy; ``auto`` starts with ``learned``."""
        costs_given = None if self.policy == "fixed" else costs
        return build_policy(self.policy, fixed=self.fixed, costs=costs_given, learned=learned)


PLAIN: Final = Variant("plain", "plain")
"""Plain decoding, run between plain runs like the other variants: it shows how much of a ratio is noise."""


SERVER_PLAIN: Final = Variant("llama-server, plain", "server")
"""A server that drafts nothing: what paceline's own plain decoding is measured against."""

SERVER_NGRAM_SETTINGS: Final[Mapping[str, tuple[str, ...]]] = {
    "ngram-simple": ("ngram-simple",),
    "ngram-simple 4/8": (
        "ngram-simple",
        *("--spec-ngram-simple-size-n", "4", "--spec-ngram-simple-size-m", "8"),
    ),
    "ngram-map-k 4/8": (
        "ngram-map-k",
        *("--spec-ngram-map-k-size-n", "4", "--spec-ngram-map-k-size-m", "8"),
    ),
    "ngram-mod": ("ngram-mod",),
    "ngram-mod 6/2-16": (
        "ngram-mod",
        *("--spec-ngram-mod-n-match", "6", "--spec-ngram-mod-n-min", "2", "--spec-ngram-mod-n-max", "16"),
    ),
    "ngram-cache": ("ngram-cache",),
}
"""Drafters of llama-server without a draft model: the name in tables, then the type and its arguments.

Its long defaults hardly ever match in a short text, so each is also run with short keys and drafts.
"""

SERVER_NGRAM_VARIANTS: Final = tuple(
    Variant(f"llama-server, {name}", "server", (name,)) for name in SERVER_NGRAM_SETTINGS
)
"""Settings of llama-server without a draft model."""
SERVER_DRAFT_VARIANTS: Final = tuple(
    Variant(
        f"llama-server, draft-max {length}" + (f", p-min {p_min:g}" if p_min else ""),
        "server",
        ("draft",),
        fixed=FixedPolicy(length, p_min=p_min),
    )
    for length in (1, 2, 3, 5, 8, 16)
    for p_min in (0.0, 0.6)
)
"""Settings of llama-server with a draft model, by the names that
:class:`~paceline.planning.policies.fixed.FixedPolicy` gives them. They are tried live: how a server drafts differs from
what is recorded here, so a replay would not find its best."""


def check_variant_names(names: Sequence[str]) -> None:
    if not names:
        raise InputError(f"no variant is named: choose from {', '.join(VARIANT_NAMES)}")
    for index, name in enumerate(names):
        if name == "plain":
            raise InputError("plain always runs, as what the others are compared with: leave it out of --variants")
        if name not in VARIANT_NAMES:
            raise InputError(f"unknown variant {name!r}: choose from {', '.join(VARIANT_NAMES)}")
        if name in names[:index]:
            raise InputError(f"variant {name!r} is named twice: name each once")


def drafter_sets(drafters: Sequence[str]) -> list[tuple[str, ...]]:
    """Return each drafter alone, and all together."""
    alone: list[tuple[str, ...]] = [(name,) for name in drafters]
    return alone if len(alone) == 1 else [*alone, tuple(drafters)]


def static_variants(drafters: Sequence[str], *, coarse: bool = False) -> Iterator[Variant]:
    """Yield the static settings that are replayed."""
    lengths, p_mins = (COARSE_LENGTHS, COARSE_P_MINS) if coarse else (DRAFT_LENGTHS, P_MINS)
    for names in drafter_sets(drafters):
        for length in lengths:
            for p_min in p_mins:
                threshold = f", p-min {p_min:g}" if p_min else ""
                name = f"draft-max {length}{threshold}, {'+'.join(names)}"
                yield Variant(name, "static", names, "fixed", FixedPolicy(length, p_min=p_min))


def server_draft_and_ngram(draft: Variant, ngram: Variant) -> Variant:
    """Return a server's setting in which both draft: where the n-grams have nothing to offer, the model does."""
    (name,) = ngram.drafters
    return dataclasses.replace(draft, name=f"{draft.name}, {name}", drafters=(name, *draft.drafters))


def policy_variants(name: str, drafters: Sequence[str]) -> Iterator[Variant]:
    """Yield a policy with the sets of drafters it is replayed with; ``auto`` always has all of them."""
    if name == AUTO:
        yield Variant(AUTO, "auto", tuple(drafters), AUTO, None)
        return
    for names in drafter_sets(drafters):
        yield Variant(f"{name}, {'+'.join(names)}", "policy", names, name, None)


@dataclass(frozen=True, slots=True)
class VariantReplay:
    """What a variant made of a workload's recordings in virtual time. ``ratio`` is the median over laps."""

    variant: Variant
    per_second: float
    ratio: float
    accept_share: float | None


Advance: TypeAlias = Callable[[], None]
"""Called after every replay; may raise to end them."""


def replay_all(
    recordings: Sequence[Recording],
    variants: Sequence[Variant],
    costs: CostProfile,
    *,
    learned: Learned | None = None,
    lap_tasks: int = 1,
    advance: Advance | None = None,
) -> list[VariantReplay]:
    """Replay every variant, each with a fresh policy; recordings follow each other in one session.

    Recordings have two tokens or more, as the first has no round. Every ``lap_tasks`` recordings are a lap; ratios are
    medians over laps, as live.
    """
    tokens = sum(len(recording.token_ids) - 1 for recording in recordings)
    plain_s = lap_seconds(recordings, replay(recordings, NO_SPECULATION, costs, drafters=[]), costs, lap_tasks)
    results = []
    for variant in variants:
        outcome = replay(recordings, variant.build(costs, learned), costs, drafters=variant.drafters)
        seconds = lap_seconds(recordings, outcome, costs, lap_tasks)
        ratio = statistics.median(before / after for before, after in zip(plain_s, seconds, strict=True))
        results.append(VariantReplay(variant, tokens / sum(seconds), ratio, outcome.accept_share))
        if advance is not None:
            advance()
    return results


def lap_seconds(
    recordings: Sequence[Recording], outcome: ReplayResult, costs: CostProfile, lap_tasks: int
) -> list[float]:
    """Return the seconds of every lap of ``lap_tasks`` recordings, sampling included."""
    seconds = []
    for recording, request in zip(recordings, outcome.requests, strict=True):
        # A walk samples one row for every emitted token, so sampling takes the same time whatever was drafted.
        sampled = len(recording.token_ids) - 1 if recording.temperature > 0 else 0
        seconds.append(request.decode_s + costs.sampling_s(sampled))
    return [sum(seconds[start : start + lap_tasks]) for start in range(0, len(seconds), lap_tasks)]


def pick_fastest(replayed: Sequence[VariantReplay], count: int) -> list[VariantReplay]:
    """Return the fastest, the fastest first; of those that did the same in every way, only the one named first."""
    different: dict[tuple[float, float | None], VariantReplay] = {}
    for each in replayed:
        different.setdefault((round(each.ratio, 9), each.accept_share), each)
    return sorted(different.values(), key=lambda each: -each.ratio)[:count]
