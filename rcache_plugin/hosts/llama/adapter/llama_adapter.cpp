/*
 * llama.cpp's class for recurrent states, answered by a cache of this package.
 *
 * The shared object made from this file is loaded before libllama. It defines every member of `llama_memory_recurrent`
 * and of its context, so the dynamic linker binds libllama's own calls to them here. It is compiled against the internal
 * headers of that very libllama; its object layout is therefore libllama's, and must stay so: the destructor of the
 * hybrid memories is inlined there. All that is ours hangs on one empty backend buffer, which sits in the class's list
 * of buffers and is freed with the object, whoever destroys it.
 *
 * Nothing is decided here. A batch is split as llama.cpp's own code splits it (or, for models without attention,
 * without the rule of consecutive sequence ids, and with the last token of a prompt by itself, so that there is a
 * state of just before it), then the table is asked. When the table has tokens read again, that is a llama_decode.
 *
 * Macros from the build, each when that version of the headers has the member: RCACHE_LLAMA_HAS_PLE (p_l),
 * RCACHE_LLAMA_HAS_STATE_CLEAR.
 */

#include "llama-memory-recurrent.h"

#include "ggml-backend-impl.h"
#include "ggml-backend.h"
#include "llama-batch.h"
#include "llama-impl.h"
#include "llama-io.h"
#include "llama-model.h"

#include "rcache_plugin.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <fstream>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

namespace {

const rcache_factory * g_factory     = nullptr;
int32_t                g_consecutive = 1;
uint32_t               g_tail        = 0;
uint32_t               g_tail_from   = 0;

// What belongs to one memory object beyond llama.cpp's own members.
struct rcache_state {
    const rcache_vtable * table       = nullptr;
    uint32_t              n_rs_full   = 0;    // rows that the largest graph is reserved for
    bool                  consecutive = true; // a ubatch holds consecutive sequence ids
    bool                  hybrid      = false; // the recurrent half of a memory that has an attention half too
    bool                  failed      = false; // the last refusal was an error, not a lack of room
    llama_context *       lctx        = nullptr; // known from its first decode on
    uint32_t              n_batches   = 0;     // batches under way
    uint32_t              tail        = 0;     // tokens at the end of a prompt that get a ubatch of their own
    uint32_t              tail_from   = 0;     // in prompts of at least so many tokens
    std::set<llama_seq_id> broken;             // sequences that a failed step has emptied in our half only
    bool                  silent      = false; // seq_pos_min tells nothing, so that a hybrid memory tells the other half's

    ~rcache_state() {
        if (table) {
            table->destroy(table->user);
        }
    }
};

// The buffers are private; an explicit instantiation may name them all the same ([temp.explicit]/12).
using buffers_member = std::vector<std::pair<ggml_context_ptr, ggml_backend_buffer_ptr>> llama_memory_recurrent::*;

template <buffers_member member> struct expose_buffers {
    friend buffers_member member_of_buffers() {
        return member;
    }
};

buffers_member member_of_buffers();
template struct expose_buffers<&llama_memory_recurrent::ctxs_bufs>;

rcache_state & state_of(const llama_memory_recurrent & mem) {
    return *static_cast<rcache_state *>((mem.*member_of_buffers()).front().second->context);
}

void free_state(ggml_backend_buffer_t buffer) {
    delete static_cast<rcache_state *>(buffer->context);
}

std::string last_error(const rcache_vtable * table) {
    std::string text(table->last_error(table->user, nullptr, 0) + 1, '\0');
    table->last_error(table->user, &text[0], (uint32_t) text.size());
    text.pop_back();
    return text;
}

// Whether the call succeeded. An error is reported; a refusal is the caller's business.
bool done(const rcache_vtable * table, const char * what, int32_t status) {
    if (status < 0) {
        LLAMA_LOG_ERROR("rcache: %s: %s (status %d)\n", what,
            status == RCACHE_STATUS_CLOSED ? "the cache is closed" : last_error(table).c_str(), status);
    }
    return status == RCACHE_STATUS_OK;
}

// A view of llama.cpp's ubatch as the table wants it.
struct ubatch_view {
    std::vector<int32_t>         n_seq_id;
    std::vector<const int32_t *> seq_id;
    rcache_ubatch                c;

    explicit ubatch_view(const llama_ubatch & ubatch) : n_seq_id(ubatch.n_seqs), seq_id(ubatch.n_seqs), c() {
        for (uint32_t s = 0; s < ubatch.n_seqs; ++s) {
            n_seq_id[s] = ubatch.n_seq_id[s * ubatch.n_seq_tokens];
            seq_id[s]   = ubatch.seq_id[s * ubatch.n_seq_tokens];
        }
        c.struct_size  = sizeof(c);
        c.n_seqs       = ubatch.n_seqs;
        c.n_seq_tokens = ubatch.n_seq_tokens;
        c.n_seq_id     = n_seq_id.data();
        c.seq_id       = seq_id.data();
        c.pos          = ubatch.pos; // the first n_tokens are the positions in the sequence, also where there are more
        c.token        = ubatch.token;
    }

