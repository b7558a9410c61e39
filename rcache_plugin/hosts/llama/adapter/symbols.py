"""Reads shared objects as the dynamic linker does, and checks that libllama will really use the adapter.

`check_interposable` and `check_symbols` look at the files; `check_loaded` loads both, in a process of its own.
"""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ....errors import counted
from .errors import LlamaBuildError, NotInterposable, SymbolsDiffer
from .found import DISTRIBUTION, ENV_LIB_PATH, SUPPORTED
from .process import last_lines, python

_SMOKE = Path(__file__).with_name("smoke.py")

_MEMORY = "22llama_memory_recurrent"
_CONTEXT = "30llama_memory_recurrent_context"
_MEMBER = re.compile(rf"_ZNK?(?:{_MEMORY}|{_CONTEXT})")
_TABLE = re.compile(rf"_ZT[VIS](?:{_MEMORY}|{_CONTEXT})")
# Functions beside the class that the adapter takes over, to clean up after restores that fail.
_TAKEN_OVER = (
    "_ZN13llama_context15state_read_dataER15llama_io_read_i",
    "_ZN13llama_context19state_seq_read_dataER15llama_io_read_iij",
    "_ZN13llama_context15state_load_fileEPKcPimPm",
    "_ZN13llama_context19state_seq_load_fileEiPKcPimPm",
)
# Members that other files of llama.cpp call in every version: through the linker, or the adapter is never reached.
_CALLED = (
    *(f"_ZN{_MEMORY}C1E", f"_ZNK{_CONTEXT}6s_copyE", f"_ZNK{_CONTEXT}8get_headE", f"_ZNK{_CONTEXT}8get_n_rsE"),
    *(f"_ZNK{_CONTEXT}8get_rs_zE", f"_ZNK{_CONTEXT}7get_r_lE", f"_ZNK{_CONTEXT}7get_s_lE"),
)

_SHT_RELA, _SHT_DYNAMIC, _SHT_DYNSYM = 4, 6, 11
_DT_SYMBOLIC, _DT_JMPREL, _DT_FLAGS = 16, 23, 30
_DF_SYMBOLIC = 2
_STB_GLOBAL, _STB_WEAK, _STT_FUNC, _STV_DEFAULT = 1, 2, 2, 0


@dataclass(frozen=True)
class _Symbol:
    binding: int
    kind: int
    visibility: int
    value: int


@dataclass(frozen=True)
class SharedObject:
    """What the dynamic linker sees of a 64-bit ELF file. Names are mangled."""

    path: Path
    machine: int
    defined: Mapping[str, _Symbol] = field(repr=False)
    undefined: frozenset[str] = field(repr=False)
    """Names that must come from elsewhere; those that may stay absent (weak ones) are left out."""
    bound_at_load: Mapping[str, tuple[tuple[int, int], ...]] = field(repr=False)
    """Name -> (address in the file, addend) of each word that the linker sets to the name's address when it loads."""
    bound_at_call: frozenset[str] = field(repr=False)
    """Names of functions that are called through the procedure linkage table."""
    symbolic: bool = False
    """Whether it was linked with ``-Bsymbolic``."""

    @classmethod
    def read(cls, path: Path) -> SharedObject:
        """Raises `LlamaBuildError` when `path` is no such file."""
        try:
            data = path.read_bytes()
        except OSError as e:
            raise LlamaBuildError(f"cannot read {path}: {e.strerror}") from e
        if data[:5] != b"\x7fELF\x02":
            raise LlamaBuildError(f"{path} is no 64-bit ELF library")
        try:
            return _parse_elf(path, data)
        except (struct.error, IndexError, ValueError) as e:
            raise LlamaBuildError(f"{path} is damaged: {e}; reinstall the package that it belongs to") from e

    @property
    def members(self) -> frozenset[str]:
        """The class's members that are not inline, and its tables (vtable, type information)."""
        return frozenset(
            name
            for name, symbol in self.defined.items()
            if (symbol.binding == _STB_GLOBAL and _MEMBER.match(name)) or _TABLE.fullmatch(name)
        )


