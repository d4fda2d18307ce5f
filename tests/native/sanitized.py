"""The tests of the compiled code, once more with AddressSanitizer and UBSan in it: python -m tests.native.sanitized

A read or write outside of its memory, or an operation that C leaves undefined, ends the process with a report. GCC's libraries must be
loaded before Python's, so the tests run in a process of their own; once with this processor's vectors, and on x86 with shorter ones too.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
PROCESSORS = ("native", *(("x86-64-v3", "x86-64-v2") if platform.machine() == "x86_64" else ()))  # vectors of 16, 8 and 4 floats
LIBRARIES = ("libasan.so", "libubsan.so")
RUN = """
import sys, pytest, native, native.build as build
build.ALWAYS = (*build.ALWAYS, "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
build.OPTIONAL = (("-march=" + sys.argv.pop(1), *build.HERE[1:], "-fopenmp"),)
if not native.available():
    sys.exit("the compiler has no sanitizers")
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


def main() -> int:
    compiler = shutil.which("gcc")
    found = [] if compiler is None else [library_of(compiler, name) for name in LIBRARIES]
    if not found or not all(Path(name).is_absolute() for name in found):
        print("no sanitizers here (GCC's libasan and libubsan)")
        return 0
    with tempfile.TemporaryDirectory() as cache:
        more = {"LD_PRELOAD": " ".join(found), "ASAN_OPTIONS": "detect_leaks=0", "XDG_CACHE_HOME": cache}  # Python frees little at its end
        environment = {**os.environ, **more, "PYTHONPATH": str(HERE.parent.parent)}
        tests = [*(str(HERE / f"test_{name}.py") for name in ("nearest", "lists", "dropout", "norm")), "-k", "not announce and not 1025"]
        runs = [[sys.executable, "-c", RUN, processor, *tests] for processor in PROCESSORS]
        together = [subprocess.Popen(run, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for run in runs]
        for processor, run in zip(PROCESSORS, together, strict=True):
            print(f"{processor}:\n{run.communicate()[0]}", flush=True)
        return int(any(run.returncode for run in together))  # that of a signal is negative


def library_of(compiler: str, name: str) -> str:
    """Its path; its name alone where the compiler has none."""
    return subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
