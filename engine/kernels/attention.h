// Attention of packed query tokens over a paged KV pool, and the writing of their keys and values into it.
//
// Order of arithmetic. Everything a (token, head) pair goes through depends on its own query and on the keys and values that the token sees only: those at
// positions 0 to its own, or the last `window` of them.
//   - keys are taken in tiles of 64 at positions that are multiples of 64, tile after tile, from the first tile in which the token sees a key;
//   - a score is one chain over the head's elements, in their order, as linear.h says: by pairs in bfloat16, by 32 with a matrix unit, singly else;
//   - an output element's share of a tile is one such chain over the tile's keys, in their order, their weights in the activations' type;
//   - a tile's share is added to what came before by one fused multiply-add with the running rescale factor;
//   - the sum of the weights is kept in 16 lanes and folded once, at the end, as a fixed tree.
// So the bits do not depend on what else is in the batch, on how a prompt was cut into chunks, on the thread count, or on the blocks' places in the pool.
// A score that a token must not see is not looked at, and its key weighs nothing. In bfloat16 a key of the same tile and sequence that is not seen may be
// multiplied by zero, so that values there must be finite or the token's result is NaN; slots beyond the chunk's last token count for nothing.
// No expression below leaves the compiler a choice of which product to fuse with which sum.

#pragma once

#include <vector>

#include "attention_tile.h"

namespace {

constexpr int kMaxQueryRows = 64;   // query rows (token, head) that share one pass over the keys, unless one token's heads are more
constexpr int kFewRows = 16;        // of all heads together: their keys are taken from the pool as they lie there
constexpr int kItemsPerThread = 4;  // at the least, for whole items

// One packed batch; the arrays belong to the caller. Mirrored by engine/kernels/structures.py.
struct Batch {
  const int32_t* chunk_starts;     // [num_chunks + 1] index of each chunk's first token in the packed batch
  const int32_t* first_positions;  // [num_chunks] position of that token in its sequence
  const int32_t* table_starts;     // [num_chunks] index of each chunk's block table in `tables`
  const int32_t* tables;           // pool block ids
  int32_t num_chunks, block_size, num_layers, num_heads, num_kv_heads, head_dim;
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

// Tokens [begin, end) of a chunk, and some KV heads: what one thread takes at a time.
struct Item {
  int chunk, begin, end, first_head, num_heads;
};

// What one thread needs for one item of work: `rows` query rows of each KV head, and room for as many as tiles may touch beyond them.
template <typename T>
struct Scratch {
  typedef typename Product<T>::Activation Activation;
  std::vector<Activation> query, weights, keys, values, columns;
  std::vector<float> output, scores, zeros, turned;
  std::vector<Floats> weight_sums;
  std::vector<float> maxima, factors;

  // Heads are filled up with zeros, here and nowhere else, to `padded(head_dim)` elements each.
  void fit(int rows, int num_heads, int head_dim) {
    constexpr int kBeyond = 32;
    const int width = padded(head_dim);
    if (head_dim != head_dim_) {
      head_dim_ = head_dim;
      query.clear();
      keys.assign(size_t(kTile) * width, 0);
      values.assign(size_t(kFewRows) * kTile * width, 0);
      zeros.assign(width, 0.0f);
      turned.resize(size_t(kTile) * kLanes);
    }
    const int all_rows = rows * num_heads, rows_at_once = std::max(rows, kFewRows);
    grow(query, size_t(all_rows + kBeyond) * width);
    grow(weights, size_t(rows_at_once + kBeyond) * kTile);
    grow(scores, size_t(rows_at_once + kBeyond) * kTile);
    output.assign(size_t(all_rows) * width, 0.0f);
    weight_sums.assign(all_rows, Floats{});
    maxima.assign(all_rows, -__builtin_inff());
    grow(factors, all_rows);
  }

 private:
  template <typename E>
  static void grow(std::vector<E>& some, size_t size) {
    if (some.size() < size) some.resize(size);
  }
  int head_dim_ = 0;
};

// Attention of one item. Q is the type of queries and outputs. Rows of scratch: [KV head of the item][token][query head of the KV head].
template <typename T, typename Q>
class Attending {
  typedef typename T::Stored Stored;
  typedef typename Q::Stored Queries;

 public:
  // `next` is what this thread does behind this item, or null.
  Attending(const Batch& b, const KvLayer<T>& layer, const Item& item, const Item* next, const Scores& how, Scratch<T>& s)
      : batch_(b), layer_(layer), item_(item), next_(next), how_(how), s_(s), table_(table_of(item)), group_(b.num_heads / b.num_kv_heads),
        head_dim_(b.head_dim), width_(padded(b.head_dim)), rows_((item.end - item.begin) * group_), first_(position_of(item)),
        last_(first_ + item.end - item.begin - 1), first_key_(how.first_seen(first_)) {
#if defined(TANDEM_TILES)
    if (std::is_same_v<T, BFloat16> && head_dim_ % kInputs == 0 && b.block_size % kLanes == 0) heads_at_once_ = std::min(item.num_heads, kFewRows / rows_);
#endif
    s.fit(rows_, item.num_heads, head_dim_);
  }

