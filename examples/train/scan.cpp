// The scan of model.py, forward and backward, for d_state 16. It walks through time for 16 channels at once, one vector
// lane each, with their states in the first-level cache. For the backward pass it keeps the state before every 32nd step
// only and computes the rest again, as section 3.3.2 of Gu and Dao 2023 does for whole sequences.

#include <torch/extension.h>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int N = 16;      // d_state
constexpr int LANES = 16;  // channels per pass
constexpr int CHUNK = 32;  // time steps between two saved states

// 32 bytes of numbers, a vector register of AVX2; elsewhere the compiler splits it.
template <typename T> struct Vec {
  typedef T type __attribute__((vector_size(32)));
  static constexpr int WIDTH = 32 / sizeof(T), PARTS = LANES / WIDTH;
};

template <typename T> inline typename Vec<T>::type load(const T* from) {
  typename Vec<T>::type v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
template <typename T> inline void store(T* to, typename Vec<T>::type v) { std::memcpy(to, &v, sizeof v); }

// exp of numbers that are not positive. x = k ln 2 + r with |r| <= ln(2)/2; Taylor's series of exp(r) to r^6 is then
// good to 2e-7, and 2^k is k put into the exponent bits.
inline Vec<float>::type exp_lanes(Vec<float>::type x) {
  typedef int32_t Bits __attribute__((vector_size(32)));
  x = x < -87.0f ? Vec<float>::type{} - 87.0f : x;
  const Bits k = __builtin_convertvector(x * 1.44269504f - 0.5f, Bits);  // truncation rounds down to nearest here
  const Vec<float>::type r = x - __builtin_convertvector(k, Vec<float>::type) * 0.693147181f;
  Vec<float>::type sum = r * (1.0f / 720) + 1.0f / 120;
  sum = sum * r + 1.0f / 24;
  sum = sum * r + 1.0f / 6;
  sum = sum * r + 0.5f;
  sum = sum * r + 1.0f;
  sum = sum * r + 1.0f;
  const Bits power = (k + 127) << 23;
  Vec<float>::type scale;
  std::memcpy(&scale, &power, sizeof scale);
  return sum * scale;
}

inline Vec<double>::type exp_lanes(Vec<double>::type x) {
  for (int i = 0; i < Vec<double>::WIDTH; ++i) x[i] = std::exp(x[i]);
  return x;
}

// All pointers of one sequence. u, dt, y and their gradients are [n_time][n_chan], B and C [n_time][N], A, the states
// and their gradients [N][n_chan], marks (the state before every CHUNK-th step) [n_chunks][N][n_chan].
template <typename T> struct Sequence {
  const T *u, *dt, *A, *B, *C, *D;
  T* marks;
  int64_t n_time, n_chan;
};

// The recurrence over steps [t0, t1) for the lanes from c0 on; h is [N][LANES]. Calls after(t, n, part, decay, h) for
// every vector, which is how the backward pass gets at the states and the decay factors.
template <typename T, typename After>
inline void advance(const Sequence<T>& s, int64_t c0, int64_t t0, int64_t t1, typename Vec<T>::type (*h)[Vec<T>::PARTS],
                    T* y, After after) {
  using V = typename Vec<T>::type;
  constexpr int P = Vec<T>::PARTS, W = Vec<T>::WIDTH;
  for (int64_t t = t0; t < t1; ++t) {
    const int64_t at = t * s.n_chan + c0;
    V dt[P], input[P], sum[P];
    for (int p = 0; p < P; ++p) {
      const V u = load(s.u + at + p * W);
      dt[p] = load(s.dt + at + p * W);
      input[p] = dt[p] * u;
      sum[p] = load(s.D + c0 + p * W) * u;
    }
    for (int n = 0; n < N; ++n) {
      const T b = s.B[t * N + n], c = s.C[t * N + n];
      for (int p = 0; p < P; ++p) {
        const V decay = exp_lanes(dt[p] * load(s.A + n * s.n_chan + c0 + p * W));
        h[n][p] = decay * h[n][p] + input[p] * b;
        sum[p] += h[n][p] * c;
        after(t, n, p, decay, h[n][p]);
      }
    }
    if (y)
      for (int p = 0; p < P; ++p) store(y + at + p * W, sum[p]);
  }
}

template <typename T>
void forward_lanes(const Sequence<T>& s, int64_t c0, T* state, T* y) {
  using V = typename Vec<T>::type;
  constexpr int P = Vec<T>::PARTS, W = Vec<T>::WIDTH;
  V h[N][P];
  for (int n = 0; n < N; ++n)
    for (int p = 0; p < P; ++p) h[n][p] = load(state + n * s.n_chan + c0 + p * W);
  for (int64_t t0 = 0; t0 < s.n_time; t0 += CHUNK) {
    T* mark = s.marks + t0 / CHUNK * N * s.n_chan + c0;
    for (int n = 0; n < N; ++n)
      for (int p = 0; p < P; ++p) store(mark + n * s.n_chan + p * W, h[n][p]);
    advance(s, c0, t0, std::min(t0 + CHUNK, s.n_time), h, y, [](int64_t, int, int, V, V) {});
  }
  for (int n = 0; n < N; ++n)
    for (int p = 0; p < P; ++p) store(state + n * s.n_chan + c0 + p * W, h[n][p]);
}

template <typename T> struct Gradients { T *carry, *u, *dt, *A, *B, *C, *D; };

// Chunks of time from the last to the first; within a chunk all channels, LANES at a time. The states of the chunk are
// computed again from its mark and stay in the cache. dB and dC are sums over channels: they are kept as one vector
// for each step and n until the chunk is done.
template <typename T>
void backward_sequence(const Sequence<T>& s, const T* dy, const Gradients<T>& grad) {
  using V = typename Vec<T>::type;
  constexpr int P = Vec<T>::PARTS, W = Vec<T>::WIDTH;
  struct Scratch { V h[CHUNK + 1][N][P], decay[CHUNK][N][P], dB[CHUNK][N], dC[CHUNK][N]; };
  std::vector<V> room(sizeof(Scratch) / sizeof(V));
  Scratch& scratch = *reinterpret_cast<Scratch*>(room.data());
  for (int64_t chunk = (s.n_time - 1) / CHUNK; chunk >= 0; --chunk) {
    const int64_t t0 = chunk * CHUNK, t1 = std::min(t0 + CHUNK, s.n_time);
    std::memset(scratch.dB, 0, sizeof scratch.dB);
    std::memset(scratch.dC, 0, sizeof scratch.dC);
    for (int64_t c0 = 0; c0 < s.n_chan; c0 += LANES) {
      V h[N][P];
      for (int n = 0; n < N; ++n)
        for (int p = 0; p < P; ++p) {
          h[n][p] = load(s.marks + (chunk * N + n) * s.n_chan + c0 + p * W);
          scratch.h[0][n][p] = h[n][p];
        }
      advance(s, c0, t0, t1, h, static_cast<T*>(nullptr), [&](int64_t t, int n, int p, V decay, V state) {
        scratch.decay[t - t0][n][p] = decay;
        scratch.h[t - t0 + 1][n][p] = state;
      });
      for (int64_t t = t1 - 1; t >= t0; --t) {
        const int64_t at = t * s.n_chan + c0, i = t - t0;
        V dt[P], input[P], out[P], from_input[P], from_decay[P];
        for (int p = 0; p < P; ++p) {
          const V u = load(s.u + at + p * W);
          dt[p] = load(s.dt + at + p * W);
          out[p] = load(dy + at + p * W);
          input[p] = dt[p] * u;
          from_input[p] = from_decay[p] = V{};
          store(grad.D + c0 + p * W, load(grad.D + c0 + p * W) + out[p] * u);
        }
        for (int n = 0; n < N; ++n) {
          const T b = s.B[t * N + n], c = s.C[t * N + n];
          V dB = scratch.dB[i][n], dC = scratch.dC[i][n];
          for (int p = 0; p < P; ++p) {
            const int64_t where = n * s.n_chan + c0 + p * W;
            const V g = load(grad.carry + where) + out[p] * c;  // gradient of the state after step t
            const V through = g * scratch.decay[i][n][p];
            const V exponent = through * scratch.h[i][n][p];
            dC += out[p] * scratch.h[i + 1][n][p];
            dB += input[p] * g;
            from_input[p] += g * b;
            from_decay[p] += exponent * load(s.A + where);
            store(grad.A + where, load(grad.A + where) + exponent * dt[p]);
            store(grad.carry + where, through);
          }
          scratch.dB[i][n] = dB;
          scratch.dC[i][n] = dC;
        }
        for (int p = 0; p < P; ++p) {
          const V u = load(s.u + at + p * W);
          store(grad.u + at + p * W, from_input[p] * dt[p] + out[p] * load(s.D + c0 + p * W));
          store(grad.dt + at + p * W, from_input[p] * u + from_decay[p]);
        }
      }
    }
    for (int64_t t = t0; t < t1; ++t)
      for (int n = 0; n < N; ++n) {
        T b = 0, c = 0;
        for (int i = 0; i < W; ++i) b += scratch.dB[t - t0][n][i], c += scratch.dC[t - t0][n][i];
        grad.B[t * N + n] = b;
        grad.C[t * N + n] = c;
      }
  }
}

template <typename T>
Sequence<T> sequence(const std::vector<torch::Tensor>& in, torch::Tensor& marks, int64_t b) {
  const int64_t n_time = in[0].size(1), n_chan = in[0].size(2), wide = b * n_time * n_chan, narrow = b * n_time * N;
  auto data = [&](int i) { return in[i].data_ptr<T>(); };
  return {data(0) + wide, data(1) + wide, data(2), data(3) + narrow, data(4) + narrow, data(5),
          marks.data_ptr<T>() + b * marks.size(1) * N * n_chan, n_time, n_chan};
}

}  // namespace

