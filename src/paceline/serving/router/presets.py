"""The models that a router has: those of a folder, and those of an INI file, with the options of each."""

from __future__ import annotations

import configparser
import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from paceline.core.errors import InputError

_PART: Final = re.compile(r"(.+)-(\d{5})-of-\d{5}")
"""Stem of a file that is part of a model."""

_PROJECTOR: Final = "mmproj"
"""How names of files begin that belong to a model's eyes."""

_GLOBAL: Final = "*"
_TOP: Final = "version and the like"
_NOWHERE: Final = "none"


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
    paths: dict[str, Path] = {}
    for name, path in () if folder is None else _list_folder(folder):
        if paths.setdefault(name, path) != path:
            raise InputError(f"`models_dir` {folder}: {name!r} is a name of both {paths[name]} and {path}: rename one")
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


def _list_folder(folder: Path) -> Iterator[tuple[str, Path]]:
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise InputError(f"cannot read `models_dir` {folder}: {error.strerror or error}") from None
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if entry.is_file() and (name := _model_name(entry)) is not None:
            yield name, entry
        if not entry.is_dir():
            continue
        try:
            files = [(name, file) for file in sorted(entry.iterdir()) if (name := _model_name(file)) is not None]
            is_folder_of_hf = not files and (entry / "config.json").is_file()
        except OSError:
            # What nobody may read is no model, such as lost+found.
            continue
        if is_folder_of_hf:
            yield entry.name, entry
        for name, file in files:
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

    def split(text: str) -> tuple[str, ...]:
        return tuple(word.strip() for word in text.split(",") if word.strip())

    own = take("model", "m", "LLAMA_ARG_MODEL", "PACELINE_MODEL")
    if own:
        path = Path(own)
    elif path is None and not {"hf-repo", "hf", "hfr", "LLAMA_ARG_HF_REPO", "PACELINE_HF_REPO"} & settings.keys():
        raise InputError(f"`models_preset` {ini}: [{name}] names no model: write model = PATH or hf-repo = USER/REPO")
    if path is not None and not path.exists():
        raise InputError(f"`models_preset` {ini}: [{name}] has model = {path}, and there is no such file")
    stop = take("stop-timeout")
    stop_s = -1.0
    with contextlib.suppress(ValueError):
        stop_s = float(stop or 10)
    if not 0 <= stop_s < float("inf"):
        raise InputError(f"`models_preset` {ini}: [{name}] has stop-timeout = {stop}: give seconds, 0 or more")
    return Preset(
        name,
        path,
        settings,
        split(take("alias", "a", "LLAMA_ARG_ALIAS", "PACELINE_ALIAS")),
        split(take("tags", "LLAMA_ARG_TAGS", "PACELINE_TAGS")),
        take("load-on-startup").lower() in ("true", "1", "yes", "on"),
        stop_s,
    )
