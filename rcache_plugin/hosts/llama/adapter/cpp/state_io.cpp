/*
 * States written to and read from llama.cpp's streams. In place of llama.cpp's:
 *
 *   llama_memory_recurrent::state_write, state_read            the table writes and reads; its format is llama.cpp's
 *   llama_memory_recurrent::state_write_meta, state_write_data,
 *                           state_read_meta, state_read_data,
 *                           state_clear                        never called. They are defined because the class must be
 *                                                              whole: were one missing, libllama's would be bound in its
 *                                                              place
 *   llama_context::state_read_data, state_seq_read_data        clean up both halves of a hybrid memory after a failure
 *   llama_context::state_load_file, state_seq_load_file        tell these two where the file ends
 *
 * The four of llama_context call libllama's own. state_clear exists in versions with RCACHE_LLAMA_HAS_STATE_CLEAR only.
 */

#include "adapter.h"
#include "versions.h"

#include "ggml-backend.h"
#include "llama-io.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <fstream>
#include <stdexcept>
#include <typeinfo>
#include <utility>

using namespace rcache;

namespace {

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

[[noreturn]] void unused(const char * what) {
    throw std::logic_error(std::string(what) + " is a part of llama.cpp's own state code, which this cache replaces");
}

} // namespace

//
// llama_memory_recurrent
//

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
// llama_context: restores of hybrid memories
//
// A restore that fails in one half leaves the other as it may be, and some of llama.cpp's hybrid memories keep an attention
// half that was restored already; what is decoded next would attend to it. So the two functions of every restore
// are taken over, under their own (mangled) names, for this one thing: after a failure that may have changed something
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
