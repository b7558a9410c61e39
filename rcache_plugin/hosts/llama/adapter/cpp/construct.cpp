/*
 * Lifetime of a memory, and what Python calls. In place of llama.cpp's:
 *
 *   llama_memory_recurrent::llama_memory_recurrent   has the factory make a cache, and takes its tensors
 *   llama_memory_recurrent::~llama_memory_recurrent  stays llama.cpp's: it is inlined into the hybrid memories
 *
 * Our part is owned by one empty backend buffer in the class's list of buffers, which is freed with the object, whoever
 * destroys it.
 */

#include "adapter.h"
#include "versions.h"

#include "ggml-backend-impl.h"
#include "ggml-backend.h"
#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <utility>

namespace rcache {

// The list of buffers is private; an explicit instantiation may name it all the same ([temp.explicit]/12).
using buffers_member = std::vector<std::pair<ggml_context_ptr, ggml_backend_buffer_ptr>> llama_memory_recurrent::*;

template <buffers_member member> struct expose_buffers {
    friend buffers_member member_of_buffers() {
        return member;
    }
};

buffers_member member_of_buffers();
template struct expose_buffers<&llama_memory_recurrent::ctxs_bufs>;

memory_state & state_of(const llama_memory_recurrent & mem) {
    return *static_cast<memory_state *>((mem.*member_of_buffers()).front().second->context);
}

std::string last_error(const rcache_vtable * table) {
    std::string text(table->last_error(table->user, nullptr, 0) + 1, '\0');
    table->last_error(table->user, &text[0], (uint32_t) text.size());
    text.pop_back();
    return text;
}

bool done(const rcache_vtable * table, const char * what, int32_t status) {
    if (status < 0) {
        LLAMA_LOG_ERROR("rcache: %s: %s (status %d)\n", what,
            status == RCACHE_STATUS_CLOSED ? "the cache is closed" : last_error(table).c_str(), status);
    }
    return status == RCACHE_STATUS_OK;
}

} // namespace rcache

using namespace rcache;

namespace {

const rcache_factory * g_factory     = nullptr;
int32_t                g_consecutive = 1;
uint32_t               g_tail        = 0;
uint32_t               g_tail_from   = 0;

// The lengths of state rows, and the type of buffer, of each layer; 0 and null for layers that the filter leaves out.
struct layer_rows {
    std::vector<uint32_t> n_embd_r, n_embd_s, n_embd_p;
    std::vector<void *>   buft;

    layer_rows(const llama_model & model, bool offload, const llama_memory_i::layer_filter_cb & filter) :
        layer_rows(n_layer_of(model.hparams, 0)) {
        const auto & hparams = model.hparams;
        for (uint32_t il = 0; il < buft.size(); ++il) {
            if (filter && !filter(il)) {
                continue;
            }
            n_embd_r[il] = hparams.n_embd_r();
            n_embd_s[il] = hparams.n_embd_s();
            n_embd_p[il] = n_embd_p_of(hparams, il);
            buft[il] = offload ? ggml_backend_dev_buffer_type(model.dev_layer(il)) : ggml_backend_cpu_buffer_type();
        }
    }

    bool has_p() const {
        return std::any_of(n_embd_p.begin(), n_embd_p.end(), [](uint32_t n) { return n > 0; });
    }

private:
    explicit layer_rows(uint32_t n_layer) :
        n_embd_r(n_layer, 0), n_embd_s(n_layer, 0), n_embd_p(n_layer, 0), buft(n_layer, nullptr) {}
};

void free_state(ggml_backend_buffer_t buffer) {
    delete static_cast<memory_state *>(buffer->context);
}

} // namespace

//
// functions for Python (host.py)
//