    ubatch_view(const ubatch_view &) = delete;
};

// Earlier versions have no third argument.
template <typename Allocr>
auto split_equal(Allocr & balloc, uint32_t n_ubatch, bool sequential, uint32_t n_keep_tail, int)
        -> decltype(balloc.split_equal(n_ubatch, sequential, n_keep_tail)) {
    return balloc.split_equal(n_ubatch, sequential, n_keep_tail);
}

template <typename Allocr>
auto split_equal(Allocr & balloc, uint32_t n_ubatch, bool sequential, uint32_t, long)
        -> decltype(balloc.split_equal(n_ubatch, sequential)) {
    return balloc.split_equal(n_ubatch, sequential);
}

// A field in earlier versions, a function in later ones.
template <typename Hparams> auto n_layer_of(const Hparams & hparams, int) -> decltype(hparams.n_layer()) {
    return hparams.n_layer();
}

template <typename Hparams> uint32_t n_layer_of(const Hparams & hparams, long) {
    return hparams.n_layer;
}

// Without the rule of consecutive ids, sets that overlap in part could be read in another order than the batch's.
bool in_order(const std::vector<llama_ubatch> & ubatches) {
    std::map<llama_seq_id, llama_pos> last;
    for (const auto & ubatch : ubatches) {
        for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
            for (int32_t j = 0; j < ubatch.n_seq_id[i]; ++j) {
                const auto found = last.emplace(ubatch.seq_id[i][j], -1).first;
                if (ubatch.pos[i] < found->second) {
                    return false;
                }
                found->second = ubatch.pos[i];
            }
        }
    }
    return true;
}

// A hybrid memory takes a sequence as empty when one half is: after a step that failed ours is, after a restore that
// failed in the attention half that one. When such a sequence starts at position 0, what the other half still holds goes.
// (After seq_keep llama.cpp's attention half holds what it should have forgotten; that is left as it is.)
void drop_left_over(rcache_state & state, const std::vector<llama_ubatch> & ubatches) {
    std::set<llama_seq_id> seen;
    llama_memory_t memory = llama_get_memory(state.lctx);
    for (const auto & ubatch : ubatches) {
        for (uint32_t s = 0; s < ubatch.n_seqs; ++s) {
            const uint32_t i = s * ubatch.n_seq_tokens;
            for (int32_t j = 0; j < ubatch.n_seq_id[i]; ++j) {
                const llama_seq_id seq_id = ubatch.seq_id[i][j];
                if (!seen.insert(seq_id).second || ubatch.pos[i] != 0 || llama_memory_seq_pos_max(memory, seq_id) >= 0) {
                    continue;
                }
                if (state.broken.erase(seq_id) > 0) {
                    llama_memory_seq_rm(memory, seq_id, -1, -1);
                } else {
                    state.table->seq_rm(state.table->user, seq_id, -1, -1);
                }
            }
        }
    }
}

// Versions whose readers can forget what they were told to put into tensors.
template <typename Reader> auto can_discard(int) -> decltype(std::declval<Reader &>().discard(), bool()) {
    return true;
}

template <typename Reader> bool can_discard(long) {
    return false;
}

// Whether rows are put into tensors only after a restore that has succeeded: the readers of memory and of what is on the
// device wait, that of files does not. No header declares them, so they are known by name; another one counts as not
// waiting, which costs a copy.
bool rows_wait(const llama_io_read_i & io) {
    const std::string name = typeid(io).name();
    const auto is = [&](const char * what) { return name.find(what) != std::string::npos; };
    return can_discard<llama_io_read_i>(0) && (is("llama_io_read_host") || is("llama_io_read_device"));
}

// Bytes of state in the file that this thread is restoring from; < 0: it is no file.
thread_local int64_t g_file_bytes = -1;

// llama.cpp's reader of files does not fail at their end: it gives whatever was in its memory before. So the end is looked
// for here.
void check_file_end(llama_io_read_i & io, uint64_t n_bytes) {
    if (g_file_bytes >= 0 && io.n_bytes() + n_bytes > (uint64_t) g_file_bytes) {
        throw std::runtime_error("the file ends after " + std::to_string(g_file_bytes) + " bytes of the state");
    }
}

