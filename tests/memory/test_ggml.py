"""Proves what an opened ggml tells about itself and its devices, and which arguments it refuses."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from ggml_kit import ggml_folder

from rcache_plugin.errors import BackendError, GgmlNotFound, InvalidArgument
from rcache_plugin.memory._ffi import BASE_FUNCTIONS, REGISTRY_FUNCTIONS, function_names
from rcache_plugin.memory.ggml import GgmlLib


@pytest.fixture
def folder() -> Path:
    return ggml_folder()


def test_missing_functions_are_named() -> None:
    import _cffi_backend

    assert _cffi_backend.__file__ is not None
    with pytest.raises(GgmlNotFound, match="lacks ggml_type_name, ggml_row_size") as caught:
        GgmlLib.find(_cffi_backend.__file__)
    assert _cffi_backend.__file__ in str(caught.value)


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
            with pytest.raises(InvalidArgument, match="a tensor cannot have"):
                lib.new_tensor_2d(ctx, 0, ne0, ne1, "t")
    finally:
        lib.free_context(ctx)
    with pytest.raises(InvalidArgument, match="must not be 0"):
        lib.buft_at(0)


def test_errors_are_import_errors() -> None:
    assert issubclass(GgmlNotFound, ImportError) and not issubclass(BackendError, ImportError)
