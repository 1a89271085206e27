"""The reference package's name for :mod:`kvant.group_quant`."""

from .group_quant import (  # noqa: F401
    _group_dequant_codes,
    _group_dequant_codes_batched,
    _group_quant_codes,
    _group_quant_codes_batched,
    _group_quant_dequant,
    _group_quant_dequant_batched,
)
