"""A target's own draft: the target itself, quantised smaller, made once and kept.

A small copy agrees with its target far more often than another small model does, and costs as much less as it is
smaller. That is worth most where the target's weights are read from a disk and the copy's are not.
Source: SubSpec (arXiv:2509.18344), which makes such a copy of the layers that are streamed.

::

    self, self:Q4_0 ──OwnDraft.parse──> what is asked for ──of(target)──> where it lies ──make──> a GGUF file

What is made lies in ``drafts`` beside the folder of models, under a name that has the target's and the hash of its
content: a target that was moved finds its draft again, and one that was changed gets another.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import psutil

from paceline.atomic_output import check_room
from paceline.core.errors import InputError, ModelFileError
from paceline.models.fingerprints import fingerprint
from paceline.models.gguf_model import model_name, read_gguf_model
from paceline.models.registry import CACHE_VARIABLE, OWN_DRAFT, complete_model, drafts_folder, names_own_draft
from paceline.sizes import format_bytes

MakeReport: TypeAlias = Callable[[int, int], None]
"""Called with the bytes that are done and their number in all, 0 of 0 until that is known.

What it raises ends the making, and no file is left.
"""

_MANY_BITS: Final = 6.0
"""Bits a weight above which Q4_0, which has about 4.5, is much smaller; it is also the fastest type on most CPUs."""
_FEW_BITS: Final = 3.75
"""Bits a weight below which Q2_K, which has 3 to 3.5, is hardly smaller, and smaller types agree with little."""
_MAX_SHARE: Final = 0.95
"""Share of the target's size that a draft of its own has at most."""

_LONGEST_NAME: Final = 80
"""Bytes of the target's name in that of its draft; file systems take 255 in all."""
_HASH_DIGITS: Final = 12
"""Hexadecimal digits of the target's fingerprint in the name of its draft."""
_WAIT_S: Final = 0.2
"""Seconds between two looks whether another process has made the draft."""

_PARTIAL: Final = re.compile(r"\.(?P<name>.+)\.(?P<process>\d+)\.\d+\.partial")


@dataclass(frozen=True, slots=True)
class OwnDraft:
    """A request for a target's own draft.

    Attributes:
        file_type: to quantise the target to, such as ``"Q4_0"``; ``None`` chooses by the target.
    """

    file_type: str | None = None

    def __post_init__(self) -> None:
        if self.file_type is None:
            return
        from paceline.conversion.quantize import file_types

        known = self.file_type.upper()
        if known not in file_types():
            raise InputError(
                f"{OWN_DRAFT}:{self.file_type}: {self.file_type!r} is not a type to quantise to; choose from "
                f"{', '.join(file_types())}, or let paceline choose with {OWN_DRAFT}"
            )
        object.__setattr__(self, "file_type", known)

    @classmethod
    def parse(cls, name: object) -> OwnDraft | None:
        """Return the request that the name of a draft model is, such as ``"self"`` or ``"self:Q4_0"``.

        ``None`` is the name of another model, as is a ``Path``.
        """
        if not names_own_draft(name):
            return None
        _, colon, file_type = name.partition(":")
        return cls(file_type if colon else None)

    def of(self, target: Path) -> OwnDraftFile:
        """Return the draft of a target, a GGUF file; it may have to be made.

        Raises ``InputError`` where the target is so small that no draft is chosen for it.
        """
        if target.is_dir():
            raise ModelFileError(
                f"a draft of its own (`draft={OWN_DRAFT!r}`) is quantised from a GGUF file, and {target} is a folder: "
                f"convert it with paceline convert {target} model.gguf, or name another draft model"
            )
        model = read_gguf_model(target)
        if model.num_parameters == 0:
            raise ModelFileError(f"{target} holds a vocabulary and no weights; give the file of a whole model")
        file_type = self.file_type or _choose_type(target, 8 * model.num_bytes / model.num_parameters)
        digest = fingerprint(target)[:_HASH_DIGITS]
        folder = drafts_folder()
        stem = os.fsencode(model_name(target))[:_LONGEST_NAME].decode(errors="ignore")
        path = folder / f"{stem}-{digest}-{file_type}.gguf"
        try:
            # The target may have had another name when the draft was made.
            kept = [] if path.is_file() else sorted(folder.glob(f"*-{digest}-{file_type}.gguf"))
        except OSError as error:
            raise ModelFileError(f"the folder of drafts {folder} cannot be read: {error.strerror or error}") from None
        found = next((each for each in kept if not each.name.startswith(".")), path)
        return OwnDraftFile(target, file_type, found, model.num_bytes)


