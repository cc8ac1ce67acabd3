"""Archives: only pinned ones are taken, and no member is written outside its folder."""

import hashlib
import io
import stat
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from linattn._archives import Wheel, download_wheel, unpack_tar, unpack_zip


def write_zip(path, *members):
    with zipfile.ZipFile(path, "w") as archive:
        for member in members:
            archive.writestr(member, "content")
    return path


def write_tar(path, *members):
    with tarfile.open(path, "w") as archive:
        for member in members:
            info = member if isinstance(member, tarfile.TarInfo) else tarfile.TarInfo(member)
            data = b"content" if info.isreg() else b""
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


WRITERS = {"zip": (write_zip, unpack_zip), "tar": (write_tar, unpack_tar)}
HOSTILE = {
    "parent": "package/model/../../../escaped.txt",
    "parent first": "../escaped.txt",
    "absolute": "/escaped.txt",
    "absolute inside": "package/model//escaped.txt",
    "dot": "package/./model/escaped.txt",
    "backslash": "package/model/..\\..\\escaped.txt",
    "drive": "C:/escaped.txt",
}


def files_in(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("name", HOSTILE.values(), ids=HOSTILE)
def test_names_that_lead_out_of_the_folder_are_refused(tmp_path, kind, name):
    write, unpack = WRITERS[kind]
    archive = write(tmp_path / "archive", "package/model/good.txt", name)
    (tmp_path / "a" / "b").mkdir(parents=True)
    with pytest.raises(ValueError, match="not to be trusted"):
        unpack(archive, "package/model", tmp_path / "a" / "b")
    assert files_in(tmp_path) == ["archive"]  # the good file neither


@pytest.mark.parametrize("kind", WRITERS)
def test_a_folder_or_one_file_is_unpacked(tmp_path, kind):
    write, unpack = WRITERS[kind]
    archive = write(tmp_path / "archive", "package/model/a.txt", "package/model/deep/b.txt", "package/models/c.txt")
    found = unpack(archive, "package/model", tmp_path / "out")
    assert files_in(tmp_path / "out") == ["a.txt", "deep/b.txt"]
    assert [path.read_text() for path in found] == ["content"] * 2
    unpack(archive, "package/models/c.txt", tmp_path / "one")
    assert files_in(tmp_path / "one") == ["c.txt"]
    assert unpack(archive, "elsewhere", tmp_path / "none") == []


def zip_link(name):
    info = zipfile.ZipInfo(name)
    info.create_system = 3
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return info


def tar_entry(name, kind, target=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def test_links_and_devices_are_refused(tmp_path):
    archives = [
        (unpack_zip, write_zip(tmp_path / "link.zip", zip_link("package/model/link"))),
        (unpack_tar, write_tar(tmp_path / "link.tar", tar_entry("package/model/link", tarfile.SYMTYPE, "/etc"))),
        (unpack_tar, write_tar(tmp_path / "hard.tar", tar_entry("package/model/link", tarfile.LNKTYPE, "package/x"))),
        (unpack_tar, write_tar(tmp_path / "fifo.tar", tar_entry("package/model/fifo", tarfile.FIFOTYPE))),
    ]
    for unpack, archive in archives:
        with pytest.raises(ValueError, match="not a file"):
            unpack(archive, "package/model", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_link_in_the_target_leads_nowhere(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "deep").symlink_to(tmp_path / "outside")
    archive = write_zip(tmp_path / "archive", "package/model/deep/b.txt")
    with pytest.raises(ValueError, match="outside"):
        unpack_zip(archive, "package/model", tmp_path / "out")
    assert files_in(tmp_path / "outside") == []


def pip_that_brings(data, seen=None):
    def run(words, **_):
        folder = words[words.index("--dest") + 1]
        if seen is not None:
            seen.extend([*words, Path(words[words.index("-r") + 1]).read_text()])
        with open(f"{folder}/x-1-py3-none-any.whl", "wb") as file:
            file.write(data)
        return subprocess.CompletedProcess(words, 0, "", "")

    return run


def test_a_wheel_is_pinned_by_version_and_digest(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(subprocess, "run", pip_that_brings(b"published", seen))
    wheel = Wheel("x", "1", hashlib.sha256(b"published").hexdigest())
    download_wheel(wheel, tmp_path / "x.whl")
    assert (tmp_path / "x.whl").read_bytes() == b"published"
    assert "--require-hashes" in seen
    assert seen[-1] == f"x==1 --hash=sha256:{wheel.sha256}\n"
    monkeypatch.setattr(subprocess, "run", pip_that_brings(b"something else"))
    with pytest.raises(ValueError, match="for x==1 is damaged or another version"):
        download_wheel(wheel, tmp_path / "y.whl")
    assert files_in(tmp_path) == ["x.whl"]
