"""What counts as a number in a caller's argument: NumPy's scalars do, booleans do not."""

from __future__ import annotations

import math
import numbers
from typing import TypeGuard


def is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_finite(value: object) -> TypeGuard[float]:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
