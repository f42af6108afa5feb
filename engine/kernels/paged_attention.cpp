// Attention of packed query tokens over a paged KV pool, and the writing of their keys and values into it.
//
// Built by engine/kernels/build.py, called through a plain C interface; see the end of the file. No torch headers.
//
// Order of arithmetic. Everything a (token, head) pair goes through depends on its own query and on the keys and values that the token sees only: those at
// positions 0 to its own, or the last `window` of them.
//   - keys are taken in tiles of 64 at positions that are multiples of 64, tile after tile, from the first tile in which the token sees a key;
//   - a score is one chain of fused multiply-adds over the head's elements, in their order;
//   - an output element's share of a tile is one chain of fused multiply-adds over the tile's keys, in their order;
//   - a tile's share is added to what came before by one fused multiply-add with the running rescale factor;
//   - the sum of the weights is kept in 16 lanes and folded once, at the end, as a fixed tree.
// So the bits do not depend on what else is in the batch, on how a prompt was cut into chunks, on the thread count, or on the blocks' places in the pool.
// A key that a token must not see never enters its arithmetic, not even multiplied by zero. No expression below leaves the compiler a choice of which
// product to fuse with which sum.

#include <algorithm>
#include <vector>

#include "lanes.h"

namespace {

constexpr int kTile = 64;     // keys
constexpr int kMaxRows = 32;  // query rows (token, head) that share one pass over the keys, unless one token's heads are more

// One packed batch; the arrays belong to the caller. Mirrored by engine/kernels/native.py.
struct Batch {
  const int32_t* chunk_starts;     // [num_chunks + 1] index of each chunk's first token in the packed batch
  const int32_t* first_positions;  // [num_chunks] position of that token in its sequence
  const int32_t* table_starts;     // [num_chunks] index of each chunk's block table in `tables`
  const int32_t* tables;           // pool block ids
  int32_t num_chunks, block_size, num_layers, num_heads, num_kv_heads, head_dim, num_threads;
};

// How a layer gets from queries and keys to softmax. Mirrored by engine/kernels/native.py.
struct Scores {
  float scale, softcap;  // 0: no cap
  int32_t window;        // keys that a token sees, its own the last; 0: all

