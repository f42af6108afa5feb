"""Kernels run in Triton's interpreter here, which they learn when they are imported: nothing outside this folder may import them."""

from __future__ import annotations

import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

from triton.runtime import interpreter

_patch_scalars = interpreter._patch_lang_tensor


def _patch_scalars_for_numpy(tensor: Any, scope: Any) -> None:
    """The interpreter's scalars are arrays of one element, which newer numpy no longer takes for a number: loops up to a loaded or computed bound fail."""
    _patch_scalars(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_scalars_for_numpy
