"""python -m verify_attn [LIBRARY [ARCH ...]]: compiles ahead of time, so that the first call does not wait for it."""

from __future__ import annotations

import argparse
import sys

from verify_attn import build, toolchain
from verify_attn.errors import KernelBuildError
from verify_attn.sources import LIBRARIES, library


def main() -> int:
    names = [lib.name for lib in LIBRARIES]
    parser = argparse.ArgumentParser(prog="python -m verify_attn", description=__doc__)
    parser.add_argument("library", nargs="?", default="cpu", choices=names, help="default: cpu, for this machine")
    parser.add_argument("arch", nargs="*", help="architectures; default: this machine's, or all that a CUDA library is written for")
    given = parser.parse_args()
    lib = library(given.library)
    try:
        default = toolchain.native_cpu_archs() if lib.compiler == "cxx" else lib.archs
        built = build.build(lib.name, tuple(given.arch) or default, progress=print)
    except KernelBuildError as error:
        print(f"verify_attn: {error}", file=sys.stderr)
        return 1
    print(f"{built.path} ({'from the cache' if built.cached else f'{built.seconds:.1f} s'})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
