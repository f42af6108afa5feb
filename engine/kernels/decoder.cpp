// One step of a dense decoder, from token ids to hidden states, in one call: engine/decoder.py says what is computed, and engine/kernels/native_decoder.py
// packs the weights and calls. No torch headers.
//
// The residual stream, queries before they are rotated, and all sums are float32; what enters a product is in the weights' type. A row goes through the same
// operations in the same order whatever else is in the step (linear.h, attention.h, rows.h), so its bits depend on its own sequence only.

#include "attention.h"
#include "buffer.h"
#include "emit.h"
#include "pack.h"
#include "rows.h"
#include "team.h"

namespace {

// The following structures are mirrored by engine/kernels/structures.py.

struct Rope {
  const float* frequencies;  // radians a position
  int32_t num_frequencies;
  float scale;  // of cosine and sine
};

struct Layer {
  Norm input_norm, q_norm, k_norm, after_attention, mlp_norm, after_mlp;
  Linear qkv, output, gate_up, down;  // gate_up: 16 of the gate, then 16 of up, in each panel
  Scores scores;
  int32_t rope;
};

struct Decoder {
  const Layer* layers;
  const Rope* ropes;
  const void* embedding;  // [vocabulary][hidden]; null: rows come out of the head's panels
  Linear head;
  Norm final_norm;
  float embedding_scale;
  int32_t num_layers, num_ropes, hidden_size, inner_size, num_heads, num_kv_heads, head_dim, vocab_size, activation;
};

class AnyModel {
 public:
  virtual ~AnyModel() = default;
  virtual void step(const Batch& batch, void* pool, const int32_t* token_ids, const int32_t* rows, int num_rows, float* hidden) = 0;
  virtual void head(const float* hidden, int num_rows, float* logits) = 0;
};

template <typename T>
class Model : public AnyModel {
  typedef typename T::Stored Stored;
  typedef Product<T> P;
  typedef typename P::Activation Activated;

 public:
  Model(const Decoder& decoder, int num_threads) : d_(decoder), team_(num_threads), scratch_(num_threads) {
    counters_ = std::vector<std::atomic<int>>(kPhasesInLayer * d_.num_layers + kOtherPhases);
  }

  // Final norm included; `rows` are the tokens whose hidden states are wanted, ascending: the last layer computes nothing more than their keys and values.
  void step(const Batch& batch, void* pool, const int32_t* token_ids, const int32_t* rows, int num_rows, float* hidden) override {
    const int num_tokens = batch.chunk_starts[batch.num_chunks];
    begin(batch, num_tokens);
    const std::vector<Item> items = items_of(batch, team_.num_threads());
    const int last = d_.num_layers - 1;
    run([&](int thread, int& phase) {
      each_part(thread, num_tokens, [&](const Part& part) {
        embed(phase, part, token_ids);
        before_attention(phase, part, 0, batch, pool);
      });
      for (int l = 0; l < last; ++l) {
        attention(phase, thread, batch, l, pool, items);
        each_part(thread, num_tokens, [&](const Part& part) {
          after_attention(phase, part, l);
          before_attention(phase, part, l + 1, batch, pool);
        });
      }
      attention(phase, thread, batch, last, pool, items);
      keep(phase, rows, num_rows);
      const Part kept{0, num_rows, false};
      after_attention(phase, kept, last);
      finish(phase, kept, hidden);
    });
  }

  void head(const float* hidden, int num_rows, float* logits) override {
    const int size = d_.hidden_size;
    normed_.fit(size_t(num_rows) * padded(size));
    run([&](int, int& phase) {
      const Part all{0, num_rows, false};
      each_row(phase, all, [&](int row) { narrow(hidden + size_t(row) * size, size, normed_.get() + size_t(row) * padded(size)); });
      product(phase, all, d_.head, normed_.get(), size, Logits{logits, d_.vocab_size});
    });
  }

