"""Whether kernel packs should lie compressed in wheels: sizes of the wheel and as installed, and times to load.

usage: python benchmarks/pack_compression.py WHEEL [--arch sm_90] [--units 5] [--repeats 20] [--json FILE]

A wheel is a zip archive: plain packs are compressed by deflate on the way and lie plain on disk. The other forms
compress each code object before it goes into the archive, and a process decompresses those that it loads. "Loading"
is what the loader does before the driver is called: read, compare the digest, decompress. Cold: the kernel was told to
drop the file from its cache. Only what the standard library decompresses on every Python of the matrix is measured.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import os
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

FORMS: dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]] = {
    "plain": (lambda data: data, lambda data: data),
    "zlib": (lambda data: zlib.compress(data, 9), zlib.decompress),
    "xz -1": (lambda data: lzma.compress(data, preset=1), lzma.decompress),
    "xz -6": (lambda data: lzma.compress(data, preset=6), lzma.decompress),
}


def packs(wheel: Path) -> dict[str, bytes]:
    """name in the wheel -> code object, plain."""
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if n.startswith("apex/packs/") and not n.endswith(".json")]
        return {n: lzma.decompress(archive.read(n)) if n.endswith(".xz") else archive.read(n) for n in names}


def archived(wheel: Path, compressed: dict[str, bytes]) -> int:
    """Bytes of the wheel with these in the place of its code objects."""
    with tempfile.TemporaryFile() as file, zipfile.ZipFile(wheel) as old:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as new:
            for name in old.namelist():
                new.writestr(name, compressed[name] if name in compressed else old.read(name))
        return file.seek(0, os.SEEK_END)


def load(path: Path, sha256: str, decompress: Callable[[bytes], bytes]) -> bytes:
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != sha256:
        raise SystemExit(f"{path} changed")
    return decompress(data)


def seconds(files: dict[Path, str], decompress: Callable, cold: bool, repeats: int) -> float:
    """Seconds to load all of `files`, the best of `repeats`."""
    times = []
    for _ in range(repeats):
        if cold:
            for path in files:
                descriptor = os.open(path, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)
        start = time.perf_counter()
        for path, sha256 in files.items():
            load(path, sha256, decompress)
        times.append(time.perf_counter() - start)
    return min(times)  # other work of the machine only adds


def measure(wheel: Path, arch: str, units: int, repeats: int) -> Iterator[dict]:
    """One row a form."""
    code = packs(wheel)
    mine = sorted((n for n in code if n.startswith(f"apex/packs/{arch}/")), key=lambda n: len(code[n]))
    middle = max(len(mine) // 2 - units // 2, 0)
    for form, (compress, decompress) in FORMS.items():
        compressed = {name: compress(data) for name, data in code.items()}
        with tempfile.TemporaryDirectory(dir=wheel.parent) as folder:  # a disk, not memory
            files = {}
            for name in mine:
                path = Path(folder) / Path(name).name
                path.write_bytes(compressed[name])
                files[path] = hashlib.sha256(compressed[name]).hexdigest()
            os.sync()  # only pages that are written can be dropped
            few = dict(list(files.items())[middle : middle + units])
            yield {
                "form": form,
                "wheel": archived(wheel, compressed),
                "installed": sum(map(len, compressed.values())),
                **{
                    f"{what} {state}": seconds(chosen, decompress, state == "cold", repeats)
                    for what, chosen in (("few", few), ("all", files))
                    for state in ("cold", "warm")
                },
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--units", type=int, default=5, help="of middle size, as a training loads")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    rows = []
    few = f"{asked.units} units"
    print(f"| packs are | wheel, MB | installed packs, MB | {few} cold, ms | warm | a pack cold, ms | warm |")
    print("|---|---|---|---|---|---|---|")
    for row in measure(asked.wheel.resolve(), asked.arch, asked.units, asked.repeats):
        rows.append(row)
        times = [row[f"{what} {state}"] for what in ("few", "all") for state in ("cold", "warm")]
        sizes = f"{row['wheel'] / 1e6:.1f} | {row['installed'] / 1e6:.1f}"
        print(
            f"| {row['form']} | {sizes} | " + " | ".join(f"{1e3 * t:.1f}" for t in times) + " |", flush=True
        )
        if asked.json:
            written = asked.json.with_name(f"{asked.json.name}.{os.getpid()}")
            written.write_text(
                json.dumps({"wheel": asked.wheel.name, "arch": asked.arch, "rows": rows}, indent=1)
            )
            written.replace(asked.json)


if __name__ == "__main__":
    main()
