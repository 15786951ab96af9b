"""llama.cpp as it is where a model is larger than memory: the file mapped, its pages left to the system."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import llama_cpp.llama_cpp as api


@contextmanager
def as_in_the_file() -> Iterator[None]:
    """Have engines that are opened within the block use weights as they lie in the file.

    llama.cpp lays some types out anew for faster kernels (``--no-repack`` of its own programs says not to). That is
    memory which the system cannot give back, as much as the weights: a process that does so in a box smaller than its
    model is ended at load.
    """
    defaults = api.llama_model_default_params

    def unchanged() -> Any:
        parameters = defaults()
        parameters.use_extra_bufts = False
        return parameters

    with patch.object(api, "llama_model_default_params", unchanged):
        yield