  int first_seen(int position) const { return window > 0 ? std::max(0, position - window + 1) : 0; }
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

inline Ints lies_in(int begin, int end) { return (lane_numbers() >= begin) & (lane_numbers() < end); }

// Turns a row's scores into weights relative to the new running maximum; keys outside [begin, end) weigh nothing.
inline void soften(float* scores, int begin, int end, float softcap, float& maximum, float& factor, Floats& weight_sum) {
  const float kMinusInfinity = -__builtin_inff();
  const int num_groups = (end + kLanes - 1) / kLanes;
  Floats masked[kTile / kLanes];
  Floats highest = all(maximum);
  for (int g = 0; g < num_groups; ++g) {
    Floats x = load_as<Floats>(scores + g * kLanes);
    if (softcap > 0.0f) x = tanh_of(x / softcap) * softcap;
    masked[g] = lies_in(begin - g * kLanes, end - g * kLanes) ? x : all(kMinusInfinity);
    highest = Max()(masked[g], highest);
  }
  float next = fold(highest, Max());
  factor = exp_nonpositive(all(maximum - next))[0];
  Floats sum = weight_sum * factor;
  for (int g = 0; g < num_groups; ++g) {
    Floats weight = exp_nonpositive(masked[g] - next);
    weight = lies_in(begin - g * kLanes, end - g * kLanes) ? weight : Floats{};
    Float32::store(scores + g * kLanes, weight);
    sum = sum + weight;
  }
  maximum = next;
  weight_sum = sum;
}

// Asks for a row of the pool: rows lie in scattered blocks, where the hardware's prefetcher loses its way. Into L2, since a tile does not fit L1 twice.
template <typename T>
inline void prefetch(const typename T::Stored* row, int head_dim) {
  for (size_t byte = 0; byte < head_dim * sizeof(*row); byte += 64) __builtin_prefetch(reinterpret_cast<const char*>(row) + byte, 0, 2);
}

// keys[group][element][16] of one tile; meanwhile the next tile's rows are asked for, a few at a time.
template <typename T>
void transpose_keys(const typename T::Stored* const* rows, int num_groups, const typename T::Stored* const* next, int num_next, const Layer<T>& layer,
                    float* keys) {
  const int head_dim = layer.head_dim, num_steps = num_groups * head_dim / kLanes;
  int step = 0, asked = 0;
  for (int g = 0; g < num_groups; ++g) {
    for (int d = 0; d < head_dim; d += kLanes) {
      for (++step; asked < num_next * step / num_steps; ++asked) {
        prefetch<T>(next[asked], head_dim);
        prefetch<T>(next[asked] + layer.value_offset, head_dim);
      }
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
void attend(const Batch& b, const Layer<T>& layer, int c, int begin, int end, int kv_head, const Packed& query, const Packed& out, const Scores& how,
            Scratch& s) {
  typedef typename T::Stored Stored;
  const int group = b.num_heads / b.num_kv_heads, head_dim = b.head_dim, rows = (end - begin) * group;
  const int32_t* table = b.tables + b.table_starts[c];
  const int first = b.first_positions[c] + begin - b.chunk_starts[c], last = b.first_positions[c] + end - 1 - b.chunk_starts[c];
  s.fit(rows, head_dim);
  for (int r = 0; r < rows; ++r) {
    const Stored* q = static_cast<const Stored*>(query.elements) + (begin + r / group) * query.token_stride + (kv_head * group + r % group) * query.head_stride;
    for (int d = 0; d < head_dim; d += kLanes)
      Float32::store(&s.query[size_t(r) * head_dim + d], T::load(q + d) * how.scale);
  }
  const Stored* zeros = reinterpret_cast<const Stored*>(s.zeros.data());
  const int first_key = how.first_seen(first);
  for (int start = first_key / kTile * kTile; start <= last; start += kTile) {
    const int num_keys = std::min(kTile, last + 1 - start), num_groups = (num_keys + kLanes - 1) / kLanes;
    const Stored *keys[kTile], *values[kTile];
    for (int j = 0; j < num_groups * kLanes; ++j) {
      const bool seen = j < num_keys && start + j >= first_key;
      keys[j] = seen ? layer.key(table, start + j, kv_head) : zeros;
      values[j] = seen ? keys[j] + layer.value_offset : zeros;
    }
    const Stored* next_keys[kTile];
    const int num_next = std::max(0, std::min(kTile, last + 1 - start - kTile));
    for (int j = 0; j < num_next; ++j) next_keys[j] = layer.key(table, start + kTile + j, kv_head);
    transpose_keys<T>(keys, num_groups, next_keys, num_next, layer, s.keys.data());
    score_all(rows, s.query.data(), s.keys.data(), s.scores.data(), head_dim, num_groups);
    const bool widen = sizeof(Stored) < sizeof(float) && rows > 4;  // many rows: convert the values once, not once for every four rows
    const float* wide_values[kTile];
    if (widen) widen_values<T>(values, num_keys, head_dim, s.values.data(), wide_values);
    int r = 0;
    while (r < rows) {  // rows that see the same of this tile's keys go together
      const int position = first + r / group;
      const int begin = std::max(0, how.first_seen(position) - start), end = std::min(kTile, position + 1 - start);
      int next = (r / group + 1) * group;
      if (begin == 0 && end == kTile) next = how.window > 0 ? std::min(rows, (start + how.window - first) * group) : rows;
      if (begin < end) {
        for (int i = r; i < next; ++i) soften(&s.scores[size_t(i) * kTile], begin, end, how.softcap, s.maxima[i], s.factors[i], s.weight_sums[i]);
        float *weights = &s.scores[size_t(r) * kTile + begin], *output = &s.output[size_t(r) * head_dim];
        if (widen) weigh_all<Float32>(next - r, weights, wide_values + begin, end - begin, &s.factors[r], output, head_dim);
        else weigh_all<T>(next - r, weights, values + begin, end - begin, &s.factors[r], output, head_dim);
      }
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
void run(const Batch& b, void* pool, int layer_index, const Packed& query, const Packed& key, const Packed& value, const Packed& out, const Scores& how) {
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
      attend<T>(b, layer, item.chunk, item.begin, item.end, i % b.num_kv_heads, query, out, how, scratch);
    }
  }
}

}  // namespace

// Writes the batch's keys and values into the pool ([num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]), then attends.
// dtype: 0 float32, 1 bfloat16, 2 float16, of pool and tensors alike; head_dim is a multiple of 16. Returns 0, or 1 for a dtype it does not know.
extern "C" int tandem_paged_attention(const Batch* batch, void* pool, int32_t layer, int32_t dtype, const Packed* query, const Packed* key,
                                      const Packed* value, const Packed* out, Scores how) {
  switch (dtype) {
    case 0: run<Float32>(*batch, pool, layer, *query, *key, *value, *out, how); return 0;
    case 1: run<BFloat16>(*batch, pool, layer, *query, *key, *value, *out, how); return 0;
    case 2: run<Float16>(*batch, pool, layer, *query, *key, *value, *out, how); return 0;
    default: return 1;
  }
}
