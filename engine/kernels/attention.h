// Attention of packed query tokens over a paged KV pool, and the writing of their keys and values into it.
//
// Order of arithmetic. Everything a (token, head) pair goes through depends on its own query and on the keys and values that the token sees only: those at
// positions 0 to its own, or the last `window` of them.
//   - keys are taken in tiles of 64 at positions that are multiples of 64, tile after tile, from the first tile in which the token sees a key;
//   - a score is one chain over the head's elements, in their order, as linear.h says: by pairs in bfloat16, singly else;
//   - an output element's share of a tile is one such chain over the tile's keys, in their order, their weights in the activations' type;
//   - a tile's share is added to what came before by one fused multiply-add with the running rescale factor;
//   - the sum of the weights is kept in 16 lanes and folded once, at the end, as a fixed tree.
// So the bits do not depend on what else is in the batch, on how a prompt was cut into chunks, on the thread count, or on the blocks' places in the pool.
// A score that a token must not see is not looked at, and its key weighs nothing. In bfloat16 a key that shares a pair with one that is seen is multiplied by
// zero, so that values there must be finite or the token's result is NaN; pairs never span blocks of an even size.
// No expression below leaves the compiler a choice of which product to fuse with which sum.

#pragma once

#include <algorithm>
#include <vector>

#include "linear.h"

namespace {

constexpr int kTile = 64;          // keys
constexpr int kMaxQueryRows = 32;  // query rows (token, head) that share one pass over the keys, unless one token's heads are more
constexpr int kQueryRows = 4;      // of them at a time
constexpr int kItemsPerThread = 4; // at the least, for whole items

// One packed batch; the arrays belong to the caller. Mirrored by engine/kernels/native.py.
struct Batch {
  const int32_t* chunk_starts;     // [num_chunks + 1] index of each chunk's first token in the packed batch
  const int32_t* first_positions;  // [num_chunks] position of that token in its sequence
  const int32_t* table_starts;     // [num_chunks] index of each chunk's block table in `tables`
  const int32_t* tables;           // pool block ids
  int32_t num_chunks, block_size, num_layers, num_heads, num_kv_heads, head_dim;
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
struct KvLayer {
  typename T::Stored* pool;
  int64_t block_stride, layer_offset, value_offset, token_stride;
  int32_t block_size, head_dim;

  KvLayer(const Batch& b, void* memory, int layer)
      : pool(static_cast<typename T::Stored*>(memory)), block_size(b.block_size), head_dim(b.head_dim) {
    token_stride = int64_t(b.num_kv_heads) * b.head_dim;
    value_offset = b.block_size * token_stride;
    block_stride = 2 * value_offset * b.num_layers;
    layer_offset = 2 * value_offset * layer;
  }
  typename T::Stored* key(const int32_t* table, int32_t position, int head) const {
    return pool + table[position / block_size] * block_stride + layer_offset + (position % block_size) * token_stride + int64_t(head) * head_dim;
  }

  // Keys of `count` positions from `first` on.
  void find_keys(const int32_t* table, int32_t first, int count, int head, const typename T::Stored** keys) const {
    int block = first / block_size, offset = first % block_size;
    for (int j = 0; j < count; ++block, offset = 0) {
      const typename T::Stored* at = pool + table[block] * block_stride + layer_offset + offset * token_stride + int64_t(head) * head_dim;
      for (; offset < block_size && j < count; ++offset, ++j, at += token_stride) keys[j] = at;
    }
  }
};

// What one thread needs for one item of work: `rows` query rows, against the keys of one KV head at a time.
template <typename T>
struct Scratch {
  typedef typename Product<T>::Activation Activation;
  static constexpr int kInputs = Product<T>::kInputs;
  std::vector<Activation> query, weights, keys, values;
  std::vector<float> output, scores, zeros;
  std::vector<Floats> weight_sums;
  std::vector<float> maxima, factors;

  void fit(int rows, int head_dim) {
    query.resize(size_t(rows) * head_dim);
    weights.resize(size_t(rows) * kTile);
    keys.resize(size_t(kTile) * head_dim);
    values.resize(size_t(kTile) * head_dim);
    output.assign(size_t(rows) * head_dim, 0.0f);
    scores.resize(size_t(rows) * kTile);
    zeros.assign(head_dim, 0.0f);
    weight_sums.assign(rows, Floats{});
    maxima.assign(rows, -__builtin_inff());
    factors.resize(rows);
  }
};

// The next tile's rows in the pool, asked for a few at a time while this tile is computed, so that memory is never idle: they lie in scattered blocks, where
// the hardware's prefetcher loses its way. Into L2, since a tile does not fit L1 twice.
template <typename T>
struct Ahead {
  const typename T::Stored* rows[2 * kTile];  // keys, then values
  int num_rows, num_bytes, num_steps;
  int step = 0, asked = 0;