@dataclass(frozen=True, slots=True)
class OwnDraftFile:
    """A target's own draft, whether or not it is made yet.

    Attributes:
        path: where it lies, or will.
    """

    target: Path
    file_type: str
    path: Path
    target_bytes: int

    @property
    def name(self) -> str:
        return f"{OWN_DRAFT}:{self.file_type}"

    def is_there(self) -> bool:
        try:
            read_gguf_model(self.path)
        except ModelFileError:
            return False
        return True

    def foreseen_bytes(self) -> int:
        """Return its size, made or not; raise ``InputError`` for a type that takes an importance matrix."""
        from paceline.conversion.quantize import quantized_bytes

        return quantized_bytes(self.target, self.file_type) or self.target_bytes

    def is_worth(self, num_bytes: int) -> bool:
        """Return whether a copy of so many bytes is so much smaller than the target that it may draft."""
        return num_bytes <= _MAX_SHARE * self.target_bytes

    def make(self, report: MakeReport | None = None, *, waiting: Callable[[], None] | None = None) -> Path:
        """Return its path, after making it if it is not there.

        Another process quantises, which an error or interrupt here ends at once. Of processes that want the same draft
        one makes it, while the others wait; ``waiting`` is called some times a second there, and what it raises ends
        the wait.

        Raises ``InputError`` where the draft would not be smaller than the target, or has no room on the disk.
        """
        if self.is_there():
            return self.path
        from paceline.conversion.quantize_apart import quantize_apart

        folder = self.path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with _hold_lock(folder / f".{self.path.name}.lock", waiting or (lambda: None)):
                if not self.is_there():
                    _remove_left_behind(self.path)
                    quantize_apart(
                        self.target,
                        self.path,
                        self.file_type,
                        begin=lambda num_bytes: self._begin(num_bytes, report),
                        report=report or (lambda done_bytes, num_bytes: None),
                    )
        except OSError as error:
            raise InputError(
                f"the draft of {self.target.name} cannot be kept in {folder}: {error.strerror or error}; "
                f"set {CACHE_VARIABLE} to another folder"
            ) from None
        return self.path

    def _begin(self, num_bytes: int, report: MakeReport | None) -> None:
        """Check that it is worth it and has room, and tell that it begins."""
        if not self.is_worth(num_bytes):
            raise InputError(
                f"{self.target} in {self.file_type} has {format_bytes(num_bytes)}, and the target has "
                f"{format_bytes(self.target_bytes)}: a draft has to be smaller; take a smaller type, such as "
                f"{OWN_DRAFT}:Q2_K, or name another draft model"
            )
        check_room(
            self.path,
            num_bytes,
            way_out=f"take a smaller type, such as {OWN_DRAFT}:Q2_K, or set {CACHE_VARIABLE} to another disk",
        )
        if report is not None:
            report(0, num_bytes)


def make_own_draft(
    target: Path, file_type: str | None = None, *, report: Callable[[float], None] | None = None
) -> Path:
    """Return the path of a target's own draft, which is made first if it is not there. Any thread may call it.

    ``report`` hears the share that is done, 0 to 1, some times a second while it is made, and 0 while another process
    makes it; not at all where it is there. What it raises ends the making, and no file is left.
    """
    draft = OwnDraft(file_type).of(target)
    if report is None:
        return draft.make()
    tell = report
    return draft.make(lambda done, total: tell(min(done / total, 1.0) if total else 0.0), waiting=lambda: tell(0.0))


def complete_draft(incomplete: str) -> list[str]:
    """Return the names of drafts that begin with ``incomplete``, as ``complete_model`` does for any model."""
    return [name for name in (OWN_DRAFT,) if name.startswith(incomplete)] + complete_model(incomplete)


def _choose_type(target: Path, bits: float) -> str:
    """Return the type for the draft of a target that has so many bits a weight."""
    if bits > _MANY_BITS:
        return "Q4_0"
    if bits >= _FEW_BITS:
        return "Q2_K"
    raise InputError(
        f"{target} has {bits:.1f} bits a weight already, and a copy that is much smaller would draft badly: name "
        f"another draft model than {OWN_DRAFT}, or none; {OWN_DRAFT}:TYPE takes a type all the same"
    )


@contextmanager
def _hold_lock(lock: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold a lock that ends with its process; call ``waiting`` between looks while another has it."""
    from huggingface_hub.utils import WeakFileLock  # takes a while to import

    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(WeakFileLock(lock, timeout=_WAIT_S))
                break
            except TimeoutError:
                waiting()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                lock.unlink()


def _remove_left_behind(path: Path) -> None:
    """Remove files that processes left half written when they were killed."""
    for partial in path.parent.glob(f".{path.name}.*.partial"):
        found = _PARTIAL.fullmatch(partial.name)
        if found is not None and int(found["process"]) != os.getpid() and not psutil.pid_exists(int(found["process"])):
            with contextlib.suppress(OSError):
                partial.unlink()
