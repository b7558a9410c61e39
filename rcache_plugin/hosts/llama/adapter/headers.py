"""Gets llama.cpp's internal headers of one version out of the source distribution of llama-cpp-python.

The installed package has not got them. About 1 MB of headers stays in the cache folder.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import shutil
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path

from .errors import HeadersNotFound, UnknownLlamaVersion
from .folders import Progress, cache_dir, digest, locked, say_with, using_cache
from .found import DISTRIBUTION, SUPPORTED
from .process import last_lines, python, run

ENV_SDIST = "RCACHE_LLAMA_SDIST"
"""Environment variable: source distribution of llama-cpp-python, packed or unpacked, to take the headers from."""

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
                f"the headers of {DISTRIBUTION} {self.version} declare llama_memory_recurrent in a way that this "
                f"version of rcache does not know ({', '.join(wrong)}); install {DISTRIBUTION} {SUPPORTED[0]} to "
                f"{SUPPORTED[-1]}"
            )

    def _read(self, name: str) -> str:
        path = self.folder / name
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def get_headers(version: str, *, progress: Progress | None = print) -> Headers:
    """The headers of `version` (without a local part) from the cache folder, else out of its source distribution.

    That is `RCACHE_LLAMA_SDIST` if set, else what pip downloads (50 to 80 MB, of which 1 MB stays). Raises
    `HeadersNotFound`, `CacheFolderError`.
    """
    say = say_with(progress)
    with locked(version, say) as scratch:
        return locked_headers(version, scratch, say)


def locked_headers(version: str, scratch: Path, say: Progress) -> Headers:
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
    with using_cache():
        _unpack(sdist, version, fresh)
        # Others may be compiling with the same headers: no change without need.
        if not (whole and (fresh / _MANIFEST).read_bytes() == (headers.folder / _MANIFEST).read_bytes()):
            shutil.rmtree(headers.folder, ignore_errors=True)
            fresh.rename(headers.folder)
    return headers


def _download(version: str, folder: Path, say: Progress) -> Path:
    """The source distribution of `version`, fetched by pip. Raises `HeadersNotFound`."""
    say(f"downloading the source of {DISTRIBUTION} {version} (50 to 80 MB) for llama.cpp's internal headers")
    started = time.monotonic()
    # pip asks a source distribution for its metadata. In an environment of its own for the build (its default) that
    # works whatever is installed here, and costs a few seconds.
    command = [*_pip(folder.parent), "download", "--no-deps", "--no-binary", DISTRIBUTION, "--dest", str(folder)]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar", "off", f"{DISTRIBUTION}=={version}"]
    hint = (
        f"check the network and pip's settings, or fetch the file elsewhere (pip download --no-deps --no-binary "
        f"{DISTRIBUTION} {DISTRIBUTION}=={version}) and name it in {ENV_SDIST}"
    )
    done = run(command)
    if done.returncode:
        raise HeadersNotFound(f"pip could not download {DISTRIBUTION} {version}; {hint}\n{last_lines(done.stdout)}")
    files = [path for path in folder.iterdir() if path.name.endswith((".tar.gz", ".zip"))]
    if len(files) != 1 or not tarfile.is_tarfile(files[0]):
        names = ", ".join(path.name for path in files) or "nothing"
        raise HeadersNotFound(f"pip downloaded {names} as the source of {DISTRIBUTION} {version}; {hint}")
    say(f"downloaded in {time.monotonic() - started:.0f} s")
    return files[0]


def _pip(scratch: Path) -> list[str]:
    """Words that start pip: this Python's own, or that of a throw-away environment. Raises `HeadersNotFound`."""
    if importlib.util.find_spec("pip") is not None:
        return [python(), "-m", "pip"]
    command = [python(), "-m", "venv", str(scratch / "venv")]
    done = run(command)
    if done.returncode:
        raise HeadersNotFound(
            f"llama.cpp's headers are fetched with pip, and {python()} has none (nor could it make an environment "
            f"that has); install pip, or name a source distribution of {DISTRIBUTION} in {ENV_SDIST}\n"
            f"{last_lines(done.stdout)}"
        )
    return [str(scratch / "venv" / "bin" / "python"), "-m", "pip"]


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
    if not found or not name or re.sub(r"[-_.]+", "-", name[1]).lower() != DISTRIBUTION or _CLASS_HEADER not in files:
        raise HeadersNotFound(
            f"{sdist} is no source distribution of {DISTRIBUTION} (no PKG-INFO of it, or no {_LLAMA}{_CLASS_HEADER}); "
            f"get it with: pip download --no-deps --no-binary {DISTRIBUTION} {DISTRIBUTION}=={version}"
        )
    if found[1] != version:
        raise HeadersNotFound(
            f"{sdist} is version {found[1]} of {DISTRIBUTION}, but {version} is installed; name its own source in "
            f"{ENV_SDIST}, or unset it to have it downloaded"
        )
    for relative, data in files.items():
        path = target / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    digests = {relative: digest(data) for relative, data in sorted(files.items())}
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
        return all(digest((folder / relative).read_bytes()) == known for relative, known in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # not there, or not what was written
        return False
