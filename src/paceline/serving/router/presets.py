"""The models that a router has: those of a folder, and those of an INI file, with the options of each."""

from __future__ import annotations

import configparser
import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from paceline.core.errors import InputError, PacelineError
from paceline.models.description import describe

_PART: Final = re.compile(r"(.+)-(\d{5})-of-\d{5}")
"""Stem of a file that is part of a model."""

_PROJECTOR: Final = "mmproj"
"""How names of files begin that belong to a model's eyes."""

_GLOBAL: Final = "*"
_TOP: Final = "version and the like"
_NOWHERE: Final = "none"

_OWN_BYTES: Final = 128 << 20
"""Bytes of a process beside its model: Python, libraries, scratch."""


@dataclass(frozen=True, slots=True)
class Preset:
    """A model that may be loaded.

    Attributes:
        name: by which requests ask for it.
        path: of its file or folder; ``None`` where its options say where it is.
        settings: options of its own, as its section has them.
        aliases: further names.
        tags: words about it.
        loads_on_startup: whether it is loaded without being asked for.
        stop_s: seconds that its process has to end in.
    """

    name: str
    path: Path | None
    settings: Mapping[str, str] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    loads_on_startup: bool = False
    stop_s: float = 10.0


def find_presets(folder: Path | None, ini: Path | None) -> dict[str, Preset]:
    """Return the models of a folder and of an INI file by their names, in the alphabet's order.

    Raises:
        InputError: a file cannot be read, or there is nothing in it.
    """
    paths = {} if folder is None else dict(_list_folder(folder))
    sections = {} if ini is None else _read_ini(ini)
    found = {
        name: _read_section(name, paths.get(name), sections.get(name, sections.get(_GLOBAL, {})), ini)
        for name in sorted({*paths, *sections} - {_GLOBAL})
    }
    names: dict[str, str] = {}
    for preset in found.values():
        for name in (preset.name, *preset.aliases):
            if names.setdefault(name, preset.name) != preset.name:
                raise InputError(f"{name!r} is a name of both {names[name]} and {preset.name}: rename one")
    if not found:
        where = " and ".join(str(each) for each in (folder, ini) if each is not None)
        raise InputError(f"there is no model in {where}: put GGUF files there, or sections with model = PATH")
    return found


def estimate_bytes(paths: Sequence[Path], cells: int) -> int:
    """Return about how much memory a process with these models takes, with room for so many tokens in F16.

    What a file does not say is measured once it is loaded.
    """
    total = _OWN_BYTES
    for path in paths:
        with contextlib.suppress(PacelineError):
            about = describe(path)
            width = (about.kv_heads or 0) * (about.head_size or 0)
            total += about.num_bytes + cells * (about.layers or 0) * width * 2 * 2
    return total


def _list_folder(folder: Path) -> Iterator[tuple[str, Path]]:
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise InputError(f"cannot read `models_dir` {folder}: {error.strerror or error}") from None
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if not entry.is_dir():
            if (name := _model_name(entry)) is not None:
                yield name, entry
        elif (entry / "config.json").is_file():
            yield entry.name, entry
        else:
            files = {name: file for file in sorted(entry.iterdir()) if (name := _model_name(file)) is not None}
            for name, file in files.items():
                yield entry.name if len(files) == 1 else f"{entry.name}/{name}", file


def _model_name(file: Path) -> str | None:
    """Return what the model of a file is called; ``None`` of a file that is not the first of a model."""
    if file.suffix != ".gguf" or file.name.startswith((_PROJECTOR, ".")):
        return None
    part = _PART.fullmatch(file.stem)
    if part is None:
        return file.stem
    return part[1] if int(part[2]) == 1 else None


def _read_ini(path: Path) -> dict[str, dict[str, str]]:
    parser = configparser.ConfigParser(
        interpolation=None, default_section=_NOWHERE, delimiters=("=",), comment_prefixes=(";", "#")
    )
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    try:
        # What stands above all sections says nothing of models.
        parser.read_string(f"[{_TOP}]\n{path.read_text('utf-8-sig')}", str(path))
    except OSError as error:
        raise InputError(f"cannot read `models_preset` {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise InputError(f"`models_preset` {path} is not UTF-8: save it as plain text") from None
    except configparser.Error as error:
        line = getattr(error, "lineno", None) or next((place for place, _ in getattr(error, "errors", ())), None)
        where = "" if line is None else f", line {line - 1}"
        said = {
            configparser.DuplicateOptionError: "an option stands twice in a section",
            configparser.DuplicateSectionError: "a section stands twice",
        }.get(type(error), "this is neither [name] nor option = value")
        raise InputError(f"`models_preset` {path}{where}: {said}") from None
    found = {name: dict(section) for name, section in parser.items() if name not in (_TOP, _NOWHERE)}
    shared = found.get(_GLOBAL, {})
    # What a section says itself comes later on the command line, under whichever of its names.
    return {name: {**shared, **section} for name, section in found.items()}


def _read_section(name: str, path: Path | None, section: Mapping[str, str], ini: Path | None) -> Preset:
    settings = dict(section)

    def take(*keys: str) -> str:
        return next((settings.pop(key) for key in keys if key in settings), "")

    own = take("model", "m")
    if own:
        path = Path(own)
    elif path is None and not {"hf-repo", "hf", "hfr", "LLAMA_ARG_HF_REPO"} & settings.keys():
        raise InputError(f"`models_preset` {ini}: [{name}] names no model: write model = PATH or hf-repo = USER/REPO")
    if path is not None and not path.exists():
        raise InputError(f"`models_preset` {ini}: [{name}] has model = {path}, and there is no such file")
    stop = take("stop-timeout")
    try:
        stop_s = float(stop or 10)
    except ValueError:
        raise InputError(f"`models_preset` {ini}: [{name}] has stop-timeout = {stop}: give seconds") from None
    return Preset(
        name,
        path,
        settings,
        tuple(alias.strip() for alias in take("alias", "a").split(",") if alias.strip()),
        tuple(tag.strip() for tag in take("tags").split(",") if tag.strip()),
        take("load-on-startup").lower() in ("true", "1", "yes", "on"),
        stop_s,
    )
