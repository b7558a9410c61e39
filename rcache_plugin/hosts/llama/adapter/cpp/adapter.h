/*
 * What the adapter's files share. Its namespace has hidden visibility, so that the shared object exports none of it: a
 * name that libllama has too would replace libllama's own.
 */
#pragma once

#include "llama-memory-recurrent.h"

#include "rcache_plugin.h"

#include <cstdint>
#include <set>
#include <string>
#include <vector>

namespace rcache __attribute__((visibility("hidden"))) {

// What belongs to one memory object beyond llama.cpp's own members.
struct memory_state {
    const rcache_vtable *  table       = nullptr;
    uint32_t               n_rs_full   = 0;       // rows that the largest graph is reserved for
    bool                   consecutive = true;    // a ubatch holds consecutive sequence ids
    bool                   hybrid      = false;   // the recurrent half of a memory that has an attention half too
    bool                   failed      = false;   // the last refusal was an error, not a lack of room
    llama_context *        lctx        = nullptr; // known from its first decode on
    uint32_t               n_batches   = 0;       // batches under way
    uint32_t               tail        = 0;       // tokens at the end of a prompt that get a ubatch of their own
    uint32_t               tail_from   = 0;       // in prompts of at least so many tokens
    std::set<llama_seq_id> broken;                // sequences that a failed step has emptied in our half only
    bool                   silent      = false;   // seq_pos_min answers -1: a hybrid memory then answers for the other half

    ~memory_state() {
        if (table) {
            table->destroy(table->user);
        }
    }
};

// construct.cpp

memory_state & state_of(const llama_memory_recurrent & mem);

// The text of the table's last error.
std::string last_error(const rcache_vtable * table);

// Whether the call succeeded. An error is reported; a refusal is the caller's business.
bool done(const rcache_vtable * table, const char * what, int32_t status);

// sequences.cpp

// A callback for rcache_vtable.set_replay; `data` is the llama_memory_recurrent.
int32_t replay(void * data, int32_t seq_id, int32_t pos0, const int32_t * tokens, uint32_t n_tokens);

// tensors.cpp

// The tensors that `get` gives for layers 0 to n_layer - 1; null where a layer has none. Throws if it fails.
std::vector<ggml_tensor *> tensors_of(
    const rcache_vtable * table, int32_t (*get)(void * user, int32_t il, void ** tensor), uint32_t n_layer);

} // namespace rcache
