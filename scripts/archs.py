"""Compares our cache with llama.cpp's own class on a tiny model of every recurrent and hybrid architecture it knows.

llama.cpp's source distribution has a program that writes such models (tests/test-llama-archs.cpp). It is compiled here
against the headers of the installed version and linked to the installed libraries, which takes under a minute; the few
functions of llama.cpp's tools that it logs with are ours. RWKV, which it leaves out, comes from
tests/support/llama_models.py. The sizes of llama.cpp's models are fixed in that program: heads of 64 and more, but rows
of 128 and 384 too, which is all right for its F32 weights; odd heads are reported. The scripts are those of
tests/hosts/llama/test_llama_parity.py; the table goes into docs/parity.md.

    python scripts/archs.py [--work build/archs] [--table docs/parity.md] [--only REGEX]
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

import children  # noqa: E402
import granularity  # noqa: E402
import llama_child  # noqa: E402
import llama_models  # noqa: E402
import llama_scripts  # noqa: E402

from rcache_plugin.hosts.llama.adapter.found import find_install  # noqa: E402
from rcache_plugin.hosts.llama.adapter.headers import ENV_SDIST  # noqa: E402

SUPPORT = """
#include "common.h"
#include "log.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>

[[noreturn]] static void unused(const char * what) {
    std::fprintf(stderr, "%s is for running models, not for writing them\\n", what);
    std::exit(3);
}

static int threshold = LOG_LEVEL_INFO;

void common_init() {}
struct common_log * common_log_main() { return nullptr; }
void common_log_flush(struct common_log *) {}
void common_log_set_verbosity_thold(int level) { threshold = level; }
int common_log_get_verbosity_thold() { return threshold; }
int common_log_get_verbosity(enum ggml_log_level) { return LOG_LEVEL_DEBUG; }

void common_log_add(struct common_log *, enum ggml_log_level, const char * format, ...) {
    va_list values;
    va_start(values, format);
    std::vfprintf(stderr, format, values);
    va_end(values);
}

common_batch::common_batch(struct llama_context *) { unused("common_batch"); }
void common_batch::clear() { unused("common_batch::clear"); }
int32_t common_batch::add(llama_token, llama_pos, llama_seq_id, bool) { unused("common_batch::add"); }
llama_batch_ext * common_batch::get_sub_batch(int32_t, int32_t) { unused("common_batch::get_sub_batch"); }
"""

KINDS = """
    import json
    from pathlib import Path
    import llama_cpp
    kinds = {}
    for path in sorted(Path(FOLDER).glob("*.gguf")):
        settings = llama_cpp.llama_model_default_params()
        settings.vocab_only = True
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), settings)
        if model:
            text = b" " * 64
            llama_cpp.llama_model_meta_val_str(model, b"general.architecture", text, 64)
            kind = "recurrent" if llama_cpp.llama_model_is_recurrent(model) else ""
            kind = kind or ("hybrid" if llama_cpp.llama_model_is_hybrid(model) else "")
            kinds[path.name] = [text.split(b"\\0")[0].decode(), kind]
            llama_cpp.llama_model_free(model)
    print(json.dumps(kinds))
"""


def main() -> int:
    """Returns 0 when every model equals stock."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "archs", help="folder for sources and models")
    parser.add_argument("--table", type=Path, default=ROOT / "docs" / "parity.md", help="Markdown file to write")
    parser.add_argument("--only", default="", metavar="REGEX", help="models whose name it finds; no table is written")
    arguments = parser.parse_args()
    work: Path = arguments.work.resolve()
    version = importlib.metadata.version("llama-cpp-python")
    models = _written_by_llama(work, version) + _written_by_us(work)
    models = [model for model in models if re.search(arguments.only, model[0])]
    compared = [_compare(name, architecture, kind, path, work) for name, architecture, kind, path in models]
    rows = [row for row in compared if row is not None]
    if not arguments.only:
        arguments.table.write_text(_table(rows, version), encoding="utf-8")
        _say(f"{arguments.table} written")
    bad = [row.name for row in rows if row.found or not row.n_scripts]
    _say(f"{len(rows) - len(bad)} of {len(rows)} models equal stock" + (f"; not: {', '.join(bad)}" if bad else ""))
    return 1 if bad or not rows else 0


