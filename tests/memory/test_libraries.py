"""Proves how ggml's libraries are found, without importing the Python packages that bring them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from ggml_kit import child, ggml_folder

from rcache_plugin.errors import GgmlNotFound
from rcache_plugin.memory import libraries
from rcache_plugin.memory.ggml import GgmlLib

LINUX_ONLY = pytest.mark.skipif(not libraries._MAPS.exists(), reason="reads /proc/self/maps, which is Linux's")


@pytest.fixture
def folder() -> Path:
    return ggml_folder()


@pytest.fixture
def copied_folder(folder: Path, tmp_path: Path) -> Path:
    """A second ggml, as another package would bring it."""
    return Path(shutil.copytree(folder, tmp_path / "other" / "lib"))


def test_import_opens_and_parses_nothing() -> None:
    out = child("""
        import sys
        from rcache_plugin.memory import _ffi, libraries, buffers
        print(libraries._mapped_files(), _ffi.ggml_ffi.cache_info().currsize, "ggml" in sys.modules)
    """)
    assert out == "() 0 False"


def test_finds_the_installed_package_without_importing_it(folder: Path) -> None:
    out = child("""
        import sys
        from rcache_plugin.memory.ggml import GgmlLib
        lib = GgmlLib.find()
        lib.devices()
        print(lib.path, "ggml" in sys.modules, "llama_cpp" in sys.modules)
    """)
    assert out == f"{folder / 'libggml-base.so'} False False"


@LINUX_ONLY
@pytest.mark.parametrize("order", ["find first", "ggml first"])
def test_shares_the_copy_of_ggml_python(order: str) -> None:
    out = child(
        """
        import ctypes, sys
        from rcache_plugin.memory import libraries
        from rcache_plugin.memory.ggml import GgmlLib
        if sys.argv[1] == "ggml first":
            import ggml
        lib = GgmlLib.find()
        import ggml
        cpu_buffer_type = ggml.lib.ggml_backend_cpu_buffer_type
        cpu_buffer_type.restype = ctypes.c_void_p
        same = cpu_buffer_type() == lib.address(lib.cpu_buft())
        print(same, len(libraries._mapped_bases()), GgmlLib.find().same_copy(lib))
        """,
        order,
    )
    assert out == "True 1 True"


@LINUX_ONLY
def test_prefers_the_mapped_copy(copied_folder: Path) -> None:
    out = child(
        """
        import ctypes, sys
        from rcache_plugin.memory.ggml import GgmlLib
        ctypes.CDLL(sys.argv[1])
        lib = GgmlLib.find()
        print(lib.path, lib.registry_path)
        """,
        copied_folder / "libggml.so",
    )
    assert out == f"{copied_folder / 'libggml-base.so'} {copied_folder / 'libggml.so'}"


@LINUX_ONLY
def test_two_mapped_copies_need_a_choice(folder: Path, copied_folder: Path) -> None:
    code = """
        import ctypes, sys
        from rcache_plugin.errors import GgmlNotFound
        from rcache_plugin.memory.ggml import GgmlLib
        for path in sys.argv[1:]:
            ctypes.CDLL(path)
        try:
            print(GgmlLib.find().path)
        except GgmlNotFound as error:
            print(error)
            first, second = (GgmlLib.find(path) for path in sys.argv[1:])
            print(first.same_copy(second))
    """
    paths = [folder / "libggml-base.so", copied_folder / "libggml-base.so"]
    message, same = child(code, *paths).splitlines()
    assert str(folder / "libggml-base.so") in message and str(copied_folder / "libggml-base.so") in message
    assert same == "False"
    assert child(code, *paths, RCACHE_GGML=str(copied_folder)) == str(copied_folder / "libggml-base.so")


@LINUX_ONLY
def test_where_the_system_tells_no_maps_an_imported_package_counts() -> None:
    out = child("""
        import sys
        from pathlib import Path
        from rcache_plugin.memory import libraries
        libraries._MAPS = Path("/nonexistent")
        before = libraries._mapped_bases()
        import ggml
        print(before, *libraries._mapped_bases())
    """)
    assert out == f"() {ggml_folder() / 'libggml-base.so'}"


@pytest.mark.parametrize("named", ["libggml-base.so", "libggml.so", ".", ".."])
def test_takes_a_file_or_a_folder(folder: Path, named: str) -> None:
    lib = GgmlLib.find(folder / named)
    assert (lib.path, lib.registry_path) == (folder / "libggml-base.so", folder / "libggml.so")


def test_environment_variable_comes_before_the_rest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RCACHE_GGML", str(tmp_path / "nothing"))
    with pytest.raises(GgmlNotFound, match=r"nothing \(given by RCACHE_GGML\)"):
        GgmlLib.find()


def test_named_place_without_ggml(tmp_path: Path) -> None:
    with pytest.raises(GgmlNotFound, match=str(tmp_path)):
        GgmlLib.find(tmp_path)


def test_not_found_lists_the_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RCACHE_GGML", raising=False)
    monkeypatch.setattr(libraries, "_mapped_files", lambda: ())
    places = {"ggml": (tmp_path / "ggml" / "lib",), "llama_cpp": ()}
    monkeypatch.setattr(libraries, "_package_folders", places.__getitem__)
    with pytest.raises(GgmlNotFound) as caught:
        GgmlLib.find()
    assert str(tmp_path / "ggml" / "lib") in str(caught.value)
    assert "package llama_cpp (not installed)" in str(caught.value)


def test_the_name_that_dependents_ask_for_comes_first(tmp_path: Path) -> None:
    for suffix in ("", ".0", ".0.25.3"):
        for stem in ("libggml-base.so", "libggml.so", "libggml-cpu.so"):
            (tmp_path / (stem + suffix)).touch()
    assert libraries._pair_in(tmp_path) == (tmp_path / "libggml-base.so.0", tmp_path / "libggml.so.0")


@pytest.mark.parametrize(
    "name", ["libggml-base.so", "libggml.so.0", "libggml.so.0.25.3", "libggml-base.0.dylib", "ggml-base.dll"]
)
def test_library_names(name: str) -> None:
    assert libraries._stem(Path(name)) == ("ggml-base" if "base" in name else "ggml")


@pytest.mark.parametrize("name", ["libggml-cpu.so", "libggml-base.so.txt", "ggml.py", "libggml-rpc.so"])
def test_other_names(name: str) -> None:
    assert libraries._stem(Path(name)) is None


def test_a_file_that_is_no_library(tmp_path: Path) -> None:
    for name in ("libggml-base.so", "libggml.so"):
        (tmp_path / name).write_text("text")
    with pytest.raises(GgmlNotFound, match="cannot be opened"):
        GgmlLib.find(tmp_path)