  void take_step() {
    for (++step; asked < num_rows * step / num_steps; ++asked) {
      const char* p = reinterpret_cast<const char*>(rows[asked]);
      for (const char* end = p + num_bytes; p < end; p += kLine) __builtin_prefetch(p, 0, 2);
    }
  }
};

// 16 words of a key, where a word is what one step of a chain takes.
template <typename T>
inline Floats load_words(const typename T::Stored* p, int) { return T::load(p); }
template <>
inline Floats load_words<BFloat16>(const uint16_t* p, int num_words) {
  if (num_words >= kLanes) return load_as<Floats>(p);
  Floats words = {};
  memcpy(&words, p, sizeof words / 2);
  return words;
}

// keys[group of 16 keys][word][16] of one tile.
template <typename T>
void transpose_keys(const typename T::Stored* const* rows, int num_groups, int head_dim, Ahead<T>& ahead, typename Product<T>::Activation* keys) {
  constexpr int kInputs = Product<T>::kInputs;
  const int num_words = head_dim / kInputs;
  for (int g = 0; g < num_groups; ++g) {
    for (int w = 0; w < num_words; w += kLanes) {
      ahead.take_step();
      Floats r[16];
      for (int i = 0; i < 16; ++i) r[i] = load_words<T>(rows[g * kLanes + i] + w * kInputs, num_words - w);
      transpose(r);
      auto* to = keys + (size_t(g) * num_words + w) * kLanes * kInputs;
      if (num_words - w >= kLanes) memcpy(to, r, sizeof r);
      else memcpy(to, r, sizeof r / 2);
    }
  }
}

// values[step of a chain][element][kInputs] of one tile's first keys, from `values` that are zeros beyond the last.
template <typename T>
inline void arrange_values(const typename T::Stored* const* values, int num_keys, int head_dim, float* arranged) {
  for (int j = 0; j < num_keys; ++j)
    for (int d = 0; d < head_dim; d += kLanes) Float32::store(arranged + size_t(j) * head_dim + d, T::load(values[j] + d));
}
typedef uint16_t Pairs __attribute__((vector_size(64)));
inline void arrange_pairs(const uint16_t* const* values, int num_keys, int head_dim, uint16_t* arranged) {
  for (int j = 0; j < num_keys; j += 2, arranged += 2 * head_dim) {
    int d = 0;
    for (; d + 2 * kLanes <= head_dim; d += 2 * kLanes) {
      const Pairs a = load_as<Pairs>(values[j] + d), b = load_as<Pairs>(values[j + 1] + d);
      const Pairs low = __builtin_shufflevector(a, b, 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14,
                                                46, 15, 47);
      const Pairs high = __builtin_shufflevector(a, b, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60,
                                                 29, 61, 30, 62, 31, 63);
      memcpy(arranged + 2 * d, &low, sizeof low);
      memcpy(arranged + 2 * d + 2 * kLanes, &high, sizeof high);
    }
    if (d < head_dim) {
      const Words first = __builtin_convertvector(load_as<Halves>(values[j] + d), Words), second = __builtin_convertvector(load_as<Halves>(values[j + 1] + d), Words);
      const Words pairs = first | (second << 16);
      memcpy(arranged + 2 * d, &pairs, sizeof pairs);
    }
  }
}
template <typename T>
inline void arrange(const typename T::Stored* const* values, int num_keys, int head_dim, float* arranged) { arrange_values<T>(values, num_keys, head_dim, arranged); }
template <typename T>
inline void arrange(const uint16_t* const* values, int num_keys, int head_dim, uint16_t* arranged) { arrange_pairs(values, num_keys, head_dim, arranged); }

// scores[row][key] of kCount rows and kGroups groups of 16 keys.
template <typename T, int kCount, int kGroups>
inline void score_rows(const typename Product<T>::Activation* query, const typename Product<T>::Activation* keys, float* scores, int head_dim) {
  typedef Product<T> P;
  typedef Product<typename P::Scalar> Q;
  const int num_words = head_dim / P::kInputs;
  Floats sum[kCount][kGroups] = {};
  for (int w = 0; w < num_words; ++w) {
    for (int g = 0; g < kGroups; ++g) {
      const auto k = Q::load(keys + (size_t(g) * num_words + w) * kLanes * P::kInputs);
      for (int r = 0; r < kCount; ++r) sum[r][g] = Q::step(sum[r][g], query + r * head_dim + w * P::kInputs, k);
    }
  }
  for (int r = 0; r < kCount; ++r)
    for (int g = 0; g < kGroups; ++g) Float32::store(scores + r * kTile + g * kLanes, sum[r][g]);
}

template <typename T, int kCount>
inline void score_groups(const typename Product<T>::Activation* query, const typename Product<T>::Activation* keys, float* scores, int head_dim, int num_groups) {
  if (num_groups == 4) return score_rows<T, kCount, 4>(query, keys, scores, head_dim);
  for (int g = 0; g < num_groups; ++g) score_rows<T, kCount, 1>(query, keys + size_t(g) * head_dim * kLanes, scores + g * kLanes, head_dim);
}

// output[row] = output[row] * factor[row] + sum over the arranged keys of weight[row][key] * value[key], for kCount vectors of 16 elements.
template <typename T, int kCount, int kWide>
inline void weigh_rows(const typename Product<T>::Activation* weights, const typename Product<T>::Activation* values, int begin, int end, const float* factors,
                       float* output, int head_dim) {
  typedef Product<T> P;
  typedef Product<typename P::Scalar> Q;
  Floats sum[kCount][kWide] = {};
  for (int j = begin; j < end; j += P::kInputs) {
    for (int v = 0; v < kWide; ++v) {
      const auto x = Q::load(values + size_t(j) * head_dim + v * kLanes * P::kInputs);
      for (int r = 0; r < kCount; ++r) sum[r][v] = Q::step(sum[r][v], weights + r * kTile + j, x);
    }
  }
  for (int r = 0; r < kCount; ++r) {
    for (int v = 0; v < kWide; ++v) {
      float* o = output + r * head_dim + v * kLanes;
      Float32::store(o, Float32::load(o) * factors[r] + sum[r][v]);
    }
  }
}

template <typename T, int kCount>
inline void weigh(const typename Product<T>::Activation* weights, const typename Product<T>::Activation* values, int begin, int end, const float* factors,
                  float* output, int head_dim) {
  for (int d = 0; d < head_dim; d += 4 * kLanes) {
    const auto* from = values + d * Product<T>::kInputs;
    switch (std::min(4, (head_dim - d) / kLanes)) {
      case 4: weigh_rows<T, kCount, 4>(weights, from, begin, end, factors, output + d, head_dim); break;
      case 3: weigh_rows<T, kCount, 3>(weights, from, begin, end, factors, output + d, head_dim); break;
      case 2: weigh_rows<T, kCount, 2>(weights, from, begin, end, factors, output + d, head_dim); break;
      default: weigh_rows<T, kCount, 1>(weights, from, begin, end, factors, output + d, head_dim);
    }
  }
}

template <typename T>
void weigh_all(int rows, const typename Product<T>::Activation* weights, const typename Product<T>::Activation* values, int begin, int end,
               const float* factors, float* output, int head_dim) {
  for (int r = 0; r < rows; r += kQueryRows) {
    const auto* w = weights + r * kTile;
    float* o = output + r * head_dim;
    switch (std::min(kQueryRows, rows - r)) {
      case 4: weigh<T, 4>(w, values, begin, end, factors + r, o, head_dim); break;
      case 3: weigh<T, 3>(w, values, begin, end, factors + r, o, head_dim); break;
      case 2: weigh<T, 2>(w, values, begin, end, factors + r, o, head_dim); break;
      default: weigh<T, 1>(w, values, begin, end, factors + r, o, head_dim);
    }
  }
}

template <typename T>
void score_all(int rows, const typename Product<T>::Activation* query, const typename Product<T>::Activation* keys, float* scores, int head_dim, int num_groups) {
  for (int r = 0; r < rows; r += kQueryRows) {
    const auto* q = query + r * head_dim;
    float* s = scores + r * kTile;
    switch (std::min(kQueryRows, rows - r)) {
      case 4: score_groups<T, 4>(q, keys, s, head_dim, num_groups); break;
      case 3: score_groups<T, 3>(q, keys, s, head_dim, num_groups); break;
      case 2: score_groups<T, 2>(q, keys, s, head_dim, num_groups); break;
      default: score_groups<T, 1>(q, keys, s, head_dim, num_groups);
    }
  }
}

inline Ints lies_in(int begin, int end) { return (lane_numbers() >= begin) & (lane_numbers() < end); }

// Turns a row's scores into weights relative to the new running maximum; keys outside [begin, end) weigh nothing. `num_keys` weights are written.
template <typename T>
inline void soften(const float* scores, typename Product<T>::Activation* weights, int begin, int end, int num_keys, const Scores& how, float& maximum,
                   float& factor, Floats& weight_sum) {
  const float kMinusInfinity = -__builtin_inff();
  const int num_groups = (num_keys + kLanes - 1) / kLanes;
  Floats masked[kTile / kLanes];
  Floats highest = all(maximum);
  for (int g = 0; g < num_groups; ++g) {
    Floats x = load_as<Floats>(scores + g * kLanes) * how.scale;
    if (how.softcap > 0.0f) x = tanh_of(x / how.softcap) * how.softcap;
    masked[g] = lies_in(begin - g * kLanes, end - g * kLanes) ? x : all(kMinusInfinity);
    highest = Max()(masked[g], highest);
  }
  const float next = fold(highest, Max());
  factor = maximum == next ? 1.0f : exp_nonpositive(all(maximum - next))[0];
  Floats sum = weight_sum * factor;
  for (int g = 0; g < num_groups; ++g) {
    Floats weight = exp_nonpositive(masked[g] - next);
    weight = lies_in(begin - g * kLanes, end - g * kLanes) ? weight : Floats{};
    Product<T>::store(weights + g * kLanes, weight);
    sum = sum + weight;
  }
  maximum = next;
  weight_sum = sum;
}

// Tokens [begin, end) of a chunk, and some KV heads: what one thread takes at a time.
struct Item {
  int chunk, begin, end, first_head, num_heads;
};

// Attention of one item. Q is the type of queries and outputs. Rows of scratch: [KV head of the item][token][query head of the KV head].
template <typename T, typename Q>
class Attending {
  typedef typename T::Stored Stored;
  typedef typename Q::Stored Queries;

