"""Corpus: Python source, English technical prose, JSON and logs, split by whole files and free of copies.

A file is held out when a hash of its name says so. Copies would undo that (packages vendor each other, documentation
is repeated from version to version), so a file that shares most of its lines with one that came before it in its
half, or with a held-out file, is dropped.
"""

import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from training import paths, simulated_logs, sources
from training.sources import Document, path_hash

KINDS = ("code", "prose", "json", "logs")
HELDOUT_BELOW = 10  # a file is held out when the first byte of sha256(name) is below this: 3.9 %
LOG_BYTES = 5e6
TELLING_LINE = 25  # characters, white space at the ends not counted; shorter lines are common to strangers
MAX_SHARED = 0.5  # a file with more than this share of its telling lines in one other file is a copy
NEAR_REPEAT_SHARE = 0.3  # share of training files that also contribute a passage and an edited copy of it
SNIPPETS_PER_KIND = 50


def is_heldout(name: str) -> bool:
    return path_hash(name)[0] < HELDOUT_BELOW


class Copies:
    """Files seen so far, by the hashes of their telling lines, to ask whether another one is a copy."""

    def __init__(self) -> None:
        self.files_with: dict[bytes, list[int]] = {}
        self.num_files = 0

    @staticmethod
    def lines_of(document: Document) -> set[bytes]:
        lines = {line.strip() for line in document.text.splitlines()}
        telling = {line for line in lines if len(line) >= TELLING_LINE} or lines
        return {hashlib.blake2b(line.encode(), digest_size=8).digest() for line in telling}

    def is_copy(self, document: Document) -> bool:
        lines = self.lines_of(document)
        shared: Counter[int] = Counter()
        for line in lines:
            shared.update(self.files_with.get(line, ()))
        return bool(shared) and shared.most_common(1)[0][1] > MAX_SHARED * len(lines)

    def add(self, document: Document) -> None:
        for line in self.lines_of(document):
            # A line that very many files share (a licence header) tells nothing: stop counting it.
            if len(files := self.files_with.setdefault(line, [])) < 50:
                files.append(self.num_files)
        self.num_files += 1


def without_copies(documents: Iterable[Document]) -> tuple[list[Document], list[Document], int]:
    """Return (training, held-out, number of copies dropped). Held-out files come first, so they win."""
    ordered = sorted(documents, key=lambda document: not is_heldout(document.name))
    seen = Copies()
    train: list[Document] = []
    heldout: list[Document] = []
    dropped = 0
    for document in ordered:
        if seen.is_copy(document):
            dropped += 1
            continue
        seen.add(document)
        (heldout if is_heldout(document.name) else train).append(document)
    return train, heldout, dropped


def near_repeat(document: Document, rng: random.Random) -> Document | None:
    """Return a passage followed by the same passage with some words replaced, as when a file is edited.

    Short enough for both copies to fall into one training sequence; it teaches copying from the context, which
    drafts of edited text depend on.
    """
    lines = document.text.splitlines(keepends=True)
    length = rng.randint(8, 20)
    if len(lines) < 2 * length:
        return None
    start = rng.randrange(len(lines) - length)
    passage = "".join(lines[start : start + length])
    names = sorted(set(re.findall(r"\b[A-Za-z_][a-z_0-9]{3,}\b", passage)))
    if not names or not 200 <= len(passage) <= 1100:
        return None
    edited = passage
    for old in rng.sample(names, min(rng.choice([0, 1, 1, 2]), len(names))):
        edited = re.sub(rf"\b{re.escape(old)}\b", rng.choice([f"new_{old}", f"{old}_2", *names]), edited)
    return Document(document.kind, document.source, f"{document.name}#near-repeat", passage + "\n\n" + edited)


def write_documents(path: Path, documents: list[Document]) -> None:
    text = "".join(json.dumps(vars(document), ensure_ascii=False) + "\n" for document in documents)
    paths.replace_atomically(path, lambda file: file.write_text(text, encoding="utf-8"))


def read_documents(path: Path) -> list[Document]:
    with path.open(encoding="utf-8") as file:
        return [Document(**json.loads(line)) for line in file]


def build(seed: int) -> None:
    """Write the training and the held-out documents, the samples that ship, and what there is of each source."""
    candidates = [*sources.documents(), *simulated_logs.documents(seed, LOG_BYTES)]
    train, heldout, num_copies = without_copies(candidates)
    shares = Counter[str]()
    for document in train:
        shares[f"{document.kind}/{document.source}"] += len(document.text.encode())
    rng = random.Random(seed)
    repeats = [near_repeat(document, rng) for document in train if rng.random() < NEAR_REPEAT_SHARE]
    train += [document for document in repeats if document is not None]
    rng.shuffle(train)
    write_documents(paths.TRAIN_DOCUMENTS, train)
    write_documents(paths.HELDOUT_DOCUMENTS, heldout)
    summary = {
        "copies_dropped": num_copies,
        "train_files": len(train),
        "heldout_files": dict(Counter(document.kind for document in heldout)),
        "near_repeats": sum(document is not None for document in repeats),
        "bytes": dict(shares.most_common()),
    }
    paths.CORPUS_SUMMARY.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    write_samples(heldout)


def write_samples(heldout: list[Document]) -> None:
    """Write the held-out samples that ship with the models, and the licences of what they are taken from.

    One sample of 1500 to 2500 characters from each file that is long enough, in the order of the files' hashes,
    alternately from the beginning and from the middle.
    """
    taken: set[str] = set()
    paths.HELDOUT_SAMPLES.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        samples: list[dict[str, str]] = []
        for document in sorted(heldout, key=lambda document: path_hash(document.name)):
            if document.kind != kind or len(document.text) < 1600 or len(samples) == SNIPPETS_PER_KIND:
                continue
            inside = len(samples) % 2 and len(document.text) > 4000
            start = document.text.find("\n", len(document.text) // 3) + 1 if inside else 0
            sample = document.text[start : start + 2500]
            if start + 2500 < len(document.text):
                sample = sample[: sample.rfind("\n") + 1]
            if len(sample) >= 1500:
                samples.append({"name": document.name, "text": sample})
                taken.add(document.source)
        text = "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)
        (paths.HELDOUT_SAMPLES / f"{kind}.jsonl").write_text(text, encoding="utf-8")
    licenses = [f"== python (PSF-2.0)\n\n{sources.python_license()}"] if "python" in taken else []
    for package in sources.packages():
        if package.name in taken:
            text = sources.license_text(package)
            licenses.append(f"== {package.name} {package.version} ({package.license})\n\n{text}")
    paths.HELDOUT_LICENSES.write_text("\n\n\n".join(licenses) + "\n", encoding="utf-8")


def describe() -> str:
    """One line per kind: files and bytes for training, files held out."""
    summary = json.loads(paths.CORPUS_SUMMARY.read_text(encoding="utf-8"))
    sizes: Counter[str] = Counter()
    for name, size in summary["bytes"].items():
        sizes[name.split("/")[0]] += size
    lines = [
        f"{kind}: {sizes[kind] / 1e6:.1f} MB, {summary['heldout_files'].get(kind, 0)} files held out" for kind in KINDS
    ]
    return "\n".join(
        [*lines, f"{summary['copies_dropped']} copies dropped, {summary['near_repeats']} near-repeats added"]
    )
