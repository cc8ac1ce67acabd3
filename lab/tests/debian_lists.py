"""Index files like apt's, for tests."""

PACKAGES = """\
Package: screen
Version: 4.9.0-4
Description: terminal multiplexer

Package: libscreen-dev
Source: screen (4.9.0-3)
Version: 4.9.0-4
"""


TRANSLATION = """\
Package: screen
Description-md5: 2d86b86ed6058a04c540802e49312f40
Description-en: terminal multiplexer  with VT100
 GNU Screen is a terminal multiplexer that runs
 several "screens". It also:
  * logs what
    it sees
  * is many-user
 and more.
 .
 Done.

Package: libscreen-dev
Description-en: terminal multiplexer (headers)
 Headers.

Package: screen-arm
Description-en: of another architecture
 Text.
"""


def write_lists(folder, packages=PACKAGES, translation=TRANSLATION):
    folder.mkdir(exist_ok=True)
    (folder / "mirror_debian_dists_bookworm_main_binary-amd64_Packages").write_text(packages)
    (folder / "mirror_debian_dists_bookworm_main_i18n_Translation-en").write_text(translation)
    return folder


def many_lists(folder, sources=60):
    """Packages of many sources: each has a program and its data; every tenth begins like the one before it."""
    packages, translation = [], []
    for i in range(sources):
        first = f"Tool{i - (i % 10 == 9)} is a fine program for the number {i - (i % 10 == 9)}."
        for name, about in ((f"tool{i}", "the program"), (f"tool{i}-data", "its data")):
            packages.append(f"Package: {name}\nSource: tool{i}\n")
            translation.append(
                f"Package: {name}\nDescription-en: tool for {i}: {about}\n {first}\n .\n Package {i} has {about}.\n"
            )
    return write_lists(folder, "\n".join(packages), "\n".join(translation))
