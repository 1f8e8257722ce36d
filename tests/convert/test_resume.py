"""A conversion that ends at any moment, in any way, is continued by the same command; what comes
out is, byte for byte, what an uninterrupted run makes. More moments: `CONVERT_KILLS=30`."""

import contextlib
import errno
import os
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import pytest

import convert.__main__ as command
from convert import converter, files, journal, tree
from glm5next_jax.checkpoint import CheckpointError, load, native
from tests.convert.conftest import content_of

NUM_KILLS = int(os.environ.get("CONVERT_KILLS", "3"))
UNFINISHED = native.UNFINISHED_NAME


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Everything that is finished is written down at once, and files are small."""
    monkeypatch.setattr(journal, "FLUSH_SECONDS", 0.0)


@pytest.fixture
def memory(tmp_path):
    """A directory in memory where there is one: flushing to a disk takes most of the time here."""
    shared = pathlib.Path("/dev/shm")
    if not shared.is_dir():
        yield tmp_path
        return
    directory = pathlib.Path(tempfile.mkdtemp(dir=shared))
    yield directory
    shutil.rmtree(directory)


def finish(source, destination) -> converter.Summary:
    return converter.convert(source, destination, mode="quiet")


def start_process(source, destination) -> subprocess.Popen:
    code = (
        "import sys, convert.journal, convert.__main__\n"
        "convert.journal.FLUSH_SECONDS = 0.0\n"
        "sys.exit(convert.__main__.main(sys.argv[1:]))\n"
    )
    line = [sys.executable, "-c", code, str(source), str(destination), "--quiet"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.getcwd()}
    with log_of(destination).open("w") as log:
        return subprocess.Popen(line, env=environment, stderr=log)


def log_of(destination: pathlib.Path) -> pathlib.Path:
    return destination.with_suffix(".log")


def num_files(directory: pathlib.Path) -> int:
    count = 0
    with contextlib.suppress(FileNotFoundError):  # it is being changed
        for _, _, names in os.walk(directory):
            count += len(names)
    return count


@pytest.mark.parametrize("seed", range(NUM_KILLS))
def test_killed_at_a_random_moment(seed, source, whole, tmp_path):
    """kill -9, up to three times in a row, each at some number of files further on."""
    rng = random.Random(seed)
    destination, at = tmp_path / "dst", 0
    for _ in range(rng.randint(1, 3)):
        at += rng.randint(1, len(whole) // 2)
        process = start_process(source, destination)
        while process.poll() is None and num_files(destination) < at:
            time.sleep(0.0005)
        process.kill()
        process.wait()
        if process.returncode == 0:  # it was faster
            break
        assert process.returncode == -signal.SIGKILL, log_of(destination).read_text()
        if not (destination / native.HEADER_NAME).exists() and destination.exists():
            with pytest.raises(ValueError, match="unfinished|no config.json"):
                load(destination)
    finish(source, destination)
    assert content_of(destination) == whole


class DiskFull:
    """Lets a number of file-system operations pass; from then on all but removals fail."""

    def __init__(self, monkeypatch, passing: int):
        self.passing, self.count = passing, 0
        self.wrap(monkeypatch, files, "make_directory")
        self.wrap(monkeypatch, os, "fsync")
        self.wrap(monkeypatch, pathlib.Path, "replace")
        self.wrap(monkeypatch, tree.TreeWriter, "prepare")
        self.wrap(monkeypatch, tree.TreeWriter, "write", self.torn)
        original = pathlib.Path.open

        @contextlib.contextmanager
        def opened(path, mode="r", *arguments, **options):
            if "w" in mode:
                self.pass_or_fail()
            with original(path, mode, *arguments, **options) as handle:
                if "w" not in mode:
                    yield handle
                    return
                write = handle.write

                class Handle:
                    flush, fileno = handle.flush, handle.fileno

                    def write(_self, data):
                        try:
                            self.pass_or_fail()
                        except OSError:
                            write(bytes(data)[: len(data) // 2])  # what still fitted
                            raise
                        return write(data)

                yield Handle()

        monkeypatch.setattr(pathlib.Path, "open", opened)

    def wrap(self, monkeypatch, owner, name, on_failure=None):
        original = getattr(owner, name)

        def wrapped(*arguments, **options):
            try:
                self.pass_or_fail()
            except OSError:
                if on_failure:
                    on_failure(*arguments)
                raise
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, wrapped)

    def torn(self, writer, leaf, index, values):
        """The worst that a file system could leave behind: half of a file, in its place."""
        starts = [start // step for (start, _), step in zip(index, self.steps(values), strict=True)]
        path = pathlib.Path(writer._weights, leaf, "c", *map(str, starts))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\1" * 100)

    @staticmethod
    def steps(values):
        return tree.grid(values.shape, values.dtype.itemsize)[0]

    def pass_or_fail(self):
        self.count += 1
        if self.count > self.passing:
            raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_that_is_full_at_every_operation(source, whole, memory, monkeypatch):
    with monkeypatch.context() as patches:
        counter = DiskFull(patches, 10**9)
        finish(source, memory / "count")
    assert content_of(memory / "count") == whole
    num_operations = counter.count
    assert num_operations > 2 * len(whole)
    step = 1 if NUM_KILLS >= 30 else num_operations // 16
    for passing in range(0, num_operations, step):
        destination = memory / f"dst{passing}"
        with monkeypatch.context() as patches:
            DiskFull(patches, passing)
            with pytest.raises(OSError, match="No space left"):
                finish(source, destination)
        if not destination.exists():  # it could not be made: and nothing is left of it
            assert passing < 10
        elif not (destination / native.HEADER_NAME).exists():
            assert not [path for path in destination.rglob("*") if path.name.endswith(".partial")]
            assert (destination / UNFINISHED).is_dir()
        finish(source, destination)
        assert content_of(destination) == whole, passing
        shutil.rmtree(destination)


def test_a_failing_write_of_the_array_library(source, whole, tmp_path):
    """The operating system refuses long files, so the failure is tensorstore's own."""
    process = start_process(source, tmp_path / "dst")
    limit = max(len(data) for name, data in whole.items() if name.startswith("weights/")) // 2
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, limit))
    assert process.wait() == 2
    error = log_of(tmp_path / "dst").read_text()
    assert "cannot be written" in error and "File too large" in error and "Traceback" not in error
    finish(source, tmp_path / "dst")
    assert content_of(tmp_path / "dst") == whole


