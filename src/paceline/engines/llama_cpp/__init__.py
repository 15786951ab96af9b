"""The GGUF engine: llama.cpp through llama-cpp-python's low-level C API.

::

    engine.py       which native sequence id holds which tokens; passes, commits, forks
    loading.py      a model and its context, or why not
    vocabulary.py   text to tokens and back
    native.py       the shared libraries: log, devices, files that do not load
    remarks.py      which of llama.cpp's warnings a user has to know
"""

from paceline.core.errors import CapabilityError

try:
    from paceline.engines.llama_cpp.engine import LlamaCppEngine
    from paceline.engines.llama_cpp.native import describe_library
    from paceline.engines.llama_cpp.vocabulary import GgufVocabulary
except (ImportError, OSError, RuntimeError) as error:  # the binding raises each of them for a library it cannot load
    raise CapabilityError(
        f"llama.cpp's library does not load ({error}): install it again with "
        "pip install --force-reinstall --no-cache-dir llama-cpp-python"
    ) from error

__all__ = ["GgufVocabulary", "LlamaCppEngine", "describe_library"]
