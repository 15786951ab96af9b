"""The options, as the environment and the command line set them.

These are fields made by ``setting()`` (:mod:`paceline.core.fields`), of the dataclasses::

    SamplingParams, StopRules, SpeculationParams, CacheParams, LogprobParams     of a request
    ModelOptions, DraftOptions, HubOptions                                       of the models
    ChatParams                                                                   of conversations
    ServerOptions                                                                of a server

Every option can be set by the environment: ``PACELINE_`` and the field's name, ``PACELINE_DRAFT_`` for a draft model's.
The command line goes before it. Only :func:`from_environment` reads these variables, so a program that uses the library
is changed by none of them unless it asks.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from paceline.chat.params import ChatParams
from paceline.core.errors import InputError
from paceline.core.fields import Field, fields_of, read_text
from paceline.core.numbers import shown
from paceline.engines.options import DraftOptions, ModelOptions, own_context
from paceline.models.hub.reference import HubModel, HubOptions
from paceline.options import REQUEST_PARTS, GenerateOptions, make_part
from paceline.server_options import ServerOptions

_PREFIX: Final = "PACELINE_"
_DRAFT_PREFIX: Final = "PACELINE_DRAFT_"


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """The models that were named from outside, and how they run.

    Attributes:
        target: what the target was called, or where the hub has it; ``None`` where none was named.
        settings: how the target runs, but for its path and ``whole_context``.
        whole_context: whether the target gets all the context that it was made for.
        draft: what the draft model was called, and how it runs.
        hub_draft: where the hub has the draft model, where that was named instead.
    """

    target: str | Path | HubModel | None
    settings: ModelOptions
    whole_context: bool
    draft: DraftOptions
    hub_draft: HubModel | None = None

    @classmethod
    def of(
        cls, target: Mapping[str, Any], draft: Mapping[str, Any], hub: Mapping[str, Any] | None = None
    ) -> ModelChoice:
        """Return the choice that values make.

        Args:
            target: by the fields of :class:`ModelOptions`; a ``context_length`` of 0 is all that the model was made
                for.
            draft: by the fields of :class:`DraftOptions`.
            hub: by the fields of :class:`~paceline.models.hub.reference.HubOptions`.

        Raises:
            InputError: a value cannot be used, or a model is named in two ways.
        """
        given = dict(target)
        path = given.pop("path", None)
        of_hub = HubOptions(**(hub or {}))
        hub_target, hub_draft = of_hub.target(), of_hub.draft()
        for flag, what, variable, is_both in (
            ("", "target", _PREFIX, path is not None and hub_target is not None),
            ("d", "draft model", _DRAFT_PREFIX, draft.get("path") is not None and hub_draft is not None),
        ):
            if is_both:
                raise InputError(
                    f"-m{flag} and -hf{flag} both name the {what}: leave out one, or unset {variable}MODEL or "
                    f"{variable}HF_REPO"
                )
        whole_context = given.get("context_length") == 0
        if whole_context:
            del given["context_length"]
        named = path if hub_target is None else hub_target
        return cls(named, ModelOptions("", **given), whole_context, DraftOptions(**draft), hub_draft)

    @property
    def named_draft(self) -> str | Path | HubModel | None:
        """What the draft model was called, or where the hub has it; ``None`` where none was named."""
        return self.draft.path if self.hub_draft is None else self.hub_draft

    def target_options(self, path: str | Path) -> ModelOptions:
        """Return how to run the target.

        Args:
            path: where the target is.

        Raises:
            InputError: all of the model's own context is asked for, and the model does not say how much that is.
            ModelFileError: all of the model's own context is asked for, and the model cannot be read.
        """
        length = own_context(path, "`context_length`") if self.whole_context else self.settings.context_length
        return dataclasses.replace(self.settings, path=path, context_length=length)

    def draft_options(self, target: ModelOptions, path: str | Path) -> ModelOptions:
        """Return how to run the draft model beside a target; raises as :meth:`DraftOptions.beside` does."""
        return dataclasses.replace(self.draft, path=path).beside(target)


@dataclass(frozen=True, slots=True)
class Environment:
    """What the environment sets, each value checked by itself.

    Attributes:
        request: options of a call, for ``model.generate(prompt, **environment.request)``.
        target: by the fields of :class:`ModelOptions`; a ``context_length`` of 0 is all that the model was made for.
        draft: by the fields of :class:`DraftOptions`.
        hub: by the fields of :class:`~paceline.models.hub.reference.HubOptions`.
        chat: how conversations are written, for ``model.chat(messages, chat=environment.chat)``.
        server: by the fields of :class:`~paceline.server_options.ServerOptions`.
    """

    request: GenerateOptions
    target: Mapping[str, Any]
    draft: Mapping[str, Any]
    hub: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    chat: ChatParams = dataclasses.field(default_factory=ChatParams)
    server: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def models(self) -> ModelChoice:
        """The models that are named there, and how they run; :func:`paceline.from_hub` fetches those of the hub."""
        return ModelChoice.of(self.target, self.draft, self.hub)


def from_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Return what the variables of the table say. An empty one counts as not set.

    The command line calls this; :func:`paceline.load` and :meth:`paceline.Model.generate` do not.

    Args:
        variables: by name; ``None`` for those of this process.

    Raises:
        InputError: a value cannot be used; the message names the variable.
    """
    variables = os.environ if variables is None else variables
    request = {}
    for part in REQUEST_PARTS:
        request.update(_read(variables, part, _PREFIX, functools.partial(make_part, part)))
    target = _read(variables, ModelOptions, _PREFIX, lambda given: ModelChoice.of(given, {}))
    draft = _read(variables, DraftOptions, _DRAFT_PREFIX, lambda given: ModelChoice.of({}, given))
    hub = _read(variables, HubOptions, _PREFIX, lambda given: ModelChoice.of({}, {}, given))
    chat = _read(variables, ChatParams, _PREFIX, lambda given: ChatParams(**given))
    server = _read(variables, ServerOptions, _PREFIX, lambda given: ServerOptions(**given))
    return Environment(cast("GenerateOptions", request), target, draft, hub, ChatParams(**chat), server)


def variables_of_the_table() -> dict[str, Field]:
    found: dict[str, Field] = {}
    for part in (*REQUEST_PARTS, ModelOptions, HubOptions, ChatParams, ServerOptions):
        found.update(_variables(part, _PREFIX))
    found.update(_variables(DraftOptions, _DRAFT_PREFIX))
    return found


def _variables(part: type, prefix: str) -> dict[str, Field]:
    return {
        prefix + (field.option.variable or field.name.upper()): field
        for field in fields_of(part)
        if field.option.variable is not None
    }


def _read(
    variables: Mapping[str, str], part: type, prefix: str, check: Callable[[Mapping[str, Any]], object]
) -> dict[str, Any]:
    """Read the variables of one dataclass; each value is checked by building it with that value alone."""
    given: dict[str, Any] = {}
    for name, field in _variables(part, prefix).items():
        text = variables.get(name, "")
        if not text:
            continue
        try:
            value = read_text(field, text)
            check({field.name: value})
        except InputError as error:
            raise InputError(f"{name} is {shown(text)}: {error}, or unset it") from None
        given[field.name] = value
    return given
