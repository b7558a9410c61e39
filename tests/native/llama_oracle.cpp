/*
 * For tests: looks into llama.cpp's own class, in a process where nothing replaces it. Compiled against that version's
 * internal headers; refers to libllama's symbols, so it is loaded after libllama.
 */

#include "llama-memory-hybrid.h"
#include "llama-memory-recurrent.h"

#include "llama.h"

#include <chrono>
#include <cstdint>
#include <vector>

namespace {

// llama.cpp's ubatch over arrays of ours; the ids of a set stand at its first token, where the class looks for them.
struct ubatch_over {
    std::vector<llama_pos>      pos;
    std::vector<int32_t>        n_seq_id;
    std::vector<llama_seq_id>   ids;
    std::vector<llama_seq_id *> seq_id;
    llama_ubatch                ubatch = {};

    ubatch_over(int32_t n_seqs, int32_t n_seq_tokens, const int32_t * counts, const int32_t * flat, const int32_t * positions) :
        pos(positions, positions + n_seqs * n_seq_tokens), n_seq_id(pos.size()), seq_id(pos.size()) {
        int32_t n_ids = 0;
        for (int32_t s = 0; s < n_seqs; ++s) {
            n_ids += counts[s];
        }
        ids.assign(flat, flat + n_ids);
        for (int32_t s = 0, at = 0; s < n_seqs; at += counts[s++]) {
            for (int32_t j = 0; j < n_seq_tokens; ++j) {
                n_seq_id[s * n_seq_tokens + j] = counts[s];
                seq_id[s * n_seq_tokens + j]   = ids.data() + at;
            }
        }
        ubatch.b_equal_seqs = 1;
        ubatch.n_tokens     = (uint32_t) pos.size();
        ubatch.n_seq_tokens = n_seq_tokens;
        ubatch.n_seqs       = n_seqs;
        ubatch.n_seqs_unq   = n_ids;
        ubatch.n_pos        = 1;
        ubatch.pos          = pos.data();
        ubatch.n_seq_id     = n_seq_id.data();
        ubatch.seq_id       = seq_id.data();
    }
};

} // namespace

extern "C" {

// The recurrent memory of a context, alone or half of a hybrid one; NULL: neither.
void * oracle_memory(llama_context * ctx) {
    llama_memory_i * memory = llama_get_memory(ctx);
    if (auto * recurrent = dynamic_cast<llama_memory_recurrent *>(memory)) {
        return recurrent;
    }
    if (auto * hybrid = dynamic_cast<llama_memory_hybrid *>(memory)) {
        return hybrid->get_mem_recr();
    }
    return nullptr;
}

int32_t oracle_find_slot(void * memory, int32_t n_seqs, int32_t n_seq_tokens, const int32_t * n_seq_id, const int32_t * ids,
                         const int32_t * pos) {
    const ubatch_over over(n_seqs, n_seq_tokens, n_seq_id, ids, pos);
    return static_cast<llama_memory_recurrent *>(memory)->find_slot(over.ubatch);
}

// Nanoseconds of one find_slot: the mean of n_calls, from position first_pos on.
double oracle_time_find_slot(void * memory, int32_t n_seqs, int32_t n_calls, int32_t first_pos) {
    std::vector<int32_t> counts(n_seqs, 1), ids(n_seqs), pos(n_seqs);
    for (int32_t s = 0; s < n_seqs; ++s) {
        ids[s] = s;
    }
    ubatch_over over(n_seqs, 1, counts.data(), ids.data(), pos.data());
    auto * recurrent = static_cast<llama_memory_recurrent *>(memory);
    const auto start = std::chrono::steady_clock::now();
    for (int32_t i = 0; i < n_calls; ++i) {
        for (auto & p : over.pos) {
            p = first_pos + i;
        }
        recurrent->find_slot(over.ubatch);
    }
    return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count() / n_calls;
}

// head, n, used, rs_z, size, then of each cell: pos, src, src0, tail, number of ids, ids. Returns the numbers written, or
// the negative of those needed.
int32_t oracle_fields(void * memory, int32_t * out, int32_t room) {
    const auto & m = *static_cast<llama_memory_recurrent *>(memory);
    std::vector<int32_t> all = { (int32_t) m.head, (int32_t) m.n, (int32_t) m.used, m.rs_z, (int32_t) m.size };
    for (const auto & cell : m.cells) {
        all.insert(all.end(), { cell.pos, cell.src, cell.src0, cell.tail, (int32_t) cell.seq_id.size() });
        all.insert(all.end(), cell.seq_id.begin(), cell.seq_id.end());
    }
    if ((int32_t) all.size() > room) {
        return -(int32_t) all.size();
    }
    std::copy(all.begin(), all.end(), out);
    return (int32_t) all.size();
}

}
