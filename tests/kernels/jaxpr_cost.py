"""What a traced function would compute and hold, counted in its jaxpr."""

import math
from collections.abc import Iterator
from typing import Any


def _inner(equation) -> list:
    """The jaxprs that an equation runs: bodies of loops, branches, nested calls."""
    found = []
    for value in equation.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            item = getattr(item, "jaxpr", item)  # closed -> open
            if hasattr(item, "eqns"):
                found.append(item)
    return found


def intermediates(jaxpr) -> Iterator[Any]:
    """Shape and dtype of every value that the jaxpr, or one inside it, computes."""
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            yield variable.aval
        for inner in _inner(equation):
            yield from intermediates(inner)


def largest(jaxpr, dtype=None) -> int:
    """Elements of the largest intermediate, of one dtype if that is given."""
    sizes = (math.prod(a.shape) for a in intermediates(jaxpr) if dtype is None or a.dtype == dtype)
    return max(sizes, default=0)


def dot_flops(jaxpr) -> int:
    """Multiply-adds x 2 of all dots; loops count every step, conditionals their worst branch."""
    total = 0
    for equation in jaxpr.eqns:
        inner = [dot_flops(j) for j in _inner(equation)]
        name = equation.primitive.name
        if name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            depth = math.prod(left[axis] for axis in contracted)
            total += 2 * depth * math.prod(equation.outvars[0].aval.shape)
        elif name == "scan":
            total += equation.params["length"] * sum(inner)
        elif name == "while":
            assert sum(inner) == 0, "the steps of a while loop are not known"
        elif name == "cond":
            total += max(inner)
        else:
            total += sum(inner)
    return total


def scan_lengths(jaxpr) -> list[int]:
    """Steps of every scan."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            found.append(equation.params["length"])
        for inner in _inner(equation):
            found.extend(scan_lengths(inner))
    return found
