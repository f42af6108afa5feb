// Attention of packed query tokens over a paged KV pool, and the writing of their keys and values into it.
//
// Built by engine/kernels/build.py, called through a plain C interface; see the end of the file. No torch headers.
//
// Order of arithmetic. Everything a (token, head) pair goes through depends on its own query and on the keys and values at positions 0 to p only:
//   - keys are taken in tiles of 64 at positions that are multiples of 64, tile after tile;
//   - a score is one chain of fused multiply-adds over the head's elements, in their order;
//   - an output element's share of a tile is one chain of fused multiply-adds over the tile's keys, in their order;
//   - a tile's share is added to what came before by one fused multiply-add with the running rescale factor;
//   - the sum of the weights is kept in 16 lanes and folded once, at the end, as a fixed tree.
// So the bits do not depend on what else is in the batch, on how a prompt was cut into chunks, on the thread count, or on the blocks' places in the pool.
// A key that a token must not see never enters its arithmetic, not even multiplied by zero. No expression below leaves the compiler a choice of which
// product to fuse with which sum.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

constexpr int kLanes = 16;
constexpr int kTile = 64;     // keys
constexpr int kMaxRows = 32;  // query rows (token, head) that share one pass over the keys, unless one token's heads are more
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

template <typename V, typename P>
inline V load_as(const P* p) {
  V x;
  memcpy(&x, p, sizeof x);
  return x;
}

struct Float32 {
  typedef float Stored;
  static Floats load(const Stored* p) { return load_as<Floats>(p); }
  static void store(Stored* p, Floats x) { memcpy(p, &x, sizeof x); }
};

struct BFloat16 {
  typedef uint16_t Stored;
  static Floats load(const Stored* p) {
    return (Floats)(__builtin_convertvector(load_as<Halves>(p), Words) << 16);
  }
  static void store(Stored* p, Floats x) {  // round to nearest even, NaN stays NaN
    Words bits = (Words)x;
    Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    Words is_nan = (Words)(x != x);
    rounded = (is_nan & 0x7fc0u) | (~is_nan & rounded);
    Halves halves = __builtin_convertvector(rounded, Halves);
    memcpy(p, &halves, sizeof halves);
  }
};