// in: u, dt, A, B, C, D, h0 with A [N, n_chan] and h0 [n_seq, N, n_chan]. Returns y, the last state, the marks.
std::vector<torch::Tensor> scan_forward(std::vector<torch::Tensor> in) {
  pybind11::gil_scoped_release other_threads_run;
  auto& u = in[0];
  const int64_t n_seq = u.size(0), n_time = u.size(1), n_chan = u.size(2);
  TORCH_CHECK(in[2].size(0) == N && n_chan % LANES == 0,
              "the compiled scan wants d_state 16 and a multiple of 16 channels");
  auto y = torch::empty_like(u), state = in[6].clone();
  auto marks = torch::empty({n_seq, (n_time + CHUNK - 1) / CHUNK, N, n_chan}, u.options());
  AT_DISPATCH_FLOATING_TYPES(u.scalar_type(), "scan_forward", [&] {
    for (int64_t b = 0; b < n_seq; ++b)
      for (int64_t c0 = 0; c0 < n_chan; c0 += LANES)
        forward_lanes<scalar_t>(sequence<scalar_t>(in, marks, b), c0, state.data_ptr<scalar_t>() + b * N * n_chan,
                                y.data_ptr<scalar_t>() + b * n_time * n_chan);
  });
  return {y, state, marks};
}

