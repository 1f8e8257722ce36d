"""What was compiled: every jitted program records itself once per trace.

Compile time dominates short jobs and a silent retrace ruins long ones, so the count is something a
caller can read (`compilations()`) and a test can assert, not something to infer from a profile.
"""

from __future__ import annotations

import logging

_logger = logging.getLogger(__name__)
_compilations: list[str] = []


def record_compilation(program: str, **shapes: object) -> None:
    """Called inside a jitted function's body, which runs only when JAX traces it."""
    entry = program + "(" + ", ".join(f"{k}={v}" for k, v in shapes.items()) + ")"
    _compilations.append(entry)
    _logger.info("compiling %s (%d so far)", entry, len(_compilations))


def compilations() -> tuple[str, ...]:
    """The programs traced in this process so far, in order, each with its static sizes."""
    return tuple(_compilations)