extern "C" {

__attribute__((visibility("default"))) uint32_t rcache_llama_abi_version(void) {
    return RCACHE_ABI_VERSION;
}

// Where memories made from now on get their caches from; NULL: making one fails.
__attribute__((visibility("default"))) void rcache_llama_set_factory(const rcache_factory * factory) {
    g_factory = factory;
}

// For memories made from now on, of models without attention: whether a ubatch holds consecutive sequence ids only.
__attribute__((visibility("default"))) void rcache_llama_set_consecutive(int32_t consecutive) {
    g_consecutive = consecutive;
}

// For memories made from now on, of models without attention: the last n_tail tokens of a batch of one sequence with at
// least n_from tokens get a ubatch of their own.
__attribute__((visibility("default"))) void rcache_llama_set_tail(uint32_t n_tail, uint32_t n_from) {
    g_tail      = n_tail;
    g_tail_from = n_from;
}

}

//
// llama_memory_recurrent
//

llama_memory_recurrent::llama_memory_recurrent(
        const llama_model & model,
                ggml_type   type_r,
                ggml_type   type_s,
                     bool   offload,
                 uint32_t   mem_size,
                 uint32_t   n_seq_max,
                 uint32_t   n_rs_seq,
    const layer_filter_cb & filter) : hparams(model.hparams), n_seq_max(n_seq_max) {
    if (!g_factory) {
        throw std::runtime_error("rcache: the adapter is loaded, but rcache_plugin.hosts.llama has not been set up");
    }
    const layer_rows rows(model, offload, filter);
    const auto       n_layer = (uint32_t) rows.buft.size();

    rcache_spec spec = {};
    spec.abi_version = RCACHE_ABI_VERSION;
    spec.struct_size = sizeof(spec);
    spec.n_cells     = mem_size;
    spec.n_seq_max   = n_seq_max;
    spec.n_layer     = n_layer;
    spec.type_r      = type_r;
    spec.type_s      = type_s;
    spec.placement   = RCACHE_PLACEMENT_CLASSIC;
    spec.n_embd_r    = rows.n_embd_r.data();
    spec.n_embd_s    = rows.n_embd_s.data();
    spec.n_embd_p    = rows.has_p() ? rows.n_embd_p.data() : nullptr;
    spec.buft        = rows.buft.data();
    spec.n_rs_seq    = n_rs_seq;
    spec.flags       = filter ? RCACHE_SPEC_HYBRID : 0;

    auto state = std::make_unique<memory_state>();
    if (g_factory->create(g_factory->user, &spec, &state->table) != RCACHE_STATUS_OK) {
        char text[512] = "";
        g_factory->last_error(g_factory->user, text, sizeof(text));
        throw std::runtime_error(std::string("rcache: ") + text);
    }
    state->n_rs_full   = mem_size;
    state->consecutive = g_consecutive != 0;
    state->hybrid      = (bool) filter;
    state->tail        = state->hybrid ? 0 : g_tail;
    state->tail_from   = g_tail_from;
    const rcache_vtable * table = state->table;

    ggml_backend_buffer_i iface = {};
    iface.free_buffer = free_state;
    ctxs_bufs.emplace_back(nullptr,
        ggml_backend_buffer_init(ggml_backend_cpu_buffer_type(), iface, state.release(), 0));

    rcache_info info = {};
    info.struct_size = sizeof(info);
    if (table->info(table->user, &info) != RCACHE_STATUS_OK) {
        throw std::runtime_error("rcache: " + last_error(table));
    }
    head = 0;
    size = info.size;
    used = 0;
    this->n_rs_seq = n_rs_seq;
    rs_idx.assign(n_seq_max, 0);

    r_l = tensors_of(table, table->r_tensor, n_layer);
    s_l = tensors_of(table, table->s_tensor, n_layer);
    if (auto * more = p_l_of(*this)) {
        *more = tensors_of(table, table->p_tensor, n_layer);
    }
    table->set_replay(table->user, replay, this);
    const double mib = (info.r_bytes + info.s_bytes) / 1048576.0;
    LLAMA_LOG_INFO("rcache: %u cells for %u sequences, R %.2f MiB, S %.2f MiB; %u of them for checkpoints, %.2f MiB\n",
        size, n_seq_max, info.r_bytes / 1048576.0, info.s_bytes / 1048576.0, size - mem_size, mib * (size - mem_size) / size);
}