// Returns the gradients of the seven inputs, in their shapes.
std::vector<torch::Tensor> scan_backward(std::vector<torch::Tensor> in, torch::Tensor marks, torch::Tensor dy,
                                         torch::Tensor dh_last) {
  pybind11::gil_scoped_release other_threads_run;
  auto& u = in[0];
  const int64_t n_seq = u.size(0), n_time = u.size(1), n_chan = u.size(2);
  auto du = torch::empty_like(u), ddt = torch::empty_like(u);
  auto dB = torch::empty_like(in[3]), dC = torch::empty_like(in[4]);
  auto carry = dh_last.clone(), dA = torch::zeros_like(carry), dD = torch::zeros({n_seq, n_chan}, u.options());
  AT_DISPATCH_FLOATING_TYPES(u.scalar_type(), "scan_backward", [&] {
    auto data = [](torch::Tensor& x, int64_t at) { return x.data_ptr<scalar_t>() + at; };
    for (int64_t b = 0; b < n_seq; ++b) {
      const int64_t wide = b * n_time * n_chan, narrow = b * n_time * N, state = b * N * n_chan;
      backward_sequence<scalar_t>(sequence<scalar_t>(in, marks, b), data(dy, wide),
                                  {data(carry, state), data(du, wide), data(ddt, wide), data(dA, state),
                                   data(dB, narrow), data(dC, narrow), data(dD, b * n_chan)});
    }
  });
  return {du, ddt, dA.sum(0), dB, dC, dD.sum(0), carry};
}
