"""Where each step of the recipe reads and writes. Everything under `build/` can be deleted and made again."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent
BUILD = ROOT / "build"
TRAIN_DOCUMENTS = BUILD / "train.jsonl"
HELDOUT_DOCUMENTS = BUILD / "heldout.jsonl"
TOKENIZER = BUILD / "tokenizer.json"
TRAIN_TOKENS = BUILD / "train.npy"
HELDOUT_TOKENS = BUILD / "heldout.npy"

EMBEDDED = ROOT.parent / "src" / "paceline" / "models" / "embedded"
HELDOUT_SNIPPETS = EMBEDDED / "heldout" / "code.jsonl"
HELDOUT_LICENSE = EMBEDDED / "heldout" / "LICENSE.txt"
MODEL_CARD = EMBEDDED / "MODEL_CARD.md"


def checkpoint(name: str) -> Path:
    """Latest weights and optimizer state of the model `name` ("target" or "draft")."""
    return BUILD / f"{name}.pt"


def record(name: str) -> Path:
    """JSON record of how far the training of `name` came and how it scored."""
    return BUILD / f"{name}.json"


def gguf(name: str, quantization: str) -> Path:
    """Where a model is exported to; only the Q8_0 files ship, the others exist for `check_export`.

    Not beside `tokenizer.json`: transformers would read that instead of the tokenizer in the GGUF file.
    """
    folder = EMBEDDED if quantization == "q8_0" else BUILD / "gguf"
    return folder / f"{name}-{quantization}.gguf"
