"""``paceline.toml``: options by their long names, for all commands or one, and profiles of them by name.

::

    model = "~/models/big.gguf"     # of every command that has --model

    [serve]
    port = 9000                     # of paceline serve alone

    [profiles.careful]              # with --profile careful
    temp = 0.2

What the file sets are defaults of the options (``default_map`` of a context), below the command line and the
environment.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Final

from typer.core import TyperOption

from paceline.cli.display import error_console
from paceline.cli.outputs import OPTIONAL_VALUE, STANDARD_OUTPUT
from paceline.core.did_you_mean import nearest
from paceline.core.errors import InputError
from paceline.terminal_text import printable_line

FILE_NAME: Final = "paceline.toml"
"""Name of a configuration file."""
FILE_VARIABLE: Final = "PACELINE_CONFIG"
"""Environment variable that names a configuration file."""
PROFILE_VARIABLE: Final = "PACELINE_PROFILE"
"""Environment variable that names a profile of the configuration file."""
PROFILES: Final = "profiles"
"""Table of a configuration file that has its profiles."""

_NOT_SET_BY_FILES: Final = ("--help", "--help-all", "--version", "--config", "--profile", "--install-completion")
_NAMES_OF_MODELS: Final = (
    frozenset({"path", "hub_repo", "hub_file", "models_dir", "models_preset"}),
    frozenset({"draft_path", "hub_draft_repo"}),
)
_DRAFT_LENGTHS: Final = frozenset({"draft_max", "draft_min", "p_min", "siblings"})
_OF_SPECULATION: Final = _DRAFT_LENGTHS | {"drafters", "policy", "draft_path", "hub_draft_repo"}


class Settings(dict[str, Any]):
    """Values of a command's parameters, by name.

    Attributes:
        file: where they are from.
        spelled: what the file calls each of them.
    """

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file
        self.spelled: dict[str, str] = {}

    def put(self, option: TyperOption, key: str, value: Any) -> None:
        self.drop({option.name})
        if value is not None:
            self[option.name] = value
            self.spelled[option.name] = key

    def drop(self, names: Set[str]) -> None:
        for name in names:
            self.pop(name, None)


def candidates() -> list[Path]:
    """Return where a configuration file is looked for where none is named, the first one first."""
    from platformdirs import user_config_path

    return [Path(FILE_NAME), user_config_path("paceline", appauthor=False) / FILE_NAME]


def find_file(named: str | None) -> Path | None:
    """Return the configuration file: one that is named here or by the environment, or the first that there is."""
    for where, name in (("--config", named), (FILE_VARIABLE, os.environ.get(FILE_VARIABLE))):
        if name:
            if not Path(name).exists():
                raise InputError(f"there is no file {name} ({where}): give the path of a configuration file")
            return Path(name)
    return next((path for path in candidates() if path.is_file()), None)


def read_file(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise InputError(f"{file} is not TOML: {error}") from None


def read_settings(
    ctx: Any,
    given: Mapping[str, Any],
    *,
    named: str | None,
    profile: str | None,
    variables: Mapping[str, str],
) -> Settings | None:
    """Return what the configuration file sets of a command, and a line on standard error says so.

    Args:
        ctx: the command's context.
        given: what the command line gives, by parameter.
        named: the file that the command line names.
        profile: that it names.
        variables: the environment, which is before the file.
    """
    file = find_file(named)
    profile = profile or os.environ.get(PROFILE_VARIABLE)
    if file is None:
        if profile:
            places = " nor ".join(str(path) for path in candidates())
            raise InputError(f"there is no configuration file to take profile {profile} from: neither {places} exists")
        return None
    settings = Settings(file)
    for layer, is_shared in _layers(ctx, file, read_file(file), profile):
        _take_layer(settings, ctx, layer, is_shared=is_shared)
    if settings:
        _set_aside(settings, ctx, given, variables)
    if settings:
        keys = ", ".join(settings.spelled[name] for name in settings)
        line = f"{file}{f', profile {profile},' if profile else ''} sets {keys}"
        error_console().print(printable_line(line), style="dim", markup=False)
    return settings


def _layers(ctx: Any, file: Path, document: Mapping[str, Any], profile: str | None) -> Iterator[tuple[Any, bool]]:
    """Yield the tables that are for a command, the later ones before the earlier, and whether others share them."""
    words = _words(ctx)
    root = ctx.find_root().command
    _check_tables(file, document, [*root.list_commands(ctx), PROFILES], "")
    yield _values(document), True
    yield _values(_table(document, words)), False
    if not profile:
        return
    profiles = document.get(PROFILES, {})
    if not isinstance(profiles, dict) or not isinstance(profiles.get(profile), dict):
        there_are = f"it has {', '.join(profiles)}" if profiles else "it has none"
        raise InputError(f"{file} has no profile {profile}: {there_are}")
    _check_tables(file, profiles[profile], root.list_commands(ctx), f"{PROFILES}.{profile}.")
    yield _values(profiles[profile]), True
    yield _values(_table(profiles[profile], words)), False


def _words(ctx: Any) -> list[str]:
    words: list[str] = []
    while ctx.parent is not None:
        words.insert(0, ctx.info_name)
        ctx = ctx.parent
    return words


def _check_tables(file: Path, document: Mapping[str, Any], known: Sequence[str], within: str) -> None:
    for name, value in document.items():
        if isinstance(value, dict) and name not in known:
            near = nearest(name, known, cutoff=0.6)
            hint = f"did you mean [{within}{near}]?" if near else "tables are called like commands"
            raise InputError(f"{file}: there is no command {name} for [{within}{name}]: {hint}")


def _table(document: Mapping[str, Any], words: Sequence[str]) -> Mapping[str, Any]:
    for word in words:
        # A value may be an option of that name, such as --chat.
        document = document[word] if isinstance(document.get(word), dict) else {}
    return document


def _values(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if not isinstance(value, dict)}


def _take_layer(settings: Settings, ctx: Any, layer: Mapping[str, Any], *, is_shared: bool) -> None:
    options = _options_by_key(ctx.command)
    found: list[tuple[TyperOption, str, Any]] = []
    for key, value in layer.items():
        option = options.get(key.replace("_", "-"))
        if option is not None:
            found.append((option, key, value))
        elif not is_shared or not _is_of_another_command(ctx, key.replace("_", "-")):
            raise _no_such_key(settings.file, ctx, key, is_shared=is_shared)
    settings.drop(_displaced({option.name for option, *_ in found}))
    for option, key, value in found:
        settings.put(option, key, _value(settings.file, option, key, value))


def _no_such_key(file: Path, ctx: Any, key: str, *, is_shared: bool) -> InputError:
    from paceline.cli.options import long_flags

    options = _options_by_key(ctx.command)
    shared = [name.removeprefix("--") for name in long_flags()] if is_shared else []
    spelled = (name for name, option in options.items() if f"-{key}" in option.opts)
    near = next(spelled, None) or nearest(key, [*options, *shared], cutoff=0.6)
    command = " ".join(["paceline", *_words(ctx)])
    hint = f"did you mean {near}?" if near else f"{command} --help-all lists its options"
    who = "no command has" if is_shared else f"{command} has no"
    return InputError(f"{file}: {who} option {key}: {hint}")


def _options_by_key(command: Any) -> dict[str, TyperOption]:
    return {
        name.removeprefix("--"): option
        for option in command.params
        if isinstance(option, TyperOption) and not option.hidden
        for name in (*option.opts, *option.secondary_opts)
        if name.startswith("--") and name not in _NOT_SET_BY_FILES
    }


def _is_of_another_command(ctx: Any, key: str) -> bool:
    root = ctx.find_root().command
    # The last resort imports them all.
    from paceline.cli.options import long_flags

    return f"--{key}" in long_flags() or any(
        key in _options_by_key(root.get_command(ctx, name)) for name in root.list_commands(ctx)
    )


def _value(file: Path, option: TyperOption, key: str, value: Any) -> Any:
    """Return a value of the file as the command line would have it; ``None`` for an option that is left out."""
    if option.metavar == OPTIONAL_VALUE and isinstance(value, bool):
        return STANDARD_OUTPUT if value else None
    if option.is_flag:
        if not isinstance(value, bool):
            raise InputError(f"{file}: {key} is {value!r}: give true or false")
        if f"--{key}" in option.secondary_opts:
            value = not value
        return value if value or option.secondary_opts else None
    texts = [_text(file, key, each) for each in (value if isinstance(value, list) else [value])]
    if option.multiple:
        return texts
    return ",".join(map(str, texts)) if isinstance(value, list) else texts[0]


def _text(file: Path, key: str, value: Any) -> str | float:
    if isinstance(value, bool):
        return "on" if value else "off"
    if not isinstance(value, str | int | float):
        raise InputError(f"{file}: {key} is {value}: give a text, a number, true or false, or a list of texts")
    # No shell has replaced it.
    return str(Path(value).expanduser()) if isinstance(value, str) and value.startswith("~/") else value


def _set_aside(settings: Settings, ctx: Any, given: Mapping[str, Any], variables: Mapping[str, str]) -> None:
    """Drop what the command line or the environment says otherwise."""
    from paceline.environment import variables_of_the_table

    flags = {flag: name for name, field in variables_of_the_table().items() for flag in field.flags}
    flags["--draft-max"] = "PACELINE_DRAFT_MAX"
    said = {name for name in given if name != "hub_file"}
    for option in ctx.command.params:
        if any(variables.get(flags.get(name, "")) for name in option.opts):
            said.add(option.name)
    settings.drop(_displaced(said) | said | given.keys())


def _displaced(names: Set[str]) -> set[str]:
    """Return what parameters of a lower rank contradict these, and so do not count."""
    displaced = {name for group in _NAMES_OF_MODELS if names & group for name in group}
    if "policy" in names:
        displaced |= _DRAFT_LENGTHS
    if names & _DRAFT_LENGTHS:
        displaced.add("policy")
    if names & _OF_SPECULATION:
        displaced.add("speculate")
    return displaced
