"""What is wrong with a checkpoint: every failure found, reported together."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable

MAX_LISTED = 40
_MAX_NAME = 200
_MAX_TEXT = 500


def printable(text: str, limit: int = _MAX_NAME) -> str:
    """`text` on one line, safe to show: names in a stranger's file may hold terminal codes.

    What does not print (line breaks, escape codes, marks that turn the writing direction, halves of
    surrogate pairs) is written as Python escapes it, and the middle of a longer text is left out.
    """
    if len(text) > limit:
        text = f"{text[: limit // 2]}…{text[len(text) - limit // 2 :]}"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


@dataclasses.dataclass(frozen=True)
class Failure:
    """One thing wrong with a checkpoint.

    Attributes:
      kind: what sort of fault: "unknown", "missing", "duplicate", "shape", "dtype", "scale",
        "value", "layer" or "file".
      file: name of the file that holds the tensor; "" where no file does.
      tensor: name as it stands in the file; "" when the whole file is at fault.
      found: what is there.
      expected: what should be there; "" when nothing should.
    """

    kind: str
    file: str
    tensor: str
    found: str
    expected: str = ""

    def __str__(self) -> str:
        """One line. The attributes hold names as they are; here they are made `printable`."""
        place = ": ".join(printable(part) for part in (self.file, self.tensor) if part)
        text = f"{place}: found {printable(self.found, _MAX_TEXT)}"
        return f"{text}, expected {printable(self.expected, _MAX_TEXT)}" if self.expected else text


class CheckpointError(ValueError):
    """A checkpoint that cannot be used. `failures` holds every fault, the message the first 40.

    Faults of one kind never crowd out the others: where there are too many, each kind present keeps
    its share of the lines. Nothing in the message but line breaks of the summary and the hint moves
    a terminal's cursor.
    """

    def __init__(self, summary: str, failures: Iterable[Failure] = (), hint: str = ""):
        self.failures = tuple(failures)
        lines = _printable_lines(summary)
        if self.failures:
            kinds = Counter(failure.kind for failure in self.failures)
            counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
            lines[-1] += f": {len(self.failures)} failure(s) ({counts})"
            listed = _fair_selection(self.failures, MAX_LISTED)
            lines += [f"  {failure}" for failure in listed]
            if len(listed) < len(self.failures):
                lines.append(f"  … and {len(self.failures) - len(listed)} more")
        if hint:
            lines += _printable_lines(hint)
        super().__init__("\n".join(lines))


def _printable_lines(text: str) -> list[str]:
    # Room for the paths and commands in it: these are the user's own words, or ours.
    return [printable(line, 8 * _MAX_TEXT) for line in text.split("\n")]


def _fair_selection(failures: tuple[Failure, ...], limit: int) -> list[Failure]:
    """At most `limit` failures in their order, taken in turn from each kind."""
    rank, seen = {}, Counter()
    for index, failure in enumerate(failures):
        rank[index] = seen[failure.kind]
        seen[failure.kind] += 1
    chosen = sorted(rank, key=lambda index: (rank[index], index))[:limit]
    return [failures[index] for index in sorted(chosen)]
