"""Proves that ``rcache doctor`` sees each thing that may be missing or broken, outlives it, and names what mends it."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from children import ROOT, rcache
from doctor_kit import ABORTING, Machine, library, needed, others
from llama_kit import VERSION, Kit

from rcache_plugin.cli import doctor
from rcache_plugin.cli.doctor import ggml, llama, machine, main_job, mend, probes
from rcache_plugin.cli.doctor.probes import Answer
from rcache_plugin.cli.doctor.report import Part
from rcache_plugin.hosts.llama.adapter import build, found

PIP = f"{shlex.quote(sys.executable)} -m pip install "
REBUILD = PIP + "--force-reinstall --no-deps --no-cache-dir --no-binary ggml-python ggml-python==0.0.45"
REINSTALL = PIP + "--force-reinstall --no-deps rcache-plugin==0.1.0"
LLAMA = f"llama-cpp-python=={VERSION}"


@pytest.fixture
def box(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


# --- nothing is missing ---

PROBED = {"error", "output"}
GGML = {"library", "version", "commit", "devices", "uses", *PROBED}
KEYS = {
    "python": {"version", "implementation", "executable", "system", "machine", "libc"},
    "package": {"version", "folder", "checkout"},
    "packages": {"numpy", "cffi", "tokenizers", "rich", "platformdirs"},
    "compiled": {"file", "abi_version", "header_abi_version", *PROBED},
    "processor": {"name", "cores", "features"},
    "ggml": {"package_version", *GGML},
    "model": {"file", "bytes", *PROBED},
    "run": {"seconds", *PROBED},
    "llama": {
        "version", "known", "folder", "library", "interposable", "ggml", "compiler", "adapter", "hostable"
    },
    "cache": {"folder", "exists", "writable", "bytes", "entries"},
}


def keys(report: dict[str, Any]) -> dict[str, set[str]]:
    return {name: part.keys() - {"state"} for name, part in report["parts"].items()}


def test_json_has_the_documented_keys_in_their_order(box: Machine) -> None:
    report = box.doctor(expect=0)
    assert list(report) == ["ready", "parts", "problems"]
    assert list(report["parts"]) == list(KEYS)
    assert keys(report) == KEYS
    assert report["parts"]["llama"]["ggml"].keys() == GGML
    assert report["ready"] is True
    assert {part["state"] for part in report["parts"].values()} == {"ok"}
    assert report["parts"]["ggml"]["devices"][0]["name"] == "CPU"
    assert report["parts"]["compiled"]["abi_version"] == build.abi_version()
    # Not built is not missing: the first use builds it.
    ((what, command),) = others(report, "llama")
    assert "not built yet" in what
    assert command == f"{shlex.quote(sys.executable)} -m rcache_plugin build-llama"
    assert len(report["problems"]) == 1


def test_the_documentation_has_the_same_keys() -> None:
    page = (ROOT / "docs" / "doctor.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", page, re.M))
    said = {name: set(re.findall(r"`(\w+)`", re.sub(r"\(.*?\)", "", row))) for name, row in rows.items()}
    assert said == KEYS


def test_text_has_a_line_for_each_part_and_ends_with_the_verdict(box: Machine) -> None:
    lines = box.run(expect=0).splitlines()
    assert [line.split()[:2] for line in lines if line.startswith("ok ")] == [["ok", name] for name in KEYS]
    assert lines[-1] == "`rcache run` works here"
    assert f"    {shlex.quote(sys.executable)} -m rcache_plugin build-llama" in lines
    assert max(map(len, lines)) > 80  # not wrapped: a command is copied whole


def test_the_devices_are_those_of_rcache_devices(box: Machine) -> None:
    names = [device["name"] for device in json.loads(rcache("devices", "--json").stdout)]
    assert [device["name"] for device in box.doctor(expect=0)["parts"]["ggml"]["devices"]] == names


def test_it_loads_nothing_itself(monkeypatch) -> None:
    asked: list[str] = []

    def ask(probe: str, *words: str) -> Answer:
        asked.append(probe)
        return Answer(error="not asked", kind="none")

    for module in (ggml, llama, main_job):
        monkeypatch.setattr(module, "ask", ask)
    report = doctor.examine()
    assert asked == ["compiled", "ggml", "model", "run", "ggml"]
    assert not report.ready


# --- packages ---


@pytest.mark.parametrize(
    ("modules", "part", "wanted"),
    [
        (("numpy",), "packages", "'numpy>=1.24'"),
        (("cffi",), "packages", "'cffi>=1.16'"),
        (("_cffi_backend",), "packages", "'cffi>=1.16'"),
        (("tokenizers",), "packages", "'tokenizers>=0.20'"),
        (("rich",), "packages", "'rich>=13'"),
        (("ggml",), "ggml", "ggml-python==0.0.45"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_missing_package_is_one_problem_with_one_command(
    box: Machine, modules: tuple[str, ...], part: str, wanted: str
) -> None:
    box.without(*modules)
    report = box.doctor(expect=1)
    name = re.split(r"[=>]", wanted.strip("'"))[0]
    assert needed(report) == [(part, f"{name} is not installed", PIP + wanted)]
    assert report["parts"][part]["state"] == "missing"
    assert keys(report) == KEYS


def test_without_rich_the_text_is_the_same_but_for_rich(box: Machine) -> None:
    steady = (r"seconds|\d+\.\d\d s", r"[\d.]+ MiB of")
    with_rich = box.run(expect=0)
    box.without("rich")
    without = box.run(expect=1)
    for pattern in steady:
        with_rich, without = re.sub(pattern, "", with_rich), re.sub(pattern, "", without)
    changed = set(without.splitlines()) - set(with_rich.splitlines())
    about = re.compile(r"\brich\b|`rcache run`|cannot be hosted|^broken +llama")
    assert [line for line in changed if not about.search(line)] == []
    assert without.splitlines()[-1] == "`rcache run` does not work here"
    assert "Missing for `rcache run`:\n- rich is not installed\n    " + PIP + "'rich>=13'\n" in without


def test_everything_missing_at_once_is_told(box: Machine) -> None:
    box.without("numpy", "cffi", "_cffi_backend", "ggml", "tokenizers", "rich", "platformdirs", "llama_cpp")
    del box.env["RCACHE_CACHE_DIR"]
    report = box.doctor(expect=1)
    assert {what.split()[0] for _, what, _ in needed(report)} == {"numpy", "cffi", "tokenizers", "rich", "ggml-python"}
    assert keys(report) == KEYS
    assert report["parts"]["cache"]["state"] == "unknown"
    assert box.run(expect=1).splitlines()[-1] == "`rcache run` does not work here"


def test_platformdirs_is_for_the_cache_folder_only(box: Machine) -> None:
    box.without("platformdirs")
    assert others(box.doctor(expect=0), "packages") == []  # RCACHE_CACHE_DIR does without it
    del box.env["RCACHE_CACHE_DIR"]
    report = box.doctor(expect=0)
    assert others(report, "packages") == [("platformdirs is not installed", PIP + "'platformdirs>=4'")]
    assert report["parts"]["llama"]["hostable"] is False


# --- the compiled part ---


def test_no_compiled_part(box: Machine) -> None:
    box.compiled().unlink()
    report = box.doctor(expect=1)
    what = "the compiled part rcache_plugin._rcache is missing"
    assert needed(report) == [("compiled", what, REINSTALL)]
    assert report["parts"]["compiled"]["state"] == "missing"
    assert report["parts"]["llama"]["hostable"] is False
    assert report["parts"]["ggml"]["state"] == "ok"


def test_a_truncated_compiled_part(box: Machine) -> None:
    file = box.compiled()
    file.write_bytes(file.read_bytes()[:1000])
    report = box.doctor(expect=1)
    ((part, what, command),) = needed(report)
    assert (part, command) == ("compiled", REINSTALL)
    assert what.startswith("the compiled part cannot be loaded: ")
    assert report["parts"]["compiled"]["file"] == str(file)


def test_a_compiled_part_that_crashes(box: Machine) -> None:
    library(box.compiled(), ABORTING)
    report = box.doctor(expect=1)
    what = "the compiled part cannot be loaded: it died of SIGABRT"
    assert needed(report) == [("compiled", what, REINSTALL)]
    assert "Fatal Python error: Aborted" in report["parts"]["compiled"]["output"]


def test_a_compiled_part_of_another_version(box: Machine) -> None:
    header = box.package() / "capi" / "include" / "rcache_plugin.h"
    header.write_text(re.sub(r"(#define RCACHE_ABI_VERSION) \d+", r"\1 77", header.read_text()))
    what = f"the compiled part has ABI version {build.abi_version()}, the package's header 77"
    assert needed(box.doctor(expect=1)) == [("compiled", what, REINSTALL)]


def test_in_a_source_tree_the_old_library_is_removed_first(monkeypatch, tmp_path: Path) -> None:
    (tmp_path / "native").mkdir()
    (tmp_path / "native" / "build_ffi.py").touch()
    monkeypatch.setattr(mend, "PACKAGE", tmp_path / "rcache_plugin")
    assert mend.package() == f"rm -f {tmp_path}/rcache_plugin/_rcache*.so && {PIP}--no-deps -e {tmp_path}"
    assert mend.model() == mend.package()  # no git that has it
    (tmp_path / ".git").mkdir()
    assert mend.model() == f"git -C {tmp_path} checkout -- rcache_plugin/hosts/mamba/models"


# --- ggml ---


def test_a_named_ggml_that_does_not_exist(box: Machine) -> None:
    box.env["RCACHE_GGML"] = str(box.folder / "nowhere")
    ((part, what, command),) = needed(box.doctor(expect=1))
    assert (part, command) == ("ggml", "unset RCACHE_GGML")
    assert str(box.folder / "nowhere") in what


def test_a_ggml_that_crashes_when_it_is_loaded(box: Machine) -> None:
    """In a package of its own: both the library and ``import ggml`` end the process."""
    for name in ("libggml-base.so", "libggml.so"):
        library(box.site / "ggml" / "lib" / name, ABORTING)
    (box.site / "ggml" / "__init__.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    report = box.doctor(expect=1)
    assert needed(report) == [("ggml", "ggml cannot be used: it died of SIGABRT", REBUILD)]
    assert report["parts"]["run"]["error"] == "it died of SIGSEGV"
    assert report["parts"]["llama"]["ggml"]["version"]  # the next one is looked at all the same
    assert "ggml cannot be used: it died of SIGABRT\n" in box.run(expect=1)


def test_a_ggml_that_crashes_when_it_computes(box: Machine) -> None:
    """As one does that was built for another processor."""
    box.at_start(
        "import os, signal",
        "if 'run' in sys.argv or 'run' in getattr(sys, 'orig_argv', ()):",
        "    os.kill(os.getpid(), signal.SIGILL)",
    )
    report = box.doctor(expect=1)
    assert needed(report) == [("run", "the bundled model does not run: it died of SIGILL", REBUILD)]


def test_a_ggml_built_for_another_processor(monkeypatch) -> None:
    answer = Answer(facts={"library": "libggml-base.so", "uses": ["avx2", "avx512f", "amx_int8"]})
    monkeypatch.setattr(ggml, "ask", lambda probe: answer)
    parts = {"processor": Part("ok", [], {"features": ("avx", "avx2")}), "packages": Part("ok", [])}
    (problem,) = ggml.ggml_part(parts).problems
    assert problem.what == "ggml was built for avx512f amx_int8, which this processor has not"
    assert problem.mend == REBUILD
    parts["processor"].facts["features"] = None
    assert ggml.ggml_part(parts).problems == []  # not known is not missing


# --- the model ---


def test_no_model(box: Machine) -> None:
    (box.package() / "hosts" / "mamba" / "models" / "tiny-mamba.gguf").unlink()
    report = box.doctor(expect=1)
    ((part, what, command),) = needed(report)
    assert (part, command) == ("model", REINSTALL)
    assert "the bundled model is missing" in what
    assert report["parts"]["model"]["state"] == "missing"


def test_a_truncated_model(box: Machine) -> None:
    model = box.package() / "hosts" / "mamba" / "models" / "tiny-mamba.gguf"
    model.write_bytes(model.read_bytes()[:100_000])
    ((part, what, command),) = needed(box.doctor(expect=1))
    assert (part, command) == ("run", REINSTALL)
    assert "truncated" in what


# --- llama-cpp-python: never keeps the main job from running ---


def test_no_llama(box: Machine) -> None:
    box.without("llama_cpp")
    report = box.doctor(expect=0)
    ((what, command),) = others(report, "llama")
    assert what.startswith("llama-cpp-python is not installed")
    assert command == PIP + LLAMA
    assert report["parts"]["llama"]["state"] == "missing"
    assert report["parts"]["llama"]["hostable"] is False


@pytest.mark.parametrize("version", ["0.2.90", "0.9.1"])
def test_a_version_of_llama_that_is_not_known(box: Machine, version: str) -> None:
    info = box.site / f"llama_cpp_python-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: llama_cpp_python\nVersion: {version}\n")
    report = box.doctor(expect=0)
    what = f"llama-cpp-python {version} is not one of 0.3.32 to 0.3.36, which rcache knows"
    assert others(report, "llama") == [(what, PIP + LLAMA)]
    facts = report["parts"]["llama"]
    assert (facts["version"], facts["known"], facts["hostable"]) == (version, False, False)
    box.env["RCACHE_LLAMA_ANY_VERSION"] = "1"
    assert box.doctor(expect=0)["parts"]["llama"]["hostable"] is True


def test_no_compiler(box: Machine) -> None:
    box.env["PATH"] = str(box.folder)
    report = box.doctor(expect=0)
    ((what, command),) = others(report, "llama")
    assert what.startswith("no working C++ compiler")
    assert command in (None, *(install for _, install in mend._COMPILERS))
    assert report["parts"]["llama"]["hostable"] is False
    box.env["CXX"] = "no-such-compiler"
    assert others(box.doctor(expect=0), "llama")[0][1] == "unset CXX"


def test_an_adapter_that_is_built_needs_no_compiler(box: Machine) -> None:
    adapter = box.cache / f"llama-{VERSION}" / f"{build._source_key()}-compiler" / build.OBJECT_NAME
    adapter.parent.mkdir(parents=True)
    adapter.touch()
    box.env["PATH"] = str(box.folder)
    report = box.doctor(expect=0)
    assert report["problems"] == []
    assert report["parts"]["llama"]["adapter"] == str(adapter)
    assert report["parts"]["llama"]["hostable"] is True


def test_the_package_manager_tells_how_to_get_a_compiler(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(os, "defpath", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(mend, "_COMPILERS", [("rcache-test-dnf", "dnf install gcc-c++")])
    assert mend.compiler() is None
    (tmp_path / "rcache-test-dnf").write_text("#!/bin/sh\n")
    (tmp_path / "rcache-test-dnf").chmod(0o755)
    assert mend.compiler() == "dnf install gcc-c++"


def test_a_libllama_that_never_calls_the_adapter(box: Machine, kit: Kit) -> None:
    box.env["LLAMA_CPP_LIB_PATH"] = str(kit.library("-Wl,-Bsymbolic").parent)
    report = box.doctor(expect=0)
    what, command = others(report, "llama")[0]
    assert what.endswith("would never call the adapter: it was linked with -Bsymbolic")
    assert command is not None and command.endswith(f"--no-binary llama-cpp-python {LLAMA}")
    assert report["parts"]["llama"]["interposable"] is False
    box.env["LLAMA_CPP_LIB_PATH"] = "/nowhere"
    assert others(box.doctor(expect=0), "llama")[0][1] == "unset LLAMA_CPP_LIB_PATH"


def test_another_system_than_linux(monkeypatch) -> None:
    monkeypatch.setattr(found, "sys", type("sys", (), {"platform": "darwin"}))
    part = llama.llama_part({})
    assert (part.state, part.problems) == ("missing", [])
    assert "not supported on darwin" in part.lines[0]
    assert part.facts["hostable"] is False


def test_a_llama_library_that_is_none(monkeypatch, small_install, build_cache: Path) -> None:
    small_install.libllama.write_bytes(b"not a library")
    monkeypatch.setattr(llama, "find_install", lambda: small_install)
    monkeypatch.setattr(llama, "ask", lambda *words: Answer(error="it died of SIGSEGV", kind="SIGSEGV"))
    nothing = {name: Part("ok", []) for name in ("processor", "packages", "compiled")}
    part = llama.llama_part(nothing)
    assert part.problems[0].what == f"{small_install.libllama} is no 64-bit ELF library"
    assert part.problems[1].what == "the ggml of llama-cpp-python cannot be used: it died of SIGSEGV"
    assert not part.facts["hostable"]


# --- the cache folder ---


def test_the_cache_folder_with_sizes(box: Machine) -> None:
    (box.cache / "headers-0.3.36" / "src").mkdir(parents=True)
    (box.cache / "headers-0.3.36" / "src" / "a.h").write_bytes(bytes(3 << 20))
    (box.cache / "lock").write_bytes(bytes(5))
    facts = box.doctor(expect=0)["parts"]["cache"]
    assert facts["entries"] == {"headers-0.3.36": 3 << 20, "lock": 5}
    assert facts["bytes"] == (3 << 20) + 5
    assert (facts["folder"], facts["exists"], facts["writable"]) == (str(box.cache), True, True)
    text = box.run(expect=0)
    assert f"{box.cache}: 3.0 MiB\n" in text
    assert "3.0 MiB  headers-0.3.36\n" in text


def test_looking_leaves_nothing_behind(box: Machine) -> None:
    assert box.doctor(expect=0)["parts"]["cache"]["exists"] is False
    assert not box.cache.exists()


def test_a_read_only_cache_folder(box: Machine) -> None:
    box.cache.mkdir(mode=0o555)
    box.at_start(  # root may write there all the same
        "import tempfile",
        "def refuse(**options):",
        "    raise PermissionError(13, 'Permission denied')",
        "tempfile.TemporaryFile = refuse",
    )
    report = box.doctor(expect=0)
    what = f"the cache folder {box.cache} cannot be written: Permission denied"
    assert others(report, "cache") == [(what, f"chmod u+rwx {box.cache}")]
    assert (report["parts"]["cache"]["state"], report["parts"]["cache"]["writable"]) == ("broken", False)


def test_a_cache_folder_that_cannot_be(box: Machine) -> None:
    (box.folder / "file").touch()
    box.env["RCACHE_CACHE_DIR"] = str(box.folder / "file" / "cache")
    ((what, command),) = others(box.doctor(expect=0), "cache")
    assert what.endswith("cannot be written: Not a directory")
    assert command is not None and command.startswith("export RCACHE_CACHE_DIR=")


# --- doctor itself ---


def test_a_probe_that_hangs_or_ends_early_is_told(monkeypatch) -> None:
    monkeypatch.setattr(probes, "TIMEOUT", 0.3)
    monkeypatch.setattr(probes, "_START", "import time; time.sleep(60) # {}")
    assert probes.ask("run") == Answer(error="it took more than 0 s", kind="timeout")
    monkeypatch.setattr(probes, "TIMEOUT", 60)
    monkeypatch.setattr(probes, "_START", "import sys; sys.exit('enough') # {}")
    assert probes.ask("run") == Answer(error="it ended with exit status 1 and no answer", kind="exit", output="enough")


def test_a_part_that_cannot_be_looked_at_does_not_hide_the_others(monkeypatch) -> None:
    def fails() -> str:
        raise OSError("no such luck")

    monkeypatch.setattr(machine, "processor_name", fails)
    report = doctor.examine()
    assert report.parts["processor"].state == "unknown"
    assert ("processor", "looking at it failed: OSError: no such luck") in [(n, p.what) for n, p in report.problems()]
    assert report.parts["cache"].facts["folder"]
    assert report.ready


def test_a_run_that_cannot_be_tried_is_not_ready(monkeypatch) -> None:
    def fails(parts: object) -> Part:
        raise OSError("no more processes")

    monkeypatch.setattr(main_job, "run_part", fails)
    report = doctor.examine()
    assert [part.state for part in report.parts.values()].count("unknown") == 1
    assert not report.ready