 private:
  static constexpr int kPhasesInLayer = 10, kOtherPhases = 8, kRowsOfPhase = 4;
  static constexpr int kRowsToPart = 96;  // a thread's, from which on it is better that each has its own rows: what it wrote is in its own cache

  // Rows of a step that go through it together.
  struct Part {
    int first, end;
    bool own;  // one thread's alone; otherwise all threads share the work on them, and are done with it together
  };

  // All rows, or a thread's own, a few hundred at a time. Threads are done together.
  template <typename Work>
  void each_part(int thread, int num_rows, Work work) {
    const int num_threads = team_.num_threads();
    if (num_rows < kRowsToPart * num_threads) return work(Part{0, num_rows, false});
    const int num_rounds = (num_rows + kRowsOfPanel * num_threads - 1) / (kRowsOfPanel * num_threads);
    const int size = padded((num_rows + num_rounds * num_threads - 1) / (num_rounds * num_threads));
    for (int round = 0; round < num_rounds; ++round) {
      const int first = std::min((thread * num_rounds + round) * size, num_rows), end = std::min(first + size, num_rows);
      if (first < end) work(Part{first, end, true});
    }
    team_.barrier();
  }

  int qkv_size() const { return (d_.num_heads + 2 * d_.num_kv_heads) * d_.head_dim; }
  int attended_size() const { return d_.num_heads * d_.head_dim; }

  void begin(const Batch& batch, int num_tokens) {
    const size_t n = num_tokens;
    residual_.fit(n * padded(d_.hidden_size));
    normed_.fit(n * padded(d_.hidden_size));
    share_.fit(n * padded(d_.hidden_size));
    qkv_.fit(n * qkv_size());
    query_.fit(n * padded(attended_size()));
    attended_.fit(n * padded(attended_size()));
    inner_.fit(n * padded(d_.inner_size));
    positions_.fit(n);
    blocks_.fit(n);
    size_t num_angles = 0;
    for (int i = 0; i < d_.num_ropes; ++i) num_angles += 2 * size_t(d_.ropes[i].num_frequencies);
    angles_.fit(n * num_angles);
    angles_of_token_ = num_angles;
    for (int c = 0; c < batch.num_chunks; ++c) {
      for (int t = batch.chunk_starts[c]; t < batch.chunk_starts[c + 1]; ++t) {
        positions_.get()[t] = batch.first_positions[c] + t - batch.chunk_starts[c];
        blocks_.get()[t] = c;
      }
    }
  }

  template <typename Step>
  void run(Step step) {
    for (std::atomic<int>& counter : counters_) counter.store(0, std::memory_order_relaxed);
    team_.run([&](int thread) {
      int phase = 0;
      step(thread, phase);
#if defined(TANDEM_TILES)
      release_tiles();
#endif
    });
  }

  // Calls work(i) for i below `count`, spread over the threads; all of it is done when it returns.
  template <typename Work>
  void each(int& phase, int count, Work work) {
    std::atomic<int>& counter = counters_[phase++];
    for (int i; (i = counter.fetch_add(1, std::memory_order_relaxed)) < count;) work(i);
    team_.barrier();
  }

  template <typename Work>
  void each_row(int& phase, const Part& part, Work work) {
    if (part.own) {
      for (int row = part.first; row < part.end; ++row) work(row);
      return;
    }
    each(phase, (part.end + kRowsOfPhase - 1) / kRowsOfPhase, [&](int i) {
      for (int row = i * kRowsOfPhase; row < std::min(part.end, (i + 1) * kRowsOfPhase); ++row) work(row);
    });
  }

