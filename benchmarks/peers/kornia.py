"""kornia's LinearAttention, the full form in LoFTR's layers, on tensors in the layout it wants."""

from __future__ import annotations

import kornia
from kornia.feature.loftr.loftr_module.linear_attention import LinearAttention

from ._tensors import Tensors

VERSION = f"kornia {kornia.__version__}"

PEER = Tensors("kornia", VERSION, full=LinearAttention(), positions_first=True)