// llama.cpp's streams as the table's. An exception of theirs waits here until the call has returned.
template <typename Stream> struct io_bridge {
    Stream &           stream;
    std::exception_ptr thrown;
    rcache_io          c;

    explicit io_bridge(Stream & stream) : stream(stream), c() {
        c.struct_size = sizeof(c);
        c.user        = this;
    }

    template <typename Call> static int32_t guarded(void * user, Call && call) {
        auto & self = *static_cast<io_bridge *>(user);
        try {
            call(self.stream);
            return RCACHE_STATUS_OK;
        } catch (...) {
            self.thrown = std::current_exception();
            return RCACHE_STATUS_IO;
        }
    }
};

int32_t io_write(void * user, const void * src, uint64_t n_bytes) {
    return io_bridge<llama_io_write_i>::guarded(user, [&](llama_io_write_i & io) { io.write(src, n_bytes); });
}

int32_t io_write_tensor(void * user, void * tensor, uint64_t offset, uint64_t n_bytes) {
    return io_bridge<llama_io_write_i>::guarded(user, [&](llama_io_write_i & io) {
        io.write_tensor(static_cast<ggml_tensor *>(tensor), offset, n_bytes);
    });
}

int32_t io_read(void * user, void * dst, uint64_t n_bytes) {
    return io_bridge<llama_io_read_i>::guarded(user, [&](llama_io_read_i & io) {
        check_file_end(io, n_bytes);
        io.read(dst, n_bytes);
    });
}

int32_t io_read_tensor(void * user, void * tensor, uint64_t offset, uint64_t n_bytes) {
    return io_bridge<llama_io_read_i>::guarded(user, [&](llama_io_read_i & io) {
        check_file_end(io, n_bytes);
        io.read_tensor(static_cast<ggml_tensor *>(tensor), offset, n_bytes);
    });
}

size_t sum_bytes(const std::vector<ggml_tensor *> & tensors) {
    size_t sum = 0;
    for (const auto * tensor : tensors) {
        sum += tensor ? ggml_nbytes(tensor) : 0;
    }
    return sum;
}

const std::vector<ggml_tensor *> & ple_tensors(const llama_memory_recurrent & mem) {
#ifdef RCACHE_LLAMA_HAS_PLE
    return mem.p_l;
#else
    static const std::vector<ggml_tensor *> none;
    (void) mem;
    return none;
#endif
}