  // Hands the sums of each row and panel to `emit`.
  template <typename Emit>
  void product(int& phase, const Part& part, const Linear& linear, const Activated* x, int size, const Emit& emit) {
    const auto panel = [&](int index, int next, int first) {
      const Stored* panels = static_cast<const Stored*>(linear.panels);
      const size_t step = size_t(linear.num_inputs) * kPanel;
      multiply_panel<T>(panels + index * step, x + size_t(first) * padded(size), padded(size), std::min(kRowsOfPanel, part.end - first), linear.num_inputs,
                        panels + next * step, [&](int row, int vector, const Floats* sums) { emit(first + row, index * kPanel + vector * kLanes, sums); });
    };
    if (part.own) {
      for (int index = 0; index < linear.num_panels; ++index) panel(index, std::min(index + 1, linear.num_panels - 1), part.first);
      return;
    }
    std::atomic<int>& counter = counters_[phase++];
    const int count = linear.num_panels * ((part.end + kRowsOfPanel - 1) / kRowsOfPanel);
    int unit = counter.fetch_add(1, std::memory_order_relaxed);
    while (unit < count) {
      const int next = counter.fetch_add(1, std::memory_order_relaxed);
      panel(unit % linear.num_panels, std::min(next, count - 1) % linear.num_panels, unit / linear.num_panels * kRowsOfPanel);
      unit = next;
    }
    team_.barrier();
  }

  void before_attention(int& phase, const Part& part, int l, const Batch& batch, void* pool) {
    const Layer& layer = d_.layers[l];
    add_and_normalize(phase, part, l > 0 ? &d_.layers[l - 1].after_mlp : nullptr, layer.input_norm);
    product(phase, part, layer.qkv, normed_.get(), d_.hidden_size, Store{qkv_.get(), layer.qkv.bias, qkv_size()});
    rotate_and_write(phase, part, batch, layer, KvLayer<T>(batch, pool, l));
  }

  void after_attention(int& phase, const Part& part, int l) {
    const Layer& layer = d_.layers[l];
    add_product(phase, part, layer.output, attended_.get(), attended_size(), layer.after_attention);
    add_and_normalize(phase, part, &layer.after_attention, layer.mlp_norm);
    product(phase, part, layer.gate_up, normed_.get(), d_.hidden_size, Gate<T>{inner_.get(), ::Activation(d_.activation), d_.inner_size});
    add_product(phase, part, layer.down, inner_.get(), d_.inner_size, layer.after_mlp);
  }

  void embed(int& phase, const Part& part, const int32_t* token_ids) {
    each_row(phase, part, [&](int t) {
      float* x = residual_.get() + size_t(t) * padded(d_.hidden_size);
      embedding_row(token_ids[t], x);
      for (int i = 0; i < d_.hidden_size; ++i) x[i] *= d_.embedding_scale;
      for (int i = d_.hidden_size; i < padded(d_.hidden_size); ++i) x[i] = 0.0f;
      float* angles = angles_.get() + t * angles_of_token_;
      for (int r = 0; r < d_.num_ropes; ++r) {
        const Rope& rope = d_.ropes[r];
        for (int i = 0; i < rope.num_frequencies; ++i) {
          const float angle = float(positions_.get()[t]) * rope.frequencies[i];
          angles[i] = std::cos(angle) * rope.scale;
          angles[rope.num_frequencies + i] = std::sin(angle) * rope.scale;
        }
        angles += 2 * rope.num_frequencies;
      }
    });
  }

  void embedding_row(int32_t token_id, float* x) const {
    const int size = d_.hidden_size;
    if (d_.embedding != nullptr) {
      const Stored* row = static_cast<const Stored*>(d_.embedding) + size_t(token_id) * size;
      for (int i = 0; i < size; ++i) x[i] = widened(row[i]);
      return;
    }
    const Stored* panel = static_cast<const Stored*>(d_.head.panels) + size_t(token_id / kPanel) * d_.head.num_inputs * kPanel;
    const int lane = token_id % kPanel;
    for (int i = 0; i < size; ++i) x[i] = widened(panel[i / P::kInputs * (kPanel * P::kInputs) + lane * P::kInputs + i % P::kInputs]);
  }

  static float widened(Stored element) {
    Stored lanes[kLanes] = {element};
    return T::load(lanes)[0];
  }

