"""Build the CUDA runtime made of CPU threads: `make_runtime.py FOLDER` makes FOLDER/libcuda.so.1.

Run by the Python of the environment that it is for.
What torch's libraries ask for and the sources do not define becomes a call that ends in an error.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
PACKAGES = Path(importlib.util.find_spec("torch").origin).parents[1]
INCLUDE = [HERE / "headers", *sorted(PACKAGES.glob("nvidia/cu*/include"))]
INCLUDE += [PACKAGES / "nvidia" / "nccl" / "include"]
FLAGS = ["-std=c++17", "-O2", "-fPIC", "-Wall", "-Wno-unused-function"]
OURS = re.compile(r"^(__cuda|cuda[A-Z]|nccl[A-Z])\w+$")


def names(library: Path, defined: bool) -> set[str]:
    """The functions of CUDA's runtime and of NCCL that a library defines or asks for."""
    which = "--defined-only" if defined else "--undefined-only"
    said = subprocess.run(["nm", "-D", which, library], capture_output=True, text=True, check=True)
    found = {line.split()[-1].split("@")[0] for line in said.stdout.splitlines() if line.split()}
    return {name for name in found if OURS.match(name)}


def build(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    library, part = folder / "libcuda.so.1", folder / "part.so"
    include = [f"-I{path}" for path in INCLUDE]
    objects = [folder / f"{source.stem}.o" for source in sorted(HERE.glob("*.cpp"))]
    running = [
        subprocess.Popen(["g++", *FLAGS, *include, "-c", HERE / f"{made.stem}.cpp", "-o", made])
        for made in objects
    ]
    codes = [process.wait() for process in running]
    if any(codes):
        raise SystemExit("the compiler failed")
    link = ["g++", "-shared", "-Wl,-soname,libcuda.so.1", *objects, "-lpthread", "-ldl", "-lrt"]
    subprocess.run([*link, "-o", part], check=True)
    asked: set[str] = set()
    for torch_has in (PACKAGES / "torch" / "lib").glob("*.so"):
        asked |= names(torch_has, defined=False)
    absent = folder / "absent.cpp"
    calls = [
        f'int {name}() {{ return {"nccl" if name[0] == "n" else "cuda"}_not_built("{name}"); }}\n'
        for name in sorted(asked - names(part, defined=True))
    ]
    head = "int cuda_not_built(const char*);\nint nccl_not_built(const char*);\n"
    absent.write_text(f'extern "C" {{\n{head}{"".join(calls)}}}\n')
    subprocess.run([*link, *FLAGS, absent, "-o", library], check=True)
    part.unlink()
    return library


def enter_environment() -> None:
    """Make every process of this environment import `start`, which sees whether it is needed."""
    packages = Path(sysconfig.get_path("purelib"))
    link = packages / "cuda_on_cpu"
    link.unlink(missing_ok=True)
    link.symlink_to(HERE)
    (packages / "cuda_on_cpu.pth").write_text("import cuda_on_cpu.start\n")


if __name__ == "__main__":
    enter_environment()
    print(build(Path(sys.argv[1])))
