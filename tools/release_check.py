"""Check that the last commit can be released: build it, and try its wheels in empty environments.

    python tools/release_check.py [--keep FOLDER] [PYTHON ...]

Each PYTHON is an interpreter to try, such as python3.12; without any it is the one that runs this. The first is tried
with the lowest versions of what paceline needs, too, so the oldest Python should be the first. Needed are git, a C++
compiler and the package index. Nothing is published. What was built is kept where --keep says. llama-cpp-python is
compiled once, which takes minutes, where pip's cache has no wheel of it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

CHECKOUT: Final = Path(__file__).resolve().parent.parent
NUM_TOKENS: Final = 40
ANSWER: Final = ("run", "--exact", "--sample", "code:4", "--seed", "1", "-n", str(NUM_TOKENS), "--json")
"""Exact, as near-ties may fall otherwise where the machine is busy: attention is then fused in one run and not in the
next.
"""

IN_PYTHON: Final = """
import paceline
from paceline.machine import machine
with paceline.load() as model:
    answer = model.generate("def main():", max_tokens=8, seed=1)
    assert answer.text, answer
print(machine()["planner"])
"""


class FailedCheckError(Exception):
    """What is wrong, in words for whoever releases."""


@dataclass(frozen=True)
class Environment:
    """An environment that began empty.

    Attributes:
        folder: the virtual environment.
        work: the folder that programs run in; no sources lie there.
    """

    folder: Path
    work: Path

    @property
    def python(self) -> Path:
        """The interpreter."""
        return self.folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")

    @property
    def command(self) -> Path:
        """The command that an installation makes."""
        return self.python.with_name("paceline.exe" if os.name == "nt" else "paceline")

    def pip(self, *arguments: str | Path, **variables: str) -> str:
        """Run pip, and return what it printed."""
        pip = (self.python, "-m", "pip", "--disable-pip-version-check", "--no-input")
        return run(*pip, *arguments, work=self.work, **variables)

    def run(self, *arguments: str | Path, **variables: str) -> str:
        """Run the interpreter, and return what it printed."""
        return run(self.python, *arguments, work=self.work, **variables)

    def paceline(self, *arguments: str) -> str:
        """Run the command, and return what it printed."""
        return run(self.command, *arguments, work=self.work, PACELINE_CACHE=str(self.folder / "cache"))


def variables_for(**more: str) -> dict[str, str]:
    """Return the environment of a program: nothing in it changes what paceline does or where it is imported from."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PACELINE_", "PYTHON"))}
    return {**kept, **more}


