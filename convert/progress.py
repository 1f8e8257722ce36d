"""How far long work is: one line on a terminal, plain lines elsewhere, or JSON lines."""

from __future__ import annotations

import json
import sys
import time
from typing import Literal

from tqdm import tqdm

from glm5next_jax.checkpoint.report import human_bytes

Mode = Literal["auto", "quiet", "json"]
_SECONDS = 10.0  # between plain lines, and between JSON lines
_NAME_WIDTH = 40


class Progress:
    """Counts bytes of work. A context manager.

    Args:
      total: bytes of the whole.
      what: verb of the work, such as "converting".
      mode: "auto" shows a bar where stderr is a terminal and a plain line every few seconds where
        not; "json" prints objects with event, bytes, total, bytes_per_second, seconds_left and
        tensor to stdout; "quiet" nothing.
      done: bytes that an earlier run finished; they count for how far, not for how fast.
    """

    def __init__(self, total: int, what: str, mode: Mode = "auto", *, done: int = 0):
        self._total, self._what, self._mode = total, what, mode
        self._first, self._count, self._name = done, done, ""
        self._began = self._said = time.monotonic()
        self._bar = None
        if mode == "auto" and sys.stderr.isatty():
            self._bar = tqdm(
                total=total, initial=done, desc=what, unit="B", unit_scale=True, dynamic_ncols=True
            )

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
        elif kind is None and self._said != self._began:  # long enough to have spoken
            self._say()

    def at(self, name: str) -> None:
        """Says which tensor is being worked on."""
        self._name = name
        if self._bar is not None:
            self._bar.set_postfix_str(name[-_NAME_WIDTH:], refresh=False)

    def update(self, num_bytes: int) -> None:
        """Counts work done."""
        self._count += num_bytes
        if self._bar is not None:
            self._bar.update(num_bytes)
        elif self._mode != "quiet" and time.monotonic() - self._said >= _SECONDS:
            self._say()

    def _say(self) -> None:
        self._said = time.monotonic()
        rate = (self._count - self._first) / max(self._said - self._began, 1e-9)
        left = (self._total - self._count) / rate if rate else None
        if self._mode == "json":
            event = {
                "event": self._what,
                "bytes": self._count,
                "total": self._total,
                "bytes_per_second": round(rate),
                "seconds_left": None if left is None else round(left),
                "tensor": self._name,
            }
            print(json.dumps(event), flush=True)
        elif self._mode == "auto":
            share = 100 * self._count / max(self._total, 1)
            time_left = "" if left is None else f", {_duration(left)} left"
            print(
                f"{self._what}: {share:.0f}% of {human_bytes(self._total)}, "
                f"{human_bytes(rate)}/s{time_left}; {self._name}",
                file=sys.stderr,
                flush=True,
            )


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