  static void narrow(const float* x, int size, Activated* y) {
    float last[kLanes] = {};
    int i = 0;
    for (; i + kLanes <= size; i += kLanes) P::store(y + i, Float32::load(x + i));
    if (i < size) {
      memcpy(last, x + i, (size - i) * sizeof(float));
      P::store(y + i, Float32::load(last));
    }
  }

  // residual += norm(share) if `after` is there; normed = norm(residual).
  void add_and_normalize(int& phase, const Part& part, const Norm* after, const Norm& norm) {
    each_row(phase, part, [&](int row) {
      float* x = settle(after, row);
      float* wide = wide_row(d_.hidden_size);
      normalize(x, norm, d_.hidden_size, wide);
      narrow(wide, d_.hidden_size, normed_.get() + size_t(row) * padded(d_.hidden_size));
    });
  }

  float* settle(const Norm* after, int row) {
    float* x = residual_.get() + size_t(row) * padded(d_.hidden_size);
    if (after != nullptr && after->weight != nullptr) {
      float* share = share_.get() + size_t(row) * padded(d_.hidden_size);
      normalize(share, *after, d_.hidden_size, share);
      for (int i = 0; i < d_.hidden_size; ++i) x[i] += share[i];
    }
    return x;
  }

  // A row of float32 that belongs to this thread.
  float* wide_row(int size) {
    static thread_local std::vector<float> wide;
    if (int(wide.size()) < size) wide.resize(size);
    return wide.data();
  }

  void add_product(int& phase, const Part& part, const Linear& linear, const Activated* x, int size, const Norm& after) {
    const bool apart = after.weight != nullptr;
    product(phase, part, linear, x, size, AddTo{apart ? share_.get() : residual_.get(), linear.bias, d_.hidden_size, padded(d_.hidden_size), apart});
  }

  // Queries into their own buffer, keys and values into the pool.
  void rotate_and_write(int& phase, const Part& part, const Batch& batch, const Layer& layer, const KvLayer<T>& kv) {
    const int head_dim = d_.head_dim, num_heads = d_.num_heads, num_kv_heads = d_.num_kv_heads;
    int first_angle = 0;
    for (int r = 0; r < layer.rope; ++r) first_angle += 2 * d_.ropes[r].num_frequencies;
    const int num_frequencies = d_.ropes[layer.rope].num_frequencies;
    each_row(phase, part, [&](int t) {
      const float* cosines = angles_.get() + t * angles_of_token_ + first_angle;
      float* row = qkv_.get() + size_t(t) * qkv_size();
      const int32_t* table = batch.tables + batch.table_starts[blocks_.get()[t]];
      for (int h = 0; h < num_heads + num_kv_heads; ++h) {
        float* head = row + h * head_dim;
        const Norm& norm = h < num_heads ? layer.q_norm : layer.k_norm;
        if (norm.weight != nullptr) normalize(head, norm, head_dim, head);
        rotate(head, cosines, cosines + num_frequencies, num_frequencies);
        if (h < num_heads) {
          for (int i = 0; i < head_dim; i += kLanes) P::store(query_.get() + size_t(t) * padded(attended_size()) + h * head_dim + i, Float32::load(head + i));
        } else {
          const float* value = head + num_kv_heads * head_dim;
          Stored* slot = kv.key(table, positions_.get()[t], h - num_heads);
          for (int i = 0; i < head_dim; i += kLanes) {
            T::store(slot + i, Float32::load(head + i));
            T::store(slot + kv.value_offset + i, Float32::load(value + i));
          }
        }
      }
    });
  }

