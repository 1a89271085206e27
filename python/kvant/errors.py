"""Exceptions. All are ``ValueError``; the library's error codes are on ``Error.code``."""

from __future__ import annotations


class Error(ValueError):
    """An argument that kvant refuses: the message names it, its value and the limit.

    Attributes:
        code: the library's error code, for example ``"invalid_argument"`` (``include/kvant/error.hpp``).
    """

    code: str = "invalid_argument"


class OutOfRangeError(Error, IndexError):
    """An index beyond what exists."""

    code = "out_of_range"


class QuantizerConfigError(Error):
    """A setting of a cache that the method cannot work with, as in the reference package."""


_CLASSES = {"out_of_range": OutOfRangeError}


def make_error(code: str, message: str) -> Error:
    """The exception for an error of the C++ library; called by ``kvant._core``."""
    error = _CLASSES.get(code, Error)(message)
    error.code = code
    return error
