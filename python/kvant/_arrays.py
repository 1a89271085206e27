"""Arrays of any framework in and out, without copies where the framework allows it.

``read`` takes a NumPy, mlx or torch array, or any object with DLPack or the buffer protocol, and gives the view that
``kvant._core`` reads. Results are made in the framework of the (first) argument with ``Array.empty``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from . import _core
from .errors import Error

# Element types by kvant's names; "bf16" of NumPy is ml_dtypes'.
_NUMPY = {"f32": "float32", "f16": "float16", "uint8": "uint8", "int32": "int32", "bool": "bool_"}
_OTHERS = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "uint8": "uint8", "int32": "int32"}


class Kind(Protocol):
    """A framework."""

    @staticmethod
    def owns(array: Any) -> bool:
        """Is this one of its arrays?"""

    @staticmethod
    def view(array: Any) -> Any:
        """What ``kvant._core`` reads in its place."""

    @staticmethod
    def empty(shape: tuple[int, ...], dtype: str) -> tuple[Any, Any]:
        """(a new array, what ``kvant._core`` writes in its place); its contents are undefined."""

    @staticmethod
    def of_bytes(data: np.ndarray) -> Any:
        """An array of uint8 with the contents of ``data``."""


class _NumPy:
    @staticmethod
    def owns(_array: Any) -> bool:
        return True  # the answer to whatever has no framework of its own: memoryview, array.array, other DLPack objects

    @staticmethod
    def view(array: Any) -> Any:
        if not isinstance(array, np.ndarray):
            return array
        if not array.dtype.isnative:
            raise Error(f"arrays of {array.dtype} are in the byte order of another machine")
        if array.dtype.name == "bfloat16":
            array = array.view(np.uint16)
        if any(step % array.itemsize for step in array.strides):
            array = np.ascontiguousarray(array)  # fields of records: strides that are no number of elements
        return array

    @staticmethod
    def empty(shape: tuple[int, ...], dtype: str) -> tuple[Any, Any]:
        if dtype != "bf16":
            made = np.empty(shape, getattr(np, _NUMPY[dtype]))
            return made, made
        from ml_dtypes import bfloat16

        bits = np.empty(shape, np.uint16)
        return bits.view(bfloat16), bits

    @staticmethod
    def of_bytes(data: np.ndarray) -> Any:
        return data


class _Mlx:
    @staticmethod
    def owns(array: Any) -> bool:
        mx = sys.modules.get("mlx.core")
        return mx is not None and isinstance(array, mx.array)

    @staticmethod
    def view(array: Any) -> Any:
        import mlx.core as mx

        if array.__dlpack_device__()[0] == 1:
            return array
        # Metal's memory is the CPU's as well; the buffer protocol says so, DLPack does not.
        return memoryview(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)

    @staticmethod
    def empty(shape: tuple[int, ...], dtype: str) -> tuple[Any, Any]:
        return _Mlx.empty_all([shape], dtype)[0]

    @staticmethod
    def empty_all(shapes: Sequence[tuple[int, ...]], dtype: str) -> list[tuple[Any, Any]]:
        # Evaluated before anybody else has seen them, so that the kernels may write into their memory; all at once,
        # because an evaluation has a price of its own.
        import mlx.core as mx

        made = [mx.zeros(shape, mx.bool_ if dtype == "bool" else getattr(mx, _OTHERS[dtype])) for shape in shapes]
        mx.eval(made)
        return [(array, _Mlx.view(array)) for array in made]

    @staticmethod
    def of_bytes(data: np.ndarray) -> Any:
        import mlx.core as mx

        return mx.array(data)


class _Torch:
    @staticmethod
    def owns(array: Any) -> bool:
        torch = sys.modules.get("torch")
        return torch is not None and isinstance(array, torch.Tensor)

    @staticmethod
    def view(array: Any) -> Any:
        return array.detach()

    @staticmethod
    def empty(shape: tuple[int, ...], dtype: str) -> tuple[Any, Any]:
        import torch

        made = torch.empty(shape, dtype=torch.bool if dtype == "bool" else getattr(torch, _OTHERS[dtype]))
        return made, made

    @staticmethod
    def of_bytes(data: np.ndarray) -> Any:
        import torch

        return torch.from_numpy(data.copy())


def default_kind() -> type[Kind]:
    """The framework of an answer to no argument: mlx where the program uses it."""
    return _Mlx if "mlx.core" in sys.modules else _NumPy


class Result:
    """An array that kernels write (``target``) and callers get (``array``)."""

    __slots__ = ("array", "target")

    def __init__(self, array: Any, target: Any):
        self.array = array
        self.target = target


def empty_pair(
    kinds: tuple[type[Kind], type[Kind]],
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    dtypes: tuple[str, str],
) -> tuple[Result, Result]:
    """Keys and values, made together where they can be."""
    if kinds == (_Mlx, _Mlx) and dtypes[0] == dtypes[1]:
        keys, values = _Mlx.empty_all(shapes, dtypes[0])
    else:
        keys, values = (kind.empty(shape, dtype) for kind, shape, dtype in zip(kinds, shapes, dtypes))
    return Result(*keys), Result(*values)


class Array:
    """An argument: ``view`` for ``kvant._core``, its shape and element type, and where answers come from."""

    __slots__ = ("kind", "view", "shape", "dtype")

    def __init__(self, array: Any, name: str):
        self.kind: type[Kind] = _NumPy
        for kind in (_Mlx, _Torch):
            if kind.owns(array):
                self.kind = kind
                break
        self.view = self.kind.view(array)
        try:
            self.shape, self.dtype = _core.describe(self.view)
        except TypeError:
            raise TypeError(
                f"{name} is a {type(array).__module__}.{type(array).__qualname__}: "
                "neither DLPack nor the buffer protocol reads it as an array"
            ) from None

    def empty(self, shape: tuple[int, ...], dtype: str) -> Result:
        """A new array of the argument's framework."""
        return Result(*self.kind.empty(tuple(shape), dtype))


def read(array: Any, name: str, rank: int) -> Array:
    """The argument ``name``, which must have ``rank`` axes.

    Raises:
        TypeError: not an array.
        kvant.Error: another number of axes.
    """
    result = Array(array, name)
    if len(result.shape) != rank:
        raise Error(f"{name} has {len(result.shape)} axes {result.shape}, not {rank}")
    return result


def read_floats(array: Any, name: str, rank: int) -> Array:
    """``read`` of an array of f16, bf16 or f32."""
    result = read(array, name, rank)
    if result.dtype not in ("f16", "bf16", "f32"):
        raise Error(f"{name} is an array of {result.dtype}, not of f16, bf16 or f32")
    return result
