"""Models that a command names, on this machine.

Those of the hub are fetched, and a target's own draft is made; how far that is can be seen.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Column

from paceline.cli.display import error_console
from paceline.conversion.own_draft import OwnDraft, OwnDraftFile
from paceline.core.errors import InputError
from paceline.engines.loading import has_head, head_names, memory_limit
from paceline.engines.options import ModelOptions
from paceline.environment import ModelChoice
from paceline.models.embedded import embedded_target
from paceline.models.hub.fetch import FetchReport, fetch_head, fetch_model, from_hub
from paceline.models.hub.reference import HubModel
from paceline.models.registry import MTP_DRAFT, MTP_FILES, resolve_model
from paceline.sizes import format_bytes
from paceline.terminal_text import printable_line

_NARROW: Final = 60
"""Columns of a terminal below which the bar and the size are left out."""

_FIGURES: Final = 44
"""Columns that all figures beside a bar take at most, those between them and some to spare included."""
_WITHOUT_HEAD: Final = " (--drafters suffix goes without)"

_FEW_FIGURES: Final = 30
"""Columns that the figures take at most where the bar and the size are left out."""


def locate_model(model: str | Path | HubModel) -> Path:
    """Return the path of a model that a command names, fetching it if need be."""
    if not isinstance(model, HubModel):
        return resolve_model(model)
    with _show_fetching(f"{model}") as tell:
        return from_hub(model, report=tell)


def locate_pair(
    models: ModelChoice, draft: str | Path | HubModel | None, *, may_draft: bool = False
) -> tuple[ModelOptions, ModelOptions | None]:
    """Return how to run a target, the embedded one where none was named, and its draft model, if it has one.

    The draft, which is the smaller, is looked for before a target is fetched: what is wrong with its name is not told
    at the end of a long download. One of the target's own (:mod:`paceline.conversion.own_draft`) is made if need be,
    and a head is fetched that lies beside a target of the hub where one is named, or may draft.
    """
    named = embedded_target() if models.target is None else models.target
    own = OwnDraft.parse(draft)
    if isinstance(draft, HubModel):
        draft = dataclasses.replace(draft, heads=head_names())
    found = (
        locate_model(draft) if draft not in (None, MTP_DRAFT) and own is None and isinstance(named, HubModel) else None
    )
    if isinstance(named, HubModel) and (draft == MTP_DRAFT or (draft is None and may_draft)):
        target = _fetch_with_head(models, named, is_named=draft is not None)
    else:
        target = models.target_options(locate_model(named))
    if draft is None:
        return target, None
    if draft == MTP_DRAFT:
        return target, models.draft_options(target, draft)
    if own is not None:
        memory_limit(target)  # what the target cannot have is told before its draft is made
        found = make_draft(own.of(Path(target.path)))
    elif found is None:
        found = locate_model(draft)
    return target, models.draft_options(target, found)


def _fetch_with_head(models: ModelChoice, named: HubModel, *, is_named: bool) -> ModelOptions:
    """Return how to run a target of the hub, whose head is fetched, too; :mod:`paceline.model_pair` finds it there."""
    with _show_fetching(f"{named}") as tell:
        fetched = fetch_model(named, tell)
    target = models.target_options(fetched.path)
    if memory_limit(target) is not None or has_head(target):
        return target
    kinds = [name for name in head_names(target) if not is_named or name == MTP_FILES]
    try:
        with _show_fetching(f"a head of {named}, which drafts for it" + ("" if is_named else _WITHOUT_HEAD)) as tell:
            fetch_head(named, fetched, kinds, tell)
    except InputError as error:
        if is_named:
            raise
        error_console().print(printable_line(f"going on without the head of {named}: {error}"), markup=False)
    return target


def make_draft(draft: OwnDraftFile) -> Path:
    """Return the path of a target's own draft, making it if need be."""
    name = printable_line(f"{draft.target.name} to {draft.file_type}")
    waits = False

    def waiting() -> None:
        nonlocal waits
        if not waits:
            error_console().print(
                printable_line(f"waiting for another process, which makes {draft.path}"), markup=False
            )
        waits = True

    with _show_progress(f"quantising {name} as its own draft, once for this model", f"quantised {name}") as tell:
        return draft.make(lambda done, total: tell(draft.path.name, done, total), waiting=waiting)


@contextmanager
def _show_fetching(what: str) -> Iterator[FetchReport]:
    # Else the library asks the hub for something of its own every day, and tells it more than a model needs.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    with _show_progress(f"fetching {what}", f"fetched {what.partition(',')[0]}") as tell:
        yield tell


@contextmanager
def _show_progress(begins: str, ended: str) -> Iterator[FetchReport]:
    """Yield what is told how many bytes of how many are there.

    It shows a bar on a terminal, and a line when it begins and when it ends, where it ever begins. The size follows the
    first line's words, size and time the last one's.
    """
    console = error_console()
    started_s, first_bytes, last_bytes = None, 0, 0
    bar_width = 0 if console.width < _NARROW else console.width // 6
    # Some columns stay free: the ^C that a terminal shows would break the line, and the bar could not be taken away.
    name_width = max(10, console.width - bar_width - (_FIGURES if bar_width else _FEW_FIGURES))
    columns = (
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, max_width=name_width)),
        *((BarColumn(bar_width), DownloadColumn()) if bar_width else ()),
        TextColumn("{task.percentage:.0f}%"),
        TransferSpeedColumn(),
        TimeRemainingColumn(compact=True),
    )
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = progress.add_task("", start=False)

    def report(what: str, done_bytes: int, total_bytes: int) -> None:
        nonlocal started_s, first_bytes, last_bytes
        if not total_bytes:
            return
        if started_s is None:
            started_s, first_bytes = time.monotonic(), done_bytes
            rest = f", of which {format_bytes(done_bytes)} are there" if done_bytes else ""
            console.print(f"{begins}: {format_bytes(total_bytes)}{rest}", markup=False)
            progress.start()
            progress.start_task(task)
        last_bytes = done_bytes
        progress.update(
            task, description=printable_line(what.rpartition("/")[2]), completed=done_bytes, total=total_bytes
        )

    try:
        yield report
    finally:
        progress.stop()
    if started_s is not None:
        seconds = time.monotonic() - started_s
        console.print(f"{ended}: {format_bytes(last_bytes - first_bytes)} in {seconds:.1f} s", markup=False)