def stopped(source, destination, monkeypatch, after: int = 30) -> None:
    """Leaves an unfinished directory with some units finished."""
    with monkeypatch.context() as patches:
        original, count = tree.TreeWriter.write, 0

        def write(*arguments):
            nonlocal count
            count += 1
            if count > after:
                raise KeyboardInterrupt
            original(*arguments)

        patches.setattr(tree.TreeWriter, "write", write)
        with pytest.raises(KeyboardInterrupt):
            finish(source, destination)


def test_what_is_finished_is_kept_and_not_written_again(source, whole, tmp_path, monkeypatch):
    destination = tmp_path / "dst"
    stopped(source, destination, monkeypatch)
    chunks = {path: path.stat().st_mtime_ns for path in destination.glob("weights/*/c/**/*")}
    summary = finish(source, destination)
    assert summary.kept_bytes > 0 and "were there from an earlier run" in str(summary)
    kept = [
        path for path, time in chunks.items() if path.is_file() and path.stat().st_mtime_ns == time
    ]
    assert len(kept) >= 20
    assert content_of(destination) == whole


@pytest.mark.parametrize("damage", ["flipped", "cut", "removed", "another"])
def test_finished_files_are_verified(damage, source, whole, tmp_path, monkeypatch):
    destination = tmp_path / "dst"
    stopped(source, destination, monkeypatch)
    chunks = [path for path in destination.glob("weights/*/c/**/*") if path.is_file()]
    assert len(chunks) > 10
    for path, other in zip(chunks[::3], chunks[1::3], strict=False):
        data = bytearray(path.read_bytes())
        match damage:
            case "flipped":
                data[len(data) // 2] ^= 1
            case "cut":
                del data[len(data) // 2 :]
            case "another":
                data = other.read_bytes()
        path.write_bytes(data)
        if damage == "removed":
            path.unlink()
    finish(source, destination)
    assert content_of(destination) == whole


def test_leftovers_of_a_killed_writer_go(source, whole, tmp_path, monkeypatch):
    destination = tmp_path / "dst"
    stopped(source, destination, monkeypatch)
    (destination / "weights" / "norm.weight" / "c").mkdir(parents=True, exist_ok=True)
    (destination / "weights" / "norm.weight" / "c" / "0.__lock").write_bytes(b"half")
    (destination / "config.json.partial").write_text("{")
    finish(source, destination)
    assert content_of(destination) == whole


def test_an_unfinished_directory_is_refused_by_every_reader(source, tmp_path, monkeypatch, capsys):
    destination = tmp_path / "dst"
    stopped(source, destination, monkeypatch)
    for line in (["verify", source, destination], ["export", destination, tmp_path / "out"]):
        assert command.main([str(word) for word in line]) == 2
        error = capsys.readouterr().err
        assert "unfinished" in error and "the same command again" in error
    with pytest.raises(CheckpointError, match="unfinished.*continues where it stopped"):
        load(destination)


def test_two_converters_of_one_destination(source, whole, tmp_path, capsys):
    destination = tmp_path / "dst"
    process = start_process(source, destination)
    refused = ""
    while process.poll() is None and not refused:
        if (destination / UNFINISHED / native.IDENTITY_NAME).exists():
            os.kill(process.pid, signal.SIGSTOP)
            if command.main([str(source), str(destination), "--overwrite"]) == 2:
                refused = capsys.readouterr().err
            os.kill(process.pid, signal.SIGCONT)
        time.sleep(0.001)
    assert process.wait() == 0
    assert "another glm5next-convert is writing it" in refused
    assert content_of(destination) == whole


def test_another_command_does_not_continue(source, tmp_path, monkeypatch, capsys):
    """Other options, and files that changed meanwhile: pieces of two checkpoints must not mix."""
    destination = tmp_path / "dst"
    stopped(source, destination, monkeypatch)
    before = content_of(destination)
    assert command.main([str(source), str(destination), "--dtype", "float32"]) == 2
    assert "dtype is 'float32', was 'keep'" in capsys.readouterr().err
    shard = next(source.glob("*.safetensors"))
    times = shard.stat().st_atime_ns, shard.stat().st_mtime_ns
    os.utime(shard, ns=(times[0], times[1] + 10**9))
    assert command.main([str(source), str(destination)]) == 2
    assert shard.name in capsys.readouterr().err
    os.utime(shard, ns=times)
    assert content_of(destination) == before
    assert command.main([str(source), str(destination), "--overwrite", "--quiet"]) == 0


def test_a_damaged_journal(source, whole, tmp_path, monkeypatch, capsys):
    destination = tmp_path / "dst"
    stopped(source, destination, monkeypatch)
    segment = next((destination / UNFINISHED).glob("done-*.jsonl"))
    segment.write_bytes(segment.read_bytes()[:-5])
    assert command.main([str(source), str(destination)]) == 2
    error = capsys.readouterr().err
    assert f"{segment.name}: damaged" in error and "start over with --overwrite" in error
    assert command.main([str(source), str(destination), "--overwrite", "--quiet"]) == 0
    assert content_of(destination) == whole


def test_a_kill_between_the_marker_and_the_end(source, whole, tmp_path, monkeypatch):
    destination = tmp_path / "dst"
    with monkeypatch.context() as patches:

        def killed(path):
            if path.name == UNFINISHED:
                raise KeyboardInterrupt

        patches.setattr(files, "remove_tree", killed)
        with pytest.raises(KeyboardInterrupt):
            finish(source, destination)
    load(destination)
    assert not finish(source, destination).is_new
    assert content_of(destination) == whole


def test_overwriting_that_is_killed(source, whole, tmp_path, monkeypatch):
    """The marker goes first: an old conversion, half removed, does not pass for a whole one."""
    destination = tmp_path / "dst"
    converter.convert(source, destination, dtype="float32", mode="quiet")
    with monkeypatch.context() as patches:
        original = files.remove_tree

        def killed(path):
            original(path)
            raise KeyboardInterrupt

        patches.setattr(files, "remove_tree", killed)
        with pytest.raises(KeyboardInterrupt):
            converter.convert(source, destination, overwrite=True, mode="quiet")
    with pytest.raises(CheckpointError, match="unfinished"):
        load(destination)
    converter.convert(source, destination, overwrite=True, mode="quiet")
    assert content_of(destination) == whole


def test_space_is_asked_for_first(source, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "free_bytes", lambda path: 1000)
    with pytest.raises(OSError, match="left to write, but only 1000 B are free"):
        finish(source, tmp_path / "dst")