def run(*command: str | Path, work: Path, **variables: str) -> str:
    """Run a program, and return its standard output.

    Raises:
        FailedCheckError: it failed; the message has the end of what it said.
    """
    ended = subprocess.run(
        command,
        cwd=work,
        env=variables_for(**variables),
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    if ended.returncode:
        said = "\n".join((ended.stdout + ended.stderr).splitlines()[-30:])
        raise FailedCheckError(f"{' '.join(map(str, command))} ended with status {ended.returncode}:\n{said}")
    return ended.stdout


def expect(what: str, found: object, wanted: object) -> None:
    """Compare what was found with what is right.

    Raises:
        FailedCheckError: they differ.
    """
    if found != wanted:
        raise FailedCheckError(f"{what} is {found!r}, and should be {wanted!r}")


@contextlib.contextmanager
def check(what: str) -> Iterator[None]:
    """Print what was checked, and the seconds it took."""
    begun = time.monotonic()
    yield
    print(f"  {what} ({time.monotonic() - begun:.0f} s)", flush=True)


def new_environment(python: str, name: str, folder: Path) -> Environment:
    """Return an environment that has pip and nothing else."""
    run(python, "-m", "venv", folder / name, work=folder)
    return Environment(folder / name, folder)


def build_wheel(environment: Environment, source: Path, folder: Path, **variables: str) -> Path:
    """Build a wheel as ``pip install`` does, and return its file."""
    environment.pip("wheel", "--quiet", "--no-deps", "--wheel-dir", folder, source, **variables)
    (wheel,) = folder.glob("*.whl")
    return wheel


def names_in(wheel: Path) -> set[str]:
    """Return the names of a wheel's files."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith((".so", ".pyd"))}


def check_answers(environment: Environment, version: str, *, planner: str) -> None:
    """Check what users do first: the command, and a few lines of Python."""
    with check("paceline --version, --help, models"):
        expect("paceline --version", environment.paceline("--version").strip(), f"paceline {version}")
        expect("the metadata's version", installed_version(environment), version)
        environment.run("-m", "paceline", "--help")
        if "target" not in environment.paceline("models"):
            raise FailedCheckError("paceline models does not list the embedded pair")
    with check("paceline run: the same text with drafts and without"):
        drafted = json.loads(environment.paceline(*ANSWER, "--draft-max", "8"))
        plain = json.loads(environment.paceline(*ANSWER, "--no-speculation"))
        planned = json.loads(environment.paceline(*ANSWER))
        expect("the number of tokens", len(plain["token_ids"]), NUM_TOKENS)
        expect("the answer with drafts", drafted["token_ids"], plain["token_ids"])
        expect("the answer of the default policy", planned["token_ids"], plain["token_ids"])
        if set(drafted["sources"]) <= {"target"}:
            raise FailedCheckError("paceline run --draft-max 8 accepted no draft")
    with check(f"paceline.load in Python, with the planner {planner}"):
        said = environment.run("-c", IN_PYTHON, PACELINE_CACHE=str(environment.folder / "cache"))
        expect("the planner", said.split()[-1], planner)


def installed_version(environment: Environment) -> str:
    """Return the version that the installation's metadata has."""
    return environment.run("-c", "from importlib.metadata import version; print(version('paceline'))").strip()


def check_server(environment: Environment, version: str) -> None:
    """Check that the server starts, answers one request, and ends."""
    command = [str(environment.command), "serve", "--host", "127.0.0.1", "--port", "0"]
    server = subprocess.Popen(
        command,
        cwd=environment.work,
        env=variables_for(PACELINE_CACHE=str(environment.folder / "cache")),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )
    assert server.stderr is not None
    said = []
    try:
        for line in server.stderr:
            said.append(line)
            if " is served at " in line:
                break
        else:
            raise FailedCheckError(f"paceline serve ended before it was ready:\n{''.join(said)}")
        url = said[-1].split(" is served at ")[1].strip()
        request = urllib.request.Request(
            f"{url}/v1/completions",
            json.dumps({"prompt": "def main():", "max_tokens": 8, "seed": 1}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            answer = json.load(response)
        expect("tokens of the answer", answer["usage"]["completion_tokens"], 8)
        with urllib.request.urlopen(f"{url}/props", timeout=60) as response:
            expect("the server's version", json.load(response)["build_info"].rpartition("-")[2], version)
    finally:
        server.terminate()
        server.communicate()


def check_python(python: str, clone: Path, pure: Path, version: str, folder: Path) -> Path:
    """Check one Python, and return the wheel that was built by it."""
    environment = new_environment(python, "environment", folder)
    tag = environment.run("-c", "import sys; print('cp%d%d' % sys.version_info[:2])").strip()
    with check(f"pip builds a wheel from a clone, compiled, for {tag}"):
        wheel = build_wheel(environment, clone, folder / "wheel")
        expect("the wheel's name", wheel.name.split("-")[:4], ["paceline", version, tag, tag])
        expect("what only one of both wheels has", names_in(wheel) ^ names_in(pure), set())
        expect(
            "what building left among the sources", run("git", "status", "--short", "--ignored", "src", work=clone), ""
        )
    with check("pip install, in an empty environment"):
        environment.pip("install", "--quiet", wheel)
        environment.pip("check")
    check_answers(environment, version, planner="compiled")
    with check("paceline[serve] answers a request"):
        environment.pip("install", "--quiet", f"{wheel}[serve]")
        environment.pip("check")
        check_server(environment, version)
    with check("the wheel that is not compiled takes its place"):
        environment.pip("install", "--quiet", "--force-reinstall", "--no-deps", pure)
    check_answers(environment, version, planner="interpreted")
    with check("pip uninstall leaves nothing"):
        environment.pip("uninstall", "--quiet", "--yes", "paceline")
        left = [path for path in environment.folder.rglob("paceline*") if "cache" not in path.parts]
        expect("what is left", [str(path) for path in left], [])
    return wheel


def check_lowest(python: str, clone: Path, wheel: Path, version: str, tools: Environment, folder: Path) -> None:
    """Check the lowest versions that ``pyproject.toml`` allows."""
    environment = new_environment(python, "lowest", folder)
    needed = tomllib.loads((clone / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    (engine,) = (each.replace(">=", "==") for each in needed if each.startswith("llama-cpp-python"))
    with check("installation with the lowest versions that are allowed"):
        # pip has it compiled; uv would compile it again.
        environment.pip("wheel", "--quiet", "--no-deps", "--wheel-dir", folder / "engine", engine)
        uv = ("-m", "uv", "pip", "install", "--quiet", "--python", environment.python)
        lowest = ("--resolution", "lowest-direct", "--find-links", folder / "engine")
        tools.run(*uv, *lowest, "--requirements", clone / "pyproject.toml", "--extra", "serve")
        tools.run(*uv, "--no-deps", wheel)
    check_answers(environment, version, planner="compiled")
    with check("paceline[serve] answers a request"):
        check_server(environment, version)


def check_release(pythons: list[str], folder: Path, keep: Path | None) -> None:
    """Check everything, and print it.

    Args:
        pythons: interpreters to try.
        folder: for all that is made.
        keep: where the archive and the wheels are copied to in the end.

    Raises:
        FailedCheckError: something is not as it should be; what follows was not tried.
    """
    if changed := run("git", "status", "--short", work=CHECKOUT):
        print(f"not committed, so left out:\n{changed}", end="")
    clone, built = folder / "clone", folder / "built"
    run("git", "clone", "--quiet", CHECKOUT, clone, work=folder)
    print("sources")
    tools = new_environment(sys.executable, "tools", folder)
    tools.pip("install", "--quiet", "build>=1.5", "twine>=6", "pipx>=1.8", "uv>=0.9")
    with check("source archive, and a wheel of it that is not compiled"):
        tools.run("-m", "build", "--quiet", "--outdir", built, clone, PACELINE_COMPILE="0")
        (archive,) = built.glob("*.tar.gz")
        (pure,) = built.glob("*.whl")
        version = archive.name.removeprefix("paceline-").removesuffix(".tar.gz")
        expect("the wheel's name", pure.name, f"paceline-{version}-py3-none-any.whl")
    with check("their metadata and the README's markup"):
        tools.run("-m", "twine", "check", "--strict", archive, pure)
    with check(f"the changelog has a heading for {version}, or for what is not released"):
        headings = [line for line in (clone / "CHANGELOG.md").read_text("utf-8").splitlines() if line[:3] == "## "]
        if not headings or not headings[0].startswith(("## Unreleased", f"## {version} ")):
            raise FailedCheckError(f"the changelog begins with {headings[:1]}, not with {version}")
    with check("llama-cpp-python, for all Pythons"):
        # pip's cache has a wheel for each Python, though this one fits them all.
        tools.pip("wheel", "--quiet", "--no-deps", "--wheel-dir", folder / "engine", "llama-cpp-python")
        os.environ["PIP_FIND_LINKS"] = f"{os.environ.get('PIP_FIND_LINKS', '')} {folder / 'engine'}".strip()
        # pipx installs by uv where it finds that, and uv would compile it again.
        os.environ["UV_FIND_LINKS"] = str(folder / "engine")
    for number, python in enumerate(pythons):
        place = folder / f"python-{number}"
        place.mkdir()
        print(run(python, "--version", work=folder).strip())
        wheel = check_python(python, clone, pure, version, place)
        with check("pipx run --spec WHEEL paceline --version"):
            pipx = ("-m", "pipx", "run", "--python", python, "--spec", wheel, "paceline", "--version")
            said = tools.run(*pipx, PIPX_HOME=str(place / "pipx"))
            expect("what it prints", said.strip(), f"paceline {version}")
        if number == 0:
            check_lowest(python, clone, wheel, version, tools, place)
        if keep is not None:
            shutil.copy(wheel, built)
        shutil.rmtree(place)
    if keep is not None:
        shutil.copytree(built, keep, dirs_exist_ok=True)
        print(f"what was checked lies in {keep}: {', '.join(sorted(path.name for path in built.iterdir()))}")


def main() -> int:
    """Run the checks, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="*", metavar="PYTHON", help="interpreter to try")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the archive and the wheels there")
    given = parser.parse_args()
    pythons = given.pythons or [sys.executable]
    if missing := [python for python in pythons if shutil.which(python) is None]:
        parser.error(f"{', '.join(missing)} cannot be found; give a path, or a command on PATH")
    pythons = [str(shutil.which(python)) for python in pythons]
    with tempfile.TemporaryDirectory(prefix="paceline-release-") as folder:
        try:
            check_release(pythons, Path(folder).resolve(), given.keep and given.keep.resolve())
        except FailedCheckError as error:
            print(f"failed: {error}", file=sys.stderr)
            return 1
    print("all checks passed; nothing was published")
    return 0


if __name__ == "__main__":
    sys.exit(main())