  void run(const Packed& query, const Packed& out) {
    each_row([&](int row, int token, int head) {
      const Queries* q = static_cast<const Queries*>(query.elements) + token * query.token_stride + head * query.head_stride;
      for (int d = 0; d < head_dim_; d += kLanes) Product<T>::store(&s_.query[size_t(row) * width_ + d], Q::load(q + d));
    });
    if (heads_at_once_ > 0) fill_columns();
    for (int start = first_key_ / kTile * kTile; start <= last_; start += kTile) tile(start);
    each_row([&](int row, int token, int head) {
      Queries* o = static_cast<Queries*>(out.elements) + token * out.token_stride + head * out.head_stride;
      const float sum = fold(s_.weight_sums[row], Add());
      for (int d = 0; d < head_dim_; d += 2 * kLanes) {
        Floats a = load_as<Floats>(&s_.output[size_t(row) * width_ + d]) / sum, b = load_as<Floats>(&s_.output[size_t(row) * width_ + d + kLanes]) / sum;
        const bool both = d + kLanes < head_dim_;
        if (both) ordered<T>(a, b);
        Q::store(o + d, a);
        if (both) Q::store(o + d + kLanes, b);
      }
    });
  }

 private:
  const int32_t* table_of(const Item& item) const { return batch_.tables + batch_.table_starts[item.chunk]; }
  int position_of(const Item& item) const { return batch_.first_positions[item.chunk] + item.begin - batch_.chunk_starts[item.chunk]; }

  template <typename Work>
  void each_row(Work work) {
    for (int h = 0; h < item_.num_heads; ++h)
      for (int r = 0; r < rows_; ++r) work(h * rows_ + r, item_.begin + r / group_, (item_.first_head + h) * group_ + r % group_);
  }

  // [KV head][pair of elements][16 columns][2]: each head's rows in columns of their own among those that are scored together.
  void fill_columns() {
    s_.columns.assign(size_t(item_.num_heads) * width_ * kLanes, 0);
    for (int h = 0; h < item_.num_heads; ++h)
      for (int r = 0; r < rows_; ++r)
        for (int d = 0; d < width_; d += 2)
          memcpy(&s_.columns[(size_t(h) * width_ + d) * kLanes + 2 * (h % heads_at_once_ * rows_ + r)], &s_.query[size_t(h * rows_ + r) * width_ + d],
                 2 * sizeof s_.query[0]);
  }

  void tile(int start) {
    const int num_keys = std::min(kTile, last_ + 1 - start), num_groups = (num_keys + kLanes - 1) / kLanes;
    const int num_values = (num_keys + kInputs - 1) / kInputs * kInputs;
    const Stored* keys[kTile];
    layer_.find_keys(table_, start, num_keys, item_.first_head, keys);
    HeadRows<T> head{keys, 0, std::max(0, first_key_ - start), num_keys, reinterpret_cast<const Stored*>(s_.zeros.data())};
    Ahead<T> ahead;
    find_ahead(start + kTile, num_groups, num_values, ahead);
    const int at_once = std::max(1, heads_at_once_);
    for (int h = 0; h < item_.num_heads; h += at_once) {
      const int together = std::min(at_once, item_.num_heads - h);
      head.offset = int64_t(h) * head_dim_;
      score(head, h, together, num_groups, ahead);
      for (int i = 0; i < together; ++i) {
        head.offset = int64_t(h + i) * head_dim_ + layer_.value_offset;
        arrange(head, num_values, head_dim_, width_, ahead, &s_.values[size_t(i) * kTile * width_]);
      }
      for (int i = 0; i < together; ++i) soften_rows(start, (h + i) * rows_, i * rows_, ahead);
      ahead.take_steps(kStepsOfWeighing * together);
      weigh(start, num_values, h * rows_, together);
    }
  }

