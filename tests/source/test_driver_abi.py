"""The declared binary interface of the driver against NVIDIA's own headers.

Two small programs print the size of every type, the offset of every field and the value of every
constant in cuda_abi.h: one built with that file, one with cuda.h. The names come from the
file itself, so none is forgotten. A third lets the compiler compare each entry of
driver/include/driver_table.h with the prototype that cudaTypedefs.h has for its name and version.
"""

import os
import re
import shutil
import sysconfig
from pathlib import Path

import pytest
from helpers.child import program

import gpumem

INCLUDE = next(Path(gpumem.__file__).parent.rglob("cuda_abi.h")).parent
ABI = re.sub(r"/\*.*?\*/", "", (INCLUDE / "cuda_abi.h").read_text(), flags=re.DOTALL)
TABLE = (INCLUDE / "driver_table.h").read_text()

# One struct of ours stands for two of the driver's that differ in a field gpumem never sets.
PARAMS = "CUDA_EXTERNAL_SEMAPHORE_PARAMS"
STANDS_FOR = {
    PARAMS: ["CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS", "CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS"]
}
NOT_SET = {
    ("CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS", "params.keyedMutex"),
    ("CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS", "params.reserved"),
}
# The driver has an unnamed union where these are used; its members are checked there.
OUR_TYPES = {"GMexternalHandle"}
OTHER_NAMES = {
    ("CUDA_EXTERNAL_MEMORY_HANDLE_DESC", "handle.nvSciObject"): "handle.nvSciBufObject",
    ("CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC", "handle.nvSciObject"): "handle.nvSciSyncObj",
}


# ---- the headers that are here -------------------------------------------------------------------


def header_folders() -> list[Path]:
    """Find the folders with NVIDIA's cuda.h: toolkits, and the wheels that carry it."""
    places = [Path(os.environ[name]) / "include" for name in ("CUDA_HOME", "CUDA_PATH")
              if name in os.environ]  # fmt: skip
    places += sorted(Path("/usr/local").glob("cuda*/include"))
    for library in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        places += sorted(Path(library).glob("nvidia/*/include"))
    return sorted({place.resolve() for place in places if (place / "cuda.h").is_file()})


@pytest.fixture(params=header_folders() or [None], ids=lambda place: "cuda.h" if place else "none")
def headers(request):
    if request.param is None:
        pytest.skip("no cuda.h here: neither a toolkit nor a wheel that carries it")
    if shutil.which("gcc") is None:
        pytest.skip("no C compiler: gcc not found")
    return request.param


def run_program(folder: Path, name: str, source: str, *include: Path) -> list[str]:
    """Compile and run one C program; returns the lines that it prints."""
    (folder / f"{name}.c").write_text(source)
    flags = [f"-I{path}" for path in include]
    program("gcc", "-std=gnu11", *flags, "-o", name, f"{name}.c", cwd=folder)
    return program(folder / name).stdout.splitlines()


# ---- the names in cuda_abi.h ---------------------------------------------------------------------