def _parse_elf(path: Path, data: bytes) -> SharedObject:
    order = "<" if data[5] == 1 else ">"
    (machine,) = struct.unpack_from(f"{order}H", data, 18)
    (start,) = struct.unpack_from(f"{order}Q", data, 40)
    size, count = struct.unpack_from(f"{order}HH", data, 58)
    # Of each section: name, type, flags, address, offset, size, link, info, alignment, entry size.
    sections = [struct.unpack_from(f"{order}IIQQQQIIQQ", data, start + i * size) for i in range(count)]

    def entries(section: tuple[int, ...], layout: str) -> Iterator[tuple[int, ...]]:
        return struct.iter_unpack(order + layout, data[section[4] : section[4] + section[5]])

    (table,) = [i for i, section in enumerate(sections) if section[1] == _SHT_DYNSYM]
    text = sections[sections[table][6]]
    strings = data[text[4] : text[4] + text[5]]
    symbols: list[tuple[str, int, _Symbol]] = []  # name, section, the rest
    for offset, info, other, section, value, _ in entries(sections[table], "IBBHQQ"):
        name = strings[offset : strings.index(b"\0", offset)].decode()
        symbols.append((name, section, _Symbol(info >> 4, info & 15, other & 3, value)))

    dynamic = [pair for section in sections if section[1] == _SHT_DYNAMIC for pair in entries(section, "qQ")]
    plt = next((value for tag, value in dynamic if tag == _DT_JMPREL), None)
    at_load: dict[str, list[tuple[int, int]]] = {}
    at_call: set[str] = set()
    for relocations in sections:
        if relocations[1] == _SHT_RELA and relocations[6] == table:
            for offset, info, addend in entries(relocations, "QQq"):
                name = symbols[info >> 32][0]
                if name and relocations[3] == plt:
                    at_call.add(name)
                elif name:
                    at_load.setdefault(name, []).append((offset, addend))
    return SharedObject(
        path=path,
        machine=machine,
        defined={name: symbol for name, section, symbol in symbols if section and name},
        undefined=frozenset(n for n, section, s in symbols if n and not section and s.binding == _STB_GLOBAL),
        bound_at_load={name: tuple(places) for name, places in at_load.items()},
        bound_at_call=frozenset(at_call),
        symbolic=any(t == _DT_SYMBOLIC or (t == _DT_FLAGS and v & _DF_SYMBOLIC) for t, v in dynamic),
    )


def check_interposable(libllama: SharedObject) -> None:
    """Whether `libllama` calls its class through the dynamic linker. Raises `NotInterposable` with the reason."""
    remedy = (
        f"; install a build of {DISTRIBUTION} that does: pip install --force-reinstall --no-binary {DISTRIBUTION} "
        f"'{DISTRIBUTION}=={SUPPORTED[-1]}', without LTO, -Bsymbolic or -fvisibility=hidden in CMAKE_ARGS, CFLAGS, "
        "CXXFLAGS or LDFLAGS"
    )

    def refuse(reason: str) -> NotInterposable:
        return NotInterposable(f"{libllama.path} would never call the adapter: {reason}{remedy}")

    members = libllama.members
    absent = [start for start in _CALLED if not any(name.startswith(start) for name in members)]
    if absent:
        raise refuse(
            f"it does not export the class llama_memory_recurrent ({counted(len(members), 'name')} of it found), as "
            "after link-time optimisation or with hidden visibility"
        )
    if libllama.symbolic:
        raise refuse("it was linked with -Bsymbolic")
    protected = sorted(name for name in members if libllama.defined[name].visibility != _STV_DEFAULT)
    if protected:
        raise refuse(f"its class has protected visibility ({protected[0]})")
    bound = libllama.bound_at_call | libllama.bound_at_load.keys()
    direct = [start for start in _CALLED if not any(name.startswith(start) for name in bound)]
    if direct:
        raise refuse(
            f"{len(direct)} of the {len(_CALLED)} functions that matter are called directly ({direct[0]}...), as after "
            "linking with -Bsymbolic-functions"
        )


