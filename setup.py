"""Builds the native engine's library beside the package; without a C++ compiler the install still succeeds.

The library has no part of Python or torch in it and is loaded by its path, so one build serves every version of both.
csrc/isa.cpp is compiled once for each instruction set of the CPU family.
"""

import os
import platform
import subprocess
import sys
from collections.abc import Sequence

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ISA_FLAGS = {
    "portable": [],
    "avx2": ["-mavx2", "-mfma"],
    "avx512": ["-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mavx2", "-mfma", "-mprefer-vector-width=512"],
}
FLAGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
]


class BuildNative(build_ext):
    """Compiles csrc with the system's compiler: $CXX, or c++."""

    def get_ext_filename(self, fullname: str) -> str:
        """Named so that nothing takes it for a module of Python."""
        return os.path.join(*fullname.split(".")) + ".lib.so"

    def build_extension(self, ext: Extension) -> None:
        target = self.get_ext_fullpath(ext.name)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.makedirs(self.build_temp, exist_ok=True)
        if os.path.exists(target):
            os.remove(target)
        try:
            compile_library(target, self.build_temp)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"linattn: the native engine was not built, the torch engine serves: {error}", file=sys.stderr)

    def get_outputs(self) -> list[str]:
        return [path for path in super().get_outputs() if os.path.exists(path)]


def compile_library(target: str, work: str, extra: Sequence[str] = (), program: Sequence[str] = ()) -> None:
    """Every instruction set and the entry points at once, then one shared library, or a program of these sources."""
    compiler = os.environ.get("CXX", "c++")
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    sets = list(ISA_FLAGS) if x86 else ["portable"]
    jobs = {isa: ["isa.cpp", f"-DLINATTN_ISA={isa}", *ISA_FLAGS[isa]] for isa in sets}
    jobs["dispatch"] = ["dispatch.cpp", *([] if x86 else ["-DLINATTN_ONLY_PORTABLE"])]
    jobs["nearfar"] = ["nearfar.cpp"]
    jobs["memory"] = ["memory.cpp"]
    running = []
    for name, (source, *flags) in jobs.items():
        options = [*FLAGS, *flags, *extra]
        command = [compiler, *options, "-c", os.path.join("csrc", source), "-o", os.path.join(work, f"{name}.o")]
        running.append((command, subprocess.Popen(command)))
    failed = [command for command, process in running if process.wait()]
    if failed:
        raise subprocess.CalledProcessError(1, failed[0])
    objects = [os.path.join(work, f"{name}.o") for name in jobs]
    kind = [*FLAGS, *extra, *program] if program else ["-shared", "-pthread"]
    subprocess.run([compiler, *kind, *objects, "-o", target], check=True)


if __name__ == "__main__":
    setup(
        ext_modules=[Extension("linattn.engines.native._linattn", sources=[], optional=True)],
        cmdclass={"build_ext": BuildNative},
    )
