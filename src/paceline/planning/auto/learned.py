"""What is known of each drafter over all requests, and how the next process that has it starts from there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from paceline.core.errors import InputError
from paceline.planning.auto.gains import Gains
from paceline.planning.auto.survival import AcceptanceForecast, Chances
from paceline.planning.base import Prior
from paceline.planning.disk_cache import PairKey, load_entry, store_entry

LEARNED_VERSION: Final = 3
"""Raised whenever something else is learned or it means something else, so that what was kept before is left."""

_FORMAT: Final = "paceline-learned"

_FORECAST_MEMORY: Final = 400.0

_READ_TOKEN_S: Final = 2e-6
"""Seconds that a token of a prompt takes a drafter without a model, before one was read."""


@dataclass(slots=True)
class DrafterState:
    """What is known of one drafter, over all requests.

    Attributes:
        is_model: whether asking costs passes that were measured, one a level.
        chances: how likely its proposals are to be right.
        forecast: how likely its next proposals are to be right, before they are made.
        ask_s: seconds that asking it for one request takes, its prompt read; 0 for a model, whose passes are known.
        read_token_s: seconds that reading a token of a prompt takes it; of no account for a model.
        last_asked: requests it was asked for when it was last considered.
        paid: whether a model's reading of the prompt paid, the latest time that it took long because it was to.
        gains: of all requests.
    """

    is_model: bool
    chances: Chances
    forecast: AcceptanceForecast = field(default_factory=lambda: AcceptanceForecast(_FORECAST_MEMORY))
    ask_s: float = 0.0
    read_token_s: float = _READ_TOKEN_S
    last_asked: int = 0
    paid: bool = True
    gains: Gains = field(default_factory=Gains)

    @classmethod
    def new(cls, name: str, *, is_model: bool, says_margins: bool | None = None) -> DrafterState:
        """Return what is believed of a drafter that was never met; models say margins unless it is said otherwise."""
        return cls(is_model, Chances.of(name, says_margins=is_model if says_margins is None else says_margins))

    @property
    def says_margins(self) -> bool:
        """Whether its evidence is that of a model, with measured passes or without."""
        return self.chances.siblings is not None

    def to_json(self) -> dict[str, Any]:
        siblings = self.chances.siblings
        return {
            "is_model": self.is_model,
            "first": self.chances.first.to_json(),
            "siblings": None if siblings is None else siblings.to_json(),
            "outlook": self.forecast.to_json(),
            "gains": self.gains.to_json(),
            "ask_s": self.ask_s,
            "read_token_s": self.read_token_s,
            "paid": self.paid,
        }

    @classmethod
    def from_json(cls, name: str, data: Any) -> DrafterState:
        """Return the state of a drafter that :meth:`to_json` gave; one of several errors where it is none."""
        is_model, paid = data["is_model"], data["paid"]
        if not (isinstance(is_model, bool) and isinstance(paid, bool)):
            raise ValueError(f"is_model {is_model} and paid {paid} are true or false")
        state = cls.new(name, is_model=is_model, says_margins=data["siblings"] is not None)
        state.chances.first.resume(data["first"])
        if state.chances.siblings is not None:
            state.chances.siblings.resume(data["siblings"])
        state.forecast.resume(data["outlook"])
        state.gains = Gains.from_json(data["gains"])
        for seconds in (data["ask_s"], data["read_token_s"]):
            if not 0 <= seconds < math.inf:
                raise ValueError(f"{seconds} seconds: at least 0")
        state.ask_s, state.read_token_s, state.paid = float(data["ask_s"]), float(data["read_token_s"]), paid
        return state


@dataclass(frozen=True, slots=True)
class Learned:
    """What a policy has learned of its drafters, for another one to start with.

    It holds of one target, with one draft model, on one machine: how often they agree, and what that is worth there.
    Nothing of any text is in it.
    """

    drafters: Mapping[str, DrafterState]

    def to_json(self) -> dict[str, Any]:
        drafters = {name: drafter.to_json() for name, drafter in self.drafters.items()}
        return {"format": _FORMAT, "version": LEARNED_VERSION, "drafters": drafters}

    @classmethod
    def from_json(cls, data: Any) -> Learned:
        """Return what :meth:`to_json` gave.

        Raises:
            InputError: it is something else, of another version, or its figures make no sense.
        """
        try:
            if (data["format"], data["version"]) != (_FORMAT, LEARNED_VERSION):
                raise InputError(f"what was learned is not of version {LEARNED_VERSION}, which alone can be read")
            drafters = {str(name): drafter for name, drafter in data["drafters"].items()}
            return cls({name: DrafterState.from_json(name, drafter) for name, drafter in drafters.items()})
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise InputError(f"this is nothing that was learned: {error}") from None


def load_learned(key: PairKey) -> Learned | None:
    """Return what is kept of a pair of models; ``None`` if there is nothing that can be trusted."""
    return load_entry("learned", key, Learned.from_json)


def store_learned(key: PairKey, learned: Prior) -> None:
    """Keep what was learned of a pair of models, in place of what is there, if it can be written."""
    store_entry("learned", key, learned.to_json())
