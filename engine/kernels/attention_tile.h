// One tile of keys against some query rows: scores, weights, and their share of the output; the order of arithmetic is told in attention.h.

#pragma once

#include <algorithm>

#include "linear.h"

namespace {

constexpr int kTile = 64;       // keys
// Of Ahead: how long parts of the work take, where two values arranged take one.
constexpr int kStepsOfTranspose = 2, kStepsOfGroup = 4, kStepsOfRow = 2, kStepsOfWeighing = 4;
constexpr int kQueryRows = 4;   // at a time, without a matrix unit

// How a layer gets from queries and keys to softmax. Mirrored by engine/kernels/structures.py.
struct Scores {
  float scale, softcap;  // 0: no cap
  int32_t window;        // keys that a token sees, its own the last; 0: all

  int first_seen(int position) const { return window > 0 ? std::max(0, position - window + 1) : 0; }
};

// The next tile's rows in the pool, asked for a few lines at a time while this tile is computed: they lie in scattered blocks, where the hardware's prefetcher
// loses its way, and a core has room for some 16 lines that are on their way: more at a time would make it wait. Into L2, since a tile does not fit L1 twice.
template <typename T>
struct Ahead {
  const typename T::Stored* rows[2 * kTile];  // keys, then values
  int row = 0, byte = 0, num_rows = 0, num_bytes = 0;
  uint32_t due = 0, a_step = 0;  // lines, in units of 2^-16

  // Everything that is in `rows` until `num_steps` steps are taken.
  void begin(int count, int row_bytes, int num_steps) {
    num_rows = count;
    num_bytes = row_bytes;
    a_step = uint32_t((uint64_t(count) * ((row_bytes + kLine - 1) / kLine) << 16) / num_steps) + 1;
  }

