"""Where the corpus comes from: pinned source distributions, the standard library, and a simulator of logs."""

import hashlib
import html
import importlib.metadata
import os
import re
import ssl
import sysconfig
import tarfile
import tomllib
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rich.progress import track

from training import paths

DEFAULT_INDEX = "https://pypi.org/simple"
TIMEOUT_S = 120
MIN_FILE_BYTES = 400
MAX_FILE_BYTES = 120_000
SUFFIXES = {".py": "code", ".rst": "prose", ".md": "prose", ".json": "json"}
PROSE_FOLDERS = {"doc", "docs", "Documentation"}  # the folders where .txt files are documentation, as in Django
# Left out everywhere: vendored copies, translations, generated tables, and rules that all services share.
SKIPPED = re.compile(r"_vendor|/vendor/|/locale/|/encodings/|endpoint-|idlelib|lib2to3|ensurepip|turtledemo|pydoc_data")


@dataclass(frozen=True)
class Document:
    """One file: `name` is its path below its source, which begins it, as in ``flask/src/flask/app.py``."""

    kind: str  # code, prose, json or logs
    source: str
    name: str
    text: str


@dataclass(frozen=True)
class Package:
    """One pinned source distribution, see `sources.toml`."""

    name: str
    version: str
    sha256: str
    license: str
    megabytes: dict[str, float]

    @property
    def archive(self) -> Path:
        return paths.DOWNLOADS / f"{self.name}-{self.version}.tar.gz"


def packages() -> list[Package]:
    with paths.SOURCES.open("rb") as file:
        return [Package(**entry) for entry in tomllib.load(file)["package"]]


def _open(url: str) -> bytes:
    context = ssl.create_default_context(cafile=os.environ.get("PIP_CERT"))
    with urllib.request.urlopen(url, timeout=TIMEOUT_S, context=context) as response:
        content: bytes = response.read()
    return content


def download(package: Package) -> None:
    """Fetch one archive from the package index (`PIP_INDEX_URL` names another), unless it is here already."""
    if package.archive.exists():
        return
    index = os.environ.get("PIP_INDEX_URL", DEFAULT_INDEX).rstrip("/")
    page_url = f"{index}/{package.name.replace('_', '-')}/"
    page = _open(page_url).decode()
    for match in re.finditer(r'href="([^"#]+)[^"]*"', page):
        url = urllib.parse.urljoin(page_url, html.unescape(match[1]))
        if PurePosixPath(urllib.parse.urlparse(url).path).name == package.archive.name:
            break
    else:
        raise FileNotFoundError(f"{index} has no {package.archive.name}; update training/sources.toml")
    content = _open(url)
    if hashlib.sha256(content).hexdigest() != package.sha256:
        raise ValueError(f"{package.archive.name} is not the archive that training/sources.toml pins")
    paths.replace_atomically(package.archive, lambda path: path.write_bytes(content))


def path_hash(name: str) -> bytes:
    """Return the hash that decides what is held out and, within a package, what is taken first."""
    return hashlib.sha256(name.encode()).digest()


def _kind(path: PurePosixPath) -> str | None:
    if path.suffix == ".txt" and PROSE_FOLDERS & set(path.parts):
        return "prose"
    return SUFFIXES.get(path.suffix)


def _decode(content: bytes) -> str | None:
    try:
        return content.decode().replace("\r\n", "\n")
    except UnicodeDecodeError:
        return None  # a handful of test files are deliberately in other encodings


def package_documents(package: Package) -> Iterator[Document]:
    """Yield the files of one package, those with the smallest hashes up to its limits."""
    left = {kind: 1e6 * megabytes for kind, megabytes in package.megabytes.items()}
    with tarfile.open(package.archive) as archive:
        files = {}
        for member in archive.getmembers():
            path = PurePosixPath(member.name)
            name = f"{package.name}/{PurePosixPath(*path.parts[1:])}"
            if member.isfile() and MIN_FILE_BYTES <= member.size <= MAX_FILE_BYTES and not SKIPPED.search(name):
                files[name] = member
        taken = {}
        for name in sorted(files, key=path_hash):
            kind = _kind(PurePosixPath(name))
            if kind is not None and left.get(kind, 0) >= files[name].size:
                left[kind] -= files[name].size
                taken[name] = kind
        # In the archive's order: going back in a compressed file means reading it again from the beginning.
        for name in sorted(taken, key=lambda name: files[name].offset):
            file = archive.extractfile(files[name])
            assert file is not None
            if (text := _decode(file.read())) is not None:
                yield Document(taken[name], package.name, name, text)


def license_text(package: Package) -> str:
    """Return the licence files at the top of the archive."""
    texts = []
    with tarfile.open(package.archive) as archive:
        for member in sorted(archive.getmembers(), key=lambda member: member.name):
            parts = PurePosixPath(member.name).parts
            if member.isfile() and len(parts) == 2 and re.match(r"LICEN[CS]E|COPYING|NOTICE|AUTHORS", parts[1]):
                file = archive.extractfile(member)
                assert file is not None
                texts.append(file.read().decode(errors="replace").strip())
    if not texts:
        raise FileNotFoundError(f"{package.archive.name} has no licence file")
    return "\n\n".join(texts)


def standard_library() -> Iterator[Document]:
    """Yield the modules of the running Python, and the language reference that its help system carries."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root).as_posix()
        skipped = "site-packages" in relative or SKIPPED.search(f"/{relative}")
        if skipped or not MIN_FILE_BYTES <= path.stat().st_size <= MAX_FILE_BYTES:
            continue
        # Tests outweigh the library and read alike: three eighths of them are enough.
        if "test" in Path(relative).parts and path_hash(relative)[1] >= 96:
            continue
        if (text := _decode(path.read_bytes())) is not None:
            yield Document("code", "python", f"python/{relative}", text)
    from pydoc_data.topics import topics  # type: ignore[import-not-found, unused-ignore]

    for topic, text in sorted(topics.items()):
        if len(text) >= MIN_FILE_BYTES:
            yield Document("prose", "python", f"python/reference/{topic}", text)


def installed_packages() -> Iterator[Document]:
    """Yield what installed packages say of themselves, and their JSON; those of the corpus are partly held out."""
    of_corpus = {package.name.replace("_", "-") for package in packages()}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"].lower().replace("_", "-")
        if name in of_corpus:
            continue
        text = str(distribution.metadata.json.get("description", ""))
        if len(text) >= MIN_FILE_BYTES:
            yield Document("prose", name, f"{name}/description", text)
        for file in distribution.files or ():
            path = Path(str(distribution.locate_file(file)))
            is_json = file.suffix == ".json" and path.is_file()
            if is_json and MIN_FILE_BYTES <= path.stat().st_size <= MAX_FILE_BYTES:
                yield Document("json", name, f"{name}/{file.as_posix()}", path.read_text(encoding="utf-8"))


def python_license() -> str:
    """PSF-2.0 asks that its text goes with excerpts."""
    path = Path(sysconfig.get_paths()["stdlib"]) / "LICENSE.txt"
    if not path.exists():
        raise FileNotFoundError("this Python comes without LICENSE.txt in its library; use one that has it")
    return path.read_text(encoding="utf-8").strip()


def documents() -> Iterator[Document]:
    """Every candidate document except the simulated logs."""
    yield from standard_library()
    for package in track(packages(), description="packages"):
        download(package)
        yield from package_documents(package)