std::map<ggml_backend_buffer_type_t, size_t> bytes_by_type(const llama_memory_recurrent & mem) {
    std::map<ggml_backend_buffer_t, size_t> buffers;
    for (const auto * tensors : { &mem.r_l, &mem.s_l, &ple_tensors(mem) }) {
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

// Whether the batch is the end of a prompt of one sequence, whose last tokens are to have a ubatch of their own.
bool is_prompt(const llama_batch_allocr & balloc, const rcache_state & state) {
    if (state.tail == 0 || balloc.get_n_tokens() < std::max(state.tail_from, state.tail + 1)) {
        return false;
    }
    if (state.lctx && balloc.get_n_tokens() == llama_n_batch(state.lctx)) {
        return false; // a piece of a longer prompt, most likely
    }
    const auto & batch = balloc.get_batch();
    for (int32_t i = 0; i < batch.n_tokens; ++i) {
        if (batch.n_seq_id[i] != 1 || batch.seq_id[i][0] != batch.seq_id[0][0]) {
            return false;
        }
    }
    return true;
}

// The table's wish to have tokens read again. No outputs, in batches as large as the context takes.
int32_t replay(void * data, int32_t seq_id, int32_t pos0, const int32_t * tokens, uint32_t n_tokens) {
    auto & state = state_of(*static_cast<llama_memory_recurrent *>(data));
    if (!state.lctx || state.n_batches > 0) {
        return RCACHE_STATUS_REFUSED; // inside a decode there can be no other
    }
    if (state.hybrid && !llama_memory_seq_rm(llama_get_memory(state.lctx), seq_id, pos0, -1)) {
        return RCACHE_STATUS_REFUSED; // what the attention half holds from there on would be there twice
    }
    const uint32_t most = std::min(n_tokens, llama_n_batch(state.lctx));
    llama_batch batch = llama_batch_init((int32_t) most, 0, 1);
    int32_t status = 0;
    for (uint32_t first = 0; first < n_tokens && status == 0; first += most) {
        batch.n_tokens = (int32_t) std::min(most, n_tokens - first);
        for (int32_t i = 0; i < batch.n_tokens; ++i) {
            batch.token[i]     = tokens[first + i];
            batch.pos[i]       = pos0 + (llama_pos) first + i;
            batch.n_seq_id[i]  = 1;
            batch.seq_id[i][0] = seq_id;
            batch.logits[i]    = 0;
        }
        status = llama_decode(state.lctx, batch);
    }
    llama_batch_free(batch);
    if (status != 0) {
        state.broken.insert(seq_id);
    }
    return status == 0 ? RCACHE_STATUS_OK : RCACHE_STATUS_BACKEND;
}

// Gives up the last slot, and notes which sequences are empty by that: bystanders in its window too.
void discard(rcache_state & state, uint32_t n_seq_max) {
    const auto * table = state.table;
    std::vector<llama_pos> before(n_seq_max, -1), after(n_seq_max, -1);
    const auto positions = [&](std::vector<llama_pos> & last) {
        for (uint32_t s = 0; s < n_seq_max; ++s) {
            table->seq_pos_max(table->user, (int32_t) s, &last[s]);
        }
    };
    positions(before);
    done(table, "discard_slot", table->discard_slot(table->user));
    positions(after);
    for (uint32_t s = 0; s < n_seq_max; ++s) {
        if (before[s] >= 0 && after[s] < 0) {
            state.broken.insert((llama_seq_id) s);
        }
    }
}

// Whether the attention half of a hybrid still has all that a sequence has read. One with a sliding window forgets the
// beginning, and hosts may have it removed; then nothing can be read again as it was.
bool attention_is_whole(rcache_state & state, llama_seq_id seq_id) {
    state.silent = true;
    const llama_pos first = llama_memory_seq_pos_min(llama_get_memory(state.lctx), seq_id);
    state.silent = false;
    return first <= 0;
}

// In a hybrid, positions before the last one were removed or shifted in the attention half only: the state has read
// tokens that are no longer there, so there is no way back. The table forgets a sequence's past when its position moves.
void forget_past(const rcache_vtable * table, llama_seq_id seq_id, llama_pos last) {
    if (last < std::numeric_limits<llama_pos>::max() - 1) {
        table->seq_add(table->user, seq_id, last, last + 1, 1);
        table->seq_add(table->user, seq_id, last + 1, last + 2, -1);
    }
}

// As forget_past, after a shift of [p0, p1) that has left the last position alone.
void forget_if_cut(const rcache_state & state, llama_seq_id seq_id, llama_pos p0, llama_pos p1) {
    llama_pos last = -1;
    const auto * table = state.table;
    if (state.hybrid && table->seq_pos_max(table->user, seq_id, &last) == RCACHE_STATUS_OK &&
        p1 >= 0 && p1 <= last && p1 > std::max(p0, 0)) {
        forget_past(table, seq_id, last);
    }
}

[[noreturn]] void unused(const char * what) {
    throw std::logic_error(std::string(what) + " is a part of llama.cpp's own state code, which this cache replaces");
}

} // namespace

//
// what Python calls
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
// restores of hybrid memories
//
// A restore that fails in one half leaves the other as it may be, and some of llama.cpp's hybrid memories keep an attention
// half that was restored already; what is decoded next would attend to it. So the two functions through which every restore
// goes are taken over, under their own (mangled) names, for this one thing: after a failure that may have changed something
// the sequence, or everything, is removed from both halves. The two that restore from files tell them where the file ends.
// Where libllama has no functions of these names, nothing changes.
//

#define RCACHE_READ_ALL "_ZN13llama_context15state_read_dataER15llama_io_read_i"
#define RCACHE_READ_SEQ "_ZN13llama_context19state_seq_read_dataER15llama_io_read_iij"
#define RCACHE_LOAD_ALL "_ZN13llama_context15state_load_fileEPKcPimPm"
#define RCACHE_LOAD_SEQ "_ZN13llama_context19state_seq_load_fileEiPKcPimPm"

namespace {

using read_all_t = size_t (*)(llama_context *, llama_io_read_i &);
using read_seq_t = size_t (*)(llama_context *, llama_io_read_i &, llama_seq_id, llama_state_seq_flags);
using load_all_t = bool (*)(llama_context *, const char *, llama_token *, size_t, size_t *);
using load_seq_t = size_t (*)(llama_context *, llama_seq_id, const char *, llama_token *, size_t, size_t *);

// libllama's own function of that name; `caller` is an address in libllama.
void * original(const char * name, void * caller) {
    Dl_info info = {};
    void *  lib  = dladdr(caller, &info) ? dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD) : nullptr;
    void *  own  = lib ? dlsym(lib, name) : nullptr;
    if (!own) {
        throw std::runtime_error(std::string("rcache: libllama's own ") + name + " was not found");
    }
    return own;
}

// The name of the class of a hybrid memory; empty for any other.
std::string hybrid_name(llama_memory_t memory) {
    const std::string name = memory ? typeid(*memory).name() : "";
    return name.find("llama_memory_hybrid") == std::string::npos ? "" : name;
}

// While inside, this thread restores from the file at `path`: three numbers, tokens, the state.
struct from_file {
    explicit from_file(const char * path) {
        std::ifstream file(path, std::ios::binary | std::ios::ate);
        const int64_t size    = file.tellg();
        uint32_t      head[3] = {};
        file.seekg(0);
        if (file.read(reinterpret_cast<char *>(head), sizeof(head))) {
            g_file_bytes = std::max<int64_t>(0, size - (int64_t) sizeof(head) - 4 * (int64_t) head[2]);
        }
    }

    ~from_file() {
        g_file_bytes = -1;
    }
};

// Whether this was thrown before anything had changed. Texts that are not known (any more) count as no.
bool is_early(const std::exception & error) {
    return std::strncmp(error.what(), "wrong model arch", 16) == 0 || std::strcmp(error.what(), "n_stream mismatch") == 0;
}

} // namespace