  void take_steps(int count = 1) {
    for (due += count * a_step; due >= 1 << 16 && row < num_rows; due -= 1 << 16) {
      __builtin_prefetch(reinterpret_cast<const char*>(rows[row]) + byte, 0, 2);
      byte += kLine;
      if (byte >= num_bytes) ++row, byte = 0;
    }
  }
};

// A tile's keys or values of one head: `keys[j] + offset` for the keys from `begin` to `end`, and zeros for the others of its 64.
template <typename T>
struct HeadRows {
  const typename T::Stored* const* keys;
  int64_t offset;
  int begin, end;
  const typename T::Stored* zeros;
  const typename T::Stored* operator[](int j) const { return j >= begin && j < end ? keys[j] + offset : zeros; }
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

// keys[group of 16 keys][word][16] of one tile; a group is `width` elements long.
template <typename T>
void transpose_keys(const HeadRows<T>& rows, int num_groups, int head_dim, int width, Ahead<T>& ahead, typename Product<T>::Activation* keys) {
  constexpr int kInputs = Product<T>::kInputs;
  const int num_words = head_dim / kInputs;
  for (int g = 0; g < num_groups; ++g) {
    for (int w = 0; w < num_words; w += kLanes) {
      ahead.take_steps(kStepsOfTranspose);
      Floats r[16];
      for (int i = 0; i < 16; ++i) r[i] = load_words<T>(rows[g * kLanes + i] + w * kInputs, num_words - w);
      transpose(r);
      auto* to = keys + (size_t(g) * width + size_t(w) * kInputs) * kLanes;
      if (num_words - w >= kLanes) memcpy(to, r, sizeof r);
      else memcpy(to, r, sizeof r / 2);
    }
  }
}

// values[step of a chain][element][kInputs] of the tile's first `count` keys.
template <typename T>
inline void arrange(const HeadRows<T>& values, int count, int head_dim, int width, Ahead<T>& ahead, float* arranged) {
  for (int j = 0; j < count; ++j) {
    if (j % 2 == 0) ahead.take_steps();
    for (int d = 0; d < head_dim; d += kLanes) Float32::store(arranged + size_t(j) * width + d, T::load(values[j] + d));
  }
}

// In bfloat16 elements change places among 32, as two instructions leave them; `ordered` undoes that. A last 16 stay in place.
typedef uint16_t Pairs __attribute__((vector_size(64)));
inline void arrange(const HeadRows<BFloat16>& values, int count, int head_dim, int width, Ahead<BFloat16>& ahead, uint16_t* arranged) {
  for (int j = 0; j < count; j += 2) {
    ahead.take_steps();
    const uint16_t *one = values[j], *other = values[j + 1];
    uint16_t* to = arranged + size_t(j) * width;
    int d = 0;
    for (; d + 2 * kLanes <= head_dim; d += 2 * kLanes) {
      const Pairs a = load_as<Pairs>(one + d), b = load_as<Pairs>(other + d);
      const Pairs low = __builtin_shufflevector(a, b, 0, 32, 1, 33, 2, 34, 3, 35, 8, 40, 9, 41, 10, 42, 11, 43, 16, 48, 17, 49, 18, 50, 19, 51, 24, 56, 25, 57,
                                                26, 58, 27, 59);
      const Pairs high = __builtin_shufflevector(a, b, 4, 36, 5, 37, 6, 38, 7, 39, 12, 44, 13, 45, 14, 46, 15, 47, 20, 52, 21, 53, 22, 54, 23, 55, 28, 60, 29,
                                                 61, 30, 62, 31, 63);
      memcpy(to + 2 * d, &low, sizeof low);
      memcpy(to + 2 * d + 2 * kLanes, &high, sizeof high);
    }
    if (d < head_dim) {
      const Words first_of_pair = __builtin_convertvector(load_as<Halves>(one + d), Words), second = __builtin_convertvector(load_as<Halves>(other + d), Words);
      const Words pairs = first_of_pair | (second << 16);
      memcpy(to + 2 * d, &pairs, sizeof pairs);
    }
  }
}

// 32 elements of an output row, in place.
template <typename T>
inline void ordered(Floats&, Floats&) {}
template <>
inline void ordered<BFloat16>(Floats& a, Floats& b) {
  const Floats low = __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  b = __builtin_shufflevector(a, b, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  a = low;
}

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
inline void weigh_rows(const typename Product<T>::Activation* weights, const typename Product<T>::Activation* values, int num_keys, const float* factors,
                       float* output, int head_dim) {
  typedef Product<T> P;
  typedef Product<typename P::Scalar> Q;
  Floats sum[kCount][kWide] = {};
  for (int j = 0; j < num_keys; j += P::kInputs) {
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
inline void weigh(const typename Product<T>::Activation* weights, const typename Product<T>::Activation* values, int num_keys, const float* factors,
                  float* output, int head_dim) {
  for (int d = 0; d < head_dim; d += 4 * kLanes) {
    const auto* from = values + d * Product<T>::kInputs;
    switch (std::min(4, (head_dim - d) / kLanes)) {
      case 4: weigh_rows<T, kCount, 4>(weights, from, num_keys, factors, output + d, head_dim); break;
      case 3: weigh_rows<T, kCount, 3>(weights, from, num_keys, factors, output + d, head_dim); break;
      case 2: weigh_rows<T, kCount, 2>(weights, from, num_keys, factors, output + d, head_dim); break;
      default: weigh_rows<T, kCount, 1>(weights, from, num_keys, factors, output + d, head_dim);
    }
  }
}

#if defined(TANDEM_TILES)
// Rows of weights up to a multiple of 16 may be read, and their shares are dropped: the tiles keep one shape.
inline void weigh_by_tiles(int rows, const uint16_t* weights, const uint16_t* values, int num_keys, const float* factors, float* output, int width) {
  alignas(64) float sums[kRowsAtOnce][2 * kTileRows];
  for (int r = 0; r < rows; r += kRowsAtOnce) {
    const int count = std::min(kRowsAtOnce, rows - r);
    for (int d = 0; d < width; d += 2 * kTileRows) {
      const uint16_t* from = values + 2 * d;
      multiply_full_tiles(count, weights + r * kTile, kTile * sizeof *weights, from, from + 2 * kTileRows, 2 * width * sizeof *values, num_keys, sums[0],
                          sizeof *sums);
      for (int i = 0; i < count; ++i) {
        float* o = output + (r + i) * width + d;
        for (int v = 0; v < 2 * kTileRows; v += kLanes) Float32::store(o + v, Float32::load(o + v) * factors[r + i] + Float32::load(sums[i] + v));
      }
    }
  }
}

// The same for up to 16 rows of each of several heads, whose values lie one behind the other; width is a multiple of 64. What a tile reads or writes is not
// touched right before or behind: neither finds in the core's store buffer what the other left there.
inline void weigh_few_rows(int num_heads, int rows, const uint16_t* weights, const uint16_t* values, int num_keys, const float* factors, float* output, int width) {
  constexpr int kColumns = 4 * kTileRows;
  alignas(64) float sums[kTileRows][kColumns * kTileRows];
  for (int d = 0; d < width; d += kColumns) {
    for (int h = 0; h < num_heads; ++h)
      multiply_few_rows(weights + size_t(h) * rows * kTile, kTile * sizeof *weights, values + size_t(h) * kTile * width + 2 * d, 2 * width * sizeof *values, num_keys,
                        sums[h]);
    for (int h = 0; h < num_heads; ++h) {
      for (int i = 0; i < rows; ++i) {
        float* o = output + size_t(h * rows + i) * width + d;
        for (int v = 0; v < 4; ++v) {
          float* to = o + v * kLanes;
          Float32::store(to, Float32::load(to) * factors[h * rows + i] + Float32::load(sums[h] + (v * kTileRows + i) * kLanes));
        }
      }
    }
  }
}

// Rows of queries and of scores up to a multiple of 32 may be read and written.
inline void score_by_tiles(int rows, const uint16_t* query, const uint16_t* keys, float* scores, int width, int num_groups) {
  for (int r = 0; r < rows; r += kRowsAtOnce) {
    for (int g = 0; g < num_groups; g += 2) {
      const uint16_t* group = keys + size_t(g) * width * kLanes;
      multiply_full_tiles(rows - r, query + r * width, width * sizeof *query, group, group + width * kLanes, 2 * kLanes * sizeof *keys, width,
                          scores + r * kTile + g * kLanes, kTile * sizeof *scores);
    }
  }
}

// Few rows, of several heads: keys are taken from the pool as they lie there, a column for each row, and each row's scores have the same bits. `columns` is
// [head][pair of elements][16], zeros in the columns of other heads; `turned` is scratch, [kTile][16].
inline void score_few_rows(int rows, int num_heads, const uint16_t* columns, const HeadRows<BFloat16>& keys, int64_t token_stride, int head_dim, float* turned,
                           float* scores, int num_groups, Ahead<BFloat16>& ahead) {
  const uint16_t* groups[kTile / kLanes];
  const int first = keys.begin / kLanes;
  for (int g = 0; g < kTile / kLanes; ++g) groups[g] = keys.keys[std::min(std::max(g, first), num_groups - 1) * kLanes] + keys.offset;
  multiply_keys(groups, token_stride * sizeof(uint16_t), columns, num_heads * head_dim, turned);
  for (int g = first; g < num_groups; ++g) {
    ahead.take_steps(kStepsOfGroup);
    Floats r[kLanes];
    memcpy(r, turned + g * kLanes * kLanes, sizeof r);
    transpose(r);
    for (int i = 0; i < rows; ++i) Float32::store(scores + i * kTile + g * kLanes, r[i]);
  }
}
#endif

template <typename T>
void weigh_all(int rows, const typename Product<T>::Activation* weights, const typename Product<T>::Activation* values, int num_keys,
               const float* factors, float* output, int head_dim) {
  for (int r = 0; r < rows; r += kQueryRows) {
    const auto* w = weights + r * kTile;
    float* o = output + r * head_dim;
    switch (std::min(kQueryRows, rows - r)) {
      case 4: weigh<T, 4>(w, values, num_keys, factors + r, o, head_dim); break;
      case 3: weigh<T, 3>(w, values, num_keys, factors + r, o, head_dim); break;
      case 2: weigh<T, 2>(w, values, num_keys, factors + r, o, head_dim); break;
      default: weigh<T, 1>(w, values, num_keys, factors + r, o, head_dim);
    }
  }
}

template <typename T>
void score_all(int rows, const typename Product<T>::Activation* query, const typename Product<T>::Activation* keys, float* scores, int head_dim, int num_groups) {
#if defined(TANDEM_TILES)
  if constexpr (std::is_same_v<T, BFloat16>) return score_by_tiles(rows, query, keys, scores, head_dim, num_groups);
#endif
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

// A score on the way to softmax, before its scale: `scale_of` says what is left to multiply by, so that 2^x does.
inline Floats capped(Floats x, const Scores& how) { return how.softcap > 0.0f ? tanh_of(x * how.scale / how.softcap) : x; }
inline float scale_of(const Scores& how) { return (how.softcap > 0.0f ? how.softcap : how.scale) * 1.44269504088896341f; }

// Turns a row's scores into weights relative to the new running maximum; keys outside [begin, end) weigh nothing.
template <typename T>
inline void soften(const float* scores, float* weights, int begin, int end, const Scores& how, float& maximum, float& factor, Floats& weight_sum) {
  const float kMinusInfinity = -__builtin_inff();
  constexpr int num_groups = kTile / kLanes;
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
    Float32::store(weights + g * kLanes, weight);
    sum = sum + weight;
  }
  maximum = next;
  weight_sum = sum;
}

// The same for weights that are rounded to bfloat16. `maximum` is one of capped scores. Whether the row sees the whole tile does not depend on its chunk.
template <bool kWhole>
inline void soften_coarse(const float* scores, uint16_t* weights, int begin, int end, const Scores& how, float& maximum, float& factor, Floats& weight_sum) {
  Floats x[kTile / kLanes];
  Floats highest = all(maximum);
  for (int g = 0; g < kTile / kLanes; ++g) {
    x[g] = capped(load_as<Floats>(scores + g * kLanes), how);
    if (!kWhole) x[g] = lies_in(begin - g * kLanes, end - g * kLanes) ? x[g] : all(-__builtin_inff());
    highest = Max()(x[g], highest);
  }
  const float next = fold(highest, Max()), scale = scale_of(how), shift = next * scale;
  factor = maximum == next ? 1.0f : exp2_coarse(all((maximum - next) * scale))[0];
  Floats sum = weight_sum * factor;
  for (int g = 0; g < kTile / kLanes; ++g) {
    Floats weight = exp2_coarse(x[g] * scale - shift);
    if (!kWhole) weight = lies_in(begin - g * kLanes, end - g * kLanes) ? weight : Floats{};
    BFloat16::store(weights + g * kLanes, weight);
    sum = sum + weight;
  }
  maximum = next;
  weight_sum = sum;
}
template <typename T>
inline void soften(const float* scores, uint16_t* weights, int begin, int end, const Scores& how, float& maximum, float& factor, Floats& weight_sum) {
  if (begin == 0 && end == kTile) soften_coarse<true>(scores, weights, begin, end, how, maximum, factor, weight_sum);
  else soften_coarse<false>(scores, weights, begin, end, how, maximum, factor, weight_sum);
}

}  // namespace
