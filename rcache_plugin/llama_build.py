"""Compiles the llama.cpp adapter for the llama-cpp-python that is installed, and keeps it in the user's cache folder.

The adapter (``adapter/llama_adapter.cpp``) defines a class of libllama anew, so it must be compiled against the
internal headers of that very version. The installed package has not got them; its source distribution has. `build`
finds the install, fetches the headers once, compiles, checks that libllama will really use the result, and returns its
path; later calls return the same path at once. Neither ``llama_cpp`` nor ``ggml`` is imported, and nothing is loaded
into this process.

The cache folder holds, for each version of llama-cpp-python, ``headers-VERSION/`` and
``llama-VERSION/KEY/librcache_llama.so``. The key stands for our C interface, the adapter's source, the compiler and its
flags; Python's own version plays no part. Beside each object, ``checked-*`` files tell for which libllama it was
checked.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from .errors import RcacheError

ENV_CACHE_DIR = "RCACHE_CACHE_DIR"
"""Environment variable: folder for what is built, instead of the user's cache folder."""
ENV_SDIST = "RCACHE_LLAMA_SDIST"
"""Environment variable: source distribution of llama-cpp-python, packed or unpacked, to take the headers from."""
ENV_ANY_VERSION = "RCACHE_LLAMA_ANY_VERSION"
"""Environment variable: ``1`` tries versions of llama-cpp-python that this package does not know."""
ENV_LIB_PATH = "LLAMA_CPP_LIB_PATH"
"""Environment variable of llama-cpp-python: folder of its libraries."""

SUPPORTED = tuple(f"0.3.{patch}" for patch in range(24, 37))
"""Versions of llama-cpp-python whose class the adapter knows."""
OBJECT_NAME = "librcache_llama.so"
_ABOUT = "build.json"

_DISTRIBUTION = "llama-cpp-python"
_PACKAGE = Path(__file__).resolve().parent
ADAPTER = _PACKAGE / "adapter" / "llama_adapter.cpp"
INCLUDE = _PACKAGE / "include"

# Never -Bsymbolic or -z now: libllama is loaded after this object, and finds its functions through it.
_COMPILE_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=default", "-Wl,-z,lazy", "-Wl,-z,nodelete")

Progress = Callable[[str], object]
"""Takes one line of text that says what is being done."""


class LlamaBuildError(RcacheError):
    """The adapter for llama-cpp-python could not be had; the message says why, and what can be done."""


class PlatformNotSupported(LlamaBuildError):
    """This operating system's linker does not let one library replace another's class as the adapter needs it."""


class LlamaNotInstalled(LlamaBuildError):
    """No llama-cpp-python, or one without its libllama."""


class UnknownLlamaVersion(LlamaBuildError):
    """A version of llama-cpp-python that the adapter was not written for."""


class CompilerNotFound(LlamaBuildError):
    """No C++ compiler that runs."""


class HeadersNotFound(LlamaBuildError):
    """The source distribution with llama.cpp's internal headers could not be had, or it is not the right one."""


class CompileFailed(LlamaBuildError):
    """The compiler rejected the adapter; the message has its first lines, `output` all of them."""

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output


