/*
 * What differs between the versions of llama.cpp that the adapter is compiled against.
 *
 * Two macros come from the build (headers.py), each when the headers of that version have the member:
 *
 *   RCACHE_LLAMA_HAS_PLE          p_l, a third kind of state row, with size_p_bytes and get_p_l (tensors.cpp)
 *   RCACHE_LLAMA_HAS_STATE_CLEAR  state_clear (state_io.cpp)
 *
 * The definitions of these three members stand with their like, under the macro. All else is here.
 *
 * Of two functions that differ in the last argument, int or long, the first is taken where it compiles: they are called
 * with 0.
 */
#pragma once

#include "llama-batch.h"
#include "llama-hparams.h"
#include "llama-memory-recurrent.h"

#include <cstdint>
#include <utility>
#include <vector>

namespace rcache __attribute__((visibility("hidden"))) {

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

// Versions whose readers of states can forget what they were told to put into tensors.
template <typename Reader> auto can_discard(int) -> decltype(std::declval<Reader &>().discard(), bool()) {
    return true;
}

template <typename Reader> bool can_discard(long) {
    return false;
}

// The length of a row of p_l in a layer, and p_l itself: 0 and nullptr in versions without.
#ifdef RCACHE_LLAMA_HAS_PLE
inline uint32_t n_embd_p_of(const llama_hparams & hparams, uint32_t il) {
    return hparams.ple_conv_state() > 0 && hparams.is_ple(il) ? hparams.ple_conv_state() : 0;
}

inline std::vector<ggml_tensor *> * p_l_of(llama_memory_recurrent & mem) {
    return &mem.p_l;
}

inline const std::vector<ggml_tensor *> * p_l_of(const llama_memory_recurrent & mem) {
    return &mem.p_l;
}
#else
inline uint32_t n_embd_p_of(const llama_hparams &, uint32_t) {
    return 0;
}

inline std::vector<ggml_tensor *> * p_l_of(const llama_memory_recurrent &) {
    return nullptr;
}
#endif

} // namespace rcache