def _say(text: str) -> None:
    print(f"archs: {text}", flush=True)


def _written_by_us(work: Path) -> list[tuple[str, str, str, Path]]:
    folder = work / "ours"
    folder.mkdir(parents=True, exist_ok=True)
    known = llama_models.models().values()
    return [(model.name, model.architecture, model.kind, llama_models.write(model.name, folder)) for model in known]


def _written_by_llama(work: Path, version: str) -> list[tuple[str, str, str, Path]]:
    """(name, architecture, kind, file) of the recurrent and hybrid ones."""
    folder = work / f"models-{version}"
    listed = folder / "kinds.json"
    if not listed.exists():
        program = _program(work, version)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        began = time.monotonic()
        _run([str(program), "-o", str(folder)])
        _say(f"models of {len(list(folder.iterdir()))} architectures written in {time.monotonic() - began:.0f} s")
        kinds = json.loads(children.run_code(KINDS.replace("FOLDER", repr(str(folder))), timeout=600))
        for path in folder.glob("*.gguf"):
            if not kinds.get(path.name, ["", ""])[1]:
                path.unlink()
        listed.write_text(json.dumps({name: entry for name, entry in kinds.items() if entry[1]}))
    kinds = json.loads(listed.read_text())
    return [(Path(name).stem, *kinds[name], folder / name) for name in sorted(kinds)]


def _program(work: Path, version: str) -> Path:
    program = work / f"write-models-{version}"
    if program.exists():
        return program
    source = _source(work, version)
    libraries = find_install().libllama.parent
    support = work / "support.cpp"
    work.mkdir(parents=True, exist_ok=True)
    support.write_text(SUPPORT)
    folders = [f"-I{source / folder}" for folder in ("include", "ggml/include", "common", "src", "vendor")]
    objects = [str(libraries / f"lib{name}.so.0") for name in ("llama", "ggml", "ggml-base", "ggml-cpu")]
    objects = [name if Path(name).exists() else name.removesuffix(".0") for name in objects]
    began = time.monotonic()
    _run(
        [
            *(os.environ.get("CXX", "c++").split()),
            *("-std=c++17", "-O1", *folders),
            *(str(source / "tests" / "test-llama-archs.cpp"), str(support)),
            *("-o", str(program), f"-Wl,-rpath,{libraries}", *objects, "-lpthread", "-ldl"),
        ]
    )
    _say(f"{program.name} compiled in {time.monotonic() - began:.0f} s")
    return program


def _source(work: Path, version: str) -> Path:
    """The unpacked llama.cpp of the source distribution; downloaded unless RCACHE_LLAMA_SDIST names it."""
    given = os.environ.get(ENV_SDIST)
    if given and Path(given).is_dir():
        return Path(given) / "vendor" / "llama.cpp"
    unpacked = work / f"llama_cpp_python-{version}"
    if not unpacked.exists():
        work.mkdir(parents=True, exist_ok=True)
        packed = Path(given) if given else _download(work, version)
        with tarfile.open(packed) as archive:
            archive.extractall(work, filter="data")
    return unpacked / "vendor" / "llama.cpp"


def _download(work: Path, version: str) -> Path:
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    # pip asks the build system for the metadata of a source distribution, even if it is only to be downloaded.
    _run([*pip, "install", "scikit-build-core[pyproject]", "cmake"])
    _run(
        [
            *(*pip, "download", f"llama-cpp-python=={version}", "--no-deps", "--no-build-isolation"),
            *("--no-binary", "llama-cpp-python", "-d", str(work)),
        ]
    )
    return next(work.glob(f"llama_cpp_python-{version}.tar.gz"))


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"archs: {' '.join(command)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}")


SLOW = ("two threads",)
"""Scripts that are left to ``make test``: threads that wait for each other take minutes on a busy machine."""


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    name: str
    architecture: str
    kind: str
    n_scripts: int
    found: str
    """What differs first; empty when nothing does."""
    stock_aborts: tuple[str, ...]
    """Scripts in which llama.cpp itself aborts; they are left out."""

    @property
    def result(self) -> str:
        """In words."""
        words = self.found or ("equal" if self.n_scripts else "llama.cpp itself aborts in every script")
        if self.stock_aborts:
            words += f"; left out, since llama.cpp itself aborts: {', '.join(self.stock_aborts)}"
        return words


