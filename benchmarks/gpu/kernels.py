"""Leaving out kernels that the measured models do not use, as compiling all of them takes most of the time there is.

ggml-cuda has a file for each group of template instances. An instance that is left out gets a definition that ends the
process with its name, so that the library links and a model that needs it does not get wrong texts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline.core.errors import EngineError

_CUDA: Final = Path("ggml", "src", "ggml-cuda")
_STUBS: Final = "left-out.cu"

TYPES: Final = ("GGML_TYPE_Q4_0", "GGML_TYPE_Q6_K", "GGML_TYPE_Q8_0")
"""Of weights: those of the models, and the output's in a file of Q4_0."""
HEAD_SIZES: Final = ("64",)
"""Of attention: inflated models keep the heads of the embedded one."""


@dataclass(frozen=True, slots=True)
class _Family:
    """Template instances of one kind.

    Attributes:
        files: pattern of the files that have them.
        template: declaration of the function, which ``{}`` follows with its arguments.
        parameters: of the function.
        kept: values of the first argument to keep.
    """

    files: str
    template: str
    function: str
    parameters: str
    kept: Sequence[str]


_FAMILIES: Final[Mapping[str, _Family]] = {
    "DECL_MMQ_CASE": _Family(
        "mmq-instance-*.cu",
        "ggml_type type, ggml_prec precision",
        "mul_mat_q_case",
        "ggml_backend_cuda_context &, const mmq_args &, CUstream_st *",
        TYPES,
    ),
    "DECL_FATTN_MMA_F16_CASE": _Family(
        "fattn-mma-f16-instance-*.cu",
        "int DKQ, int DV, int ncols1, int ncols2",
        "ggml_cuda_flash_attn_ext_mma_f16_case",
        "ggml_backend_cuda_context &, ggml_tensor *",
        HEAD_SIZES,
    ),
    "DECL_FATTN_TILE_CASE": _Family(
        "fattn-tile-instance-*.cu",
        "int DKQ, int DV",
        "ggml_cuda_flash_attn_ext_tile_case",
        "ggml_backend_cuda_context &, ggml_tensor *",
        HEAD_SIZES,
    ),
}

_DECLARED: Final = re.compile(r"^(?P<macro>DECL_\w+)\((?P<arguments>[^)]*)\);$", re.MULTILINE)

# A specialisation has the name of the instance in its place, to a linker.
_HEAD: Final = """\
// What this build leaves out: see benchmarks/gpu/kernels.py.
#include "ggml.h"

struct CUstream_st;
struct mmq_args;
struct ggml_backend_cuda_context;
"""


def cut_kernels(sources: Path) -> list[str]:
    """Take instances out of llama.cpp's sources that the measured models do not use; return their names."""
    folder = sources / _CUDA
    stubs, names = [_HEAD], []
    for macro, family in _FAMILIES.items():
        stubs.append(f"template <{family.template}> void {family.function}({family.parameters});\n")
        kept = 0
        for path in sorted((folder / "template-instances").glob(family.files)):
            text = path.read_text(encoding="utf-8")
            for found in list(_DECLARED.finditer(text)):
                arguments = [argument.strip() for argument in found["arguments"].split(",")]
                if found["macro"] == macro and arguments[0] in family.kept:
                    kept += 1
                    continue
                if macro == "DECL_MMQ_CASE":
                    # The kernel of the 4-bit floats is the same macro with another ending.
                    arguments.append("GGML_PREC_Q4" if found["macro"].endswith("_W4A4") else "GGML_PREC_Q8")
                name = f"{family.function}<{', '.join(arguments)}>"
                stubs.append(f'template <> void {name}({family.parameters}) {{ GGML_ABORT("left out: {name}"); }}\n')
                names.append(name)
                text = text.replace(found[0], "")
            if _DECLARED.search(text):
                path.write_text(text, encoding="utf-8")
            else:
                path.unlink()
        if not kept:
            raise EngineError(f"{folder} has no {macro}({', '.join(family.kept)}): take the llama.cpp that is known")
    (folder / _STUBS).write_text("".join(stubs), encoding="utf-8")
    return names
