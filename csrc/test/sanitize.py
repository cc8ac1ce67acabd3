"""Builds csrc and its driver with AddressSanitizer and UndefinedBehaviorSanitizer, and runs the driver."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import setup  # noqa: E402

SANITIZE = ["-O1", "-g", "-DLINATTN_KEEP_LOOPS", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def main() -> int:
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        print(f"sanitize: no compiler ({compiler}); nothing to check, the native engine is not built either")
        return 0
    work = ROOT / "build" / "sanitize"
    work.mkdir(parents=True, exist_ok=True)
    os.chdir(ROOT)
    setup.compile_library(str(work / "driver"), str(work), SANITIZE, ["csrc/test/driver.cpp", "-pthread"])
    return subprocess.run([str(work / "driver")]).returncode


if __name__ == "__main__":
    sys.exit(main())
