/*
 * Tensors and sizes. The cache allocates the tensors; the class only holds pointers to them. In place of llama.cpp's:
 *
 *   llama_memory_recurrent::memory_breakdown                   bytes by type of buffer, as the memory's owner asks for them
 *   llama_memory_recurrent::total_size                         bytes of all buffers
 *   llama_memory_recurrent::size_r_bytes, size_s_bytes,        bytes of all rows of one kind
 *                           size_p_bytes
 *   llama_memory_recurrent_context::get_r_l, get_s_l, get_p_l  a layer's tensor, for the graph
 *   llama_memory_recurrent_context::get_size                   rows of a tensor, checkpoints' too
 *
 * size_p_bytes and get_p_l exist in versions with RCACHE_LLAMA_HAS_PLE only.
 */

#include "adapter.h"
#include "versions.h"

#include "ggml-backend.h"

#include <map>
#include <stdexcept>

namespace rcache {

std::vector<ggml_tensor *> tensors_of(
        const rcache_vtable * table, int32_t (*get)(void * user, int32_t il, void ** tensor), uint32_t n_layer) {
    std::vector<ggml_tensor *> found(n_layer, nullptr);
    for (uint32_t il = 0; il < n_layer; ++il) {
        void * tensor = nullptr;
        if (get(table->user, (int32_t) il, &tensor) != RCACHE_STATUS_OK) {
            throw std::runtime_error("rcache: " + last_error(table));
        }
        found[il] = static_cast<ggml_tensor *>(tensor);
    }
    return found;
}

} // namespace rcache

using namespace rcache;

namespace {

size_t sum_bytes(const std::vector<ggml_tensor *> & tensors) {
    size_t sum = 0;
    for (const auto * tensor : tensors) {
        sum += tensor ? ggml_nbytes(tensor) : 0;
    }
    return sum;
}

std::map<ggml_backend_buffer_type_t, size_t> bytes_by_type(const llama_memory_recurrent & mem) {
    std::map<ggml_backend_buffer_t, size_t> buffers; // each once: layers may share one
    const std::vector<ggml_tensor *> * kinds[] = { &mem.r_l, &mem.s_l, p_l_of(mem) };
    for (const auto * tensors : kinds) {
        if (!tensors) {
            continue;
        }
        for (const auto * tensor : *tensors) {
            if (tensor) {
                buffers[tensor->buffer] = ggml_backend_buffer_get_size(tensor->buffer);
            }
        }
    }
    std::map<ggml_backend_buffer_type_t, size_t> by_type;
    for (const auto & buffer : buffers) {
        by_type[ggml_backend_buffer_get_type(buffer.first)] += buffer.second;
    }
    return by_type;
}

} // namespace

//
// llama_memory_recurrent
//

std::map<ggml_backend_buffer_type_t, size_t> llama_memory_recurrent::memory_breakdown() const {
    return bytes_by_type(*this);
}

size_t llama_memory_recurrent::total_size() const {
    size_t sum = 0;
    for (const auto & by_type : bytes_by_type(*this)) {
        sum += by_type.second;
    }
    return sum;
}

size_t llama_memory_recurrent::size_r_bytes() const {
    return sum_bytes(r_l);
}

size_t llama_memory_recurrent::size_s_bytes() const {
    return sum_bytes(s_l);
}

#ifdef RCACHE_LLAMA_HAS_PLE
size_t llama_memory_recurrent::size_p_bytes() const {
    return sum_bytes(p_l);
}
#endif

//
// llama_memory_recurrent_context
//

ggml_tensor * llama_memory_recurrent_context::get_r_l(int32_t il) const {
    return mem->r_l[il];
}

ggml_tensor * llama_memory_recurrent_context::get_s_l(int32_t il) const {
    return mem->s_l[il];
}

#ifdef RCACHE_LLAMA_HAS_PLE
ggml_tensor * llama_memory_recurrent_context::get_p_l(int32_t il) const {
    return mem->p_l[il];
}
#endif

uint32_t llama_memory_recurrent_context::get_size() const {
    return mem->size;
}