 public:
  Attending(const Batch& b, const KvLayer<T>& layer, const Item& item, const Scores& how, Scratch<T>& s)
      : layer_(layer), item_(item), how_(how), s_(s), table_(b.tables + b.table_starts[item.chunk]), group_(b.num_heads / b.num_kv_heads),
        head_dim_(b.head_dim), rows_((item.end - item.begin) * group_), first_(b.first_positions[item.chunk] + item.begin - b.chunk_starts[item.chunk]),
        last_(first_ + item.end - item.begin - 1), first_key_(how.first_seen(first_)) {
    s.fit(rows_ * item.num_heads, head_dim_);
  }

  void run(const Packed& query, const Packed& out) {
    each_row([&](int row, int token, int head) {
      const Queries* q = static_cast<const Queries*>(query.elements) + token * query.token_stride + head * query.head_stride;
      for (int d = 0; d < head_dim_; d += kLanes) Product<T>::store(&s_.query[size_t(row) * head_dim_ + d], Q::load(q + d));
    });
    for (int start = first_key_ / kTile * kTile; start <= last_; start += kTile) tile(start);
    each_row([&](int row, int token, int head) {
      Queries* o = static_cast<Queries*>(out.elements) + token * out.token_stride + head * out.head_stride;
      const float sum = fold(s_.weight_sums[row], Add());
      for (int d = 0; d < head_dim_; d += kLanes) Q::store(o + d, load_as<Floats>(&s_.output[size_t(row) * head_dim_ + d]) / sum);
    });
  }

