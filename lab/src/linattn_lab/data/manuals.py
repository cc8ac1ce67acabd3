"""Manual pages out of Debian packages, which are downloaded and read but never installed."""

import gzip
import io
import json
import re
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from linattn._files import write_json

from .apt import download_debs
from .cache import DataMissing
from .projects import Progress, no_progress

BATCH = 40  # packages that apt-get is asked for at once
PAGE = re.compile(r"^(?:\./)?usr/share/man/man[1-9]/[^/]+\.[1-9][^/]*$")  # English: others have their language before


def fetch_manuals(packages: Sequence[str], folder: Path, progress: Progress = no_progress) -> None:
    """Writes PACKAGE.json into `folder`: every manual page of the package, file name -> roff; what is there stays."""
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()  # apt-get runs in another one
    wanted = [name for name in packages if not (folder / f"{name}.json").is_file()]
    groups = [wanted[i : i + BATCH] for i in range(0, len(wanted), BATCH)]
    if not groups:
        return
    with tempfile.TemporaryDirectory(dir=folder, prefix=".apt-") as apt:
        for group in progress(groups, desc="manual pages"):
            with tempfile.TemporaryDirectory(dir=folder, prefix=".debs-") as place:
                for package, deb in download_debs(group, Path(place), Path(apt)):
                    write_json(folder / f"{package}.json", pages_of(deb))


def pages_of(deb: Path) -> dict[str, str]:
    """The manual pages of a package. Links to other pages are left out."""
    done = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(deb)], capture_output=True, check=False)
    if done.returncode:
        raise DataMissing(f"dpkg-deb cannot read {deb.name}: {done.stderr.decode(errors='replace').strip()}")
    found = {}
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as tar:
        for entry in tar:
            if entry.isreg() and PAGE.match(entry.name):
                file = tar.extractfile(entry)
                assert file is not None  # it is a regular file
                data = file.read()
                if entry.name.endswith(".gz"):
                    data = gzip.decompress(data)
                found[entry.name.rsplit("/", 1)[1].removesuffix(".gz")] = data.decode("utf-8", errors="replace")
    return found


def read_manuals(packages: Iterable[str], folder: Path) -> dict[str, dict[str, str]]:
    """What `fetch_manuals` wrote: the pages of each package; those that could not be fetched are left out."""
    paths = {name: folder / f"{name}.json" for name in packages}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.is_file()}
