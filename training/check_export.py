"""Check that the exported files say what the trained models say.

Compares both readers of the files, llama.cpp and transformers, on held-out text: their tokens with those of
the trained tokenizer, their logits with those of the checkpoint.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import llama_cpp
import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from training import corpus, paths, tokenizer
from training.export import FILE_TYPES
from training.train import load_trained

if TYPE_CHECKING:
    from collections.abc import Callable

Logits = npt.NDArray[np.float32]

# Largest allowed root-mean-square difference of the logits (their own spread is about 3). llama.cpp keeps its
# KV cache in F16 and quantises activations for Q8_0, so even F32 weights do not give equal bits.
RMS_LIMITS = {"f32": 0.01, "f16": 0.01, "q8_0": 0.15}
NUM_TOKENS = 400


@dataclass(frozen=True)
class LogitComparison:
    """Difference of two `[num_tokens, vocab]` logit arrays."""

    largest: float
    rms: float
    argmax_agreement: float

    @classmethod
    def of(cls, ours: Logits, reference: Logits) -> "LogitComparison":
        difference = ours - reference
        return cls(
            largest=float(np.abs(difference).max()),
            rms=float(np.sqrt((difference**2).mean())),
            argmax_agreement=float((ours.argmax(-1) == reference.argmax(-1)).mean()),
        )

    def __str__(self) -> str:
        return f"largest {self.largest:.2g}, rms {self.rms:.2g}, same argmax {self.argmax_agreement:.1%}"


def llama_cpp_logits(model: llama_cpp.Llama, token_ids: list[int]) -> Logits:
    """`[num_tokens, vocab]`; the model must have been opened with `logits_all`."""
    model.reset()
    model.eval(token_ids)
    return np.array(model.scores[: len(token_ids)], dtype=np.float32)


def torch_logits(model: torch.nn.Module, token_ids: list[int]) -> Logits:
    """Return `[num_tokens, vocab]`."""
    with torch.inference_mode():
        logits: Logits = model(torch.tensor([token_ids])).logits[0].float().numpy()
    return logits


def check(name: str, file_type: str) -> list[str]:
    """Print the comparison of one file; returns what is wrong with it."""
    problems: list[str] = []
    path = paths.gguf(name, file_type)
    trained = tokenizer.load()
    documents = corpus.read_documents(paths.HELDOUT_DOCUMENTS)
    # Text the corpus lacks: other scripts, control characters, odd white space, almost a special token.
    odd = "naïve — 你好 мир 🙂\t\t x\r\n\n\n   \u00a0y\u2028 1234567 don't I'LL <|endoftext"
    odd += "".join(map(chr, range(1, 128)))
    texts = [document.text for document in documents] + [odd]
    expected = [trained.encode(text).ids for text in texts]
    model = llama_cpp.Llama(str(path), n_ctx=NUM_TOKENS, n_threads=1, logits_all=True, verbose=False)
    in_transformers = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    readers: dict[str, tuple[Callable[[str], list[int]], Callable[[list[int]], str]]] = {
        "llama.cpp": (
            lambda text: model.tokenize(text.encode(), add_bos=False, special=False),
            lambda ids: model.detokenize(ids).decode(errors="replace"),
        ),
        "transformers": (
            lambda text: in_transformers.encode(text, add_special_tokens=False),
            lambda ids: in_transformers.decode(ids, clean_up_tokenization_spaces=False),
        ),
    }
    for reader, (encode, decode) in readers.items():
        different = sum(encode(text) != ids for text, ids in zip(texts, expected, strict=True))
        lossy = sum(decode(ids) != text for text, ids in zip(texts, expected, strict=True))
        print(
            f"{path.name}: {reader} tokenises {different} of {len(texts)} texts differently, "
            f"{lossy} do not decode to themselves"
        )
        if different or lossy:
            problems.append(f"{path.name}: tokens in {reader}")
    end_of_text = trained.token_to_id(tokenizer.END_OF_TEXT)
    if (model.token_eos(), model.token_bos()) != (end_of_text, end_of_text):
        problems.append(f"{path.name}: end or begin of text in llama.cpp")
    if (in_transformers.eos_token_id, in_transformers.bos_token_id) != (end_of_text, end_of_text):
        problems.append(f"{path.name}: end or begin of text in transformers")

    token_ids = max(expected, key=len)[:NUM_TOKENS]
    reference = torch_logits(load_trained(name).cpu(), token_ids)
    loaded = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    for reader, logits in (
        ("llama.cpp", llama_cpp_logits(model, token_ids)),
        ("transformers", torch_logits(loaded.eval(), token_ids)),
    ):
        comparison = LogitComparison.of(logits, reference)
        print(f"{path.name}: {reader} logits against the checkpoint: {comparison}")
        if comparison.rms > RMS_LIMITS[file_type]:
            problems.append(f"{path.name}: logits in {reader}")
    return problems


def check_all() -> list[str]:
    """Check every file that has been exported."""
    exported = [
        (name, file_type)
        for name in ("target", "draft")
        for file_type in FILE_TYPES
        if paths.gguf(name, file_type).exists()
    ]
    return [problem for name, file_type in exported for problem in check(name, file_type)]
