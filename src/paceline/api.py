"""The Python API: load a model with its drafters, then generate or stream.

>>> import paceline
>>> with paceline.load() as model:  # the embedded pair
...     answer = model.generate("def fibonacci(n):", max_tokens=64, temperature=0)
...     print(answer.text, answer.stats.acceptance_length)
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias, Unpack

from paceline.chat.params import ChatParams
from paceline.constraints import ConstraintCompiler, Source
from paceline.conversion.own_draft import OwnDraft
from paceline.core.clock import Clock
from paceline.core.constraint import Constraint
from paceline.core.did_you_mean import no_such_option
from paceline.core.errors import CapabilityError, ClosedError, ContextLengthError, InputError, blame
from paceline.core.numbers import whole_number
from paceline.core.params import MAX_TOKENS, VERIFIER_NAMES, StopRules, VerifierName
from paceline.core.request import Request
from paceline.core.verify import Verifier
from paceline.drafters.base import Drafter
from paceline.drafters.lookup import PREDICTION
from paceline.drafters.registry import build_drafters, check_drafter_names
from paceline.engines.base import Engine, paced_draft
from paceline.engines.memory import MemoryPlan
from paceline.engines.options import DEFAULT_BRANCHES, MAX_BRANCHES, DraftOptions, LoadOptions, ModelOptions
from paceline.engines.sequence_pool import SequencePool
from paceline.model_pair import find_mtp, open_pair
from paceline.models.description import describe
from paceline.models.embedded import embedded_draft, embedded_target
from paceline.models.registry import MTP_DRAFT, resolve_model
from paceline.models.sampling_defaults import NO_DEFAULTS, SamplingDefaults, read_sampling_defaults
from paceline.notebook import loading_report
from paceline.options import GenerateOptions, RequestOptions, describe_options, read_options
from paceline.planning.auto.learned import load_learned, store_learned
from paceline.planning.base import Observer, Policy, RoundCosts
from paceline.planning.costs.attention import MAX_S as ATTENTION_S
from paceline.planning.costs.meter import FIRST_LOAD, Report
from paceline.planning.costs.profile_cache import find_or_measure
from paceline.planning.disk_cache import PairKey
from paceline.planning.registry import COST_POLICIES, build_policy, check_asked, check_policy_name
from paceline.prompts import Prompt, read_prediction, read_prompt
from paceline.runtime.loop import DecodingLoop
from paceline.runtime.loop_driver import LoopDriver
from paceline.runtime.scheduler import PrefilledPrompt
from paceline.runtime.worker import CLOSED, Worker
from paceline.streams import Generation, Stream, Submission
from paceline.vocabularies.length import most_tokens

if TYPE_CHECKING:
    from paceline.async_streams import AsyncStream
    from paceline.chat.messages import Message
    from paceline.chat.prompt_builder import ChatPromptBuilder
    from paceline.chat.prompts import ChatPrompt
    from paceline.chat.replies import AsyncReplyStream, Reply, ReplyStream

Wrap: TypeAlias = Callable[[Verifier, Sequence[int]], Verifier]
"""Makes another verifier of a request's own, given the prompt's tokens."""

Read: TypeAlias = Callable[[Sequence[int]], PrefilledPrompt]
"""Reads a prompt, given its tokens, and says where it was read."""


PROMPT_CACHE_MIB = 512
"""Host memory for what finished requests have read and said, by default."""
MIN_REUSE = 8
"""Tokens that have to be shared with what was read before, for them not to be read again."""


class Model:
    """A target with its drafters. Use it as a context manager, or call :meth:`close` to free native memory.

    Any thread and any event loop may use it; all answers that are under way share each pass of the target. It owns its
    engine and drafters, and the thread that uses them, and closes all of them.

    Args:
        target: runs the target.
        drafters: in the order they are asked.
        policy: decides how much is drafted.
        verify: how drafts are judged.
        clock: where times come from.
        target_options: what the target was opened with.
        observers: told of every round, in the engine's thread.
        pool: gives out the target's sequences; by default one that keeps none whose request is over.
        costs: what passes take, by which prompts are read in chunks beside running answers; ``None`` learns it.
        max_running: most answers under way at once; by default as many as the engine has sequences.
        max_waiting: most requests of one client that wait for their start; ``None`` for any number.
        worker: the thread in which the engines were opened; by default a new one.
        closing: called once, before anything is freed.
        defaults: how answers are sampled where a call does not say it.

    Attributes:
        target: as it was given; nothing but :attr:`worker` may have it make a pass.
        target_options: with all that was found out at load; ``None`` where it is not said.
        drafters: as they were given; for :attr:`worker` alone.
        policy: as it was given; while an answer is under way for :attr:`worker` alone.
        verify: how drafts are judged.
        defaults: as they were given; :func:`load` reads them from the target's file.
        pool: gives out the target's sequences; for :attr:`worker` alone.
        worker: the thread that owns the engines; ``model.worker.call(function)`` has it do something between rounds.
        loop: the decoding loop; for :attr:`worker` alone.
    """

    def __init__(
        self,
        target: Engine,
        drafters: Sequence[Drafter],
        policy: Policy,
        *,
        verify: VerifierName = "coupled",
        clock: Clock | None = None,
        target_options: ModelOptions | None = None,
        observers: Sequence[Observer] = (),
        pool: SequencePool | None = None,
        costs: RoundCosts | None = None,
        max_running: int | None = None,
        max_waiting: int | None = None,
        worker: Worker | None = None,
        closing: Callable[[], object] | None = None,
        defaults: SamplingDefaults = NO_DEFAULTS,
    ) -> None:
        self.target = target
        self.target_options = target_options
        self.drafters = list(drafters)
        self.policy = policy
        self.verify: VerifierName = verify
        self.defaults = defaults
        self.worker = worker or Worker()
        self.pool = pool or SequencePool(target, max_idle=0, max_saved_bytes=0)
        self.loop = DecodingLoop(
            target,
            drafters,
            policy,
            pool=self.pool,
            clock=clock,
            observers=observers,
            costs=costs,
            max_running=max_running,
            max_waiting=max_waiting,
        )
        self._driver = LoopDriver(self.worker, self.loop)
        self._closed = False
        self._closing = closing
        self._compiler = ConstraintCompiler(target.vocabulary)
        self._chat_readers: dict[str | Path | None, ChatPromptBuilder] = {}

    @property
    def drafter_names(self) -> tuple[str, ...]:
        """Names of those that may draft: of :attr:`drafters`, and of the one that a request brings its text to."""
        own = (PREDICTION,) if self.policy.speculates else ()
        return (*own, *(drafter.name for drafter in self.drafters))

    @property
    def memory_plan(self) -> MemoryPlan | None:
        """What the process's memory goes to, where layers of the target are read while they are used; else ``None``."""
        plan: MemoryPlan | None = getattr(self.target, "memory_plan", None)
        return plan

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        drafters = ", ".join(drafter.name for drafter in self.drafters) or "nothing"
        return (
            f"<Model {self.target.description}: context of {self.target.capabilities.context_length} tokens, drafts by "
            f"{drafters}{', closed' if self._closed else ''}>"
        )

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Return the tokens of a text, as :meth:`generate` reads it.

        Args:
            text: any text.
            add_special: put the model's own special tokens at the start.
            parse_special: take the spelling of a control token for that token; for text that is trusted.
        """
        return self.target.vocabulary.tokenize(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, without control tokens; bytes that are no UTF-8 become U+FFFD."""
        token_bytes = self.target.vocabulary.token_bytes
        return b"".join(map(token_bytes, token_ids)).decode("utf-8", "replace")

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Generation:
        """Return the answer to a prompt: a text or token ids, ``[num_tokens]`` or ``[1, num_tokens]``, in any sequence.

        ``speculate=False`` decodes plainly; under ``coupled`` the text is the same.

        Raises:
            InputError: the prompt or an option cannot be used.
            ClosedError: the model is closed.
            BusyError: asked for from within a round, as by a drafter or a policy.
            CapabilityError: this process was forked from the one that loaded the model.

        """
        with self.stream(prompt, **options) as stream:
            return stream.result()

    # With the options by their names, where an editor or a notebook shows it.
    generate.__doc__ = f"{generate.__doc__}{describe_options()}"

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Stream:
        """Start an answer and return it for iteration. Raises as :meth:`generate` does."""
        return self._start(prompt, self.read_options(options))

    def choices(self, prompt: Prompt, count: int, **options: Unpack[GenerateOptions]) -> list[Generation]:
        """Return several answers to one prompt.

        As many are written together as the model has sequences. The prompt is read once, but where the model keeps
        nothing of what it read (``prompt_cache_mib=0``), or cannot take tokens back.

        Args:
            prompt: as for :meth:`generate`.
            count: how many. Their ``choice`` is 0, 1 and so on, all with one seed.
            **options: as for :meth:`generate`, but for ``choice``.

        Raises:
            InputError: the prompt or an option cannot be used, ``choice`` is given, or the count is below 1.
        """
        count = whole_number(count, "the number of choices")
        if count < 1:
            raise InputError(f"{count} choices: the least is 1")
        if options.get("choice") is not None:
            raise InputError(f"choice {options['choice']} of {count} choices: leave it out, or generate that one alone")
        request = self.read_options(options)
        with ExitStack() as written:
            streams: list[Stream] = []
            for choice in range(count):
                again = streams[0].prompt_ids if streams else prompt
                streams.append(written.enter_context(self._start(again, request.replaced({"choice": choice}))))
            return [stream.result() for stream in streams]

    async def agenerate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Generation:
        """Return the answer to a prompt, without keeping the event loop; else as :meth:`generate`."""
        async with self.astream(prompt, **options) as stream:
            return await stream.result()

    def astream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> AsyncStream:
        """Start an answer and return it for ``async for``, in a running event loop.

        A text is tokenized in the engine's thread. Where it is long and other answers are under way, give token ids,
        from ``await asyncio.to_thread(model.target.vocabulary.tokenize, text)``.

        Raises:
            InputError: an option cannot be used. What is wrong with the prompt is raised by the first wait.
            ClosedError: the model is closed.
        """
        from paceline.async_streams import AsyncStream  # asyncio takes a while to import

        return AsyncStream(*self._submit(lambda: self._prompt_ids(prompt), self.read_options(options)))

    def read_options(self, options: GenerateOptions) -> RequestOptions:
        """Return what a call asks for, complete and checked; what it leaves open, the model's own defaults say.

        For servers, which read the options of a request once and answer several prompts by them, with :meth:`astart`.

        Raises:
            InputError: an option cannot be used; its ``field`` is the option's name.
        """
        constraint = options.get("constraint")
        if isinstance(constraint, Source):
            constraint = self.compile(constraint, namespace=options.get("namespace") or "")
        made: dict[str, object] = {**options, "constraint": constraint}
        if options.get("prediction") is not None:
            self._check_usable()
            most = self.target.capabilities.context_length
            made["prediction"] = read_prediction(options["prediction"], self.target.vocabulary, most)
        left_open = self.defaults.left_open(options)
        request = read_options({**made, **left_open}, verify=self.verify, drafters=self.drafter_names)
        check_asked(request.speculation, self.policy, [drafter.name for drafter in self.drafters])
        # Here, as that may take a while, and the engine's thread has answers to write.
        self.loop.breakers.find(request.params)
        return dataclasses.replace(request, model_defaults=left_open)

    def astart(self, prompt_ids: Sequence[int], request: RequestOptions) -> AsyncStream:
        """Start an answer to token ids of the model's vocabulary and return it for ``async for``, for servers.

        As :meth:`astream`, of options that :meth:`read_options` returned.

        Raises:
            ClosedError: the model is closed.
        """
        from paceline.async_streams import AsyncStream

        return AsyncStream(*self._submit(lambda: [*prompt_ids], request))

    def chat(
        self,
        messages: str | Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat: ChatParams | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Reply:
        """Return the answer to a conversation, written as the model's chat template has it.

        >>> reply = model.chat([{"role": "user", "content": "The capital of France is?"}])
        >>> print(reply.text)

        Control tokens come of the template alone: those that are spelled out in messages are plain text. Without
        ``max_tokens`` the answer may fill the context.

        Args:
            messages: of the conversation, in the form of OpenAI's API; a text is what a user says.
            tools: functions that the model may call, in the form of OpenAI's API, for templates that know them. Calls
                of them are ``reply.tool_calls``, where it is known how the model writes them.
            chat: how the conversation is written, and whether the model reasons.
            **options: as for :meth:`generate`.

        Raises:
            InputError: the messages, an option or the model's template cannot be used.
            CapabilityError: the model has no chat template, or what reads calls of tools is not installed.
            PacelineError: as :meth:`generate`.
        """
        with self.chat_stream(messages, tools=tools, chat=chat, **options) as stream:
            return stream.result()

    def chat_stream(
        self,
        messages: str | Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat: ChatParams | None = None,
        **options: Unpack[GenerateOptions],
    ) -> ReplyStream:
        """Start an answer to a conversation and return it for iteration. Takes and raises what :meth:`chat` does.

        >>> with model.chat_stream("What time is it?", tools=tools) as stream:
        ...     for part in stream:
        ...         print(part.name if part.kind == "call" else part.segment.text, end="")

        Parts are pieces of reasoning, content, calls of tools and their arguments, as :class:`ReplyStream` says.
        """
        from paceline.chat.replies import ReplyStream

        params, request = chat or ChatParams(), self._read_chat_options(options)
        prompt = self._reading_calls(messages, tools=tools, params=params, max_tokens=request.rules.max_tokens)
        return ReplyStream(prompt, self._start(prompt.token_ids, _with_needed(request, prompt.options)), params)

    def chat_prompt(
        self,
        messages: str | Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat: ChatParams | None = None,
        max_tokens: int | None = None,
    ) -> ChatPrompt:
        """Return what a conversation comes to, for :meth:`stream` or :meth:`choices` and to be looked at.

        Takes and raises what :meth:`chat` does. ``options`` of what is returned belong to the call that it is given to.
        With 0 ``max_tokens`` the prompt is only looked at, and may be of any length.
        """
        params = chat or ChatParams()
        most = MAX_TOKENS if max_tokens is None else max_tokens
        if most != 0:
            most = StopRules(max_tokens=most).max_tokens
        self._check_usable()
        return self._chat_reader(params.replaced_by).prompt(messages, tools=tools, params=params, max_tokens=most)

    async def achat(
        self,
        messages: str | Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat: ChatParams | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Reply:
        """Return the answer to a conversation, without keeping the event loop. Takes and raises what :meth:`chat` does.

        The prompt is made in a thread of its own. Cancelling the task that waits gives the request up.
        """
        async with await self.achat_stream(messages, tools=tools, chat=chat, **options) as stream:
            return await stream.result()

    async def achat_stream(
        self,
        messages: str | Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat: ChatParams | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncReplyStream:
        """Start an answer to a conversation and return it for ``async for``. Takes and raises what :meth:`chat` does.

        >>> async with await model.achat_stream("The capital of France is?") as stream:
        ...     async for part in stream:
        ...         print(part.segment.text, end="")

        It returns once the prompt is made, in a thread of its own.
        """
        import asyncio

        from paceline.chat.replies import AsyncReplyStream

        params, request = chat or ChatParams(), self._read_chat_options(options)
        most = request.rules.max_tokens
        prompt = await asyncio.to_thread(self._reading_calls, messages, tools=tools, params=params, max_tokens=most)
        request = _with_needed(request, prompt.options)
        return AsyncReplyStream(prompt, self.astart(prompt.token_ids, request), params)

    async def achat_prompt(
        self,
        messages: str | Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat: ChatParams | None = None,
        max_tokens: int | None = None,
    ) -> ChatPrompt:
        """Return what a conversation comes to, made in a thread of its own; else as :meth:`chat_prompt`."""
        import asyncio

        return await asyncio.to_thread(self.chat_prompt, messages, tools=tools, chat=chat, max_tokens=max_tokens)

    def _reading_calls(
        self,
        messages: str | Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        params: ChatParams,
        max_tokens: int | None,
    ) -> ChatPrompt:
        """Return what a conversation comes to, whose answer has calls of its tools read."""
        prompt = self.chat_prompt(messages, tools=tools, chat=params, max_tokens=max_tokens)
        return self._chat_reader(params.replaced_by).reading_calls(prompt, tools)

    def _chat_reader(self, replaced_by: str | Path | None) -> ChatPromptBuilder:
        """Return what makes prompts of conversations, by the model's own template or another."""
        from paceline.chat.prompt_builder import ChatPromptBuilder
        from paceline.chat.template_sources import find_template, no_template_error

        reader = self._chat_readers.get(replaced_by)
        if reader is None:
            if self.target_options is None:
                raise CapabilityError("this model was loaded from no file, so it has no chat template: give token ids")
            path = Path(self.target_options.path)
            template = find_template(path, self.target.vocabulary, replaced_by=replaced_by)
            if template is None:
                raise no_template_error(path)
            reader = ChatPromptBuilder(
                template,
                self.target.vocabulary,
                self.target.capabilities.context_length,
                trained=describe(path).context_length,
            )
            # Several threads may have made one.
            self._chat_readers[replaced_by] = reader
        return reader

    def add_observer(self, observer: Observer) -> None:
        """Have one more told of every round from now on, in the engine's thread.

        Raises:
            ClosedError: the model is closed.
        """
        self.worker.call(lambda: self.loop.add_observer(observer))

    def repeats_text(self, options: GenerateOptions) -> bool:
        """Return whether a seed gives the same text with and without speculation."""
        asked: dict[str, object] = {**options, **self.defaults.left_open(options)}
        is_greedy = asked.get("temperature") == 0.0 and not asked.get("dynatemp_range")
        return (options.get("verify") or self.verify) == "coupled" or is_greedy

    def close(self) -> None:
        """Cancel what still runs and free native memory. Idempotent; using the model afterwards is a clear error.

        Consumers of what ran get the text so far, and ``finish_reason`` is ``cancelled``. In a process that was forked
        nothing is freed, as all of it is the parent's.

        Raises:
            BusyError: asked for from within a round.
        """
        if not self.worker.is_here:
            return
        self.worker.check()
        self._closed = True
        try:
            with contextlib.suppress(ClosedError):  # another thread closed it
                self.worker.call(self._free)
        finally:
            self.worker.close()

    def _start(
        self, prompt: Prompt, request: RequestOptions, *, wrap: Wrap | None = None, read: Read | None = None
    ) -> Stream:
        self._check_usable()
        # Here, as a long text takes a while, and the engine's thread has answers to write.
        prompt_ids = self._prompt_ids(prompt)
        return Stream(*self._submit(lambda: prompt_ids, request, wrap, read))

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt, if it is not too long by its bytes: a text of megabytes takes seconds."""
        vocabulary, context_length = self.target.vocabulary, self.target.capabilities.context_length
        if isinstance(prompt, str) and most_tokens(prompt) >= context_length:
            least = vocabulary.fewest_tokens(prompt)
            if least >= context_length:
                raise ContextLengthError.of_prompt(least, context_length, is_least=True)
        return read_prompt(prompt, vocabulary)

    def compile(self, source: Source, *, namespace: str = "", salt: str = "") -> Constraint:
        """Make a constraint of a source: what ``constraint`` takes, ready to be used in any number of answers.

        A call that is given the source itself does the same first, in its own thread, and what was compiled is kept for
        a while. A large schema takes some tenths of a second, and the first source as long again for the vocabulary.

        Args:
            source: what an answer keeps to.
            namespace: whose it is, as for an answer: what one has compiled is not found by another.
            salt: parts one namespace further.

        Raises:
            ConstraintError: the source cannot be used, or would take too long; the message says where in it.
            CapabilityError: llguidance is not installed, or the model has no token that ends an answer.
            QueueFullError: others are being compiled, and take their time.
            ClosedError: the model is closed.
        """
        self._check_usable()
        return self._compiler.compile(source, namespace=namespace, salt=salt)

    def _check_usable(self) -> None:
        """Raise where nothing can be asked: the model is closed, or this is within a round or a forked process."""
        self.worker.check()
        if self._closed:
            raise ClosedError(CLOSED)

    def _read_chat_options(self, options: GenerateOptions) -> RequestOptions:
        """Read the options of a call in which an answer may fill the context, unless they say how long it may be."""
        if options.get("max_tokens") is None:
            options = {**options, "max_tokens": MAX_TOKENS}
        return self.read_options(options)

    def _submit(
        self,
        prompt_ids: Callable[[], list[int]],
        request: RequestOptions,
        wrap: Wrap | None = None,
        read: Read | None = None,
    ) -> tuple[LoopDriver, Submission]:
        """Return what a stream is made of; ``prompt_ids``, ``wrap`` and ``read`` are called in the engine's thread."""
        if self._closed:
            raise ClosedError(CLOSED)

        def add() -> Request:
            if self._closed:
                # A vocabulary that was freed is not to be asked.
                raise ClosedError(CLOSED)
            ids = prompt_ids()
            verifier = None
            if wrap is not None:
                made = self.loop.make_verifier(
                    len(ids), request.params, request.rules, request.speculation, request.constraint
                )
                verifier = wrap(made, ids)
            prefilled = None if read is None else read(ids)
            return self.loop.add(
                ids,
                request.params,
                request.rules,
                request.speculation,
                request.cache,
                logprobs=request.logprobs,
                constraint=request.constraint,
                verifier=verifier,
                prefilled=prefilled,
            )

        return self._driver, Submission(request, add)

    def _free(self) -> None:
        closing, self._closing = self._closing, None
        with ExitStack() as stack:
            stack.callback(self.target.close)
            for drafter in self.drafters:
                stack.callback(drafter.close)
            if closing is not None:
                stack.callback(closing)
            stack.callback(self.pool.drop_all)
            stack.callback(self._driver.cancel_all)


def load(
    target: str | Path | ModelOptions | None = None,
    *,
    draft: str | Path | ModelOptions | DraftOptions | None = None,
    drafters: Sequence[str] | None = None,
    policy: Policy | str | None = None,
    verify: VerifierName = "coupled",
    remember: bool = True,
    prompt_cache_mib: int = PROMPT_CACHE_MIB,
    max_waiting: int | None = None,
    report: Report | None = None,
    **options: Unpack[LoadOptions],
) -> Model:
    """Load a target, its draft model if any, and the drafters.

    >>> model = paceline.load("target.gguf", draft="draft.gguf", context_length=8192, threads=8)

    Args:
        target: a GGUF file or Hugging Face folder, by path or by a name that ``paceline models`` lists; ``None`` for
            the embedded pair.
        draft: a smaller model, given as the target is; where its tokens are others than the target's, what it says is
            translated. ``"self"`` is the target itself, quantised smaller, which is made once and kept; ``"self:Q4_0"``
            and the like say how small. It is the default for a target whose layers are read while they are used
            (``ModelOptions.memory``), and is done without, with a warning, where it cannot be had.
            It runs as its target does; :class:`DraftOptions` say how otherwise, and without a path they are of that
            default. Its context is shorter where it was made for less.
        drafters: names from :data:`~paceline.drafters.registry.DRAFTER_NAMES` in the order they are asked; by default
            ``suffix``, and where there is a draft model ``lookup`` and then that. With a
            :class:`~paceline.planning.policies.fixed.FixedPolicy`, which cannot tell which of them pays, only the draft
            model if there is one. ``prediction`` is there in any case; named alone, there is no other.
        policy: what to draft: a policy or the name of one, from :data:`~paceline.planning.registry.POLICY_NAMES`.
            By default ``auto``, which plans by what passes cost on this machine. That is measured when a model is
            loaded for the first time, in at most ten seconds, and kept.
        verify: ``"coupled"`` or ``"rejection"``.
        remember: start with what ``auto`` learned of these models on this machine before, and keep what it learns when
            the model is closed: how often drafts were right and what that was worth, nothing of any text.
        prompt_cache_mib: most host memory, in MiB, for what finished requests have read and said, so that requests that
            begin alike need not read it again; as much again for the draft model's. 0 keeps nothing. With ``exact``
            nothing is kept either.
        max_waiting: most requests of one client that wait for their start; ``None`` for any number.
        report: told the share done while the draft ``"self"`` is made, and then while costs are measured, in the
            thread that loads; an error that it raises ends the load. In a notebook it is shown unless you say.
        **options: how models given by path or name are run, by the fields of :class:`ModelOptions`. The likeliest:

            ``context_length``
                tokens of prompt and answer together.
            ``max_sequences``
                answers that are written together, 1 unless you say; further requests wait. Without ``context_length``
                they share one context, and have room for 4,096 tokens each at least.
            ``threads``, ``gpu_layers``, ``devices``
                where it runs.
            ``memory``
                all that the process may hold, such as ``"12G"``.
            ``cache_type_k``, ``cache_type_v``
                types of the cache, such as ``"q8_0"``.
            ``engine``, ``dtype``
                ``"llama_cpp"`` or ``"torch_hf"``, and the weights' type under the latter.

    Models are loaded, measured and run in a thread of their own, while this one waits. An interrupt of the wait gives
    the load up: the thread closes what it opened, and ends.

    Raises:
        InputError: a file, a name or a value cannot be used; nothing stays loaded.
    """
    with blame("prompt_cache_mib"):
        prompt_cache_mib = whole_number(prompt_cache_mib, "prompt_cache_mib")
        if prompt_cache_mib < 0:
            raise InputError(f"a prompt cache of {prompt_cache_mib} MiB: the least is 0, which keeps nothing")
    with blame("max_waiting"):
        if max_waiting is not None and whole_number(max_waiting, "max_waiting") < 0:
            raise InputError(f"max_waiting {max_waiting}: the least is 0, and None is no limit")
    if verify not in VERIFIER_NAMES:
        raise InputError(f"unknown verifier {verify!r}: choose from {', '.join(VERIFIER_NAMES)}", field="verify")
    if drafters is not None:
        if not isinstance(drafters, str):
            # Requests bring that one.
            drafters = [name for name in drafters if name != PREDICTION]
        check_drafter_names(drafters)
    policy = "auto" if policy is None else policy
    if isinstance(policy, str):
        check_policy_name(policy)
        policy = policy if policy in COST_POLICIES else build_policy(policy)
    speculates = isinstance(policy, str) or policy.speculates
    if not speculates and (draft is not None or drafters):
        raise InputError("drafters and draft models have no effect without speculation: leave out one or the other")
    if target is None:
        target = embedded_target()
        if draft is None and speculates and (drafters is None or "draft" in drafters):
            draft = embedded_draft()
    # Both are looked up before either is loaded, which may take long.
    target_options = _target_options(target, options)
    target_options = dataclasses.replace(target_options, rollback=speculates)
    if draft is None and speculates and (drafters is None or "draft" in drafters):
        draft = DraftOptions()
    draft_options = None if draft is None else _asked_draft(draft, target_options)
    worker, loading = Worker(), _Loading(loading_report() if report is None else report)

    def load_here() -> Model:
        loading.loaded = _open(
            worker,
            target_options,
            draft_options,
            drafters,
            policy,
            verify=verify,
            remember=remember,
            kept_bytes=prompt_cache_mib << 20,
            max_waiting=max_waiting,
            report=loading.report,
        )
        loading.end_report()
        return loading.loaded

    try:
        return worker.call(load_here)
    except BaseException:
        # Where it was the wait that was interrupted, the model may be loaded all the same.
        loading.given_up = True
        worker.end_first()
        worker.post(loading.discard)
        worker.leave()
        raise


class _Loading:
    """What has become of a load, for whoever waits for it and may be interrupted: then its next step ends it."""

    def __init__(self, report: Report | None) -> None:
        self.given_up = False
        self.loaded: Model | None = None
        self._report = report
        self._share: float | None = None

    def report(self, share: float) -> None:
        if self.given_up:
            raise KeyboardInterrupt
        self._share = share
        if self._report is not None:
            self._report(share)

    def end_report(self) -> None:
        """Have whoever was told a share be told of the last one: measuring may end before its time is up."""
        if self._share not in (None, 1.0):
            self.report(1.0)

    def discard(self) -> None:
        if self.loaded is not None:
            self.loaded._free()


def _open(
    worker: Worker,
    target_options: ModelOptions,
    asked: ModelOptions | DraftOptions | None,
    drafters: Sequence[str] | None,
    policy: Policy | str,
    *,
    verify: VerifierName,
    remember: bool,
    kept_bytes: int,
    max_waiting: int | None,
    report: Report,
) -> Model:
    """Open the engines, measure them and build the drafters, in the thread that is to own all of them."""
    speculates = target_options.rollback

    def names(has_draft: bool) -> Sequence[str]:
        return drafters if drafters is not None else _default_drafters(policy, speculates, has_draft)

    if target_options.branches is None and not isinstance(policy, str):
        num_drafters = len(names(asked is not None))
        # Beside several, a prediction is one more; one alone makes chains, and of two the first that proposes anything.
        most_branches = policy.most_branches(num_drafters + (num_drafters > 1))
        if most_branches is not None:
            branches = min(most_branches * target_options.max_sequences, MAX_BRANCHES)
            target_options = dataclasses.replace(target_options, branches=branches)
    # Exact arithmetic is that of chunks which a request reads by itself.
    kept_bytes = 0 if target_options.exact else kept_bytes
    # Whoever names drafters counts on them.
    opened = open_pair(target_options, asked, may_go_without=drafters is None, kept_bytes=kept_bytes, report=report)
    target_engine, target_options = opened.target, opened.target_options
    draft_engine, draft_options = opened.draft, opened.draft_options
    closing: Callable[[], object] | None = None
    try:
        # Once it is open: of a file that is no model the engine says more.
        defaults = read_sampling_defaults(Path(target_options.path)) if target_options.model_defaults else NO_DEFAULTS
        if speculates and target_engine.capabilities.max_rollback == 0:
            raise CapabilityError(
                f"{target_engine.description} cannot take tokens back, so drafts cannot be verified: "
                "decode it without speculation (`policy=NO_SPECULATION`)"
            )
        pools = [
            SequencePool(engine, max_saved_bytes=opened.kept_bytes, least_reuse=MIN_REUSE)
            if opened.kept_bytes > 0 and engine is not None
            else None
            for engine in (target_engine, draft_engine)
        ]
        costs: RoundCosts | None = None
        built = build_drafters(
            names(draft_engine is not None),
            target=target_engine,
            draft=draft_engine,
            draft_pool=pools[1],
            draft_vocab="auto" if draft_options is None else draft_options.draft_vocab,
            draft_map=() if draft_options is None else draft_options.draft_map,
        )
        if isinstance(policy, str):
            budget = FIRST_LOAD.less(ATTENTION_S) if opened.measured else FIRST_LOAD
            kept = find_or_measure(
                target_engine, target_options, paced_draft(draft_engine), draft_options, budget=budget, report=report
            )
            branches = DEFAULT_BRANCHES if target_options.branches is None else target_options.branches
            key = kept.key if remember else None
            learned = load_learned(key) if key is not None else None
            costs = kept.profile
            policy = build_policy(policy, costs=costs, branches=branches, learned=learned)
            if key is not None:
                closing = functools.partial(_keep_learned, key, policy)
        return Model(
            target_engine,
            built,
            policy,
            verify=verify,
            target_options=target_options,
            pool=pools[0],
            costs=costs,
            max_waiting=max_waiting,
            worker=worker,
            closing=closing,
            defaults=defaults,
        )
    except BaseException:
        opened.close()
        raise


def _asked_draft(draft: str | Path | ModelOptions | DraftOptions, target: ModelOptions) -> ModelOptions | DraftOptions:
    """Return how to run the draft model that :func:`load` was given; one of the target's own may have to be made."""
    if isinstance(draft, (str, Path)):
        draft = DraftOptions(draft)
    named = draft.path
    own = OwnDraft.parse(named)
    # What has none is refused before anything is loaded.
    if own is not None:
        own.of(Path(target.path))
    elif named == MTP_DRAFT:
        find_mtp(target)
    if isinstance(draft, DraftOptions) and named is None:
        return draft
    is_of_target = own is not None or named == MTP_DRAFT
    assert named is not None
    path = named if is_of_target else resolve_model(named)
    if isinstance(draft, ModelOptions):
        return dataclasses.replace(draft, path=path)
    return dataclasses.replace(draft, path=path).beside(target)


def _keep_learned(key: PairKey, policy: Policy) -> None:
    learned = policy.learned()
    if learned is not None:
        store_learned(key, learned)


def _with_needed(request: RequestOptions, needed: GenerateOptions) -> RequestOptions:
    """Return what is asked for with what the prompt of a conversation needs.

    Control tokens that the call preserves come on top: without the prompt's, reasoning could not be told from content.
    """
    changes = dict(needed)
    if request.params.reasoning_budget is not None:
        changes.pop("reasoning_budget", None)
    if "preserved_ids" in needed:
        changes["preserved_ids"] = (*(needed["preserved_ids"] or ()), *request.rules.preserved_ids)
    return request.replaced(changes)


def _default_drafters(policy: Policy | str, speculates: bool, has_draft: bool) -> list[str]:
    if not speculates:
        return []
    if not isinstance(policy, str) and not policy.weighs_drafters:
        return ["draft"] if has_draft else ["suffix"]
    # Beside a model's drafts, which tell what a copy is worth, a second source of copies brings more than it costs.
    return ["suffix", "lookup", "draft"] if has_draft else ["suffix"]


def _target_options(target: str | Path | ModelOptions, options: LoadOptions) -> ModelOptions:
    """Return how to run the target that :func:`load` was given; what is given twice is refused."""
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    for name in options:
        if name not in LoadOptions.__annotations__:
            known = sorted(LoadOptions.__annotations__)
            raise InputError(no_such_option(name, known, "see the fields of ModelOptions"), field=name)
    if isinstance(target, ModelOptions):
        for name in given:
            raise InputError(
                f"{name} is for models given by path: set it in ModelOptions, or give the path", field=name
            )
        return dataclasses.replace(target, path=resolve_model(target.path))
    return ModelOptions(resolve_model(target), **given)
