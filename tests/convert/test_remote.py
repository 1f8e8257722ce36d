"""Conversion from and to a bucket, where nothing is renamed or locked, and folders do not exist."""

import pytest
from etils import epath

import convert.__main__ as command
from convert import converter, journal
from glm5next_jax.checkpoint import load, native
from tests.checkpoint import remote
from tests.checkpoint.test_load import leaves_of
from tests.convert.conftest import content_of
from tests.convert.test_resume import stopped


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """gs://bucket, and where its objects are; tensorstore, with drivers of its own, goes there."""
    with remote.bucket(tmp_path) as url:
        original = native.url_of

        def url_of(folder):
            text = str(folder)
            local = text.replace(url, str(tmp_path / "bucket")) if text.startswith(url) else text
            return original(epath.Path(local))

        monkeypatch.setattr(native, "url_of", url_of)
        yield url, tmp_path / "bucket"


def test_to_and_from_a_bucket(source, whole, bucket):
    url, folder = bucket
    assert command.main([str(source), f"{url}/dst", "--quiet"]) == 0
    assert content_of(folder / "dst") == whole
    got, expected = leaves_of(load(f"{url}/dst")), leaves_of(load(source))
    assert {n: x.tobytes() for n, x in got.items()} == {n: x.tobytes() for n, x in expected.items()}
    assert command.main(["verify", str(source), f"{url}/dst", "--quiet"]) == 0
    assert command.main(["export", f"{url}/dst", f"{url}/exported", "--quiet"]) == 0
    assert command.main(["verify", f"{url}/exported", f"{url}/dst", "--quiet"]) == 0
    assert command.main([f"{url}/exported", f"{url}/again", "--quiet"]) == 0
    weights = {n: x for n, x in whole.items() if "/c/" in n}
    again = content_of(folder / "again")
    assert {n: x for n, x in again.items() if "/c/" in n} == weights


def test_continuing_in_a_bucket(source, whole, bucket, monkeypatch, capsys):
    url, folder = bucket
    monkeypatch.setattr(journal, "FLUSH_SECONDS", 0.0)
    with monkeypatch.context() as patches:
        patches.setattr(journal._Lease, "drop", lambda lease: None)  # killed
        stopped(source, f"{url}/dst", monkeypatch)
    with pytest.raises(ValueError, match="unfinished"):
        load(f"{url}/dst")
    assert command.main([str(source), f"{url}/dst"]) == 2  # it might be at work still
    assert "another glm5next-convert was writing it" in capsys.readouterr().err
    monkeypatch.setattr(journal, "LEASE_SECONDS", 0.0)
    assert converter.convert(source, f"{url}/dst", mode="quiet").kept_bytes > 0
    assert content_of(folder / "dst") == whole


def test_two_converters_of_one_bucket(source, bucket, monkeypatch):
    """The later one is seen by the earlier one, which ends."""
    url, _ = bucket
    monkeypatch.setattr(journal, "FLUSH_SECONDS", 0.0)
    refresh, count = journal._Lease.refresh, 0

    def refresh_after_a_theft(lease):
        nonlocal count
        count += 1
        if count == 5:
            journal._Lease(lease._path)._write()
        refresh(lease)

    monkeypatch.setattr(journal._Lease, "refresh", refresh_after_a_theft)
    with pytest.raises(ValueError, match="another glm5next-convert has taken over"):
        converter.convert(source, f"{url}/dst", mode="quiet")