class SymbolsDiffer(LlamaBuildError):
    """Adapter and libllama do not define the same class.

    `missing` are the mangled names that only libllama has, `extra` those that only the adapter has.
    """

    def __init__(self, message: str, missing: Iterable[str] = (), extra: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(sorted(missing))
        self.extra = tuple(sorted(extra))


class NotInterposable(LlamaBuildError):
    """This build of libllama calls its own class directly, so it would never call the adapter."""


class CacheFolderError(LlamaBuildError):
    """The folder for what is built cannot be used."""


# ---------------------------------------------------------------------------------------------------- the installation


@dataclass(frozen=True)
class LlamaInstall:
    """An installed llama-cpp-python."""

    version: str
    """As its metadata say: ``0.3.36``; a wheel may add a local part (``0.3.36+cu124``)."""
    folder: Path
    """The package folder, ``.../site-packages/llama_cpp``."""
    libllama: Path
    """The library that ``import llama_cpp`` will load."""
    overridden: bool = False
    """Whether `LLAMA_CPP_LIB_PATH` names the library's folder: it need not be the build of this package."""

    @property
    def release(self) -> str:
        """The version without its local part: the one that has a source distribution."""
        return self.version.partition("+")[0]

    def identity(self) -> str:
        """Changes when another file takes the library's place. Raises `LlamaNotInstalled` when it is gone."""
        try:
            stat = self.libllama.stat()
        except OSError as e:
            raise LlamaNotInstalled(f"cannot read {self.libllama}: {e.strerror}; reinstall {_DISTRIBUTION}") from e
        return f"{self.libllama.resolve()} {stat.st_size} {stat.st_mtime_ns}"


def find_install() -> LlamaInstall:
    """The llama-cpp-python that ``import llama_cpp`` would import, found without importing it.

    Raises `PlatformNotSupported`, `LlamaNotInstalled`.
    """
    _check_platform()
    folder = _package_folder()
    if folder is None:
        raise LlamaNotInstalled(
            f"{_DISTRIBUTION} is not installed for {sys.executable}; install it: "
            f"pip install '{_DISTRIBUTION}=={SUPPORTED[-1]}' (it takes some minutes to build)"
        )
    # Not resolved, and relative to the current folder if it is relative: that is what llama_cpp does with it.
    override = os.environ.get(ENV_LIB_PATH)
    libllama = (folder / "lib" if override is None else Path(override).absolute()) / "libllama.so"
    if not libllama.is_file():
        place = f"{ENV_LIB_PATH}={override} has" if override is not None else f"{folder} has"
        raise LlamaNotInstalled(
            f"{place} no {'libllama.so' if override is not None else 'lib/libllama.so'}; "
            + (f"unset {ENV_LIB_PATH} or correct it" if override is not None else f"reinstall {_DISTRIBUTION}")
        )
    return LlamaInstall(_installed_version(folder), folder, libllama, override is not None)


def _check_platform() -> None:
    if sys.platform != "linux":
        raise PlatformNotSupported(
            f"the llama.cpp adapter is not supported on {sys.platform} yet: it replaces a class of libllama through "
            "the dynamic linker, and only Linux's does that. The reference host (rcache_plugin.hosts.mamba) runs here."
        )


def _package_folder() -> Path | None:
    loaded = sys.modules.get("llama_cpp")
    if loaded is not None and loaded.__file__:
        return Path(loaded.__file__).absolute().parent
    spec = importlib.util.find_spec("llama_cpp")
    return Path(spec.origin).absolute().parent if spec is not None and spec.origin else None


def _installed_version(folder: Path) -> str:
    try:
        return importlib.metadata.version(_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        # A package folder that was put on the path by hand has no metadata.
        init = (folder / "__init__.py").read_text(encoding="utf-8", errors="replace")
        found = re.search(r"""^__version__\s*=\s*["']([^"']+)["']""", init, re.MULTILINE)
        if found is None:
            raise LlamaNotInstalled(f"{folder} does not tell its version; reinstall {_DISTRIBUTION}") from None
        return found[1]


def check_version(version: str) -> None:
    """Refuses versions that the adapter was not written for. Raises `UnknownLlamaVersion`."""
    if version.partition("+")[0] in SUPPORTED or os.environ.get(ENV_ANY_VERSION, "0") not in ("", "0"):
        return
    numbers = _numbers(version)
    newer = numbers > _numbers(SUPPORTED[-1])
    raise UnknownLlamaVersion(
        f"{_DISTRIBUTION} {version} is installed, and this version of rcache knows {SUPPORTED[0]} to {SUPPORTED[-1]}; "
        + ("update rcache-plugin, or install" if newer else "install")
        + f" one that it knows: pip install '{_DISTRIBUTION}=={SUPPORTED[-1]}'. "
        f"{ENV_ANY_VERSION}=1 tries this one all the same: the checks of the build apply, but nobody has tested it."
    )


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


# -------------------------------------------------------------------------------------------------------- the compiler


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: the words of `CXX`, or the first of c++, g++ and clang++ on the path."""

    command: tuple[str, ...]
    """Words to start it with; the first is a full path."""
    version: str
    machine: str
    """What it compiles for: ``x86_64-linux-gnu``."""

    @classmethod
    def find(cls) -> Compiler:
        """Raises `CompilerNotFound`."""
        own = shlex.split(os.environ.get("CXX", ""))
        candidates = [own] if own else [["c++"], ["g++"], ["clang++"]]
        for words in candidates:
            path = shutil.which(words[0])
            if path is not None:
                command = (path, *words[1:])
                # clang has no -dumpfullversion, and an old gcc's -dumpversion is its first number only.
                version = _answer(command, "-dumpfullversion") or _answer(command, "-dumpversion")
                machine = _answer(command, "-dumpmachine")
                if version and machine:
                    return cls(command, version, machine)
        looked = f"CXX={shlex.join(own)}" if own else "looked for c++, g++ and clang++ on PATH"
        raise CompilerNotFound(
            f"no working C++ compiler ({looked}); install one (Debian and Ubuntu: apt install g++; Fedora: "
            "dnf install gcc-c++), or name one in CXX"
        )

    def __str__(self) -> str:
        return f"{shlex.join(self.command)} {self.version} ({self.machine})"


def _answer(command: Sequence[str], option: str) -> str:
    """One line that the compiler prints for `option`, or an empty text."""
    try:
        done = subprocess.run([*command, option], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


# --------------------------------------------------------------------------------------------------------- the headers

_HEADER_FOLDERS = ("src", "include", "ggml/include", "ggml/src")
_TOP = r"(?:\./)?[^/]+/"  # the one folder of a source distribution
_LLAMA = "vendor/llama.cpp/"
_WANTED = re.compile(
    rf"PKG-INFO|{re.escape(_LLAMA)}(?:LICENSE|ggml/CMakeLists\.txt|(?:{'|'.join(_HEADER_FOLDERS)})/[A-Za-z0-9_-]+\.h)"
)
_IN_TAR = re.compile(rf"{_TOP}({_WANTED.pattern})")
_LARGEST_FILE = 8 << 20  # bytes; the largest header has under 200 kB
_CLASS_HEADER = "src/llama-memory-recurrent.h"
_MANIFEST = "manifest.json"

# What the class has in some versions and not in others: macro without its prefix, file, text to look for.
_FEATURES = (
    ("HAS_PLE", _CLASS_HEADER, r"\bp_l;"),
    ("HAS_STATE_CLEAR", _CLASS_HEADER, r"\bstate_clear\b"),
    ("HAS_N_RS_SEQ", _CLASS_HEADER, r"\bn_rs_seq\b"),
    ("HAS_CTXS_BUFS", _CLASS_HEADER, r"\bctxs_bufs\b"),
    ("HAS_MEMORY_BREAKDOWN", _CLASS_HEADER, r"\bmemory_breakdown\b"),
    ("CTOR_FILTER_FIRST", _CLASS_HEADER, r"layer_filter_cb\s*&&\s*filter"),
)
# Functions beside the class that the adapter takes over, to clean up after restores that fail.
_TAKEN_OVER = (
    "_ZN13llama_context15state_read_dataER15llama_io_read_i",
    "_ZN13llama_context19state_seq_read_dataER15llama_io_read_iij",
    "_ZN13llama_context15state_load_fileEPKcPimPm",
    "_ZN13llama_context19state_seq_load_fileEiPKcPimPm",
)
_MUST_HAVE = ("HAS_N_RS_SEQ", "HAS_CTXS_BUFS", "HAS_MEMORY_BREAKDOWN")
_MUST_NOT_HAVE = ("CTOR_FILTER_FIRST",)


@dataclass(frozen=True)
class Headers:
    """llama.cpp's internal headers of one version of llama-cpp-python, unpacked."""

    version: str
    folder: Path
    """Holds ``src``, ``include``, ``ggml/include`` and ``ggml/src``."""

    @functools.cached_property
    def features(self) -> frozenset[str]:
        """Names of the macros (``RCACHE_LLAMA_HAS_PLE``) that are to be 1; the others stay undefined."""
        found = {n for n, name, text in _FEATURES if re.search(text, self._read(name))}
        return frozenset(f"RCACHE_LLAMA_{n}" for n in found)

    @property
    def flags(self) -> tuple[str, ...]:
        """Compiler flags: the macros and the include folders."""
        macros = [f"-D{name}=1" for name in sorted(self.features)]
        return (*macros, *(f"-isystem{self.folder / name}" for name in _HEADER_FOLDERS))

    @functools.cached_property
    def ggml_version(self) -> str | None:
        """The version of the ggml that belongs to these headers, as ``ggml_version()`` answers it; None if unknown."""
        text = self._read("ggml/CMakeLists.txt")
        parts = [re.search(rf"set\(GGML_VERSION_{part}\s+(\d+)\)", text) for part in ("MAJOR", "MINOR", "PATCH")]
        return ".".join(part[1] for part in parts if part) if all(parts) else None

    def check(self) -> None:
        """Whether the class is one that the adapter can be. Raises `UnknownLlamaVersion`."""
        wrong = [n for n in _MUST_HAVE if f"RCACHE_LLAMA_{n}" not in self.features]
        wrong += [n for n in _MUST_NOT_HAVE if f"RCACHE_LLAMA_{n}" in self.features]
        if wrong:
            raise UnknownLlamaVersion(
                f"the headers of {_DISTRIBUTION} {self.version} declare llama_memory_recurrent in a way that this "
                f"version of rcache does not know ({', '.join(wrong)}); install {_DISTRIBUTION} {SUPPORTED[0]} to "
                f"{SUPPORTED[-1]}"
            )

    def _read(self, name: str) -> str:
        path = self.folder / name
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def get_headers(version: str, *, progress: Progress | None = print) -> Headers:
    """The headers of `version` (without a local part) from the cache folder, else out of its source distribution.

    That is `RCACHE_LLAMA_SDIST` if set, else what pip downloads (50 to 80 MB, of which 1 MB is kept). Raises
    `HeadersNotFound`, `CacheFolderError`.
    """
    say = _say(progress)
    with _locked(version, say) as scratch:
        return _headers(version, scratch, say)


def _headers(version: str, scratch: Path, say: Progress) -> Headers:
    """As `get_headers`; the caller holds the lock of this version."""
    headers = Headers(version, cache_dir() / f"headers-{version}")
    own = os.environ.get(ENV_SDIST)
    whole = _is_whole(headers.folder)
    if whole and not own:
        return headers
    if own:
        say(f"taking llama.cpp's headers from {own}")
    sdist = Path(own).expanduser() if own else _download(version, scratch / "sdist", say)
    fresh = scratch / "headers"
    with _using_cache():
        _unpack(sdist, version, fresh)
        # Others may be compiling with the same headers: no change without need.
        if not (whole and (fresh / _MANIFEST).read_bytes() == (headers.folder / _MANIFEST).read_bytes()):
            shutil.rmtree(headers.folder, ignore_errors=True)
            fresh.rename(headers.folder)
    return headers


def _download(version: str, folder: Path, say: Progress) -> Path:
    """The source distribution of `version`, fetched by pip. Raises `HeadersNotFound`."""
    say(f"downloading the source of {_DISTRIBUTION} {version} (50 to 80 MB) for llama.cpp's internal headers")
    started = time.monotonic()
    # pip asks a source distribution for its metadata. In an environment of its own for the build (its default) that
    # works whatever is installed here, and costs a few seconds.
    command = [*_pip(folder.parent), "download", "--no-deps", "--no-binary", _DISTRIBUTION, "--dest", str(folder)]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar", "off", f"{_DISTRIBUTION}=={version}"]
    hint = (
        f"check the network and pip's settings, or fetch the file elsewhere (pip download --no-deps --no-binary "
        f"{_DISTRIBUTION} {_DISTRIBUTION}=={version}) and name it in {ENV_SDIST}"
    )
    done = _run(command)
    if done.returncode:
        raise HeadersNotFound(f"pip could not download {_DISTRIBUTION} {version}; {hint}\n{_last_lines(done.stdout)}")
    files = [path for path in folder.iterdir() if path.name.endswith((".tar.gz", ".zip"))]
    if len(files) != 1 or not tarfile.is_tarfile(files[0]):
        names = ", ".join(path.name for path in files) or "nothing"
        raise HeadersNotFound(f"pip downloaded {names} as the source of {_DISTRIBUTION} {version}; {hint}")
    say(f"downloaded in {time.monotonic() - started:.0f} s")
    return files[0]


def _pip(scratch: Path) -> list[str]:
    """Words that start pip: this Python's own, or that of a throw-away environment. Raises `HeadersNotFound`."""
    if importlib.util.find_spec("pip") is not None:
        return [_python(), "-m", "pip"]
    command = [_python(), "-m", "venv", str(scratch / "venv")]
    done = _run(command)
    if done.returncode:
        raise HeadersNotFound(
            f"llama.cpp's headers are fetched with pip, and {_python()} has none (nor could it make an environment "
            f"that has); install pip, or name a source distribution of {_DISTRIBUTION} in {ENV_SDIST}\n"
            f"{_last_lines(done.stdout)}"
        )
    return [str(scratch / "venv" / "bin" / "python"), "-m", "pip"]


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Runs `command` to its end, stdout and stderr in one text; messages in English, as they are searched."""
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | {"LC_ALL": "C.UTF-8"},
        encoding="utf-8",
        errors="replace",
    )


def _python() -> str:
    return sys.executable or shutil.which("python3") or "python3"


def _last_lines(text: str, count: int = 8) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-count:])


def _unpack(sdist: Path, version: str, target: Path) -> None:
    """Copies the headers out of `sdist` (a .tar.gz or a folder) into the new folder `target`. Raises `HeadersNotFound`.

    Only regular files whose whole name is expected are read, and each is written under a name that was composed here.
    """
    try:
        files = _from_folder(sdist) if sdist.is_dir() else _from_tar(sdist)
    except (OSError, tarfile.TarError, EOFError) as e:
        raise HeadersNotFound(f"cannot read {sdist}: {e}; name another in {ENV_SDIST}, or unset it") from e
    info = files.pop("PKG-INFO", b"").decode("utf-8", errors="replace").partition("\n\n")[0]
    found = re.search(r"^Version:\s*(\S+)", info, re.MULTILINE)
    name = re.search(r"^Name:\s*(\S+)", info, re.MULTILINE)
    if not found or not name or re.sub(r"[-_.]+", "-", name[1]).lower() != _DISTRIBUTION or _CLASS_HEADER not in files:
        raise HeadersNotFound(
            f"{sdist} is no source distribution of {_DISTRIBUTION} (no PKG-INFO of it, or no {_LLAMA}{_CLASS_HEADER}); "
            f"get it with: pip download --no-deps --no-binary {_DISTRIBUTION} {_DISTRIBUTION}=={version}"
        )
    if found[1] != version:
        raise HeadersNotFound(
            f"{sdist} is version {found[1]} of {_DISTRIBUTION}, but {version} is installed; name its own source in "
            f"{ENV_SDIST}, or unset it to have it downloaded"
        )
    for relative, data in files.items():
        path = target / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    digests = {relative: _digest(data) for relative, data in sorted(files.items())}
    (target / _MANIFEST).write_text(json.dumps({"version": version, "files": digests}, indent=1) + "\n")


def _from_tar(path: Path) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    with tarfile.open(path, "r:*") as tar:
        for member in tar:
            match = _IN_TAR.fullmatch(member.name)
            if match and member.isreg() and member.size <= _LARGEST_FILE:
                reader = tar.extractfile(member)
                if reader is not None:
                    files[match[1].removeprefix(_LLAMA)] = reader.read()
    return files


def _from_folder(folder: Path) -> dict[str, bytes]:
    names = [folder / "PKG-INFO", folder / _LLAMA / "LICENSE", folder / _LLAMA / "ggml/CMakeLists.txt"]
    names += [path for part in _HEADER_FOLDERS for path in sorted((folder / _LLAMA / part).glob("*.h"))]
    relative = {path: path.relative_to(folder).as_posix() for path in names if path.is_file()}
    return {n.removeprefix(_LLAMA): p.read_bytes() for p, n in relative.items() if _WANTED.fullmatch(n)}


def _is_whole(folder: Path) -> bool:
    """Whether the files of an unpacked folder are those that were written."""
    try:
        files: dict[str, str] = json.loads((folder / _MANIFEST).read_text())["files"]
        return all(_digest((folder / relative).read_bytes()) == digest for relative, digest in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # not there, or not what was written
        return False


def _digest(*parts: bytes) -> str:
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(b"%d:" % len(part))
        hasher.update(part)
    return hasher.hexdigest()


# ------------------------------------------------------------------------------------------------------ shared objects

_MEMORY = "22llama_memory_recurrent"
_CONTEXT = "30llama_memory_recurrent_context"
_MEMBER = re.compile(rf"_ZNK?(?:{_MEMORY}|{_CONTEXT})")
_TABLE = re.compile(rf"_ZT[VIS](?:{_MEMORY}|{_CONTEXT})")
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
        f"; install a build of {_DISTRIBUTION} that does: pip install --force-reinstall --no-binary {_DISTRIBUTION} "
        f"'{_DISTRIBUTION}=={SUPPORTED[-1]}', without LTO, -Bsymbolic or -fvisibility=hidden in CMAKE_ARGS, CFLAGS, "
        "CXXFLAGS or LDFLAGS"
    )

    def refuse(reason: str) -> NotInterposable:
        return NotInterposable(f"{libllama.path} would never call the adapter: {reason}{remedy}")

    members = libllama.members
    absent = [start for start in _CALLED if not any(name.startswith(start) for name in members)]
    if absent:
        raise refuse(
            f"it does not export the class llama_memory_recurrent ({len(members)} names of it found), as after "
            "link-time optimisation or with hidden visibility"
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
            f"the adapter's class and the one in {libllama.path} differ ({len(lines)} names): this libllama was not "
            f"built from the same source. Reinstall {_DISTRIBUTION}, and unset {ENV_LIB_PATH} if it is set\n"
            + "\n".join(lines),
            missing | hidden,
            extra,
        )


# Runs in a process of its own: loads both as a host does, and looks where libllama's references have gone. ctypes.CDLL
# adds RTLD_NOW to any mode, and the adapter has to be bound lazily (libllama is not there yet): hence dlopen itself.
_SMOKE = """
import ctypes, json, os, sys

class DlInfo(ctypes.Structure):
    _fields_ = [("fname", ctypes.c_char_p), ("fbase", ctypes.c_void_p)]
    _fields_ += [("sname", ctypes.c_char_p), ("saddr", ctypes.c_void_p)]

job = json.load(sys.stdin)
c = ctypes.CDLL(None)
c.dlopen.restype = c.dlsym.restype = ctypes.c_void_p
c.dlopen.argtypes = [ctypes.c_char_p, ctypes.c_int]
c.dlsym.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
c.dladdr.argtypes = [ctypes.c_void_p, ctypes.POINTER(DlInfo)]
c.dlerror.restype = ctypes.c_char_p

def load(path):
    handle = c.dlopen(os.fsencode(path), os.RTLD_LAZY | os.RTLD_GLOBAL)
    if not handle:
        sys.exit((c.dlerror() or b"no reason given").decode(errors="replace"))
    return handle

def place(name, handle=None):
    return c.dlsym(handle, name.encode())

def owner(address):
    info = DlInfo()
    return os.path.realpath(os.fsdecode(info.fname)) if c.dladdr(address, ctypes.byref(info)) and info.fname else ""

load(job["adapter"])
libllama = load(job["libllama"])
base = place(job["anchor"][0], libllama) - job["anchor"][1]
adapter = os.path.realpath(job["adapter"])
version = place("ggml_version")
print(json.dumps({
    "elsewhere": [name for name in job["members"] if owner(place(name)) != adapter],
    "unbound": [
        name for name, places in job["words"].items() for offset, addend in places
        if ctypes.c_void_p.from_address(base + offset).value != place(name) + addend
    ],
    "unresolved": [name for name in job["undefined"] if not place(name)],
    "ggml": ctypes.CFUNCTYPE(ctypes.c_char_p)(version)().decode() if version else None,
}))
"""


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
    command = [_python(), "-I", "-S", "-c", _SMOKE]
    try:
        done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired as e:
        raise LlamaBuildError(f"loading {libllama.path} in a child process took more than {e.timeout:.0f} s") from e
    if done.returncode:
        hint = "; unset LD_BIND_NOW, the adapter is bound lazily" if os.environ.get("LD_BIND_NOW") else ""
        raise LlamaBuildError(
            f"the adapter and {libllama.path} cannot be loaded together (exit status {done.returncode}){hint}\n"
            f"{_last_lines(done.stderr)}"
        )
    found = json.loads(done.stdout.splitlines()[-1])
    wrong = found["elsewhere"] or found["unbound"]
    if wrong:
        raise NotInterposable(
            f"with the adapter loaded first, {libllama.path} still uses its own {wrong[0]} ({len(wrong)} names in "
            f"all); is another copy of libllama preloaded (LD_PRELOAD={os.environ.get('LD_PRELOAD', '')})?"
        )
    if found["unresolved"]:
        names = found["unresolved"]
        raise SymbolsDiffer(
            f"the adapter needs what {libllama.path} does not export: {', '.join(names)}; reinstall {_DISTRIBUTION}",
            extra=names,
        )
    if ggml_version and found["ggml"] and found["ggml"].partition("-")[0] != ggml_version:
        raise SymbolsDiffer(
            f"{libllama.path} runs with ggml {found['ggml']}, but the headers are those of ggml {ggml_version}: it is "
            f"not the build of this {_DISTRIBUTION}; reinstall it, and unset {ENV_LIB_PATH} if it is set"
        )


# ----------------------------------------------------------------------------------------------------- cache and build


def cache_dir() -> Path:
    """The folder for what is built; it need not exist yet. Raises `CacheFolderError`."""
    own = os.environ.get(ENV_CACHE_DIR)
    if own:
        return Path(own).expanduser().absolute()
    try:
        import platformdirs
    except ModuleNotFoundError as e:
        raise CacheFolderError(f"platformdirs is missing: pip install platformdirs, or set {ENV_CACHE_DIR}") from e
    return Path(platformdirs.user_cache_dir("rcache")).absolute()


def abi_version() -> int:
    """`RCACHE_ABI_VERSION` of the header that the adapter is compiled with."""
    found = re.search(r"#define\s+RCACHE_ABI_VERSION\s+(\d+)", (INCLUDE / "rcache_plugin.h").read_text())
    if found is None:
        raise LlamaBuildError(f"{INCLUDE / 'rcache_plugin.h'} has no RCACHE_ABI_VERSION; reinstall rcache-plugin")
    return int(found[1])


def _source_key() -> str:
    """Stands for our side: C interface, adapter, headers and flags."""
    files = [*sorted(ADAPTER.parent.glob("*.h")), ADAPTER, *sorted(INCLUDE.glob("*.h"))]
    try:
        parts = [part for path in files for part in (path.name.encode(), path.read_bytes())]
    except OSError as e:
        raise LlamaBuildError(f"{e.filename} is missing from the package; reinstall rcache-plugin") from e
    return f"abi{abi_version()}-{_digest(*parts, ' '.join(_COMPILE_FLAGS).encode())[:12]}"


def _compiler_key(compiler: Compiler) -> str:
    return _digest(json.dumps([compiler.command, compiler.version, compiler.machine]).encode())[:12]


def object_path(install: LlamaInstall, compiler: Compiler) -> Path:
    """Where `build` keeps the adapter for this version, made by this compiler. Raises `CacheFolderError`."""
    return cache_dir() / f"llama-{install.version}" / f"{_source_key()}-{_compiler_key(compiler)}" / OBJECT_NAME


Smoke = Callable[[Path, LlamaInstall], None]
"""A further check of a new adapter; raises what `build` is to raise."""


def build(
    install: LlamaInstall | None = None,
    *,
    force: bool = False,
    progress: Progress | None = print,
    smoke: Smoke | None = None,
) -> Path:
    """The compiled adapter for `install` (default: `find_install`), from the cache folder if it is there.

    A new one is compiled, checked and only then put in place; an old one is checked again when libllama has changed.
    `force` compiles in any case. `progress` gets lines that say what takes its time; none when the adapter is there.
    `smoke` is called with the object (a new one: not yet in its final place) after the other checks, once for each
    libllama.

    The object must be loaded with ``RTLD_LAZY | RTLD_GLOBAL``, and before libllama.
    Processes may call this at the same time: one builds, the others wait. Raises `LlamaBuildError`.
    """
    _check_platform()
    install = install or find_install()
    check_version(install.version)
    say = _say(progress)
    if not force:
        ready = _ready(install, smoke, say)
        if ready is not None:
            return ready
    with _locked(install.release, say) as scratch:
        ready = None if force else _ready(install, smoke, say)  # another process may have been faster
        return ready or _build(install, smoke, scratch, say)


def _ready(install: LlamaInstall, smoke: Smoke | None, say: Progress) -> Path | None:
    """The adapter in the cache folder, checked for this libllama."""
    with _using_cache():
        try:
            path = object_path(install, Compiler.find())
        except CompilerNotFound:
            # Whatever compiler made it: built in one image of a container, it is used in another without compiler.
            folder = cache_dir() / f"llama-{install.version}"
            path = next(iter(sorted(folder.glob(f"{_source_key()}-*/{OBJECT_NAME}"))), folder / OBJECT_NAME)
        if not path.is_file():
            return None
        stamp = _stamp(path, install, smoke)
        if stamp.is_file():
            return path
        try:
            ggml_version = json.loads((path.parent / _ABOUT).read_text())["ggml"]
        except (FileNotFoundError, ValueError, KeyError, TypeError):  # somebody tidied up, or is building right now
            return None
    say(f"checking the llama.cpp adapter for {install.libllama}")
    _check(path, install, ggml_version, smoke)
    try:
        stamp.touch()
    except OSError as e:
        say(f"cannot keep in {stamp.parent} that this was checked ({e.strerror}): it will be, each time")
    return path


def _stamp(path: Path, install: LlamaInstall, smoke: Smoke | None) -> Path:
    name = f"{getattr(smoke, '__module__', '')}.{getattr(smoke, '__qualname__', '')}" if smoke else ""
    return path.with_name(f"checked-{_digest(install.identity().encode(), name.encode())[:16]}")


def _check(path: Path, install: LlamaInstall, ggml_version: str | None, smoke: Smoke | None) -> None:
    libllama = SharedObject.read(install.libllama)
    check_interposable(libllama)
    adapter = SharedObject.read(path)
    check_symbols(adapter, libllama)
    check_loaded(adapter, libllama, ggml_version)
    if smoke is not None:
        smoke(path, install)


def _build(install: LlamaInstall, smoke: Smoke | None, scratch: Path, say: Progress) -> Path:
    """Compiles, checks and publishes; the caller holds the lock."""
    started = time.monotonic()
    check_interposable(SharedObject.read(install.libllama))  # before the slow steps
    compiler = Compiler.find()
    target = object_path(install, compiler)
    headers = _headers(install.release, scratch, say)
    headers.check()
    say(f"compiling the llama.cpp adapter for {_DISTRIBUTION} {install.version} with {compiler}")
    fresh = scratch / OBJECT_NAME
    compile_object(compiler, headers, ADAPTER, fresh)
    say(f"checking it with {install.libllama}")
    _check(fresh, install, headers.ggml_version, smoke)
    about = {
        "llama_cpp_python": install.version,
        "compiler": str(compiler),
        "features": sorted(headers.features),
        "ggml": headers.ggml_version,
        "rcache_abi": abi_version(),
    }
    with _using_cache():
        target.parent.mkdir(parents=True, exist_ok=True)
        for old in target.parent.glob("checked-*"):
            old.unlink(missing_ok=True)
        (target.parent / _ABOUT).write_text(json.dumps(about, indent=1) + "\n")
        os.replace(fresh, target)
        _stamp(target, install, smoke).touch()
    say(f"the adapter is ready after {time.monotonic() - started:.0f} s: {target}")
    return target


def compile_object(compiler: Compiler, headers: Headers, source: Path, target: Path, flags: Sequence[str] = ()) -> None:
    """Compiles one C++ file against `headers` and our own into the shared object `target`. Raises `CompileFailed`."""
    command = [*compiler.command, *_COMPILE_FLAGS, *flags, f"-I{INCLUDE}", *headers.flags]
    done = _run([*command, str(source), "-o", str(target)])
    if done.returncode:
        lines = done.stdout.splitlines()
        wanted = [line for line in lines if re.search(r"\b(?:error|undefined)\b", line)] or lines
        raise CompileFailed(
            f"{compiler} could not compile {source.name} for {_DISTRIBUTION} {headers.version} (exit status "
            f"{done.returncode}); try another compiler (CXX), g++ 9 or later, and report it with this output:\n"
            + "\n".join(wanted[:10]),
            done.stdout,
        )


@contextmanager
def _locked(version: str, say: Progress) -> Iterator[Path]:
    """Holds the lock of one version; yields a folder for temporary files, in the cache folder's file system."""
    import fcntl  # not at the top: elsewhere than on Linux and macOS there is none, and this module shall say it better

    root = cache_dir()
    prefix = f".tmp-{version}-"
    with _using_cache():
        root.mkdir(parents=True, exist_ok=True)
        lock = open(root / f"llama-{version}.lock", "w")
    with lock:
        with _using_cache():
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("another process is building the llama.cpp adapter; waiting for it")
                fcntl.flock(lock, fcntl.LOCK_EX)
            for left in root.glob(f"{prefix}*"):  # by a process that was killed: nobody else holds the lock
                shutil.rmtree(left, ignore_errors=True)
            scratch = tempfile.TemporaryDirectory(prefix=prefix, dir=root, ignore_cleanup_errors=True)
        with scratch as folder:
            yield Path(folder)


@contextmanager
def _using_cache() -> Iterator[None]:
    """Turns an `OSError` on the cache folder into `CacheFolderError`."""
    try:
        yield
    except OSError as e:
        raise CacheFolderError(
            f"cannot use the folder {cache_dir()}: {e}; make room or correct its rights, or set {ENV_CACHE_DIR}"
        ) from e


def _say(progress: Progress | None) -> Progress:
    return progress if progress is not None else lambda _: None


def build_command(force: bool, verbose: bool) -> int:
    """``rcache build-llama``: builds with lines of progress, prints the path; returns the exit code (2: not built)."""
    started = time.monotonic()
    try:
        install = find_install()
        print(f"{_DISTRIBUTION} {install.version} in {install.folder}")
        if verbose:
            print(f"library: {install.libllama}\ncompiler: {Compiler.find()}\ncache folder: {cache_dir()}")
        path = build(install, force=force)
        if verbose:
            print((path.parent / _ABOUT).read_text().strip())
        print(f"{path} ({time.monotonic() - started:.1f} s)")
        return 0
    except CompileFailed as e:
        output = f"\n--- all of the compiler's output\n{e.output}" if verbose else ""
        print(f"rcache: error: {e}{output}", file=sys.stderr)
    except LlamaBuildError as e:
        print(f"rcache: error: {e}", file=sys.stderr)
    return 2