 private:
  template <typename Work>
  void each_row(Work work) {
    for (int h = 0; h < item_.num_heads; ++h)
      for (int r = 0; r < rows_; ++r) work(h * rows_ + r, item_.begin + r / group_, (item_.first_head + h) * group_ + r % group_);
  }

  void tile(int start) {
    const int num_keys = std::min(kTile, last_ + 1 - start), num_groups = (num_keys + kLanes - 1) / kLanes;
    const Stored* keys[kTile];
    layer_.find_keys(table_, start, num_keys, item_.first_head, keys);
    Ahead<T> ahead;
    find_ahead(start + kTile, num_groups, ahead);
    const Stored* zeros = reinterpret_cast<const Stored*>(s_.zeros.data());
    for (int h = 0; h < item_.num_heads; ++h) {
      const Stored *own_keys[kTile], *values[kTile];
      for (int j = 0; j < num_groups * kLanes; ++j) {
        const bool seen = j < num_keys && start + j >= first_key_;
        own_keys[j] = seen ? keys[j] + h * head_dim_ : zeros;
        values[j] = seen ? own_keys[j] + layer_.value_offset : zeros;
      }
      transpose_keys<T>(own_keys, num_groups, head_dim_, ahead, s_.keys.data());
      for (int j = 0; j < num_keys; j += kLanes) {
        ahead.take_step();
        arrange<T>(values + j, std::min(kLanes, num_keys - j), head_dim_, &s_.values[size_t(j) * head_dim_]);
      }
      rows_of_tile(start, num_groups, h * rows_);
    }
  }

