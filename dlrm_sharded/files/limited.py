"""Types for JSON forms with limited numbers and texts."""

from __future__ import annotations

import sys
from typing import Annotated

from msgspec import Meta

MAX_INT, MAX_FLOAT = 2**63 - 1, sys.float_info.max

Count = Annotated[int, Meta(ge=0, le=MAX_INT)]
PositiveInt = Annotated[int, Meta(gt=0, le=MAX_INT)]
Int = Annotated[int, Meta(ge=-MAX_INT, le=MAX_INT)]
PositiveFloat = Annotated[float, Meta(gt=0, le=MAX_FLOAT)]
NonNegative = Annotated[float, Meta(ge=0, le=MAX_FLOAT)]
Finite = Annotated[float, Meta(ge=-MAX_FLOAT, le=MAX_FLOAT)]
Text = Annotated[str, Meta(min_length=1)]
