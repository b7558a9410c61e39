/*
 * Operations on sequences. Each asks the table. seq_rm may roll a sequence back: the table restores a checkpoint and has
 * the tokens from there on replayed, by llama_decode. In place of llama.cpp's:
 *
 *   llama_memory_recurrent::clear                              empties all sequences
 *   llama_memory_recurrent::seq_rm                             removes or rolls back a sequence
 *   llama_memory_recurrent::seq_cp, seq_keep                   forks a sequence; removes all others
 *   llama_memory_recurrent::seq_add, seq_div                   shifts and divides positions
 *   llama_memory_recurrent::seq_pos_min, seq_pos_max           first and last position
 *   llama_memory_recurrent::get_can_shift                      whether positions may be shifted
 *   llama_memory_recurrent::set_rs_idx                         how far a sequence is rolled back by snapshots
 */

#include "adapter.h"

#include <algorithm>
#include <limits>

namespace rcache {

// Without outputs, in batches as large as the context takes.
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

} // namespace rcache

using namespace rcache;

namespace {

// Discards the last slot, and notes which sequences lose their states by that: bystanders in its window too.
void discard(memory_state & state, uint32_t n_seq_max) {
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

// Whether the attention half of a hybrid still has all tokens of a sequence. One with a sliding window forgets the
// beginning, and hosts may have it removed; then a replay would give other states.
bool attention_is_whole(memory_state & state, llama_seq_id seq_id) {
    state.silent = true;
    const llama_pos first = llama_memory_seq_pos_min(llama_get_memory(state.lctx), seq_id);
    state.silent = false;
    return first <= 0;
}

// In a hybrid, positions before the last one were removed or shifted in the attention half only: the state has seen
// tokens that are no longer there, so it cannot be rolled back. The table drops a sequence's lineage when its position
// moves.
void forget_lineage(const rcache_vtable * table, llama_seq_id seq_id, llama_pos last) {
    if (last < std::numeric_limits<llama_pos>::max() - 1) {
        table->seq_add(table->user, seq_id, last, last + 1, 1);
        table->seq_add(table->user, seq_id, last + 1, last + 2, -1);
    }
}

// As forget_lineage, after a shift of [p0, p1) that has left the last position alone.
void forget_if_cut(const memory_state & state, llama_seq_id seq_id, llama_pos p0, llama_pos p1) {
    llama_pos last = -1;
    const auto * table = state.table;
    if (state.hybrid && table->seq_pos_max(table->user, seq_id, &last) == RCACHE_STATUS_OK &&
        p1 >= 0 && p1 <= last && p1 > std::max(p0, 0)) {
        forget_lineage(table, seq_id, last);
    }
}

} // namespace

//
// llama_memory_recurrent
//

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
        // llama_decode removes a ubatch that it could not compute: its rows may be half written. It does so sequence by
        // sequence, and no other decode is possible meanwhile; the first call discards the slot for all
        if (last >= std::max(p0, 0)) {
            discard(state, n_seq_max);
        }
        return p0 > 0 || done(table, "seq_rm", table->seq_rm(table->user, seq_id, p0, p1));
    }
    const bool rollback = p0 > 0 && (last < 0 || p0 <= last - (llama_pos) n_rs_seq);
    const bool one = seq_id >= 0 && (uint32_t) seq_id < n_seq_max;
    if (rollback && one && state.hybrid && state.lctx && !attention_is_whole(state, seq_id)) {
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

void llama_memory_recurrent::set_rs_idx(llama_seq_id seq_id, uint32_t idx) {
    // the table counts its own rollbacks; the member is for whoever else reads it
    if (seq_id < 0) {
        std::fill(rs_idx.begin(), rs_idx.end(), 0);
    } else if ((size_t) seq_id < rs_idx.size()) {
        rs_idx[seq_id] = idx;
    }
}