  void attention(int& phase, int thread, const Batch& batch, int l, void* pool, const std::vector<Item>& items) {
    const KvLayer<T> kv(batch, pool, l);
    const Packed query{query_.get(), padded(attended_size()), d_.head_dim}, out{attended_.get(), padded(attended_size()), d_.head_dim};
    std::atomic<int>& counter = counters_[phase++];
    const auto take = [&]() -> const Item* {
      const int i = counter.fetch_add(1, std::memory_order_relaxed);
      return i < int(items.size()) ? &items[items.size() - 1 - i] : nullptr;
    };
    for (const Item *item = take(), *next; item != nullptr; item = next) {
      next = take();
      Attending<T, typename P::Scalar>(batch, kv, *item, next, d_.layers[l].scores, scratch_[thread]).run(query, out);
    }
    team_.barrier();
  }

  // From here on row i is what row rows[i] was.
  void keep(int& phase, const int32_t* rows, int num_rows) {
    each(phase, 1, [&](int) {
      for (int i = 0; i < num_rows; ++i) {
        if (rows[i] == i) continue;
        memcpy(residual_.get() + size_t(i) * padded(d_.hidden_size), residual_.get() + size_t(rows[i]) * padded(d_.hidden_size), d_.hidden_size * sizeof(float));
        const size_t size = padded(attended_size());
        memcpy(attended_.get() + i * size, attended_.get() + rows[i] * size, size * sizeof(Activated));
      }
    });
  }

  void finish(int& phase, const Part& part, float* hidden) {
    each_row(phase, part, [&](int row) {
      float* x = settle(&d_.layers[d_.num_layers - 1].after_mlp, row);
      normalize(x, d_.final_norm, d_.hidden_size, hidden + size_t(row) * d_.hidden_size);
    });
  }

  const Decoder d_;
  Team team_;
  std::vector<Scratch<T>> scratch_;
  std::vector<std::atomic<int>> counters_;
  Buffer<float> residual_, share_, qkv_, angles_;
  Buffer<Activated> normed_, attended_, inner_, query_;
  Buffer<int32_t> positions_, blocks_;
  size_t angles_of_token_ = 0;
};

}  // namespace

// dtype everywhere: 0 float32, 1 bfloat16, 2 float16, of weights and pool. Sizes: head_dim is a multiple of 16.

extern "C" void tandem_pack(int32_t dtype, const void* weights, int32_t num_outputs, int32_t num_inputs, int32_t first, int32_t interleave, void* panels) {
  switch (dtype) {
    case 0: return pack<Float32>(static_cast<const float*>(weights), num_outputs, num_inputs, first, interleave, static_cast<float*>(panels));
    default: return pack<BFloat16>(static_cast<const uint16_t*>(weights), num_outputs, num_inputs, first, interleave, static_cast<uint16_t*>(panels));
    case 2: return pack<Float16>(static_cast<const uint16_t*>(weights), num_outputs, num_inputs, first, interleave, static_cast<uint16_t*>(panels));
  }
}

// Keeps a copy of `decoder`, not of what it points to. One thread at a time may call what follows.
extern "C" void* tandem_decoder_new(int32_t dtype, const Decoder* decoder, int32_t num_threads) {
  switch (dtype) {
    case 0: return static_cast<AnyModel*>(new Model<Float32>(*decoder, num_threads));
    case 1: return static_cast<AnyModel*>(new Model<BFloat16>(*decoder, num_threads));
    case 2: return static_cast<AnyModel*>(new Model<Float16>(*decoder, num_threads));
    default: return nullptr;
  }
}

extern "C" void tandem_decoder_delete(void* model) { delete static_cast<AnyModel*>(model); }

// hidden: [num_rows][hidden size] float32, of the tokens `rows`, final norm included.
extern "C" void tandem_decoder_step(void* model, const Batch* batch, void* pool, const int32_t* token_ids, const int32_t* rows, int32_t num_rows, float* hidden) {
  static_cast<AnyModel*>(model)->step(*batch, pool, token_ids, rows, num_rows, hidden);
}

// logits: [num_rows][vocabulary] float32.
extern "C" void tandem_decoder_head(void* model, const float* hidden, int32_t num_rows, float* logits) {
  static_cast<AnyModel*>(model)->head(hidden, num_rows, logits);
}
