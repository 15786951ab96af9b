"""Byte-level BPE with the GPT-2 pre-tokenizer, so that llama.cpp's `gpt-2` splits text the same way."""

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from training import paths
from training.sources import Document

VOCAB_SIZE = 4096
END_OF_TEXT = "<|endoftext|>"
MAX_TOKEN_BYTES = 32  # the piece buffer of llama-cpp-python's `detokenize`; longer tokens would come out cut


def train(documents: list[Document]) -> Tokenizer:
    """Learn the vocabulary from the training documents and save it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),  # every byte has a token: no unk needed
        max_token_length=MAX_TOKEN_BYTES,
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents), trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        size = tokenizer.get_vocab_size()
        raise ValueError(f"the corpus gave {size} tokens, {VOCAB_SIZE} are needed; add text")
    tokenizer.save(str(paths.TOKENIZER))
    return tokenizer


def load() -> Tokenizer:
    return Tokenizer.from_file(str(paths.TOKENIZER))


def encode_documents(tokenizer: Tokenizer, documents: list[Document]) -> npt.NDArray[np.uint16]:
    """Return all documents as one stream `[num_tokens]`, each followed by the end-of-text token."""
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    assert end_of_text is not None
    stream: list[int] = []
    for encoding in tokenizer.encode_batch([document.text for document in documents]):
        stream += [*encoding.ids, end_of_text]
    return np.array(stream, dtype=np.uint16)
