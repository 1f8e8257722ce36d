"""A storage bucket without a network: URLs that etils opens lead to a local folder.

The whole of etils and of fsspec is the real one, but for the filesystem at the end.
"""

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from etils.epath import backend
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

_PROTOCOLS = {"gs": "gcs"}  # etils' names for them


class Storage(DirFileSystem):
    """Objects of a bucket, kept as files.

    Without `directories` it does as object stores do: what holds no object is not there, making a
    directory makes nothing, and an object needs no directory to go to.
    """

    protocol = ("gs", "gcs", "s3", "az", "hf")
    cachable = False

    def __init__(self, root: pathlib.Path, directories: bool):
        super().__init__(str(root), LocalFileSystem(auto_mkdir=not directories))
        self._directories = directories

    def exists(self, path, **kwargs):
        return self.isfile(path) or self.isdir(path)

    def isdir(self, path):
        is_bucket = "/" not in self._strip_protocol(path)
        known = self._directories or is_bucket
        return super().isdir(path) and (known or bool(self.find(path)))

    def ls(self, path, detail=True, **kwargs):
        entries: Any = super().ls(path, detail=True, **kwargs)
        entries = [e for e in entries if e["type"] != "directory" or self.isdir(e["name"])]
        return entries if detail else [entry["name"] for entry in entries]

    def mkdir(self, path, *args, **kwargs):
        if self._directories:
            super().mkdir(path, *args, **kwargs)

    def makedirs(self, path, *args, **kwargs):
        if self._directories:
            super().makedirs(path, *args, **kwargs)


@contextlib.contextmanager
def bucket(
    root: pathlib.Path, name: str = "bucket", *, scheme: str = "gs", directories: bool = False
) -> Iterator[str]:
    """Within it, `<scheme>://<name>/x` is the file `<root>/<name>/x`. Gives `<scheme>://<name>`.

    Args:
      root: a local folder.
      name: of the bucket.
      scheme: gs, s3, az or hf.
      directories: keep empty directories, as a filesystem does and object stores do not.
    """
    (root / name).mkdir(parents=True, exist_ok=True)
    storage, other = Storage(root, directories), backend._FileSystemSpecBackend._get_filesystem

    def get_filesystem(self, protocol: str):
        mine = protocol == _PROTOCOLS.get(scheme, scheme)
        return storage if mine else other(self, protocol)

    with mock.patch.object(backend._FileSystemSpecBackend, "_get_filesystem", get_filesystem):
        yield f"{scheme}://{name}"