def _compare(name: str, architecture: str, kind: str, path: Path, work: Path) -> Row | None:
    """Runs all scripts that stock survives, in both, and looks for the first difference; None: not of our class."""
    known = llama_models.models().get(name)
    for line in granularity.odd_heads_of(path):
        _say(f"{name}: {line}; a difference or a crash may come from there, on some processors")
    folder = work / "runs" / name
    scripts = llama_scripts.parity_scripts(shifts=known.shifts if known else True, random_walks=(1, 2))
    scripts = [script for script in scripts if script.name not in SLOW]
    aborts: list[str] = []
    found = ""
    try:
        if not _has_our_class(path, folder):
            _say(f"{name}: its memory is of another class")
            return None
    except children.ChildFailed as e:
        found, scripts = f"ours ends when a context is made: {str(e).splitlines()[0]}", []
    while scripts:
        try:
            stock, ours = llama_child.run(llama_child.MODES, path, scripts, folder, timeout=600)
        except children.ChildFailed as e:
            mode, script, why = _crash(str(e))
            if mode == "stock" and script in {one.name for one in scripts}:
                aborts.append(script)
                scripts = [one for one in scripts if one.name != script]
                continue
            found = f"{mode} ends in '{script}': {why}"
        else:
            found = _first_difference(stock, ours)
        break
    row = Row(name, architecture, kind, len(scripts), found, tuple(aborts))
    _say(f"{name}: {row.result}")
    return row


def _has_our_class(path: Path, folder: Path) -> bool:
    """Whether a context of this model has a cache of ours."""
    ((trace,),) = llama_child.run(["rcache"], path, [llama_child.Script("class")], folder)
    return bool(trace.of("new")[0]["caches"])


def _first_difference(stock: Sequence[llama_child.Trace], ours: Sequence[llama_child.Trace]) -> str:
    for one, other in zip(stock, ours, strict=True):
        for line in llama_child.differences(other, one):
            return f"{one.name}: {line}"
    return ""


def _crash(text: str) -> tuple[str, str, str]:
    """Mode, script and reason of the first child that failed."""
    mode = text.split(":", 1)[0]
    own = text.split("\nrcache: ", 1)[0]  # stock's part comes first
    scripts = re.findall(r"^script: (.*)$", own, re.MULTILINE)
    why = re.findall(r"GGML_ASSERT\(.*|GGML_ABORT.*|^\w*(?:Error|Failed)\b.*$", own, re.MULTILINE)
    return mode, scripts[-1] if scripts else "loading", why[-1] if why else "no reason given"


def _table(rows: Sequence[Row], version: str) -> str:
    equal = sum(not row.found and row.n_scripts > 0 for row in rows)
    lines = [
        "# Parity with llama.cpp's own class",
        "",
        f"llama-cpp-python {version}, {datetime.date.today():%Y-%m-%d}, {platform.system()} {platform.machine()}, "
        f"Python {platform.python_version()}; written by `make test-archs`.",
        "",
        "Each model ran the scripts of `tests/support/llama_scripts.py` in a process with llama.cpp's own class and in",
        "one with ours: prompts over several ubatches, sequences of different length together and in turn, forks,",
        "removal, shifts, states of all and of one sequence, embeddings in and out, rollback, several contexts, mixes.",
        "*Equal*: logits and embeddings to the last bit, and so are positions and return values after every operation;",
        "the bytes of all states too, but for the sign of zeros that no token has overwritten yet.",
        "",
        f"**{equal} of {len(rows)} models are equal.** The first ones were written by llama.cpp's own generator, the",
        "others by `tests/support/llama_models.py`.",
        "",
        "| model | architecture | kind | scripts | result |",
        "| --- | --- | --- | ---: | --- |",
    ]
    lines += [
        f"| {row.name} | {row.architecture} | {row.kind} | {row.n_scripts} | {row.result.replace('|', '/')} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