def body_at(text: str, brace: int) -> tuple[str, int]:
    """Return what stands between a brace and its partner, and where the partner is."""
    depth = 0
    for at in range(brace, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[brace + 1 : at], at
    raise AssertionError("a brace is never closed")


def compounds(kind: str):
    """Yield (name, body) of each ``typedef struct|union ... {...} Name;``."""
    for match in re.finditer(rf"typedef {kind} \w+ {{", ABI):
        body, end = body_at(ABI, match.end() - 1)
        yield re.match(r"}\s*(\w+);", ABI[end:]).group(1), body


def fields(body: str, prefix: str = ""):
    """Yield the path of each field, those of nested structs and of our unions included."""
    at = 0
    while at < len(body):
        nested = re.compile(r"\s*(?:struct|union) {").match(body, at)
        if nested:
            inner, end = body_at(body, nested.end() - 1)
            name = re.compile(r"}\s*(\w+);").match(body, end)
            yield prefix + name.group(1)
            yield from fields(inner, f"{prefix}{name.group(1)}.")
            at = name.end()
            continue
        plain = re.compile(r"\s*([\w\s*]+?)(\w+)(?:\[\w+\])?;").match(body, at)
        if plain is None:
            assert not body[at:].strip(), body[at:]
            return
        yield prefix + plain.group(2)
        if plain.group(1).strip() in UNIONS:
            yield from fields(UNIONS[plain.group(1).strip()], f"{prefix}{plain.group(2)}.")
        at = plain.end()


UNIONS = dict(compounds("union"))
STRUCTS = {name: list(fields(body)) for name, body in compounds("struct")}
ENUMS = [name for name, _ in compounds("enum")]
ENUMERATORS = [
    name
    for match in re.finditer(r"enum(?: \w+)? {", ABI)
    for name in re.findall(r"(\w+)\s*=", body_at(ABI, match.end() - 1)[0])
]
ENUMERATORS += [f"CUDA_{name}" for name in re.findall(r"\bE\((\w+), \d+", ABI)]
ENUMERATORS += [f"CU_DEVICE_ATTRIBUTE_{name}" for name in re.findall(r"\bA\((\w+), \d+", ABI)]
SCALARS = re.findall(r"^typedef [^{}()]*?(\w+);", ABI, re.MULTILINE)
MACROS = re.findall(r"#define (CU_\w+)", ABI)


def print_abi(include: str, of_driver: bool) -> str:
    """Write the program that prints the interface as one header has it."""
    lines = [f'print("value {name}", (long long){name});' for name in ENUMERATORS]
    lines += [f'print("value {name}", (long long)(uintptr_t){name});' for name in MACROS]
    lines += [f'print("size {name}", sizeof({name}));' for name in [*SCALARS, *ENUMS]]
    for ours, paths in STRUCTS.items():
        for theirs in STANDS_FOR.get(ours, [ours]):
            name = theirs if of_driver else ours
            lines.append(f'print("size {theirs}", sizeof({name}));')
            for path in paths:
                if (theirs, path) in NOT_SET:
                    continue
                field = OTHER_NAMES.get((theirs, path), path) if of_driver else path
                lines.append(f'print("at {theirs}.{path}", offsetof({name}, {field}));')
                lines.append(f'print("bytes {theirs}.{path}", sizeof((({name} *)0)->{field}));')
    calls = "\n    ".join(lines)
    return f"""
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include {include}
static void print(const char *what, long long value) {{ printf("%s = %lld\\n", what, value); }}
int main(void) {{
    {calls}
    return 0;
}}
"""


def test_abi_header_is_parsed_completely():
    assert len(STRUCTS) == len(re.findall(r"typedef struct \w+ {", ABI))
    assert len(ENUMERATORS) == len(re.findall(r"\bCU(?:DA)?_\w+ = |^ +[EA]\(", ABI, re.MULTILINE))
    assert {"CUdevice", "CUdeviceptr", "CUstream"} <= set(SCALARS)
    assert {"CUresult", "CUmemLocationType"} <= set(ENUMS)
    assert "allocFlags.usage" in STRUCTS["CUmemAllocationProp"]
    assert "handle.win32.name" in STRUCTS["CUDA_EXTERNAL_MEMORY_HANDLE_DESC"]
    assert "params.fence.value" in STRUCTS[PARAMS]
    assert set(UNIONS) == OUR_TYPES


def test_sizes_offsets_and_values_equal_the_drivers_header(headers, tmp_path):
    ours = run_program(tmp_path, "ours", print_abi('"cuda_abi.h"', of_driver=False), INCLUDE)
    theirs = run_program(tmp_path, "theirs", print_abi("<cuda.h>", of_driver=True), headers)
    assert len(ours) > 350
    different = [f"{a}, but in cuda.h {b}" for a, b in zip(ours, theirs, strict=True) if a != b]
    assert not different, "\n".join(different)


# ---- the functions -------------------------------------------------------------------------------

ENTRIES = re.findall(r"^\s+F\((\w+), (\d+),(?! \d)", TABLE, re.MULTILINE)
OLDER = re.findall(r"^\s+F\((\w+), (\d+), (\d+),", TABLE, re.MULTILINE)


def print_prototypes(stands_for: str) -> str:
    """Write the program that prints whether each entry has its prototype's type."""
    return f"""
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <cuda.h>
#include <cudaTypedefs.h>
#define GPUMEM_CUDA_ABI_H
#define {PARAMS} {stands_for}
#include "driver_table.h"
#define CHECK(name, version, parameters)                                                      \\
    printf("cu%s %d %d\\n", #name, version,                                                    \\
           __builtin_types_compatible_p(CUresult (*) parameters, PFN_cu##name##_v##version));
#define CHECK_OLDER(name, version, until, parameters) CHECK(name, version, parameters)
int main(void) {{
    GM_DRIVER_FUNCTIONS(CHECK)
    GM_OLDER_FUNCTIONS(CHECK_OLDER)
    return 0;
}}
"""


def test_driver_table_is_parsed_completely():
    from gpumem._testing.driver import driver_entry_names

    assert [(f"cu{name}", int(version)) for name, version in ENTRIES] == driver_entry_names()


def test_older_entry_is_a_prefix_of_the_later_signature():
    later = dict(ENTRIES)
    assert [(name, later[name]) for name, _, until in OLDER] == [
        (n, until) for n, _, until in OLDER
    ]


def test_every_entry_has_the_type_of_its_prototype(headers, tmp_path):
    if not (headers / "cudaTypedefs.h").is_file():
        pytest.skip("this cuda.h comes without cudaTypedefs.h")
    known = set(re.findall(r"PFN_(cu\w+)_v(\d+)\)", (headers / "cudaTypedefs.h").read_text()))
    both = [*ENTRIES, *((name, version) for name, version, _ in OLDER)]
    missing = [entry for entry in both if (f"cu{entry[0]}", entry[1]) not in known]
    assert not missing, f"cudaTypedefs.h has no such function and version: {missing}"
    wrong = set()
    for theirs, other in zip(STANDS_FOR[PARAMS], ("cuWait", "cuSignal"), strict=True):
        lines = run_program(tmp_path, theirs, print_prototypes(theirs), headers, INCLUDE)
        assert len(lines) == len(both)
        wrong |= {line for line in lines if line.endswith(" 0") and not line.startswith(other)}
    assert not wrong, f"other than in cudaTypedefs.h: {sorted(wrong)}"
