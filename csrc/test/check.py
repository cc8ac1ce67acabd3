"""Builds the test driver through CMake's presets and runs it: under sanitizers, with clang, and for aarch64 in an emulator.

python csrc/test/check.py address    AddressSanitizer and UndefinedBehaviorSanitizer, every shape
python csrc/test/check.py threads    ThreadSanitizer, shapes that threads share
python csrc/test/check.py clang      clang++: the driver, then tests of the Python package with that library
python csrc/test/check.py neon       aarch64-linux-gnu-g++: the driver under qemu, against the numbers of this machine
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CLANG_TESTS = [
    *(f"native/test_{name}" for name in ("forward", "backward", "operators", "delta_rule", "decayed_sums", "scan")),
    *(f"native/test_{name}" for name in ("layers", "mixer")),
    "nearfar/test_native",
    "nearfar/test_native_recall",
    "nearfar/test_native_training",
    "nearfar/test_native_bidirectional",
    "nearfar/test_state_bits",
]


def need(tool: str, package: str) -> str:
    """The tool's path, or one line that says where it comes from."""
    found = shutil.which(tool)
    if found is None:
        sys.exit(f"check: {tool} is missing; on Debian: apt-get install {package}")
    return found


def run(command: Sequence[str | Path], **environment: str) -> int:
    print("check:", *command, flush=True)
    return subprocess.run(command, env={**os.environ, **environment}).returncode


def build(preset: str) -> Path:
    """Configures and builds a preset of CMakePresets.json; returns its build folder."""
    # cmake and ninja of this environment first
    scripts = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    cmake = shutil.which("cmake", path=scripts) or need("cmake", "cmake")
    for command in ([cmake, "--preset", preset], [cmake, "--build", "--preset", preset]):
        failed = run(command, PATH=scripts)
        if failed:
            sys.exit(failed)
    return ROOT / "build" / preset


def has_compiler() -> bool:
    compiler = shlex.split(os.environ.get("CXX", "c++"))[0]
    if shutil.which(compiler) is None:
        print(f"check: no compiler ({compiler}); nothing to check, the native engine is not built either")
        return False
    return True


def address() -> int:
    return run([build("address") / "driver"]) if has_compiler() else 0


def threads() -> int:
    """One instruction set: the code that shares data between threads is the same in all of them."""
    if not has_compiler():
        return 0
    driver = build("threads") / "driver"
    # gcc 12's ThreadSanitizer cannot take addresses as random as newer kernels make them.
    fixed_addresses = ["setarch", "-R"]
    allowed = shutil.which("setarch") and subprocess.run([*fixed_addresses, "true"], stderr=subprocess.DEVNULL)
    return run([*(fixed_addresses if allowed and allowed.returncode == 0 else []), driver, "threads"])


def clang() -> int:
    compiler = need("clang++", "clang")
    folder = build("clang")
    # What macOS compiles in place of the parts that are for Linux only.
    options = ["-std=c++17", "-Icsrc", "-Wall", "-Wextra", "-Wshadow", "-Werror", "-U__linux__", "-fsyntax-only"]
    entries = [*sorted(ROOT.glob("csrc/core/*.cpp")), *sorted(ROOT.glob("csrc/*/entry.cpp"))]
    failed = run([compiler, *options, *entries]) or run([folder / "driver"])
    (library,) = folder.glob("_linattn.lib.*")
    said = "from linattn.engines.native.ffi import library; assert library.why_not is None, library.why_not"
    tests = [f"tests/{name}.py" for name in CLANG_TESTS]
    return (
        failed
        or run([sys.executable, "-c", said], LINATTN_LIBRARY=str(library))
        or run([sys.executable, "-m", "pytest", "-n", "auto", *tests], LINATTN_LIBRARY=str(library))
    )


def neon() -> int:
    need("aarch64-linux-gnu-g++", "g++-aarch64-linux-gnu")
    emulator = shutil.which("qemu-aarch64-static") or need("qemu-aarch64", "qemu-user")
    here, there = build("portable"), build("neon")
    numbers = here / "numbers.txt"
    failed = run([here / "driver", "few", "--write", numbers])
    return failed or run([emulator, there / "driver", "few", "--against", numbers])


def main() -> int:
    checks = {check.__name__: check for check in (address, threads, clang, neon)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("check", choices=checks)
    os.chdir(ROOT)
    return checks[parser.parse_args().check]()


if __name__ == "__main__":
    sys.exit(main())
