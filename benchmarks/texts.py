"""Writes the six texts that near/far fidelity is judged on, from what any Debian machine has or can get.

    python benchmarks/texts.py out/texts

calibration.txt (the jargon file) is for `linattn.hf.calibrate`; the other five are of other kinds and other books.
"""

import argparse
import gzip
import html.parser
import inspect
import subprocess
import tempfile
from pathlib import Path

PACKAGES = ("anarchism", "jargon-text", "bible-kjv", "bible-kjv-text")
LICENCES = ("GPL-2", "LGPL-2.1", "LGPL-2", "GPL-1", "GPL-3", "GFDL-1.2", "GFDL-1.3")


class _Prose(html.parser.HTMLParser):
    """The text of a page's paragraphs."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.parts = 0, []

    def handle_starttag(self, tag, attrs):
        if tag == "p":
            self.open, self.parts = 1, [*self.parts, "\n\n"]

    def handle_endtag(self, tag):
        if tag in ("p", "body"):
            self.open = 0

    def handle_data(self, data):
        if self.open:
            self.parts.append(" ".join(data.split()) + " ")


def unpack(folder: Path) -> None:
    """Downloads the Debian packages and unpacks them into a folder, without installing anything."""
    subprocess.run(["apt-get", "download", "-q", *PACKAGES], cwd=folder, check=True, capture_output=True)
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", package, folder], check=True)


def texts(folder: Path) -> dict[str, str]:
    share = folder / "usr/share/doc"
    pages = _Prose()
    for name in ("secA1", "secA2", "secI1", "secJ3"):
        pages.feed((share / f"anarchism/html/{name}.html").read_text(errors="replace"))
    bible = [folder / "usr/bin/bible", "-p", folder / "usr/lib", "-f", "Ruth1:1-Job42:17"]
    verses = subprocess.run(bible, check=True, capture_output=True, text=True).stdout.splitlines()
    man = subprocess.run(
        ["man", "bash"], check=True, capture_output=True, text=True, env={"MANWIDTH": "80", "PATH": "/usr/bin:/bin"}
    )
    licences = [(Path("/usr/share/common-licenses") / name).read_text() for name in LICENCES]
    return {
        "prose": "".join(pages.parts).strip(),
        "manual": man.stdout,
        "code": inspect.getsource(argparse),
        "old-english": "\n".join(verse.split(" ", 1)[1] for verse in verses if " " in verse),
        # Their openings first: they repeat each other almost word for word, so that even a short stretch repeats itself.
        "licences": "\n".join([text[:2800] for text in licences] + licences),
        "calibration": gzip.decompress((share / "jargon-text/jargon.txt.gz").read_bytes()).decode(errors="replace")[
            40000:
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        unpack(Path(name))
        for kind, text in texts(Path(name)).items():
            (folder / f"{kind}.txt").write_text(text)
            print(f"{folder / kind}.txt: {len(text)} characters")


if __name__ == "__main__":
    main()
