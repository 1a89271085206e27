"""The group quantizer that the methods share (``veloxquant_mlx.quantizers._quant_utils``).

``group_size`` consecutive rows of one column share their minimum and a step of ``(max - min) / (2^bits - 1)``. Plain
forms take one matrix ``[N, D]``, batched ones ``[B, N, D]``, B independent matrices. A group of one row comes back
exactly. A NaN or an infinity makes its whole (group, column) NaN.

The names with a leading underscore are the reference's.
"""

from __future__ import annotations

from typing import Any

from . import _core
from ._arrays import read, read_floats
from .errors import Error


def count_groups(rows: int, group_size: int) -> int:
    """ceil(rows / group_size)."""
    if group_size < 1:
        raise Error(f"group_size is {group_size}; it must be at least 1")
    return -(-rows // group_size)


def _quant_codes(x: Any, bits: int, group_size: int, rank: int) -> tuple[Any, Any, Any]:
    a = read_floats(x, "x", rank)
    *batch, rows, columns = a.shape
    groups = count_groups(rows, group_size)
    codes = a.empty((*batch, groups, group_size, columns), "f32")
    scale = a.empty((*batch, groups, 1, columns), "f32")
    zero = a.empty((*batch, groups, 1, columns), "f32")
    _core.group_quant_codes(a.view, bits, group_size, codes.target, scale.target, zero.target, rank)
    return codes.array, scale.array, zero.array


def _dequant_codes(codes: Any, scale: Any, zero: Any, n: int, group_size: int, rank: int) -> Any:
    batch = tuple(codes.shape[: rank - 2])
    columns = codes.shape[-1]
    groups = scale.shape[rank - 2]
    if not 0 <= n <= groups * group_size:
        raise Error(f"n is {n}; {groups} groups of {group_size} rows hold 0..{groups * group_size}")
    parts = [codes.reshape(*batch, groups, group_size, columns)]
    parts += [part.reshape(*batch, groups, 1, columns) for part in (scale, zero)]
    c, s, z = (read(part, name, rank + 1) for part, name in zip(parts, ("codes", "scale", "zero")))
    out = c.empty((*batch, n, columns), "f32")
    _core.group_dequant_codes(c.view, s.view, z.view, out.target, rank)
    return out.array


def _quant_dequant(x: Any, bits: int, group_size: int, rank: int) -> Any:
    a = read_floats(x, "x", rank)
    out = a.empty(a.shape, "f16")
    _core.group_quant_dequant(a.view, bits, group_size, out.target, rank)
    return out.array


def group_quant_codes(x: Any, b: int, group_size: int = 32) -> tuple[Any, Any, Any]:
    """Codes, step and minimum of every group.

    Args:
        x: ``[N, D]`` f16, bf16 or f32.
        b: bits of a code, 1..8.
        group_size: rows in a group, at least 1.

    Returns:
        ``(codes [G, group_size, D], scale [G, 1, D], zero [G, 1, D])``, all f32, G = ceil(N / group_size). Rows that
        the last group lacks repeat the last row; ``zero`` is the group's minimum.

    Raises:
        kvant.Error: a shape, type, width or group size outside its range.

    Reference: ``_group_quant_codes``.
    """
    return _quant_codes(x, b, group_size, 2)


def group_dequant_codes(codes: Any, scale: Any, zero: Any, n: int, group_size: int = 32) -> Any:
    """The first ``n`` rows of ``code * scale + zero``, ``[n, D]`` f32.

    Args:
        codes: ``[G, group_size, D]`` or ``[G * group_size, D]``, integers 0..255 of any type.
        scale: ``[G, 1, D]`` or ``[G, D]`` f32.
        zero: as scale.
        n: rows to give back, 0..G * group_size.
        group_size: rows in a group.

    Raises:
        kvant.Error: shapes that do not fit each other.

    Reference: ``_group_dequant_codes``.
    """
    return _dequant_codes(codes, scale, zero, n, group_size, 2)


def group_quant_dequant(x: Any, b: int, group_size: int = 32) -> Any:
    """``x`` as the codes hold it: ``[N, D]`` f16. Arguments as :func:`group_quant_codes`.

    Reference: ``_group_quant_dequant``.
    """
    return _quant_dequant(x, b, group_size, 2)


def group_quant_codes_batched(x: Any, b: int, group_size: int = 32) -> tuple[Any, Any, Any]:
    """:func:`group_quant_codes` of every matrix of ``[B, N, D]``; results have B in front.

    Reference: ``_group_quant_codes_batched``.
    """
    return _quant_codes(x, b, group_size, 3)


def group_dequant_codes_batched(codes: Any, scale: Any, zero: Any, s: int, group_size: int = 32) -> Any:
    """:func:`group_dequant_codes` of every matrix: ``[B, s, D]`` f32.

    Reference: ``_group_dequant_codes_batched``.
    """
    return _dequant_codes(codes, scale, zero, s, group_size, 3)


def group_quant_dequant_batched(x: Any, b: int, group_size: int = 32) -> Any:
    """:func:`group_quant_dequant` of every matrix of ``[B, N, D]``: ``[B, N, D]`` f16.

    Reference: ``_group_quant_dequant_batched``.
    """
    return _quant_dequant(x, b, group_size, 3)


_group_quant_codes = group_quant_codes
_group_dequant_codes = group_dequant_codes
_group_quant_dequant = group_quant_dequant
_group_quant_codes_batched = group_quant_codes_batched
_group_dequant_codes_batched = group_dequant_codes_batched
_group_quant_dequant_batched = group_quant_dequant_batched

__all__ = [
    "group_dequant_codes",
    "group_dequant_codes_batched",
    "group_quant_codes",
    "group_quant_codes_batched",
    "group_quant_dequant",
    "group_quant_dequant_batched",
]
