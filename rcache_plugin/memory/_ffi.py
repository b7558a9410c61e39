"""What the package calls of ggml, as a cffi declaration in ABI mode: no compiler, and any ggml build of the same API.

Nothing is parsed and no library is opened at import; `ggml_ffi` does the parsing once, on first use.
"""

from __future__ import annotations

import functools
from typing import Any

import cffi

BASE_FUNCTIONS = """
const char * ggml_type_name(int type);
size_t ggml_row_size(int type, int64_t ne);
size_t ggml_tensor_overhead(void);
ggml_context * ggml_init(struct ggml_init_params params);
void ggml_free(ggml_context * ctx);
ggml_tensor * ggml_new_tensor_2d(ggml_context * ctx, int type, int64_t ne0, int64_t ne1);
ggml_tensor * ggml_view_1d(ggml_context * ctx, ggml_tensor * a, int64_t ne0, size_t offset);
ggml_tensor * ggml_set_name(ggml_tensor * tensor, const char * name);
void * ggml_get_data(const ggml_tensor * tensor);
size_t ggml_nbytes(const ggml_tensor * tensor);

ggml_buft * ggml_backend_cpu_buffer_type(void);
const char * ggml_backend_buft_name(ggml_buft * buft);
size_t ggml_backend_buft_get_alignment(ggml_buft * buft);
size_t ggml_backend_buft_get_alloc_size(ggml_buft * buft, const ggml_tensor * tensor);
bool ggml_backend_buft_is_host(ggml_buft * buft);
ggml_device * ggml_backend_buft_get_device(ggml_buft * buft);

ggml_buffer * ggml_backend_buft_alloc_buffer(ggml_buft * buft, size_t size);
ggml_buffer * ggml_backend_alloc_ctx_tensors_from_buft(ggml_context * ctx, ggml_buft * buft);
void ggml_backend_buffer_free(ggml_buffer * buffer);
size_t ggml_backend_buffer_get_size(ggml_buffer * buffer);
void ggml_backend_buffer_clear(ggml_buffer * buffer, uint8_t value);

void ggml_backend_tensor_set(ggml_tensor * tensor, const void * data, size_t offset, size_t size);
void ggml_backend_tensor_get(const ggml_tensor * tensor, void * data, size_t offset, size_t size);
void ggml_backend_tensor_copy(const ggml_tensor * src, ggml_tensor * dst);
int ggml_backend_view_init(ggml_tensor * tensor);

const char * ggml_backend_dev_name(ggml_device * device);
const char * ggml_backend_dev_description(ggml_device * device);
void ggml_backend_dev_memory(ggml_device * device, size_t * free, size_t * total);
int ggml_backend_dev_type(ggml_device * device);
ggml_buft * ggml_backend_dev_buffer_type(ggml_device * device);
ggml_reg * ggml_backend_dev_backend_reg(ggml_device * device);
const char * ggml_backend_reg_name(ggml_reg * reg);
size_t ggml_backend_reg_dev_count(ggml_reg * reg);
ggml_device * ggml_backend_reg_dev_get(ggml_reg * reg, size_t index);
void * ggml_backend_reg_get_proc_address(ggml_reg * reg, const char * name);
"""
"""Functions of ``libggml-base``."""

REGISTRY_FUNCTIONS = """
void ggml_backend_register(ggml_reg * reg);
ggml_reg * ggml_backend_reg_by_name(const char * name);
size_t ggml_backend_dev_count(void);
ggml_device * ggml_backend_dev_get(size_t index);
"""
"""Functions of ``libggml``, which knows the devices."""

OPTIONAL_FUNCTIONS = """
const char * ggml_version(void);
const char * ggml_commit(void);
"""
"""Functions of ``libggml-base`` that the package can do without."""

_TYPES = """
typedef struct ggml_context ggml_context;
typedef struct ggml_tensor ggml_tensor;
typedef struct ggml_backend_buffer_type ggml_buft;
typedef struct ggml_backend_buffer ggml_buffer;
typedef struct ggml_backend_device ggml_device;
typedef struct ggml_backend_reg ggml_reg;
struct ggml_init_params { size_t mem_size; void * mem_buffer; bool no_alloc; };
typedef ggml_reg * (*rpc_add_server_t)(const char * endpoint);
"""


def function_names(declarations: str) -> tuple[str, ...]:
    """The names that one of the blocks above declares, in order."""
    lines = (line for line in declarations.splitlines() if "(" in line)
    return tuple(line.partition("(")[0].split()[-1].lstrip("*") for line in lines)


@functools.cache
def ggml_ffi() -> Any:
    """The ``cffi.FFI`` that knows ggml's declarations; always the same object."""
    ffi = cffi.FFI()
    ffi.cdef(_TYPES + BASE_FUNCTIONS + REGISTRY_FUNCTIONS + OPTIONAL_FUNCTIONS)
    return ffi
