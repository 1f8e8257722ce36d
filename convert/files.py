"""Every change that conversion makes to a file system: whole files or none.

Local files are written beside their place as `NAME.partial`, flushed to the disk, and renamed; what
is read by others is therefore never half a file, after a kill or a power cut either. Objects behind
a URL appear when they are closed, so they need no second name.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any

from etils import epath

from glm5next_jax.checkpoint.report import human_bytes
from glm5next_jax.files import is_url

PARTIAL = ".partial"
_READ_BYTES = 4 << 20


@contextlib.contextmanager
def atomic_writer(path: epath.Path) -> Iterator[IO[Any]]:
    """A handle to write a file's bytes to; the file appears when the block ends well.

    Raises:
      OSError: the file system refuses; nothing is left behind.
    """
    if is_url(path):
        with path.open("wb") as handle:
            yield handle
        return
    partial = pathlib.Path(f"{os.fspath(path)}{PARTIAL}")
    try:
        with partial.open("wb") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    _flush_directory(path.parent)


def write_atomic(path: epath.Path, data: bytes) -> None:
    """Writes a whole file at once; see `atomic_writer`."""
    with atomic_writer(path) as handle:
        handle.write(data)


def make_directory(path: epath.Path) -> None:
    """Makes a directory and those above it; nothing happens where it exists."""
    path.mkdir(parents=True, exist_ok=True)


def remove(path: epath.Path) -> None:
    """Removes a file that may be gone already."""
    path.unlink(missing_ok=True)


def remove_tree(path: epath.Path) -> None:
    """Removes a directory with all that it holds; it may be gone already."""
    if path.exists():
        path.rmtree()


def remove_partial(directory: epath.Path, suffixes: tuple[str, ...]) -> None:
    """Removes what a killed process was writing in a local directory, by its endings."""
    if is_url(directory):
        return
    for folder, _, names in os.walk(directory):
        for name in names:
            if name.endswith(suffixes):
                remove(epath.Path(folder) / name)


def crc32_of(path: epath.Path, progress: Callable[[int], object] = lambda num_bytes: None) -> int:
    """Checksum of a file's bytes, read piece by piece."""
    crc = 0
    with path.open("rb") as handle:
        while piece := handle.read(_READ_BYTES):
            crc = zlib.crc32(piece, crc)
            progress(len(piece))
    return crc


def require_space(path: epath.Path, num_bytes: int) -> None:
    """Refuses to begin what will not fit where `path` is or will be.

    Raises:
      OSError: less is free; the message has both numbers.
    """
    free = free_bytes(path)
    if free is not None and num_bytes > free:
        raise OSError(
            f"{path}: {human_bytes(num_bytes)} are left to write, but only {human_bytes(free)} are "
            "free there. Free some and run this again: what is written is kept"
        )


def free_bytes(path: epath.Path) -> int | None:
    """Free space where `path` is or will be; None where nobody knows."""
    if is_url(path):
        return None
    at = pathlib.Path(path)
    while not at.exists():
        at = at.parent
    return shutil.disk_usage(at).free


def _flush_directory(path: epath.Path) -> None:
    """Makes a rename last through a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
