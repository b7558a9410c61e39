"""Finding ggml without importing its Python packages, and what it tells about itself."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest
from ggml_kit import child, ggml_folder

from rcache_plugin.errors import BackendError, GgmlNotFound, InvalidArgument
from rcache_plugin.memory import libraries
from rcache_plugin.memory._ffi import BASE_FUNCTIONS, REGISTRY_FUNCTIONS, function_names
from rcache_plugin.memory.ggml import GgmlLib

ROOT = Path(__file__).resolve().parents[2]
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


def test_missing_functions_are_named() -> None:
    import _cffi_backend

    assert _cffi_backend.__file__ is not None
    with pytest.raises(GgmlNotFound, match="lacks ggml_type_name, ggml_row_size") as caught:
        GgmlLib.find(_cffi_backend.__file__)
    assert _cffi_backend.__file__ in str(caught.value)


def test_a_file_that_is_no_library(tmp_path: Path) -> None:
    for name in ("libggml-base.so", "libggml.so"):
        (tmp_path / name).write_text("text")
    with pytest.raises(GgmlNotFound, match="cannot be opened"):
        GgmlLib.find(tmp_path)


def test_from_a_handle_that_a_host_has_opened(folder: Path) -> None:
    found = GgmlLib.find(folder)
    opened = ctypes.CDLL(str(folder / "libggml.so"))
    for lib in (
        GgmlLib.from_handle(opened),
        GgmlLib.from_handle(ctypes.CDLL(str(folder / "libggml-base.so")), opened._handle),
    ):
        assert lib.same_copy(found) and lib.devices() == found.devices() and lib.path is None
    for nothing in (0, None, "libggml.so"):
        with pytest.raises(InvalidArgument, match="neither an opened library nor a handle"):
            GgmlLib.from_handle(nothing)


def test_tells_its_version(folder: Path) -> None:
    lib = GgmlLib.find(folder)
    assert lib.version.count(".") >= 2 and lib.version in repr(lib) and str(lib.path) in repr(lib)


def test_devices(folder: Path) -> None:
    lib = GgmlLib.find(folder)
    cpu = next(device for device in lib.devices() if device.kind == "CPU")
    assert cpu.name == "CPU" and cpu.description and 0 < cpu.memory_free <= cpu.memory_total
    assert lib.device("cpu") == cpu
    assert lib.buft_of(cpu) == lib.buft_of("CPU") == lib.buft_of(None) == lib.cpu_buft()
    assert lib.device_of(lib.cpu_buft()) == cpu.handle and lib.buft_name(lib.cpu_buft()) == "CPU"
    assert lib.is_host(lib.cpu_buft()) and lib.endpoint_of(cpu.handle) is None
    with pytest.raises(InvalidArgument, match="no device 'CUDA7'; this ggml has CPU"):
        lib.buft_of("CUDA7")


def test_kinds_before_and_after_integrated_gpus(folder: Path) -> None:
    lib = GgmlLib.find(folder)
    assert [lib._kind(n) for n in range(5)] == ["CPU", "GPU", "IGPU", "ACCEL", "META"]
    assert lib._kind(9) == "TYPE9"
    lib.version = ""
    assert [lib._kind(n) for n in range(3)] == ["CPU", "GPU", "ACCEL"]


def test_function_names_are_read_from_the_declarations() -> None:
    names = function_names(BASE_FUNCTIONS) + function_names(REGISTRY_FUNCTIONS)
    assert {"ggml_init", "ggml_type_name", "ggml_get_data", "ggml_backend_dev_get"} <= set(names)
    assert len(names) == (BASE_FUNCTIONS + REGISTRY_FUNCTIONS).count(");")


@pytest.mark.parametrize(
    "endpoint", ["", "localhost", "localhost:", ":5052", "localhost:0", "localhost:99999", "a:1:2"]
)
def test_endpoints_that_cannot_be(folder: Path, endpoint: str) -> None:
    with pytest.raises(InvalidArgument, match="host:port"):
        GgmlLib.find(folder).add_rpc_server(endpoint)


def test_tensors_that_cannot_be(folder: Path) -> None:
    lib = GgmlLib.find(folder)
    ctx = lib.new_context(1)
    try:
        for ne0, ne1 in ((-1, 1), (1, 0), (1 << 40, 1 << 40)):
            with pytest.raises(InvalidArgument, match="elements cannot be"):
                lib.new_tensor_2d(ctx, 0, ne0, ne1, "t")
    finally:
        lib.free_context(ctx)
    with pytest.raises(InvalidArgument, match="must not be 0"):
        lib.buft_at(0)


def test_errors_are_import_errors() -> None:
    assert issubclass(GgmlNotFound, ImportError) and not issubclass(BackendError, ImportError)