extern "C" {

__attribute__((visibility("default"))) size_t rcache_read_all(llama_context *, llama_io_read_i &) __asm__(RCACHE_READ_ALL);
__attribute__((visibility("default"))) size_t rcache_read_seq(
    llama_context *, llama_io_read_i &, llama_seq_id, llama_state_seq_flags) __asm__(RCACHE_READ_SEQ);

__attribute__((visibility("default"))) bool rcache_load_all(
    llama_context *, const char *, llama_token *, size_t, size_t *) __asm__(RCACHE_LOAD_ALL);
__attribute__((visibility("default"))) size_t rcache_load_seq(
    llama_context *, llama_seq_id, const char *, llama_token *, size_t, size_t *) __asm__(RCACHE_LOAD_SEQ);

bool rcache_load_all(llama_context * ctx, const char * path, llama_token * tokens, size_t n_max, size_t * n_tokens) {
    static const auto load = (load_all_t) original(RCACHE_LOAD_ALL, __builtin_return_address(0));
    const from_file   inside(path);
    return load(ctx, path, tokens, n_max, n_tokens);
}

size_t rcache_load_seq(
    llama_context * ctx, llama_seq_id seq_id, const char * path, llama_token * tokens, size_t n_max, size_t * n_tokens) {
    static const auto load = (load_seq_t) original(RCACHE_LOAD_SEQ, __builtin_return_address(0));
    const from_file   inside(path);
    return load(ctx, seq_id, path, tokens, n_max, n_tokens);
}

size_t rcache_read_all(llama_context * ctx, llama_io_read_i & io) {
    static const auto read = (read_all_t) original(RCACHE_READ_ALL, __builtin_return_address(0));
    try {
        const size_t n_read = read(ctx, io);
        if (!hybrid_name(llama_get_memory(ctx)).empty()) {
            check_file_end(io, 0);
        }
        return n_read;
    } catch (const std::exception & error) {
        llama_memory_t memory = llama_get_memory(ctx);
        if (!hybrid_name(memory).empty() && !is_early(error)) {
            llama_memory_clear(memory, true);
        }
        throw;
    }
}

size_t rcache_read_seq(llama_context * ctx, llama_io_read_i & io, llama_seq_id seq_id, llama_state_seq_flags flags) {
    static const auto read = (read_seq_t) original(RCACHE_READ_SEQ, __builtin_return_address(0));
    if (!hybrid_name(llama_get_memory(ctx)).empty() && (seq_id < -1 || seq_id >= (llama_seq_id) llama_n_seq_max(ctx))) {
        throw std::runtime_error("seq_id " + std::to_string(seq_id) + " is none of this context"); // llama.cpp would abort
    }
    try {
        const size_t n_read = read(ctx, io, seq_id, flags);
        if (!hybrid_name(llama_get_memory(ctx)).empty()) {
            check_file_end(io, 0);
        }
        return n_read;
    } catch (const std::exception & error) {
        llama_memory_t    memory  = llama_get_memory(ctx);
        const std::string name    = hybrid_name(memory);
        const bool        partial = flags & LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY;
        // the partial state of one with two kinds of attention holds the smaller one, of others no attention at all
        if (!name.empty() && !is_early(error) && (!partial || name.find("iswa") != std::string::npos)) {
            if (seq_id < 0) {
                llama_memory_clear(memory, true);
            } else {
                llama_memory_seq_rm(memory, seq_id, -1, -1);
            }
        }
        throw;
    }
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
    const uint32_t n_layer = n_layer_of(hparams, 0);
    std::vector<uint32_t> n_embd_r(n_layer, 0), n_embd_s(n_layer, 0), n_embd_p(n_layer, 0);
    std::vector<void *>   bufts(n_layer, nullptr);
    for (uint32_t il = 0; il < n_layer; ++il) {
        if (filter && !filter(il)) {
            continue;
        }
        n_embd_r[il] = hparams.n_embd_r();
        n_embd_s[il] = hparams.n_embd_s();
#ifdef RCACHE_LLAMA_HAS_PLE
        if (hparams.ple_conv_state() > 0 && hparams.is_ple(il)) {
            n_embd_p[il] = hparams.ple_conv_state();
        }
#endif
        bufts[il] = offload ? ggml_backend_dev_buffer_type(model.dev_layer(il)) : ggml_backend_cpu_buffer_type();
    }
    const bool has_p = std::any_of(n_embd_p.begin(), n_embd_p.end(), [](uint32_t n) { return n > 0; });

    rcache_spec spec = {};
    spec.abi_version = RCACHE_ABI_VERSION;
    spec.struct_size = sizeof(spec);
    spec.n_cells     = mem_size;
    spec.n_seq_max   = n_seq_max;
    spec.n_layer     = n_layer;
    spec.type_r      = type_r;
    spec.type_s      = type_s;
    spec.placement   = RCACHE_PLACEMENT_CLASSIC;
    spec.n_embd_r    = n_embd_r.data();
    spec.n_embd_s    = n_embd_s.data();
    spec.n_embd_p    = has_p ? n_embd_p.data() : nullptr;
    spec.buft        = bufts.data();
    spec.n_rs_seq    = n_rs_seq;
    spec.flags       = filter ? RCACHE_SPEC_HYBRID : 0;

    auto state = std::make_unique<rcache_state>();
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

    const auto tensors = [&](int32_t (*get)(void *, int32_t, void **)) {
        std::vector<ggml_tensor *> found(n_layer, nullptr);
        for (uint32_t il = 0; il < n_layer; ++il) {
            void * tensor = nullptr;
            if (get(table->user, (int32_t) il, &tensor) != RCACHE_STATUS_OK) {
                throw std::runtime_error("rcache: " + last_error(table));
            }
            found[il] = static_cast<ggml_tensor *>(tensor);
        }
        return found;
    };
    r_l = tensors(table->r_tensor);
    s_l = tensors(table->s_tensor);
#ifdef RCACHE_LLAMA_HAS_PLE
    p_l = tensors(table->p_tensor);
#endif
    table->set_replay(table->user, replay, this);
    const double mib = (info.r_bytes + info.s_bytes) / 1048576.0;
    LLAMA_LOG_INFO("rcache: %u cells for %u sequences, R %.2f MiB, S %.2f MiB; %u of them for checkpoints, %.2f MiB\n",
        size, n_seq_max, info.r_bytes / 1048576.0, info.s_bytes / 1048576.0, size - mem_size, mib * (size - mem_size) / size);
}

llama_memory_context_ptr llama_memory_recurrent::init_batch(llama_batch_allocr & balloc, uint32_t n_ubatch, bool embd_all) {
    auto & state = state_of(*this);
    std::vector<llama_ubatch> ubatches;
    const uint32_t tail = embd_all || !is_prompt(balloc, state) ? 0 : state.tail;
    balloc.split_reset();
    for (;;) {
        const uint32_t left = balloc.get_n_tokens() - balloc.get_n_used();
        const uint32_t most = tail > 0 && left > tail && left <= n_ubatch ? left - tail : n_ubatch;
        auto ubatch = embd_all ? balloc.split_seq(n_ubatch)
                               : split_equal(balloc, most, state.consecutive, n_rs_seq > 0 ? n_rs_seq + 1 : 0, 0);
        if (ubatch.n_tokens == 0) {
            break;
        }
        ubatches.push_back(std::move(ubatch));
    }
    if (balloc.get_n_used() == balloc.get_n_tokens() && (state.consecutive || in_order(ubatches)) && prepare(ubatches)) {
        return std::make_unique<llama_memory_recurrent_context>(this, std::move(ubatches));
    }
    return std::make_unique<llama_memory_recurrent_context>(
        state.failed ? LLAMA_MEMORY_STATUS_FAILED_COMPUTE : LLAMA_MEMORY_STATUS_FAILED_PREPARE);
}

llama_memory_context_ptr llama_memory_recurrent::init_full() {
    return std::make_unique<llama_memory_recurrent_context>(this);
}

llama_memory_context_ptr llama_memory_recurrent::init_update(llama_context * lctx, bool) {
    state_of(*this).lctx = lctx;
    return std::make_unique<llama_memory_recurrent_context>(LLAMA_MEMORY_STATUS_NO_UPDATE);
}

bool llama_memory_recurrent::prepare(const std::vector<llama_ubatch> & ubatches) {
    auto & state = state_of(*this);
    if (state.hybrid && state.lctx) {
        drop_left_over(state, ubatches);
    }
    std::vector<std::unique_ptr<ubatch_view>> views;
    std::vector<rcache_ubatch>                all;
    for (const auto & ubatch : ubatches) {
        views.push_back(std::make_unique<ubatch_view>(ubatch));
        all.push_back(views.back()->c);
    }
    const int32_t status = state.table->prepare(state.table->user, all.data(), (uint32_t) all.size());
    state.failed = status < 0;
    return done(state.table, "prepare", status);
}

bool llama_memory_recurrent::find_slot(const llama_ubatch & ubatch) {
    auto & state = state_of(*this);
    const ubatch_view view(ubatch);
    rcache_slot slot = {};
    slot.struct_size = sizeof(slot);
    if (!done(state.table, "find_slot", state.table->find_slot(state.table->user, &view.c, &slot))) {
        return false;
    }
    head = slot.head;
    n    = slot.n;
    rs_z = slot.rs_z;
    return true;
}

void llama_memory_recurrent::clear(bool data) {
    const auto * table = state_of(*this).table;
    done(table, "clear", table->clear(table->user, data));
    head = 0;
}

bool llama_memory_recurrent::seq_rm(llama_seq_id seq_id, llama_pos p0, llama_pos p1) {
    auto & state = state_of(*this);
    const auto * table = state.table;
    llama_pos last = -1;
    if (seq_id >= 0 && (p1 >= 0 || state.n_batches > 0 || state.hybrid)) {
        table->seq_pos_max(table->user, seq_id, &last);
    }
    if (p1 >= 0 && p1 <= last) {
        // llama.cpp takes a range that ends before the last position as one that the state need not forget, which is
        // what makes a context shift possible
        forget_if_cut(state, seq_id, p0, p1);
        return true;
    }
    if (state.n_batches > 0) {
        // llama_decode takes back a ubatch that it could not compute: its rows may be half written. It does so sequence by
        // sequence, and no other decode is possible meanwhile; the first call is for all
        if (last >= std::max(p0, 0)) {
            discard(state, n_seq_max);
        }
        return p0 > 0 || done(table, "seq_rm", table->seq_rm(table->user, seq_id, p0, p1));
    }
    const bool back = p0 > 0 && (last < 0 || p0 <= last - (llama_pos) n_rs_seq);
    const bool one = seq_id >= 0 && (uint32_t) seq_id < n_seq_max;
    if (back && one && state.hybrid && state.lctx && !attention_is_whole(state, seq_id)) {
        return false;
    }
    return done(table, "seq_rm", table->seq_rm(table->user, seq_id, p0, p1));
}

void llama_memory_recurrent::seq_cp(llama_seq_id seq_id_src, llama_seq_id seq_id_dst, llama_pos p0, llama_pos p1) {
    const auto * table = state_of(*this).table;
    done(table, "seq_cp", table->seq_cp(table->user, seq_id_src, seq_id_dst, p0, p1));
}

void llama_memory_recurrent::seq_keep(llama_seq_id seq_id) {
    const auto * table = state_of(*this).table;
    done(table, "seq_keep", table->seq_keep(table->user, seq_id));
}

void llama_memory_recurrent::seq_add(llama_seq_id seq_id, llama_pos p0, llama_pos p1, llama_pos shift) {
    const auto & state = state_of(*this);
    if (done(state.table, "seq_add", state.table->seq_add(state.table->user, seq_id, p0, p1, shift)) && shift != 0) {
        forget_if_cut(state, seq_id, p0, p1);
    }
}

void llama_memory_recurrent::seq_div(llama_seq_id seq_id, llama_pos p0, llama_pos p1, int d) {
    const auto & state = state_of(*this);
    if (done(state.table, "seq_div", state.table->seq_div(state.table->user, seq_id, p0, p1, d)) && d != 1) {
        forget_if_cut(state, seq_id, p0, p1);
    }
}

llama_pos llama_memory_recurrent::seq_pos_min(llama_seq_id seq_id) const {
    const auto & state = state_of(*this);
    llama_pos pos = -1;
    if (state.silent) {
        return pos;
    }
    done(state.table, "seq_pos_min", state.table->seq_pos_min(state.table->user, seq_id, &pos));
    return pos;
}

llama_pos llama_memory_recurrent::seq_pos_max(llama_seq_id seq_id) const {
    const auto * table = state_of(*this).table;
    llama_pos pos = -1;
    done(table, "seq_pos_max", table->seq_pos_max(table->user, seq_id, &pos));
    return pos;
}

bool llama_memory_recurrent::get_can_shift() const {
    const auto * table = state_of(*this).table;
    return table->get_can_shift(table->user) == 1;
}

std::map<ggml_backend_buffer_type_t, size_t> llama_memory_recurrent::memory_breakdown() const {
    return bytes_by_type(*this);
}

void llama_memory_recurrent::set_rs_idx(llama_seq_id seq_id, uint32_t idx) {
    // the table counts its own rollbacks; this one is kept for whoever reads the member
    if (seq_id < 0) {
        std::fill(rs_idx.begin(), rs_idx.end(), 0);
    } else if ((size_t) seq_id < rs_idx.size()) {
        rs_idx[seq_id] = idx;
    }
}

void llama_memory_recurrent::state_write(llama_io_write_i & io, llama_seq_id seq_id, llama_state_seq_flags flags) const {
    const auto * table = state_of(*this).table;
    io_bridge<llama_io_write_i> bridge(io);
    bridge.c.write        = io_write;
    bridge.c.write_tensor = io_write_tensor;
    const int32_t status = table->state_write(table->user, &bridge.c, seq_id, flags);
    if (bridge.thrown) {
        std::rethrow_exception(bridge.thrown);
    }
    if (status != RCACHE_STATUS_OK) {
        throw std::runtime_error("rcache: state_write: " + last_error(table));
    }
}

void llama_memory_recurrent::state_read(llama_io_read_i & io, llama_seq_id seq_id, llama_state_seq_flags flags) {
    const auto & state = state_of(*this);
    const auto * table = state.table;
    io_bridge<llama_io_read_i> bridge(io);
    bridge.c.read        = io_read;
    bridge.c.read_tensor = io_read_tensor;
    bridge.c.flags       = rows_wait(io) ? RCACHE_IO_ROWS_WAIT : 0;
    const int32_t status = table->state_read(table->user, &bridge.c, seq_id, flags);
    if (status != RCACHE_STATUS_OK && state.hybrid && !(flags & LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)) {
        // our half is what it was, but llama.cpp clears the attention half, which it has restored already
        if (seq_id < 0) {
            table->clear(table->user, 1);
        } else {
            table->seq_rm(table->user, seq_id, -1, -1);
        }
    }
    if (bridge.thrown) {
        std::rethrow_exception(bridge.thrown);
    }
    if (status != RCACHE_STATUS_OK) {
        throw std::runtime_error("rcache: state_read: " + last_error(table));
    }
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

// Private steps of llama.cpp's own state_write and state_read. They are defined because the class must be whole: were one
// missing, libllama's would be bound in its place.

void llama_memory_recurrent::state_write_meta(llama_io_write_i &, const std::vector<std::pair<uint32_t, uint32_t>> &, llama_seq_id) const {
    unused("state_write_meta");
}

void llama_memory_recurrent::state_write_data(llama_io_write_i &, const std::vector<std::pair<uint32_t, uint32_t>> &) const {
    unused("state_write_data");
}

bool llama_memory_recurrent::state_read_meta(llama_io_read_i &, uint32_t, llama_seq_id) {
    unused("state_read_meta");
}

bool llama_memory_recurrent::state_read_data(llama_io_read_i &, uint32_t) {
    unused("state_read_data");
}

#ifdef RCACHE_LLAMA_HAS_STATE_CLEAR
void llama_memory_recurrent::state_clear(llama_seq_id, uint32_t, uint32_t) {
    unused("state_clear");
}
#endif

//
// llama_memory_recurrent_context
//

llama_memory_recurrent_context::llama_memory_recurrent_context(llama_memory_status status) : status(status), mem(nullptr) {}

llama_memory_recurrent_context::llama_memory_recurrent_context(llama_memory_recurrent * mem) :
    status(LLAMA_MEMORY_STATUS_SUCCESS), mem(mem), is_full(true) {}

llama_memory_recurrent_context::llama_memory_recurrent_context(
    llama_memory_recurrent * mem, std::vector<llama_ubatch> ubatches) :
    status(LLAMA_MEMORY_STATUS_SUCCESS), mem(mem), ubatches(std::move(ubatches)) {
    ++state_of(*mem).n_batches;
}

llama_memory_recurrent_context::~llama_memory_recurrent_context() {
    if (mem && !is_full) {
        --state_of(*mem).n_batches;
    }
}

bool llama_memory_recurrent_context::next() {
    return ++i_next < ubatches.size();
}

bool llama_memory_recurrent_context::apply() {
    // without ubatches it is an update, and a state never needs one
    return i_next >= ubatches.size() || mem->find_slot(ubatches[i_next]);
}

llama_memory_status llama_memory_recurrent_context::get_status() const {
    return status;
}

const llama_ubatch & llama_memory_recurrent_context::get_ubatch() const {
    return ubatches[i_next];
}

uint32_t llama_memory_recurrent_context::get_n_rs() const {
    return is_full ? state_of(*mem).n_rs_full : mem->n;
}

uint32_t llama_memory_recurrent_context::get_head() const {
    return is_full ? 0 : mem->head;
}

int32_t llama_memory_recurrent_context::get_rs_z() const {
    return is_full ? 0 : mem->rs_z;
}

uint32_t llama_memory_recurrent_context::get_size() const {
    return mem->size;
}

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

int32_t llama_memory_recurrent_context::s_copy(int i) const {
    const auto * table = state_of(*mem).table;
    return table->s_copy(table->user, i);
}
