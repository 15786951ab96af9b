"""The model behind a server: loaded while the server answers already, and what is known of the model then.

::

    loading ──> ready ──nobody asks──> asleep ──the next request──> ready
       └─> failed
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from paceline.api import Model
from paceline.chat.params import ChatParams
from paceline.chat.template import ChatTemplate
from paceline.chat.tool_calls.base import ToolCallFormat
from paceline.chat.tool_calls.response_template import find_call_format
from paceline.core.errors import ClosedError, PacelineError
from paceline.core.vocabulary import Vocabulary
from paceline.embedder import Embedder
from paceline.models.description import ModelDescription
from paceline.options import GenerateOptions
from paceline.serving.errors import HostState, NotFoundError, NotReadyError
from paceline.serving.work import in_own_thread

_log = logging.getLogger(__name__)

BUILD: Final = "b1-paceline"
"""``system_fingerprint`` of answers. It begins with ``b`` and a number, which clients of llama-server look for."""


class _Named:
    """What clients know a model by: ``names`` are in alphabetical order, and the first is the one that answers have."""

    __slots__ = ()
    names: tuple[str, ...]

    @property
    def id(self) -> str:
        return self.names[0]


@dataclass(frozen=True, slots=True)
class ServedModel(_Named):
    """A model and how requests are answered where they do not say it.

    Attributes:
        about: what the file says of the model, if there is one.
        policy: the name of what decides how much is drafted.
        template: of conversations; ``None`` of a model that cannot chat.
        options: of a request that says nothing else.
        chat: how conversations are written where a request says nothing else.
        seed: shown as the default seed; ``None`` where each request draws one.
    """

    model: Model
    about: ModelDescription | None
    names: tuple[str, ...]
    policy: str = "auto"
    template: ChatTemplate | None = None
    tags: tuple[str, ...] = ()
    options: GenerateOptions = field(default_factory=lambda: GenerateOptions())
    chat: ChatParams = field(default_factory=lambda: ChatParams(forget=False))
    seed: int | None = None

    @property
    def call_format(self) -> ToolCallFormat | None:
        """How the model writes calls of tools; ``None`` where that is not known."""
        return None if self.template is None else find_call_format(self.template)

    @property
    def context_length(self) -> int:
        """Tokens of prompt and answer together, of one request."""
        return self.model.target.capabilities.context_length

    @property
    def max_running(self) -> int:
        """Most requests that are answered at once."""
        return self.model.target.capabilities.max_sequences

    @property
    def drafters(self) -> tuple[str, ...]:
        """Names of what drafts."""
        return self.model.drafter_names

    @property
    def vocabulary(self) -> Vocabulary:
        return self.model.target.vocabulary

    def close(self) -> None:
        """End what runs and free the model."""
        self.model.close()


@dataclass(frozen=True, slots=True)
class ServedEmbedder(_Named):
    """A model that turns texts into vectors or scores, one pass at a time."""

    embedder: Embedder
    about: ModelDescription | None
    names: tuple[str, ...]
    tags: tuple[str, ...] = ()

    @property
    def context_length(self) -> int:
        """Most tokens of a text."""
        return self.embedder.engine.context_length

    @property
    def max_running(self) -> int:
        """Most requests that are answered at once."""
        return 1

    @property
    def vocabulary(self) -> Vocabulary:
        return self.embedder.engine.vocabulary

    def close(self) -> None:
        """Free the model, once no pass is under way."""
        self.embedder.close()


Served: TypeAlias = ServedModel | ServedEmbedder
"""What a server may have."""


def model_facts(served: Served) -> Mapping[str, Any]:
    """Return what llama-server's ``/v1/models`` says of a model's file."""
    about, vocabulary = served.about, served.vocabulary
    return {
        "vocab_type": {"spm": 1, "bpe": 2, "wpm": 3, "ugm": 4}.get(vocabulary.kind, 0),
        "n_vocab": vocabulary.size,
        "n_ctx": served.context_length,
        "n_ctx_train": (about.context_length if about is not None else None) or served.context_length,
        "n_embd": (about.width if about is not None else None) or 0,
        "n_params": (about.num_parameters if about is not None else None) or 0,
        "size": about.num_bytes if about is not None else 0,
        "ftype": (about.file_type if about is not None else None) or "",
    }


class ModelHost:
    """Loads a model in the background, and gives it to whoever asks once it is there.

    All of it belongs to the event loop, but for ``load``: it is called in a thread of its own, told how to report a
    share of the work, and may raise.

    Attributes:
        started_s: when the server began, in seconds since 1970.
        share: of the measuring that is done, while that takes place.
        error: by which loading ended.
        asleep: what there is to tell of a model that was freed until somebody asks; ``None`` where there is one, or
            never was.
    """

    def __init__(
        self,
        load: Callable[[Callable[[float], None]], Served],
        *,
        on_ready: Callable[[Served], object] | None = None,
        on_sleep: Callable[[], object] | None = None,
    ) -> None:
        self._load = load
        self._on_ready = on_ready
        self._on_sleep = on_sleep
        self._served: Served | None = None
        self._given_up = False
        self.state: HostState = "loading"
        self.started_s = time.time()
        self.share: float | None = None
        self.error: PacelineError | None = None
        self.asleep: Mapping[str, Any] | None = None
        self._turning = asyncio.Lock()
        self._waking: asyncio.Task[None] | None = None

    @property
    def loaded(self) -> Served:
        """What there is; a :class:`NotReadyError` where it is not loaded yet, or not any more."""
        if self._served is None or self.state != "ready":
            raise NotReadyError(self.state, self.share)
        return self._served

    @property
    def served(self) -> ServedModel:
        """The model that writes; a :class:`NotFoundError` where what there is writes nothing."""
        if isinstance(self.loaded, ServedEmbedder):
            does, use = "scores documents", "/v1/rerank"
            if self.loaded.embedder.engine.pooling != "rank":
                does, use = "turns texts into vectors", "/v1/embeddings"
            raise NotFoundError(f"this server does not support answers: {self.loaded.id} {does}; use {use}")
        return self.loaded

    @property
    def embedder(self) -> ServedEmbedder:
        """What turns texts into vectors; a :class:`NotFoundError` where what there is writes texts."""
        if isinstance(self.loaded, ServedModel):
            raise NotFoundError(
                f"this server does not support embeddings and reranking: {self.loaded.id} writes texts; start one with "
                "`embedding=True`, or with a model that was made for it"
            )
        return self.loaded

    async def load(self) -> None:
        """Load the model. An error of ours is kept; others are raised."""
        try:
            served = await in_own_thread(lambda: self._load(self._report))
        except PacelineError as error:
            if not self._given_up:
                self.state, self.error = "failed", error
            return
        if self._given_up:
            await in_own_thread(served.close)
            return
        self._served, self.asleep = served, None
        self.state = "ready"
        if self._on_ready is not None:
            self._on_ready(served)

    def check(self) -> None:
        """Raise a :class:`NotReadyError` where there is no model, and none to be had again."""
        if self.asleep is None or self.state == "closing":
            _ = self.loaded

    async def sleep(self, told: Mapping[str, Any]) -> None:
        """Free the model until :meth:`wake`; nothing may run. Meanwhile there is this to tell of it."""
        async with self._turning:
            if self.state != "ready" or self._served is None:
                return
            self.asleep = told
            served, self._served = self._served, None
            if self._on_sleep is not None:
                self._on_sleep()
            await in_own_thread(served.close)

    async def wake(self) -> None:
        """Load a model that sleeps again; a :class:`NotReadyError` where that fails."""
        if self._waking is None or self._waking.done():
            self._waking = asyncio.create_task(self._wake())
        # Others wait for it too.
        await asyncio.shield(self._waking)

    async def _wake(self) -> None:
        async with self._turning:
            if self.asleep is not None and not self._given_up:
                await self.load()
                if self.state == "failed":
                    _log.error("the model could not be loaded again: %s", self.error)
                    # Whoever asks next has it tried once more.
                    self.state, self.error = "ready", None
                    raise NotReadyError("failed")
        _ = self.loaded

    def stop_taking(self) -> None:
        """Take no more requests; those under way go on."""
        self._given_up = True
        if self.state != "failed":
            self.state = "closing"

    async def close(self) -> None:
        """End what still runs and free the model."""
        self.stop_taking()
        async with self._turning:
            if self._served is not None:
                await in_own_thread(self._served.close)

    def _report(self, share: float) -> None:
        if self._given_up:
            # No KeyboardInterrupt, which would end the event loop wherever it is.
            raise ClosedError("the server stopped before its model was loaded")
        self.share = share
