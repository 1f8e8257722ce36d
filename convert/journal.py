"""What a conversion has finished, so that the same command continues after any kind of end.

DST/UNFINISHED/identity.json     what is being made, and from what: must be the same to continue
DST/UNFINISHED/done-00000.jsonl  units of work that are written, with checksums; a file per moment
DST/UNFINISHED/lease.json        behind a URL: who is at work, refreshed while it is

While the folder is there and the marker of a complete directory is not, the directory is unfinished
and every reader refuses it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from etils import epath

from convert import files
from glm5next_jax.checkpoint.native import IDENTITY_NAME, UNFINISHED_NAME
from glm5next_jax.files import is_url

FLUSH_SECONDS = 2.0  # what is finished since the last flush is done again after a kill
LEASE_SECONDS = 60.0
_LEASE_NAME = "lease.json"


@dataclasses.dataclass(frozen=True)
class Record:
    """A finished unit of work: its size, and the CRC-32 of its bytes."""

    num_bytes: int
    crc32: int


class Journal:
    """Finished units of work in one destination. Made by `Journal.open`.

    Attributes:
      destination: the directory.
      digest: of the identity; belongs into the marker.
      finished: records by name of the unit.
      is_complete: whether the same command has made all of it before; there is nothing to do.
    """

    def __init__(
        self,
        destination: epath.Path,
        lease: _Lease | None,
        identity: Mapping[str, Any],
        marker: str,
    ):
        self.destination = destination
        self.digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        self.finished: dict[str, Record] = {}
        self.is_complete = False
        self._identity, self._lease = identity, lease
        self._folder, self._marker = destination / UNFINISHED_NAME, destination / marker
        self._pending: dict[str, Record] = {}
        self._next_segment = 0
        self._flushed_at = time.monotonic()

    @classmethod
    @contextlib.contextmanager
    def open(
        cls,
        destination: epath.Path,
        identity: Mapping[str, Any],
        *,
        marker: str,
        digest_of: Callable[[epath.Path], str | None],
        overwrite: bool = False,
    ) -> Iterator[Journal]:
        """Begins or continues the making of `destination`, of which this is then the only maker.

        Args:
          destination: absent, empty, unfinished by the same command, or to be overwritten.
          identity: JSON of all that decides what is made: format, options, the source's files.
          marker: name of the file that a finished directory has, which is written last.
          digest_of: the `digest` in the marker at a path, or None where the file is none that this
            command wrote. Only such directories, and unfinished ones, are ever overwritten.
          overwrite: start from nothing where another conversion is, finished or not.

        Raises:
          ValueError: another process is making it; it holds something else; it is unfinished, but
            by another command or from other files (the message names what differs).
          OSError: it cannot be made.
        """
        identity = json.loads(json.dumps(identity))  # as it will be read back
        if destination.exists() and not destination.is_dir():
            raise ValueError(f"{destination}: exists and is not a directory")
        made = not destination.exists()
        files.make_directory(destination)
        with contextlib.ExitStack() as stack:
            try:
                lease = stack.enter_context(_only_maker(destination))
                journal = cls(destination, lease, identity, marker)
                journal._begin(digest_of, overwrite)
            except BaseException:
                if made and not (destination / UNFINISHED_NAME / IDENTITY_NAME).exists():
                    with contextlib.suppress(OSError):
                        files.remove_tree(destination / UNFINISHED_NAME)
                        destination.rmdir()  # which refuses what is not empty
                raise
            try:
                yield journal
            finally:
                # A full disk must not hide why the work ended; unflushed units are done again.
                with contextlib.suppress(OSError):
                    journal.flush()

    def add(self, name: str, num_bytes: int, crc32: int) -> None:
        """Records a unit of work whose bytes have reached the destination."""
        self.finished[name] = self._pending[name] = Record(num_bytes, crc32)
        if time.monotonic() - self._flushed_at >= FLUSH_SECONDS:
            self.flush()

    def forget(self, name: str) -> None:
        """Drops a unit whose bytes are not those that were written; it is to be done again."""
        self.finished.pop(name)
        self._pending.pop(name, None)

    def flush(self) -> None:
        """Writes what was added since the last time."""
        self._flushed_at = time.monotonic()
        if self.is_complete:
            return
        if self._lease is not None:
            self._lease.refresh()
        if not self._pending:
            return
        lines = [
            json.dumps({"unit": name, "bytes": record.num_bytes, "crc32": record.crc32})
            for name, record in self._pending.items()
        ]
        path = self._folder / f"done-{self._next_segment:05d}.jsonl"
        files.write_atomic(path, ("\n".join(lines) + "\n").encode())
        self._next_segment += 1
        self._pending.clear()

    def commit(self, content: bytes) -> None:
        """Makes the directory a finished one: writes its marker, then the journal goes."""
        self.flush()
        files.write_atomic(self._marker, content)
        self.is_complete = True
        files.remove_tree(self._folder)

    def _begin(self, digest_of: Callable[[epath.Path], str | None], overwrite: bool) -> None:
        digest = digest_of(self._marker) if self._marker.exists() else None
        if digest is not None and not overwrite:
            if digest != self.digest:
                raise ValueError(
                    f"{self.destination}: exists, and holds a checkpoint made from other files or "
                    "with other options; give another directory, or --overwrite to replace it"
                )
            self.is_complete = True
            files.remove_tree(self._folder)  # there if a kill came just before this
            return
        path = self._folder / IDENTITY_NAME
        if digest is None and path.exists():
            try:
                if self._continues():
                    return
            except ValueError:
                if not overwrite:
                    raise
                self.finished.clear()
        elif digest is None:
            names = {entry.name for entry in self.destination.iterdir()}
            if not names <= {UNFINISHED_NAME}:  # that alone: killed before it said who it was
                raise ValueError(
                    f"{self.destination}: exists and is not empty, and holds something else than a "
                    "checkpoint that this command made; it is not overwritten, give another "
                    "directory"
                )
        self._clear()
        files.make_directory(self._folder)
        files.write_atomic(path, json.dumps(self._identity, indent=1).encode())

    def _clear(self) -> None:
        """Empties the destination. The marker goes first, and what says whose it is last, so that a
        kill in between leaves an unfinished directory of ours."""
        if not self._marker.exists() and not self._folder.exists():
            return
        files.make_directory(self._folder)
        files.write_atomic(self._folder / IDENTITY_NAME, b'{"cleared": true}')
        files.remove(self._marker)
        for entry in list(self.destination.iterdir()):
            if entry.name != UNFINISHED_NAME:
                (files.remove_tree if entry.is_dir() else files.remove)(entry)
        for entry in list(self._folder.iterdir()):
            if entry.name not in (IDENTITY_NAME, _LEASE_NAME):
                files.remove(entry)

    def _continues(self) -> bool:
        """Reads what earlier runs of the same command finished.

        Raises:
          ValueError: it is another command's, or the journal is damaged.
        """
        found = _parsed(self._folder / IDENTITY_NAME)[0]
        if found != self._identity:
            raise ValueError(
                f"{self.destination}: holds an unfinished conversion that differs from this one: "
                f"{_difference(found, self._identity)}. Run the command that began it, or "
                "--overwrite to start over"
            )
        for path in sorted(self._folder.iterdir()):
            if path.name.startswith("done-") and path.name.endswith(".jsonl"):
                self._next_segment = int(path.name[5:10]) + 1
                for unit in _parsed(path):
                    self.finished[unit["unit"]] = Record(unit["bytes"], unit["crc32"])
        return True


def _parsed(path: epath.Path) -> list[Any]:
    """The JSON of a file of the journal: one object, or one per line."""
    text = path.read_text()
    lines = [text] if path.name.endswith(".json") else text.splitlines()
    try:
        return [json.loads(line) for line in lines]
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: damaged: {error}; start over with --overwrite") from None


def _difference(found: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """In words, what of an identity is another one."""
    parts = []
    for key in sorted({*found, *ours}):
        was, now = found.get(key), ours.get(key)
        if was == now:
            continue
        if isinstance(was, dict) and isinstance(now, dict):
            names = [name for name in {**was, **now} if was.get(name) != now.get(name)]
            more = f", and {len(names) - 1} more" if len(names) > 1 else ""
            parts.append(f"{key}: {names[0]} is {now.get(names[0])}, was {was.get(names[0])}{more}")
        else:
            parts.append(f"{key} is {now!r}, was {was!r}")
    return "; ".join(parts)


@contextlib.contextmanager
def _only_maker(destination: epath.Path) -> Iterator[_Lease | None]:
    """Holds a directory against other makers: by a lock, or behind a URL by a lease.

    The system drops the lock when the process ends, however it does. Behind a URL there are no
    locks, so a killed maker keeps its directory for a minute.
    """
    if not is_url(destination):
        descriptor = os.open(destination, os.O_RDONLY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(
                    f"{destination}: another glm5next-convert is writing it; wait for it to end"
                ) from None
            yield None
        finally:
            os.close(descriptor)
        return
    lease = _Lease(destination / UNFINISHED_NAME / _LEASE_NAME)
    lease.take(destination)
    yield lease
    lease.drop()


class _Lease:
    """A note of who is at work, refreshed while it is."""

    def __init__(self, path: epath.Path):
        self._path, self._token = path, secrets.token_hex(8)

    def take(self, destination: epath.Path) -> None:
        age = self._age_of_another()
        if age is not None:
            raise ValueError(
                f"{destination}: another glm5next-convert was writing it {age:.0f} s ago; if it "
                f"was killed, run this again in {LEASE_SECONDS - age:.0f} s"
            )
        files.make_directory(self._path.parent)
        self._write()

    def refresh(self) -> None:
        if self._age_of_another() is not None:
            raise ValueError(f"{self._path}: another glm5next-convert has taken over")
        self._write()

    def drop(self) -> None:
        with contextlib.suppress(OSError):
            files.remove(self._path)

    def _age_of_another(self) -> float | None:
        """Seconds since another maker was at work; None where none is."""
        if not self._path.exists():
            return None
        note = _parsed(self._path)[0]
        age = time.time() - note["at"]
        return age if note["token"] != self._token and 0 <= age < LEASE_SECONDS else None

    def _write(self) -> None:
        note = {"at": time.time(), "token": self._token}
        files.write_atomic(self._path, json.dumps(note).encode())
