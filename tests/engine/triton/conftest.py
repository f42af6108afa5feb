"""Kernels run in Triton's interpreter here, which they learn when they are imported: nothing outside this folder may import them."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"
