"""Corpus: the source of the Python standard library that runs this recipe (licence PSF-2.0).

Whole files are held out, never parts of a file, so that no held-out text has a neighbour in training.
"""

import hashlib
import json
import random
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from training import paths

MAX_FILE_BYTES = 200_000
HELDOUT_BELOW = 20  # a file is held out when the first byte of sha256(relative path) is below this: 7.8 %
TEST_KEEP_BELOW = 96  # test files are trained on when the second hash byte is below this: 37.5 %
SKIPPED_FOLDERS = {"site-packages", "__pycache__", "idlelib", "lib2to3", "ensurepip", "turtledemo"}
SKIPPED_FOLDERS |= {"encodings"}  # tables of code points
NEAR_REPEAT_SHARE = 0.15  # share of training files that also contribute a passage and an edited copy of it


@dataclass(frozen=True)
class Document:
    """One source file: `name` is its path relative to the standard library."""

    name: str
    text: str


def path_hash(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def is_heldout(name: str) -> bool:
    return path_hash(name)[0] < HELDOUT_BELOW


def is_test(name: str) -> bool:
    return any(part in {"test", "tests"} for part in Path(name).parts)


def standard_library() -> Iterator[Document]:
    """Every usable file once, in name order; a second file with the same content is dropped."""
    root = Path(sysconfig.get_paths()["stdlib"])
    seen: set[bytes] = set()
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS & set(relative.parts) or not 200 <= path.stat().st_size <= MAX_FILE_BYTES:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a handful of test files are deliberately in other encodings
        digest = hashlib.sha256(text.encode()).digest()
        if digest not in seen:
            seen.add(digest)
            yield Document(relative.as_posix(), text)


def near_repeat(document: Document, rng: random.Random) -> Document | None:
    """Return a passage followed by the same passage with one identifier renamed, as when code is edited.

    Short enough (about 20 lines) for both copies to fall into one training sequence; it teaches copying
    from the context, which drafts of edited code depend on.
    """
    lines = document.text.splitlines(keepends=True)
    length = rng.randint(12, 24)
    if len(lines) < 2 * length:
        return None
    start = rng.randrange(len(lines) - length)
    passage = "".join(lines[start : start + length])
    names = sorted(set(re.findall(r"\b[a-z_][a-z_0-9]{3,}\b", passage)))
    if not names:
        return None
    old = rng.choice(names)
    new = rng.choice([f"new_{old}", f"{old}_2", f"_{old}", f"my_{old}", "value", "item"])
    edited = re.sub(rf"\b{re.escape(old)}\b", new, passage)
    return Document(f"{document.name}#near-repeat", passage + "\n\n" + edited)


def write_documents(path: Path, documents: list[Document]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for document in documents:
            file.write(json.dumps({"name": document.name, "text": document.text}, ensure_ascii=False) + "\n")


def read_documents(path: Path) -> list[Document]:
    with path.open(encoding="utf-8") as file:
        return [Document(**json.loads(line)) for line in file]


def write_license() -> None:
    """Put the licence of the library beside the snippets: PSF-2.0 asks that it goes with excerpts."""
    license_file = Path(sysconfig.get_paths()["stdlib"]) / "LICENSE.txt"
    if not license_file.exists():
        raise FileNotFoundError("this Python comes without LICENSE.txt in its library; use one that has it")
    paths.HELDOUT_LICENSE.write_bytes(license_file.read_bytes())


def build(seed: int) -> tuple[list[Document], list[Document]]:
    """Write and return the training and the held-out documents; training order is shuffled by `seed`."""
    rng = random.Random(seed)
    train: list[Document] = []
    heldout: list[Document] = []
    for document in standard_library():
        if is_heldout(document.name):
            heldout.append(document)
        elif not is_test(document.name) or path_hash(document.name)[1] < TEST_KEEP_BELOW:
            train.append(document)
    repeats = [near_repeat(document, rng) for document in train if rng.random() < NEAR_REPEAT_SHARE]
    train += [document for document in repeats if document is not None]
    rng.shuffle(train)
    write_documents(paths.TRAIN_DOCUMENTS, train)
    write_documents(paths.HELDOUT_DOCUMENTS, heldout)
    return train, heldout


def write_snippets(seed: int, max_total_bytes: int = 195_000) -> int:
    """Write the held-out snippets that ship with the models; returns how many.

    One snippet of 1500 to 2500 characters from each held-out file that is long enough, alternately from
    its beginning and from a line start inside it.
    """
    rng = random.Random(seed)
    documents = read_documents(paths.HELDOUT_DOCUMENTS)
    # Library code first: if the size limit cuts, it should cut test code.
    documents.sort(key=lambda document: (is_test(document.name), document.name))
    snippets: list[dict[str, str]] = []
    total_bytes = 0
    for document in documents:
        text = document.text
        if len(text) < 1500:
            continue
        start = 0
        if len(snippets) % 2 and len(text) > 4000:
            start = text.find("\n", rng.randrange(len(text) - 3000)) + 1
        end = min(start + rng.randint(1700, 2500), len(text))
        if end < len(text):
            end = text.rfind("\n", start, end) + 1
        snippet = {"name": document.name, "text": text[start:end]}
        size = len(json.dumps(snippet, ensure_ascii=False).encode()) + 1
        if not 1500 <= end - start <= 2500 or total_bytes + size > max_total_bytes:
            continue
        total_bytes += size
        snippets.append(snippet)
    paths.HELDOUT_SNIPPETS.parent.mkdir(parents=True, exist_ok=True)
    with paths.HELDOUT_SNIPPETS.open("w", encoding="utf-8") as file:
        for snippet in snippets:
            file.write(json.dumps(snippet, ensure_ascii=False) + "\n")
    write_license()
    return len(snippets)
