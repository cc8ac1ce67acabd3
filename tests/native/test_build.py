"""What CMake compiles and how the library is named and found, on machines other than this one too."""

import json
import os
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from linattn.engines.native.ffi import ISA_LEVELS, find_library, isa_levels, library, torch_library
from native_support import needs_native

ROOT = Path(__file__).resolve().parents[2]
CMAKE = shutil.which("cmake", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]))
COMPILER = shutil.which("c++")
STRIP = shutil.which("strip")
PACKAGE = ROOT / "src" / "linattn"
LIBRARY = PACKAGE / "engines" / "native" / "_linattn.lib.so"
TARGETS = {  # what a compiler calls its target, and the machine's name in Python
    "x86_64-linux-gnu": "x86_64",
    "x86_64-w64-mingw32": "AMD64",
    "x86_64-apple-darwin22.6.0": "x86_64",
    "aarch64-linux-gnu": "aarch64",
    "arm64-apple-darwin23.4.0": "arm64",
    "riscv64-linux-gnu": "riscv64",
    "i686-linux-gnu": "i686",
}
needs_cmake = pytest.mark.skipif(CMAKE is None or COMPILER is None, reason="needs CMake and a C++ compiler")


def configure(build: Path, environment: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    """Runs CMake's configure step, which compiles nothing."""
    assert CMAKE is not None
    command = [CMAKE, "-S", str(ROOT), "-B", str(build), "-G", "Unix Makefiles", *options]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=True)


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compiler that says it compiles for $TARGET."""
    script = tmp_path_factory.mktemp("cxx") / "cxx"
    script.write_text(f'#!/bin/sh\ntest "$1" = -dumpmachine && echo "$TARGET" && exit\nexec {COMPILER} "$@"\n')
    script.chmod(0o755)
    return script


@needs_cmake
@pytest.mark.parametrize("target", TARGETS)
def test_every_instruction_set_is_compiled_with_its_own_flags(compiler, tmp_path, target):
    configure(tmp_path, {"CXX": str(compiler), "TARGET": target})
    commands = [entry["command"] for entry in json.loads((tmp_path / "compile_commands.json").read_text())]
    kernels = [command for command in commands if command.endswith("kernels.cpp")]
    levels, subjects = isa_levels(TARGETS[target]), len(list(ROOT.glob("csrc/*/kernels.cpp")))
    assert len(kernels) == len(levels) * subjects
    for isa in levels:
        mine = [command for command in kernels if f"-DLINATTN_ISA={isa} " in command]
        assert len(mine) == subjects
        for command in mine:
            assert ("-mavx" in command) == isa.startswith("avx")
            assert ("-DLINATTN_NEON" in command) == (isa == "neon")
    for command in commands:
        assert ("-DLINATTN_ONLY_PORTABLE" in command) == (levels == ("portable",))
        assert {"-std=c++17", "-fPIC", "-ffp-contract=fast", "-fvisibility=hidden"} <= set(command.split())


@needs_cmake
def test_a_compiler_may_have_arguments(compiler, tmp_path):
    configure(tmp_path, {"CXX": f"{compiler} -m64", "TARGET": "x86_64-linux-gnu"})
    commands = [entry["command"] for entry in json.loads((tmp_path / "compile_commands.json").read_text())]
    assert all(command.split()[:2] == [str(compiler), "-m64"] for command in commands)


@needs_cmake
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["-DLINATTN_BUILD_FAILED=ON"], "compiling its library failed when linattn was installed"),
        (["-DCMAKE_CXX_COMPILER=NOTFOUND"], "no C++ compiler was found when linattn was installed"),
    ],
)
def test_without_a_library_the_reason_is_installed(tmp_path, options, reason):
    configure(tmp_path / "build", {}, *options)
    assert CMAKE is not None
    install = [CMAKE, "--install", str(tmp_path / "build"), "--prefix", str(tmp_path)]
    subprocess.run(install, capture_output=True, check=True)
    with pytest.raises(OSError, match=reason.replace("+", r"\+")):
        find_library(str(tmp_path / "linattn" / "engines" / "native"))


@needs_native
def test_the_library_runs_on_one_of_the_named_sets():
    assert library.isa in ISA_LEVELS


@pytest.mark.skipif(STRIP is None or not LIBRARY.exists(), reason="needs strip and the library in its place")
def test_a_wheel_of_the_package_is_small(tmp_path):
    """As scikit-build-core makes it: deflated, the library without symbols."""
    subprocess.run([STRIP, "-o", tmp_path / LIBRARY.name, LIBRARY], check=True)
    files = [path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in (".pyc", ".so", ".txt")]
    sizes = {path: len(zlib.compress(path.read_bytes())) + 200 for path in [*files, tmp_path / LIBRARY.name]}
    assert sum(sizes.values()) < 3_000_000, sorted(sizes.items(), key=lambda item: -item[1])[:5]


@pytest.mark.parametrize(("system", "name"), [("linux", "_linattn.lib.so"), ("darwin", "_linattn.lib.dylib")])
def test_the_library_of_this_system_is_taken(tmp_path, monkeypatch, system, name):
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.delenv("LINATTN_LIBRARY", raising=False)
    for file in ("_linattn.lib.so", "_linattn.lib.dylib"):
        (tmp_path / file).touch()
    assert find_library(str(tmp_path)) == str(tmp_path / name)
    (tmp_path / name).unlink()
    with pytest.raises(OSError, match="was not built when linattn was installed"):
        find_library(str(tmp_path))


def test_another_library_may_be_named(tmp_path, monkeypatch):
    monkeypatch.setenv("LINATTN_LIBRARY", "some/other.so")
    assert find_library(str(tmp_path)) == "some/other.so"


def test_the_library_of_torch_with_its_threads(monkeypatch):
    assert os.path.exists(torch_library())
    monkeypatch.setattr(sys, "platform", "darwin")
    assert os.path.basename(torch_library()) == "libtorch_cpu.dylib"
