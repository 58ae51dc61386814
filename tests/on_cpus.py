"""Runs the tests as they would run on other CPUs, and prints what passed and failed on each: ``make test-cpus``.

    python tests/on_cpus.py                          all tests, every kind of CPU: hours
    python tests/on_cpus.py --only avx2 -- tests/passes -m "not slow"

What stands after ``--`` goes to pytest.  Exits with 1 where a test failed anywhere.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

KINDS: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {  # variables of the environment, options of pytest
    "as it is": ({}, ()),
    "avx2": ({"ATEN_CPU_CAPABILITY": "avx2"}, ()),
    "default": ({"ATEN_CPU_CAPABILITY": "default"}, ()),
    "mkl": ({"MKL_CBWR": "COMPATIBLE"}, ()),
    "two threads": ({"OMP_NUM_THREADS": "2"}, ()),
    "other kernels": ({}, ("--other-kernels",)),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("tests", nargs="*", help="for pytest, after --")
    options = parser.parse_args()
    worst = 0
    for kind in options.only:
        variables, more = KINDS[kind]
        command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
        command += ["--max-worker-restart", "0"]
        started = time.perf_counter()
        done = subprocess.run(
            [*command, "-rfE", *more, *options.tests],
            env={"OMP_NUM_THREADS": "1", **os.environ, **variables},
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        lines = done.stdout.splitlines()
        print(f"{kind}: {lines[-1] if lines else 'nothing ran'}; {time.perf_counter() - started:.0f} s")
        print("".join(f"  {line}\n" for line in lines if line.startswith(("FAILED", "ERROR"))), end="", flush=True)
        worst = max(worst, min(done.returncode, 1))
    return worst


if __name__ == "__main__":
    sys.exit(main())
