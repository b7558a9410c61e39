/*
 * Batches: how one becomes ubatches, and where each of these goes. In place of llama.cpp's:
 *
 *   llama_memory_recurrent::init_batch    splits a batch and asks the table for slots
 *   llama_memory_recurrent::init_full     the context for the largest graph
 *   llama_memory_recurrent::init_update   never an update; notes the memory's llama_context
 *   llama_memory_recurrent::prepare       whether all ubatches have a slot
 *   llama_memory_recurrent::find_slot     the slot of the next ubatch, with its cells taken
 *   llama_memory_recurrent_context        one decode under way: its ubatches, and what the graph asks of the slot
 *                                         (get_r_l, get_s_l, get_p_l and get_size: tensors.cpp)
 *
 * A batch is split as llama.cpp's own code splits it, with two exceptions for models without attention: ubatches need not
 * hold consecutive sequence ids, and the last token of a prompt gets a ubatch of its own, so that there is a checkpoint
 * before it.
 */

#include "adapter.h"
#include "versions.h"

#include "llama-batch.h"

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <utility>

using namespace rcache;

namespace {

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

// Without the rule of consecutive ids, sets that overlap in part could be decoded in another order than the batch's.
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
// failed in the attention half that one. When such a sequence starts at position 0, the other half's rest is removed.
// (After seq_keep llama.cpp's attention half holds what it should have forgotten; that is left as it is.)
void drop_left_over(memory_state & state, const std::vector<llama_ubatch> & ubatches) {
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

// Whether the batch is the end of a prompt of one sequence, whose last tokens are to have a ubatch of their own.
bool is_prompt(const llama_batch_allocr & balloc, const memory_state & state) {
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

} // namespace

//
// llama_memory_recurrent
//

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

int32_t llama_memory_recurrent_context::s_copy(int i) const {
    const auto * table = state_of(*mem).table;
    return table->s_copy(table->user, i);
}
