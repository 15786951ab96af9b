"""Rotary position embeddings: their base, and how they are stretched to longer contexts.

GGUF has two ways: linear scaling by a number, and any other scaling by ``rope_freqs.weight``, one divisor for every
frequency. Hugging Face names a recipe. Of the recipes with divisors, ``llama3`` is known here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from paceline.core.errors import InputError
from paceline.core.numbers import shown

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.models.gguf_file import Floats

_STANDARD: Final = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What every Llama 3.1 and 3.2 has; tried before anything is fitted."""

_LARGEST: Final = 1e30
"""Largest base or factor, well within GGUF's float32."""

_TOLERANCE: Final = 1e-5
"""Relative: files by other converters have computed the divisors in float32."""


@dataclass(frozen=True)
class Llama3Scaling:
    """The ``llama3`` recipe: short wavelengths stay, long ones are stretched by ``factor``, those between in part."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def divisors(self, head_size: int, theta: float) -> Floats:
        """Return the divisor of each frequency, ``[head_size / 2]``.

        Source: ``_compute_llama3_parameters`` of transformers, there as frequencies.
        """
        wavelengths = _wavelengths(head_size, theta)
        original = self.original_max_position_embeddings
        smooth = (original / wavelengths - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        divisors = 1 / ((1 - smooth) / self.factor + smooth)
        divisors = np.where(wavelengths > original / self.low_freq_factor, self.factor, divisors)
        divisors = np.where(wavelengths < original / self.high_freq_factor, 1.0, divisors)
        return divisors.astype(np.float32)


@dataclass(frozen=True)
class LinearScaling:
    """Every position is divided by ``factor``."""

    factor: float


@dataclass(frozen=True)
class Rope:
    """Base and scaling of the rotary embedding."""

    theta: float
    scaling: Llama3Scaling | LinearScaling | None = None


def parse_rope(config: dict[str, Any], name: str) -> Rope:
    """Read ``config.json``: ``rope_parameters``, or the older ``rope_theta`` and ``rope_scaling``.

    Raises ``InputError`` for a recipe that llama.cpp's ``llama`` cannot follow.
    """
    settings = {"rope_theta": config.get("rope_theta", 10000.0)}
    settings |= config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = settings.get("rope_type", settings.get("type", "default"))
    try:
        theta = _check_range(settings["rope_theta"])
        if settings.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) not in (None, 1, 1.0):
            raise InputError(f"{name}: rotary embeddings on a part of each head cannot be converted")
        if kind in ("default", None):
            return Rope(theta)
        if kind == "linear":
            return Rope(theta, LinearScaling(_check_range(settings["factor"])))
        if kind == "llama3":
            scaling = Llama3Scaling(
                _check_range(settings["factor"]),
                _check_range(settings["low_freq_factor"]),
                _check_range(settings["high_freq_factor"]),
                int(settings["original_max_position_embeddings"]),
            )
            if not scaling.high_freq_factor > scaling.low_freq_factor > 0 or scaling.factor < 1:
                raise InputError(f"{name}: the llama3 rope scaling {settings} is out of range")
            return Rope(theta, scaling)
    except (KeyError, TypeError, ValueError, OverflowError):
        raise InputError(
            f"{name}: the rope scaling {shown(settings)} is not complete for its type {shown(kind)}, or has a number "
            f"that is not above 0 and at most {_LARGEST:.1g}"
        ) from None
    raise InputError(f"{name} scales rope by {kind!r}; default, linear and llama3 can be converted")


def _check_range(value: Any) -> float:
    number = float(value)
    if not 0 < number <= _LARGEST:  # NaN is not either
        raise ValueError
    return number


def rope_to_config(rope: Rope) -> dict[str, Any]:
    """Return the entries of ``config.json``, in the spelling that transformers 4 and 5 both read."""
    scaling: dict[str, Any] | None = None
    if isinstance(rope.scaling, LinearScaling):
        scaling = {"rope_type": "linear", "factor": rope.scaling.factor}
    elif rope.scaling is not None:
        scaling = {
            "rope_type": "llama3",
            "factor": rope.scaling.factor,
            "low_freq_factor": rope.scaling.low_freq_factor,
            "high_freq_factor": rope.scaling.high_freq_factor,
            "original_max_position_embeddings": rope.scaling.original_max_position_embeddings,
        }
    return {"rope_theta": rope.theta, "rope_scaling": scaling}


def recover_llama3(divisors: Floats, head_size: int, theta: float, name: str) -> Llama3Scaling | None:
    """Return the recipe that gives these divisors ``[head_size / 2]``; ``None`` where they are all 1.

    Only ``original_max_position_embeddings`` over each of the two factors matters, so another recipe than the one the
    model was made with may be found; its divisors are the same. ``theta`` is the base of the frequencies.
    """
    if np.all(divisors == 1):
        return None
    if divisors.shape == (head_size // 2,) and np.all(np.isfinite(divisors)) and divisors.min() >= 1:
        for candidate in _iter_candidates(divisors.astype(np.float64), _wavelengths(head_size, theta)):
            if np.allclose(candidate.divisors(head_size, theta), divisors, rtol=_TOLERANCE, atol=0):
                return candidate
    raise InputError(
        f"{name} has rope_freqs.weight that the llama3 recipe cannot give, and Hugging Face has no other for this "
        "architecture; it cannot be converted"
    )


def _wavelengths(head_size: int, theta: float) -> npt.NDArray[np.float64]:
    exponents = np.arange(0, head_size, 2, dtype=np.float64) / head_size
    wavelengths: npt.NDArray[np.float64] = 2 * math.pi * theta**exponents
    return wavelengths


def _iter_candidates(
    divisors: npt.NDArray[np.float64], wavelengths: npt.NDArray[np.float64]
) -> Iterator[Llama3Scaling]:
    factor = _round_digits(float(divisors.max()))
    yield Llama3Scaling(factor, **_STANDARD)  # type: ignore[arg-type]
    stretched = divisors >= divisors.max() * (1 - _TOLERANCE)
    between = (divisors > 1) & ~stretched
    longest_kept = float(wavelengths[divisors == 1].max(initial=wavelengths[0] / 2))
    shortest_stretched = float(wavelengths[stretched].min())
    # Between the two, the kept share is a straight line over 1 / wavelength: 0 at `low`, 1 at `high`.
    kept = (1 / divisors[between] - 1 / factor) / (1 - 1 / factor)
    inverse = 1 / wavelengths[between]
    bounds: list[tuple[float, float]] = []
    if len(kept) >= 2:
        slope, offset = np.polyfit(inverse, kept, 1)
        bounds.append((-slope / offset, slope / (1 - offset)))
    elif len(kept) == 1:  # one equation for two unknowns: any solution within reach
        for high in np.geomspace(longest_kept, 1 / inverse[0], 18)[1:-1]:
            bounds.append(((1 - kept[0]) / (inverse[0] - kept[0] / high), high))
    else:
        bounds.append((shortest_stretched * 0.999, longest_kept * 1.001))
    for low, high in bounds:
        if 1 <= low < math.inf and 0 < high < low:
            original = round(low)
            for digits in (2, 4, 6):  # a person would have written short numbers
                yield Llama3Scaling(factor, 1.0, _round_digits(original / high, digits), original)
            yield Llama3Scaling(factor, original / low, original / high, original)


def _round_digits(value: float, digits: int = 7) -> float:
    return float(f"{value:.{digits}g}")