  void find_ahead(int start, int num_groups, Ahead<T>& ahead) const {
    const int num_keys = std::max(0, std::min(kTile, last_ + 1 - start));
    layer_.find_keys(table_, start, num_keys, item_.first_head, ahead.rows);
    for (int j = 0; j < num_keys; ++j) ahead.rows[num_keys + j] = ahead.rows[j] + layer_.value_offset;
    const int num_words = head_dim_ / Product<T>::kInputs;
    ahead.num_rows = 2 * num_keys;
    ahead.num_bytes = item_.num_heads * head_dim_ * sizeof(Stored);
    ahead.num_steps = item_.num_heads * num_groups * ((num_words + kLanes - 1) / kLanes + 1);
  }

  // Rows [base, base + rows) of scratch against the tile's keys of their head.
  void rows_of_tile(int start, int num_groups, int base) {
    score_all<T>(rows_, &s_.query[size_t(base) * head_dim_], s_.keys.data(), s_.scores.data(), head_dim_, num_groups);
    for (int r = 0, next; r < rows_; r = next) {  // rows that see the same of this tile's keys go together
      const int position = first_ + r / group_;
      const int from = std::max(0, how_.first_seen(position) - start), to = std::min(kTile, position + 1 - start);
      next = (r / group_ + 1) * group_;
      if (from == 0 && to == kTile) next = how_.window > 0 ? std::min(rows_, (start + how_.window - first_) * group_) : rows_;
      if (from >= to) continue;
      for (int i = r; i < next; ++i) {
        const int row = base + i;
        soften<T>(&s_.scores[size_t(i) * kTile], &s_.weights[size_t(i) * kTile], from, to, to, how_, s_.maxima[row], s_.factors[row], s_.weight_sums[row]);
      }
      const int even = from / Product<T>::kInputs * Product<T>::kInputs;
      weigh_all<T>(next - r, &s_.weights[size_t(r) * kTile], s_.values.data(), even, to, &s_.factors[base + r], &s_.output[size_t(base + r) * head_dim_],
                   head_dim_);
    }
  }

  const KvLayer<T>& layer_;
  const Item item_;
  const Scores how_;
  Scratch<T>& s_;
  const int32_t* table_;
  const int group_, head_dim_, rows_, first_, last_, first_key_;
};

// A chunk's last tokens see the most keys: start with the last items. All heads of a token go together, as they lie in the pool, unless threads would idle.
inline std::vector<Item> items_of(const Batch& b, int num_threads) {
  const int tokens_per_item = std::max(1, kMaxQueryRows / (b.num_heads / b.num_kv_heads));
  std::vector<Item> whole, split;
  for (int c = 0; c < b.num_chunks; ++c)
    for (int t = b.chunk_starts[c]; t < b.chunk_starts[c + 1]; t += tokens_per_item)
      whole.push_back({c, t, std::min(t + tokens_per_item, b.chunk_starts[c + 1]), 0, b.num_kv_heads});
  if (num_threads == 1 || int(whole.size()) >= kItemsPerThread * num_threads) return whole;
  for (const Item& item : whole)
    for (int h = 0; h < b.num_kv_heads; ++h) split.push_back({item.chunk, item.begin, item.end, h, 1});
  return split;
}

}  // namespace
