"""The GGUF engine: llama.cpp through llama-cpp-python's low-level C API.

::

    engine.py       passes, commits, forks
    lines.py        which native sequence id holds which tokens
    head_engines.py heads, which draft from the states of their target; states.py says which can be run
    embedder.py     vectors of texts, without all that
    loading.py      a model and its context, or why not
    settings.py     what the model and the machine allow of the options
    memory.py       how much memory there is for it, and how long its context is
    weights.py      reading the model's file
    vocabulary.py   text to tokens and back
    native.py       the shared libraries: log, devices, files that do not load
    remarks.py      which of llama.cpp's warnings a user has to know
"""

from paceline.core.errors import CapabilityError

try:
    from paceline.engines.llama_cpp.engine import LlamaCppEngine
    from paceline.engines.llama_cpp.head_engines import open_head
    from paceline.engines.llama_cpp.native import describe_library
    from paceline.engines.llama_cpp.vocabulary import GgufVocabulary
except (ImportError, OSError, RuntimeError) as error:  # the binding raises each of them for a library it cannot load
    raise CapabilityError(
        f"llama.cpp's library does not load ({error}): install it again with "
        "pip install --force-reinstall --no-cache-dir llama-cpp-python"
    ) from error

__all__ = ["GgufVocabulary", "LlamaCppEngine", "describe_library", "open_head"]