def check_symbols(adapter: SharedObject, libllama: SharedObject) -> None:
    """Whether the adapter defines the class as `libllama` does, and nothing else of it. Raises `SymbolsDiffer`.

    Inline members are not compared: which of them have a body outside of their callers is the compiler's choice.
    """
    if adapter.machine != libllama.machine:
        raise SymbolsDiffer(f"{adapter.path} was compiled for another machine than {libllama.path}; check CXX")
    missing = libllama.members - adapter.members
    extra = adapter.members - libllama.members
    # Any other function that both define would take libllama's place as well.
    extra |= {
        name
        for name, symbol in adapter.defined.items()
        if symbol.binding == _STB_GLOBAL and not _MEMBER.match(name) and not _TABLE.fullmatch(name)
        if name in libllama.defined and name not in _TAKEN_OVER
    }
    hidden = {n for n in adapter.members & libllama.members if adapter.defined[n].visibility != _STV_DEFAULT}
    if missing or extra or hidden:
        lines = [f"only libllama defines {name}" for name in sorted(missing)]
        lines += [f"the adapter should not define {name}" for name in sorted(extra)]
        lines += [f"the adapter defines with the wrong visibility {name}" for name in sorted(hidden)]
        raise SymbolsDiffer(
            f"the adapter's class and the one in {libllama.path} differ ({counted(len(lines), 'name')}): this libllama "
            f"was not built from the same source. Reinstall {DISTRIBUTION}, and unset {ENV_LIB_PATH} if it is set\n"
            + "\n".join(lines),
            missing | hidden,
            extra,
        )


def check_loaded(adapter: SharedObject, libllama: SharedObject, ggml_version: str | None = None) -> None:
    """Loads both in a child process and checks that libllama's class is the adapter's there.

    `ggml_version` is the version that the ggml beside libllama must have, if known. Raises `NotInterposable` when it
    stays libllama's own, `SymbolsDiffer` when the adapter needs what libllama does not have, `LlamaBuildError` when one
    of the two cannot be loaded.
    """
    anchor = next(
        (name, symbol.value)
        for name, symbol in sorted(libllama.defined.items())
        if symbol.kind == _STT_FUNC and symbol.binding == _STB_GLOBAL and name not in libllama.members
    )
    members = sorted(adapter.members)
    job = {
        "adapter": str(adapter.path),
        "libllama": str(libllama.path),
        "anchor": anchor,
        "members": members,
        "words": {name: libllama.bound_at_load[name] for name in members if name in libllama.bound_at_load},
        "undefined": sorted(adapter.undefined),
    }
    command = [python(), "-I", "-S", str(_SMOKE)]
    try:
        done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired as e:
        raise LlamaBuildError(f"loading {libllama.path} in a child process took more than {e.timeout:.0f} s") from e
    if done.returncode:
        hint = "; unset LD_BIND_NOW, the adapter is bound lazily" if os.environ.get("LD_BIND_NOW") else ""
        raise LlamaBuildError(
            f"the adapter and {libllama.path} cannot be loaded together (exit status {done.returncode}){hint}\n"
            f"{last_lines(done.stderr)}"
        )
    found = json.loads(done.stdout.splitlines()[-1])
    wrong = found["elsewhere"] or found["unbound"]
    if wrong:
        raise NotInterposable(
            f"with the adapter loaded first, {libllama.path} still uses its own {wrong[0]} "
            f"({counted(len(wrong), 'name')} in all); is another copy of libllama preloaded "
            f"(LD_PRELOAD={os.environ.get('LD_PRELOAD', '')})?"
        )
    if found["unresolved"]:
        names = found["unresolved"]
        raise SymbolsDiffer(
            f"the adapter needs what {libllama.path} does not export: {', '.join(names)}; reinstall {DISTRIBUTION}",
            extra=names,
        )
    if ggml_version and found["ggml"] and found["ggml"].partition("-")[0] != ggml_version:
        raise SymbolsDiffer(
            f"{libllama.path} runs with ggml {found['ggml']}, but the headers are those of ggml {ggml_version}: it is "
            f"not the build of this {DISTRIBUTION}; reinstall it, and unset {ENV_LIB_PATH} if it is set"
        )
