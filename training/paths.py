"""Where each step of the recipe reads and writes. Everything under `build/` can be deleted and made again."""

from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent
SOURCES = ROOT / "sources.toml"
CARD_TEMPLATE = ROOT / "model_card.md"

BUILD = ROOT / "build"
DOWNLOADS = BUILD / "downloads"
TRAIN_DOCUMENTS = BUILD / "train.jsonl"
HELDOUT_DOCUMENTS = BUILD / "heldout.jsonl"
CORPUS_SUMMARY = BUILD / "corpus.json"
TOKENIZER = BUILD / "tokenizer.json"
TRAIN_TOKENS = BUILD / "train.npy"
SAMPLED_TOKENS = BUILD / "samples.npy"
EVALUATION = BUILD / "evaluation.md"

EMBEDDED = ROOT.parent / "src" / "paceline" / "models" / "embedded"
HELDOUT_SAMPLES = EMBEDDED / "heldout"
HELDOUT_LICENSES = HELDOUT_SAMPLES / "LICENSES.txt"
MODEL_CARD = EMBEDDED / "MODEL_CARD.md"


def heldout_tokens(kind: str) -> Path:
    """Token ids of the whole held-out files of one kind of text."""
    return BUILD / f"heldout-{kind}.npy"


def checkpoint(name: str) -> Path:
    """Latest weights and optimizer state of what is trained under `name` (see `shapes.SHAPES`)."""
    return BUILD / f"{name}.pt"


def record(name: str) -> Path:
    """JSON record of how far the training of `name` came and how it scored."""
    return BUILD / f"{name}.json"


def texts(model: str, number: int, seed: int) -> Path:
    """Texts of a model for its head to learn from."""
    return BUILD / f"{model}-{number}-texts-{seed}.npy"


def hugging_face(name: str) -> Path:
    """Return the folder of the checkpoint as transformers reads it."""
    return BUILD / "huggingface" / name


def gguf(name: str, file_type: str) -> Path:
    """Where a model is exported to; only the Q8_0 files ship, the others exist for `check_export`."""
    folder = EMBEDDED if file_type == "q8_0" else BUILD / "gguf"
    return folder / f"{name}-{file_type}.gguf"


def replace_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write beside `path`, then rename, so that readers see the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    write(temporary)
    temporary.replace(path)