  // The next tile of this item, or the first of the thread's next one.
  void find_ahead(int start, int num_groups, int num_values, Ahead<T>& ahead) const {
    const Item& item = start > last_ && next_ != nullptr ? *next_ : item_;
    const int last = position_of(item) + item.end - item.begin - 1;
    const int from = &item == &item_ ? start : how_.first_seen(position_of(item)) / kTile * kTile;
    const int num_keys = std::max(0, std::min(kTile, last + 1 - from));
    layer_.find_keys(table_of(item), from, num_keys, item.first_head, ahead.rows);
    for (int j = 0; j < num_keys; ++j) ahead.rows[num_keys + j] = ahead.rows[j] + layer_.value_offset;
    const int num_words = head_dim_ / Product<T>::kInputs;
    const int scoring = heads_at_once_ > 0 ? kStepsOfGroup * num_groups / heads_at_once_ : kStepsOfTranspose * num_groups * ((num_words + kLanes - 1) / kLanes);
    ahead.begin(2 * num_keys, item.num_heads * head_dim_ * sizeof(Stored), item_.num_heads * (scoring + kStepsOfRow * rows_ + num_values / 2 + kStepsOfWeighing));
  }

  // Scores of heads `h` to `h + together`, row after row from the first of scratch on.
  void score(const HeadRows<T>& keys, int h, int together, int num_groups, Ahead<T>& ahead) {
#if defined(TANDEM_TILES)
    if constexpr (std::is_same_v<T, BFloat16>) {
      if (heads_at_once_ > 0) {
        const HeadRows<T>& k = keys;
        return score_few_rows(together * rows_, together, &s_.columns[size_t(h) * width_ * kLanes], k, layer_.token_stride, head_dim_, s_.turned.data(),
                              s_.scores.data(), num_groups, ahead);
      }
    }
#endif
    transpose_keys<T>(keys, num_groups, head_dim_, width_, ahead, s_.keys.data());
    score_all<T>(rows_, &s_.query[size_t(h) * rows_ * width_], s_.keys.data(), s_.scores.data(), width_, num_groups);
  }

  // Rows of one head, whose running maxima and sums lie from `row` on, and whose scores and weights from `at` on.
  void soften_rows(int start, int row, int at, Ahead<T>& ahead) {
    for (int r = 0; r < rows_; ++r, ++row, ++at) {
      const int position = first_ + r / group_;
      const int from = std::max(0, how_.first_seen(position) - start), to = std::min(kTile, position + 1 - start);
      auto* weights = &s_.weights[size_t(at) * kTile];
      ahead.take_steps(kStepsOfRow);
      if (from < to) {
        soften<T>(&s_.scores[size_t(at) * kTile], weights, from, to, how_, s_.maxima[row], s_.factors[row], s_.weight_sums[row]);
      } else {
        memset(weights, 0, kTile * sizeof *weights);
        s_.factors[row] = 1.0f;
      }
    }
  }

  // Adds the tile's share to the outputs of some heads' rows, from `row` on.
  void weigh(int start, int num_values, int row, int together) {
    const auto* weights = s_.weights.data();
    const auto* values = s_.values.data();
    float* output = &s_.output[size_t(row) * width_];
#if defined(TANDEM_TILES)
    if constexpr (std::is_same_v<T, BFloat16>) {
      if (heads_at_once_ > 0 && width_ % (4 * kTileRows) == 0) return weigh_few_rows(together, rows_, weights, values, num_values, &s_.factors[row], output, width_);
      for (int i = 0; i < together; ++i)
        weigh_by_tiles(rows_, weights + size_t(i) * rows_ * kTile, values + size_t(i) * kTile * width_, num_values, &s_.factors[row + i * rows_],
                       output + size_t(i) * rows_ * width_, width_);
      return;
    }
#endif
    for (int r = 0, next; r < rows_; r = next) {  // rows that see the same of this tile's keys go together
      const int position = first_ + r / group_;
      const int from = std::max(0, how_.first_seen(position) - start) / Product<T>::kInputs * Product<T>::kInputs, to = std::min(kTile, position + 1 - start);
      next = (r / group_ + 1) * group_;
      if (from == 0 && to == kTile) next = how_.window > 0 ? std::min(rows_, (start + how_.window - first_) * group_) : rows_;
      if (from >= to) continue;
      weigh_all<T>(next - r, weights + r * kTile + from, values + size_t(from) * width_, to - from, &s_.factors[row + r], output + r * width_, width_);
    }
  }

  const Batch& batch_;
  const KvLayer<T>& layer_;
  const Item item_;
  const Item* next_;
  const Scores how_;
  Scratch<T>& s_;
  const int32_t* table_;
  const int group_, head_dim_, width_, rows_, first_, last_, first_key_;
  int heads_at_once_ = 0;  // whose keys are taken from the pool as they lie there; 0: they are transposed head by head
};

// A chunk's last tokens see the most keys: start with the last items. All heads of a token go together, as they lie in the pool, unless threads would idle.
inline std::vector<Item> items_of(const Batch& b, int num_threads) {
  const int group = b.num_heads / b.num_kv_heads, tokens_per_item = 2 * std::max(1, kMaxQueryRows / 2 / group);  // even: halves are tiles of one shape
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
