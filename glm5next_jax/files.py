"""Files of checkpoint directories, which strangers wrote: which may be opened, how much is read.

A link in a downloaded directory may lead to a private file, a pipe in it blocks whoever opens it
for ever, and a few bytes of JSON can stand for gigabytes. So every file that a directory names is
opened through `contained_file`, and read by a function with a limit.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from typing import Any, Literal

from etils import epath

from glm5next_jax import bounded_json
from glm5next_jax.bounded_json import Limits
from glm5next_jax.errors import CheckpointError, Failure

# config.json, generation_config.json, tokenizer_config.json and their like: a released one has some
# kB, one that lists every module that is not quantised some MB.
CONFIG = Limits(16 << 20, 1_000_000)
# The index of the released model: 76,108 names, 8 MB.
INDEX = Limits(32 << 20, 1_000_000)
# A vocabulary of 155,000 tokens and as many pairs or more take 20 MB, and twice that in memory.
TOKENIZER = Limits(128 << 20, 4_000_000)
# Templates are a few hundred lines.
TEMPLATE_BYTES = 4 << 20

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
# What etils opens by fsspec, and the package that makes fsspec open it.
_DRIVERS = {"gs": "gcsfs", "s3": "s3fs", "az": "adlfs", "hf": "huggingface_hub"}


def is_url(path: str | os.PathLike[str]) -> bool:
    return "://" in os.fspath(path)


def require_driver(path: str | os.PathLike[str]) -> epath.Path:
    """`path` as an etils path, `~` expanded, once it is known that this machine can reach it.

    A local path is returned as it is, whether or not anything is there. For a URL its storage is
    asked, once.

    Raises:
      CheckpointError: nothing here opens URLs of this scheme, or the storage cannot be reached: no
        such host, no permission. The message names the URL, and what to install.
    """
    text = os.fspath(path)
    if not is_url(text):
        return epath.Path(os.path.expanduser(text))
    scheme = text.partition("://")[0]
    if scheme not in _DRIVERS:
        known = ", ".join(f"{name}://" for name in _DRIVERS)
        raise CheckpointError(
            f"{text}: found a URL of {scheme}://, expected a local path or {known}"
        )
    url = epath.Path(text)
    with clean_errors(url):
        url.exists()
    return url


def existing_directory(path: str | os.PathLike[str]) -> epath.Path:
    """The directory at `path`, local or a URL.

    Raises:
      CheckpointError: there is none, or nothing here that opens such URLs. For what looks like a
        name on the hub, the message holds the command that downloads it.
    """
    text = os.fspath(path)
    directory = require_driver(path)
    with clean_errors(directory):
        is_directory, exists = directory.is_dir(), directory.exists()
    if is_directory:
        return directory
    if exists:
        raise CheckpointError(
            f"{text}: is a file, expected the directory that holds config.json and the weights"
        )
    if _HUB_NAME.fullmatch(text) and not text.startswith("."):
        local = text.split("/")[1]
        raise CheckpointError(
            f"{text}: no such directory. If this is a repository on the Hugging Face Hub, download "
            f"it first:\n  hf download {text} --local-dir {local}\nand give {local} instead."
        )
    raise CheckpointError(f"{text}: no such directory")


def file_names(directory: epath.Path) -> list[str]:
    """Names of everything in a directory, sorted.

    Raises:
      CheckpointError: it cannot be listed.
    """
    with clean_errors(directory):
        return sorted(entry.name for entry in directory.iterdir())


def contained_file(directory: epath.Path, name: str) -> epath.Path:
    """The path of a directory's own file `name`, which may be missing.

    Links that stay in the directory are followed, and so are those of the hub's cache, which keeps
    `snapshots/<revision>` full of links to `blobs` beside it. A URL has no links.

    Raises:
      CheckpointError: `name` is a path, or what is there is a link that leads elsewhere, or no
        file: a directory, a pipe, a socket, a device. None of these is opened.
    """
    if "/" in name or "\\" in name or "\0" in name or name in ("", ".", ".."):
        raise _refused(directory, "", f"the file name {name!r}", "a name without a path")
    path = directory / name
    if is_url(directory):
        return path
    home = os.path.realpath(directory)
    homes = [home]
    if os.path.basename(os.path.dirname(home)) == "snapshots":
        homes.append(os.path.join(os.path.dirname(os.path.dirname(home)), "blobs"))
    target = os.path.realpath(path)
    if not any(target.startswith(os.path.join(home, "")) for home in homes):
        raise _refused(directory, name, f"a link to {target}", "a file within the directory")
    try:
        mode = os.stat(target).st_mode
    except FileNotFoundError:
        return path
    except OSError as error:
        raise _refused(directory, name, error.strerror or str(error), "a file") from None
    _require_regular(directory, name, mode)
    return path


def is_within(path: epath.Path, directory: epath.Path) -> bool:
    """Whether a path, its links followed, is in a directory. A URL has no links."""
    return is_url(path) or os.path.realpath(path).startswith(
        os.path.join(os.path.realpath(directory), "")
    )


def size_of(path: epath.Path) -> int:
    """Bytes of a file.

    Raises:
      CheckpointError: it is missing, or no regular file.
    """
    with clean_errors(path):
        if is_url(path):
            length: int | None = path.stat().length
        else:
            # Of etils' own `stat`, only the size is wanted, and it fails for owners without a name.
            found = os.stat(path)
            _require_regular(path.parent, path.name, found.st_mode)
            length = found.st_size
    if length is None:
        raise CheckpointError(f"{path}: its storage does not say how long this file is")
    return length


def read_bytes(path: epath.Path, limit: int) -> bytes:
    """A whole file of at most `limit` bytes.

    Raises:
      CheckpointError: it is missing, no regular file, or longer.
    """
    size = size_of(path)
    if size <= limit:
        with clean_errors(path), path.open("rb") as handle:
            data: Any = handle.read(limit + 1)
        if len(data) <= limit:
            return data
        size = len(data)  # it grew meanwhile
    raise CheckpointError(f"{path}: found {size} bytes, expected {limit} at most")


def read_range(path: epath.Path, start: int, length: int) -> bytes:
    """Bytes [start, start + length) of a file; fewer where it ends before.

    Raises:
      CheckpointError: it cannot be read.
    """
    with clean_errors(path), path.open("rb") as handle:
        handle.seek(start)
        data: Any = handle.read(length)
    return data


def read_text(path: epath.Path, limit: int) -> str:
    """A whole UTF-8 file of at most `limit` bytes; line ends become "\\n".

    Raises:
      CheckpointError: as `read_bytes`, or it is not UTF-8.
    """
    try:
        text = read_bytes(path, limit).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8: {error}") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_json_object(
    path: epath.Path,
    limits: Limits = CONFIG,
    *,
    objects: Literal["dict", "unique"] = "dict",
) -> dict[str, Any]:
    """A file's JSON object; `bounded_json.parse` has the arguments.

    Raises:
      CheckpointError: as `read_bytes`, or it is no JSON object, or too large or deep for `limits`.
    """
    return parse_json_object(read_bytes(path, limits.num_bytes), path, limits, objects=objects)


def parse_json_object(
    data: bytes,
    path: epath.Path,
    limits: Limits = CONFIG,
    *,
    objects: Literal["dict", "unique"] = "dict",
) -> dict[str, Any]:
    """`read_json_object` of a file that has been read."""
    try:
        value = bounded_json.parse(data, limits, objects=objects)
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


@contextlib.contextmanager
def clean_errors(path: epath.Path) -> Iterator[None]:
    """Turns what reading at `path` raises into CheckpointError; faults of the program pass."""
    try:
        yield
    except CheckpointError:
        raise
    except ImportError as error:
        scheme = os.fspath(path).partition("://")[0]
        package = _DRIVERS.get(scheme)
        if package is None:
            raise
        raise CheckpointError(
            f"{path}: nothing installed here opens {scheme}:// URLs ({error}). Install what does:"
            f"\n  pip install {package}"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except Exception as error:  # drivers of URLs have errors of their own, of no common class
        if not is_url(path):
            raise
        what = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{path}: cannot be reached: {what}") from error


def _require_regular(directory: epath.Path, name: str, mode: int) -> None:
    kinds = {
        stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
    }  # fmt: skip
    if not stat.S_ISREG(mode):
        found = kinds.get(stat.S_IFMT(mode), "no regular file")
        raise _refused(directory, name, found, "a file")


def _refused(directory: epath.Path, name: str, found: str, expected: str) -> CheckpointError:
    failure = Failure("file", name, "", found, expected)
    return CheckpointError(f"{directory}: a file that is not read", [failure])