struct Float16 {
  typedef uint16_t Stored;
#if defined(__AVX512F__)
  static Floats load(const Stored* p) { return (Floats)_mm512_maskz_cvtph_ps(0xffff, load_as<__m256i>(p)); }
  static void store(Stored* p, Floats x) {
    __m256i halves = _mm512_maskz_cvtps_ph(0xffff, (__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    memcpy(p, &halves, sizeof halves);
  }
#else
  static Floats load(const Stored* p) {
    Floats x;
    for (int i = 0; i < kLanes; ++i) {
      _Float16 h;
      memcpy(&h, p + i, 2);
      x[i] = (float)h;
    }
    return x;
  }
  static void store(Stored* p, Floats x) {
    for (int i = 0; i < kLanes; ++i) {
      _Float16 h = (_Float16)x[i];
      memcpy(p + i, &h, 2);
    }
  }
#endif
};

inline Floats all(float x) { return Floats{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
inline Ints lane_numbers() { return Ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

// e^x for x <= 0, within 2 ulp, exactly 1 at 0; anything below -87 gives e^-87, NaN stays NaN.
inline Floats exp_nonpositive(Floats x) {
  x = x < -87.0f ? all(-87.0f) : x;
  const Floats shift = all(12582912.0f);  // 1.5 * 2^23: the sum's low bits are the rounded integer
  Floats shifted = x * 1.44269504088896341f + shift;
  Floats n = shifted - shift;
  Floats r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  Floats y = all(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * (r * r) + r + 1.0f;
  Ints exponent = ((Ints)shifted - (Ints)shift + 127) << 23;
  return y * (Floats)exponent;
}

template <typename Op>
inline float fold(Floats x, Op op) {
  typedef float F8 __attribute__((vector_size(32)));
  typedef float F4 __attribute__((vector_size(16)));
  F8 a = op(__builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7), __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15));
  F4 b = op(__builtin_shufflevector(a, a, 0, 1, 2, 3), __builtin_shufflevector(a, a, 4, 5, 6, 7));
  F4 c = op(b, __builtin_shufflevector(b, b, 2, 3, 0, 1));
  F4 d = op(c, __builtin_shufflevector(c, c, 1, 0, 3, 2));
  return d[0];
}
struct Max {
  template <typename V>
  V operator()(V a, V b) const { return a > b ? a : b; }
};
struct Add {
  template <typename V>
  V operator()(V a, V b) const { return a + b; }
};

// Transposes 16 rows of 16 floats.
inline void transpose(Floats (&r)[16]) {
#define EVEN_QUARTERS 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27
#define ODD_QUARTERS 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31
  Floats t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = __builtin_shufflevector(r[i], r[i + 1], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
    t[i + 1] = __builtin_shufflevector(r[i], r[i + 1], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  }
  for (int i = 0; i < 16; i += 4) {
    for (int h = 0; h < 2; ++h) {
      r[i + 2 * h] = __builtin_shufflevector(t[i + h], t[i + 2 + h], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
      r[i + 2 * h + 1] = __builtin_shufflevector(t[i + h], t[i + 2 + h], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    }
  }
  for (int c = 0; c < 4; ++c) {  // r[i + c] holds column 4 g + c of rows i to i + 3 in its quarter g
    Floats top_even = __builtin_shufflevector(r[c], r[c + 4], EVEN_QUARTERS), top_odd = __builtin_shufflevector(r[c], r[c + 4], ODD_QUARTERS);
    Floats low_even = __builtin_shufflevector(r[c + 8], r[c + 12], EVEN_QUARTERS), low_odd = __builtin_shufflevector(r[c + 8], r[c + 12], ODD_QUARTERS);
    t[c] = __builtin_shufflevector(top_even, low_even, EVEN_QUARTERS);
    t[c + 8] = __builtin_shufflevector(top_even, low_even, ODD_QUARTERS);
    t[c + 4] = __builtin_shufflevector(top_odd, low_odd, EVEN_QUARTERS);
    t[c + 12] = __builtin_shufflevector(top_odd, low_odd, ODD_QUARTERS);
  }
  for (int i = 0; i < 16; ++i) r[i] = t[i];
#undef EVEN_QUARTERS
#undef ODD_QUARTERS
}

// One packed batch; the arrays belong to the caller. Mirrored by engine/kernels/native.py.
struct Batch {
  const int32_t* chunk_starts;     // [num_chunks + 1] index of each chunk's first token in the packed batch
  const int32_t* first_positions;  // [num_chunks] position of that token in its sequence
  const int32_t* table_starts;     // [num_chunks] index of each chunk's block table in `tables`
  const int32_t* tables;           // pool block ids
  int32_t num_chunks, block_size, num_layers, num_heads, num_kv_heads, head_dim, num_threads;
};

// A tensor of the packed batch, [tokens, heads, head_dim], by strides in elements; head_dim is contiguous.
struct Packed {
  void* elements;
  int64_t token_stride, head_stride;
};

// Addresses of one layer's keys and values in the pool.
template <typename T>
struct Layer {
  typename T::Stored* pool;
  int64_t block_stride, layer_offset, value_offset, token_stride;
  int32_t block_size, head_dim;

  Layer(const Batch& b, void* memory, int layer)
      : pool(static_cast<typename T::Stored*>(memory)), block_size(b.block_size), head_dim(b.head_dim) {
    token_stride = int64_t(b.num_kv_heads) * b.head_dim;
    value_offset = b.block_size * token_stride;
    block_stride = 2 * value_offset * b.num_layers;
    layer_offset = 2 * value_offset * layer;
  }
  typename T::Stored* key(const int32_t* table, int32_t position, int head) const {
    return pool + table[position / block_size] * block_stride + layer_offset + (position % block_size) * token_stride + int64_t(head) * head_dim;
  }
};

// What one thread needs for one item of work: `rows` query rows against the keys of one KV head.
struct Scratch {
  std::vector<float> query, output, keys, values, scores, zeros;
  std::vector<Floats> weight_sums;
  std::vector<float> maxima, factors;

  void fit(int rows, int head_dim) {
    query.resize(size_t(rows) * head_dim);
    output.assign(size_t(rows) * head_dim, 0.0f);
    keys.resize(size_t(kTile) * head_dim);
    values.resize(size_t(kTile) * head_dim);
    scores.resize(size_t(rows) * kTile);
    zeros.assign(head_dim, 0.0f);
    weight_sums.assign(rows, Floats{});
    maxima.assign(rows, -__builtin_inff());
    factors.resize(rows);
  }
};

// scores[row][key] for kRows rows and kGroups groups of 16 keys; keys are transposed: [group][element][16].
template <int kRows, int kGroups>
inline void score_rows(const float* query, const float* keys, float* scores, int head_dim) {
  Floats sum[kRows][kGroups] = {};
  for (int d = 0; d < head_dim; ++d) {
    for (int g = 0; g < kGroups; ++g) {
      Floats k = load_as<Floats>(keys + (size_t(g) * head_dim + d) * kLanes);
      for (int r = 0; r < kRows; ++r) sum[r][g] += query[r * head_dim + d] * k;
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int g = 0; g < kGroups; ++g) Float32::store(scores + r * kTile + g * kLanes, sum[r][g]);
}

template <int kRows>
inline void score_groups(const float* query, const float* keys, float* scores, int head_dim, int num_groups) {
  if (num_groups == 4) return score_rows<kRows, 4>(query, keys, scores, head_dim);
  for (int g = 0; g < num_groups; ++g) score_rows<kRows, 1>(query, keys + size_t(g) * head_dim * kLanes, scores + g * kLanes, head_dim);
}

// output[row] = output[row] * factor[row] + sum over keys of weight[row][key] * value[key], for kVectors * 16 elements.
template <typename T, int kRows, int kVectors>
inline void weigh_rows(const float* weights, const typename T::Stored* const* values, int num_keys, const float* factors, float* output, int head_dim) {
  Floats sum[kRows][kVectors] = {};
  for (int j = 0; j < num_keys; ++j) {
    for (int v = 0; v < kVectors; ++v) {
      Floats x = T::load(values[j] + v * kLanes);
      for (int r = 0; r < kRows; ++r) sum[r][v] += weights[r * kTile + j] * x;
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      float* o = output + r * head_dim + v * kLanes;
      Float32::store(o, Float32::load(o) * factors[r] + sum[r][v]);
    }
  }
}

template <typename T, int kRows>
inline void weigh(const float* weights, const typename T::Stored* const* values, int num_keys, const float* factors, float* output, int head_dim) {
  const typename T::Stored* shifted[kTile];
  for (int d = 0; d < head_dim; d += 4 * kLanes) {
    for (int j = 0; j < num_keys; ++j) shifted[j] = values[j] + d;
    switch (std::min(4, (head_dim - d) / kLanes)) {
      case 4: weigh_rows<T, kRows, 4>(weights, shifted, num_keys, factors, output + d, head_dim); break;
      case 3: weigh_rows<T, kRows, 3>(weights, shifted, num_keys, factors, output + d, head_dim); break;
      case 2: weigh_rows<T, kRows, 2>(weights, shifted, num_keys, factors, output + d, head_dim); break;
      default: weigh_rows<T, kRows, 1>(weights, shifted, num_keys, factors, output + d, head_dim);
    }
  }
}

template <typename T>
void weigh_all(int rows, const float* weights, const typename T::Stored* const* values, int num_keys, const float* factors, float* output, int head_dim) {
  int r = 0;
  for (; r + 4 <= rows; r += 4) weigh<T, 4>(weights + r * kTile, values, num_keys, factors + r, output + r * head_dim, head_dim);
  switch (rows - r) {
    case 3: weigh<T, 3>(weights + r * kTile, values, num_keys, factors + r, output + r * head_dim, head_dim); break;
    case 2: weigh<T, 2>(weights + r * kTile, values, num_keys, factors + r, output + r * head_dim, head_dim); break;
    case 1: weigh<T, 1>(weights + r * kTile, values, num_keys, factors + r, output + r * head_dim, head_dim);
  }
}

void score_all(int rows, const float* query, const float* keys, float* scores, int head_dim, int num_groups) {
  int r = 0;
  for (; r + 4 <= rows; r += 4) score_groups<4>(query + r * head_dim, keys, scores + r * kTile, head_dim, num_groups);
  switch (rows - r) {
    case 3: score_groups<3>(query + r * head_dim, keys, scores + r * kTile, head_dim, num_groups); break;
    case 2: score_groups<2>(query + r * head_dim, keys, scores + r * kTile, head_dim, num_groups); break;
    case 1: score_groups<1>(query + r * head_dim, keys, scores + r * kTile, head_dim, num_groups);
  }
}

// Turns a row's scores into weights relative to the new running maximum; keys from num_keys on weigh nothing.
inline void soften(float* scores, int num_keys, float& maximum, float& factor, Floats& weight_sum) {
  const float kMinusInfinity = -__builtin_inff();
  const int num_groups = (num_keys + kLanes - 1) / kLanes;
  Floats masked[kTile / kLanes];
  Floats highest = all(maximum);
  for (int g = 0; g < num_groups; ++g) {
    Floats x = load_as<Floats>(scores + g * kLanes);
    masked[g] = lane_numbers() < num_keys - g * kLanes ? x : all(kMinusInfinity);
    highest = Max()(masked[g], highest);
  }
  float next = fold(highest, Max());
  factor = exp_nonpositive(all(maximum - next))[0];
  Floats sum = weight_sum * factor;
  for (int g = 0; g < num_groups; ++g) {
    Floats weight = exp_nonpositive(masked[g] - next);
    weight = lane_numbers() < num_keys - g * kLanes ? weight : Floats{};
    Float32::store(scores + g * kLanes, weight);
    sum = sum + weight;
  }
  maximum = next;
  weight_sum = sum;
}

template <typename T>
void transpose_keys(const typename T::Stored* const* rows, int num_groups, int head_dim, float* keys) {
  for (int g = 0; g < num_groups; ++g) {
    for (int d = 0; d < head_dim; d += kLanes) {
      Floats r[16];
      for (int i = 0; i < 16; ++i) r[i] = T::load(rows[g * kLanes + i] + d);
      transpose(r);
      memcpy(keys + (size_t(g) * head_dim + d) * kLanes, r, sizeof r);
    }
  }
}

template <typename T>
void widen_values(const typename T::Stored* const* values, int num_keys, int head_dim, float* wide, const float** rows) {
  for (int j = 0; j < num_keys; ++j) {
    rows[j] = wide + size_t(j) * head_dim;
    for (int d = 0; d < head_dim; d += kLanes) Float32::store(wide + size_t(j) * head_dim + d, T::load(values[j] + d));
  }
}

// Attention of tokens [begin, end) of chunk c, heads of one KV head.
template <typename T>
void attend(const Batch& b, const Layer<T>& layer, int c, int begin, int end, int kv_head, const Packed& query, const Packed& out, float scale, Scratch& s) {
  typedef typename T::Stored Stored;
  const int group = b.num_heads / b.num_kv_heads, head_dim = b.head_dim, rows = (end - begin) * group;
  const int32_t* table = b.tables + b.table_starts[c];
  const int first = b.first_positions[c] + begin - b.chunk_starts[c], last = b.first_positions[c] + end - 1 - b.chunk_starts[c];
  s.fit(rows, head_dim);
  for (int r = 0; r < rows; ++r) {
    const Stored* q = static_cast<const Stored*>(query.elements) + (begin + r / group) * query.token_stride + (kv_head * group + r % group) * query.head_stride;
    for (int d = 0; d < head_dim; d += kLanes)
      Float32::store(&s.query[size_t(r) * head_dim + d], T::load(q + d) * scale);
  }
  const Stored* zeros = reinterpret_cast<const Stored*>(s.zeros.data());
  for (int start = 0; start <= last; start += kTile) {
    const int num_keys = std::min(kTile, last + 1 - start), num_groups = (num_keys + kLanes - 1) / kLanes;
    const Stored *keys[kTile], *values[kTile];
    for (int j = 0; j < num_groups * kLanes; ++j) {
      keys[j] = j < num_keys ? layer.key(table, start + j, kv_head) : zeros;
      values[j] = j < num_keys ? keys[j] + layer.value_offset : zeros;
    }
    transpose_keys<T>(keys, num_groups, head_dim, s.keys.data());
    score_all(rows, s.query.data(), s.keys.data(), s.scores.data(), head_dim, num_groups);
    const bool widen = sizeof(Stored) < sizeof(float) && rows > 4;  // many rows: convert the values once, not once for every four rows
    const float* wide_values[kTile];
    if (widen) widen_values<T>(values, num_keys, head_dim, s.values.data(), wide_values);
    int r = 0;
    while (r < rows) {  // rows that see the same number of this tile's keys go together
      const int seen = std::min(kTile, first + r / group + 1 - start);
      const int next = seen == kTile ? rows : (r / group + 1) * group;
      for (int i = r; i < next && seen > 0; ++i) soften(&s.scores[size_t(i) * kTile], seen, s.maxima[i], s.factors[i], s.weight_sums[i]);
      float *weights = &s.scores[size_t(r) * kTile], *output = &s.output[size_t(r) * head_dim];
      if (seen > 0 && widen) weigh_all<Float32>(next - r, weights, wide_values, seen, &s.factors[r], output, head_dim);
      if (seen > 0 && !widen) weigh_all<T>(next - r, weights, values, seen, &s.factors[r], output, head_dim);
      r = next;
    }
  }
  for (int r = 0; r < rows; ++r) {
    Stored* o = static_cast<Stored*>(out.elements) + (begin + r / group) * out.token_stride + (kv_head * group + r % group) * out.head_stride;
    const float sum = fold(s.weight_sums[r], Add());
    for (int d = 0; d < head_dim; d += kLanes) T::store(o + d, load_as<Floats>(&s.output[size_t(r) * head_dim + d]) / sum);
  }
}

template <typename T>
void write_keys_and_values(const Batch& b, const Layer<T>& layer, const Packed& key, const Packed& value) {
  typedef typename T::Stored Stored;
  for (int c = 0; c < b.num_chunks; ++c) {
    for (int t = b.chunk_starts[c]; t < b.chunk_starts[c + 1]; ++t) {
      const int position = b.first_positions[c] + t - b.chunk_starts[c];
      for (int h = 0; h < b.num_kv_heads; ++h) {
        Stored* slot = layer.key(b.tables + b.table_starts[c], position, h);
        memcpy(slot, static_cast<const Stored*>(key.elements) + t * key.token_stride + h * key.head_stride, sizeof(Stored) * b.head_dim);
        memcpy(slot + layer.value_offset, static_cast<const Stored*>(value.elements) + t * value.token_stride + h * value.head_stride,
               sizeof(Stored) * b.head_dim);
      }
    }
  }
}

struct Item {
  int chunk, begin, end;
};

template <typename T>
void run(const Batch& b, void* pool, int layer_index, const Packed& query, const Packed& key, const Packed& value, const Packed& out, float scale) {
  const Layer<T> layer(b, pool, layer_index);
  write_keys_and_values(b, layer, key, value);
  const int tokens_per_item = std::max(1, kMaxRows / (b.num_heads / b.num_kv_heads));
  std::vector<Item> items;
  for (int c = 0; c < b.num_chunks; ++c)
    for (int t = b.chunk_starts[c]; t < b.chunk_starts[c + 1]; t += tokens_per_item) items.push_back({c, t, std::min(t + tokens_per_item, b.chunk_starts[c + 1])});
  const int num_items = int(items.size()) * b.num_kv_heads;
#pragma omp parallel num_threads(b.num_threads) if (b.num_threads > 1 && num_items > 1)
  {
    static thread_local Scratch scratch;
#pragma omp for schedule(dynamic, 1)
    for (int i = num_items - 1; i >= 0; --i) {  // a chunk's last tokens see the most keys: start with them
      const Item& item = items[i / b.num_kv_heads];
      attend<T>(b, layer, item.chunk, item.begin, item.end, i % b.num_kv_heads, query, out, scale, scratch);
    }
  }
}

}  // namespace

// Writes the batch's keys and values into the pool ([num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]), then attends.
// dtype: 0 float32, 1 bfloat16, 2 float16, of pool and tensors alike; head_dim is a multiple of 16. Returns 0, or 1 for a dtype it does not know.
extern "C" int tandem_paged_attention(const Batch* batch, void* pool, int32_t layer, int32_t dtype, const Packed* query, const Packed* key,
                                      const Packed* value, const Packed* out, float scale) {
  switch (dtype) {
    case 0: run<Float32>(*batch, pool, layer, *query, *key, *value, *out, scale); return 0;
    case 1: run<BFloat16>(*batch, pool, layer, *query, *key, *value, *out, scale); return 0;
    case 2: run<Float16>(*batch, pool, layer, *query, *key, *value, *out, scale); return 0;
    default: return 1;
  }
}
