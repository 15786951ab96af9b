"""Every exception paceline raises on purpose, and its one warning.

::

    PacelineError
    ├── InputError                   what the caller gave cannot be used; the message says the way out
    │   ├── ModelFileError           missing, truncated, of another format, or refused by the engine
    │   ├── VocabularyMismatchError  target and draft do not share their token ids
    │   ├── ContextLengthError       more tokens than the context holds
    │   ├── SamplingError            a sampling value outside its range, or a combination that would not be lossless
    │   ├── ConstraintError          a grammar or schema that cannot be used, or that an answer cannot keep to
    │   └── CapabilityError          the engine or the installation cannot do what was asked
    ├── EngineError                  the engine failed although the input was fine
    │   └── NoRoomError              the cache has no free cells for this pass; nothing was changed
    ├── ClosedError                  used after ``close()``
    ├── BusyError                    used from within one of its own rounds
    └── QueueFullError               too many requests wait already

Messages are one line: the value, the limit, the way out. They call an option what it is called in Python, in
backticks: `temperature`, `DraftOptions.context_length`, `speculate=False`. The command line says its flag instead,
and the server the field of a request (:func:`paceline.core.fields.rename_options`). The command line prints an
``InputError`` as that line and exits with status 2.

What does not keep a model from being used, but means another text than one may expect, is a :class:`ModelWarning`: by
Python's ``warnings``, which filter it, print it once or make it an error. The command line prints it as one line.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class PacelineError(Exception):
    """Base of every error paceline raises on purpose."""


class InputError(PacelineError):
    """What the caller gave cannot be used; the message says the way out.

    Attributes:
        field: the option or argument at fault, as Python calls it, such as ``temperature``; ``None`` where it is not
            one alone. A server calls it what the request does.
    """

    def __init__(self, message: str = "", *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


@contextlib.contextmanager
def blame(field: str) -> Iterator[None]:
    """Have errors of a block or a function name this option, where they name none."""
    try:
        yield
    except InputError as error:
        error.field = error.field or field
        raise


class ModelFileError(InputError):
    """A model file is missing, truncated, of another format, or refused by the engine."""


class VocabularyMismatchError(InputError):
    """Target and draft do not share their token ids."""


class ContextLengthError(InputError):
    """More tokens than the context holds.

    Attributes:
        num_tokens: of the prompt; ``None`` where it is not a prompt that is too long.
        is_least: whether the prompt has that many at least, as its bytes tell.
        context_length: tokens that the context holds; ``None`` where it is not a prompt that is too long.
    """

    num_tokens: int | None = None
    is_least = False
    context_length: int | None = None

    @classmethod
    def of_prompt(
        cls, num_tokens: int, context_length: int, *, is_least: bool = False, trained: int | None = None
    ) -> ContextLengthError:
        """Return the error of a prompt that leaves no room in the context for a token of answer.

        ``trained`` is the most that the model was made for, where that is known.
        """
        way_out = longer_context(context_length, trained, "raise the context length (`context_length`)")
        return cls(
            f"the prompt has {'at least ' if is_least else ''}{num_tokens} tokens and the context holds "
            f"{context_length}, answer included: shorten the prompt or {way_out}"
        ).with_lengths(num_tokens, context_length, is_least=is_least)

    def with_lengths(self, num_tokens: int, context_length: int, *, is_least: bool = False) -> ContextLengthError:
        """Note how long the prompt and the context are, and return the error."""
        self.num_tokens, self.context_length, self.is_least = num_tokens, context_length, is_least
        return self


def longer_context(context_length: int, trained: int | None, way_out: str) -> str:
    """Return the way out of a context that is too short: another one where it is all that the model was made for."""
    if trained is None or context_length < trained:
        return way_out
    return f"take a model made for longer texts: this one was made for {trained} tokens"


class SamplingError(InputError):
    """A sampling value outside its range, or a combination that would not be lossless."""


class ConstraintError(InputError):
    """A grammar or schema that cannot be used, or that an answer cannot keep to."""


class CapabilityError(InputError):
    """The engine, or this installation, cannot do what was asked."""


class EngineError(PacelineError):
    """The engine failed although the input was fine."""


class NoRoomError(EngineError):
    """The cache has no free cells for this pass; nothing was changed, so a smaller pass may be tried."""


class ClosedError(PacelineError):
    """An engine, sequence or session was used after it was closed."""


class BusyError(PacelineError):
    """A model was asked for a round, a request or its end from within one of its own rounds."""


class QueueFullError(PacelineError):
    """Too many requests wait already; the same one may be taken later."""


class ModelWarning(UserWarning):
    """A model is used, but its text may be another than one expects; the message says why, and the way out."""
