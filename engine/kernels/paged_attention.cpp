// Paged attention for a model whose other layers are somebody else's: built by engine/kernels/build.py, called through a plain C interface. No torch headers.

#include "attention.h"

namespace {

template <typename T>
void write_keys_and_values(const Batch& b, const KvLayer<T>& layer, const Packed& key, const Packed& value) {
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

template <typename T>
void run(const Batch& b, int num_threads, void* pool, int layer_index, const Packed& query, const Packed& key, const Packed& value, const Packed& out, const Scores& how) {
  const KvLayer<T> layer(b, pool, layer_index);
  write_keys_and_values(b, layer, key, value);
  const std::vector<Item> items = items_of(b, num_threads);
  const int num_items = int(items.size());
#pragma omp parallel num_threads(num_threads) if (num_threads > 1 && num_items > 1)
  {
    static thread_local Scratch<T> scratch;
#pragma omp for schedule(dynamic, 1)
    for (int i = num_items - 1; i >= 0; --i) Attending<T, T>(b, layer, items[i], nullptr, how, scratch).run(query, out);
#if defined(TANDEM_TILES)
    release_tiles();
#endif
  }
}

}  // namespace

// Writes the batch's keys and values into the pool ([num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]), then attends.
// dtype: 0 float32, 1 bfloat16, 2 float16, of pool and tensors alike; head_dim is a multiple of 16. Returns 0, or 1 for a dtype it does not know.
extern "C" int tandem_paged_attention(const Batch* batch, int32_t num_threads, void* pool, int32_t layer, int32_t dtype, const Packed* query, const Packed* key,
                                      const Packed* value, const Packed* out, Scores how) {
  switch (dtype) {
    case 0: run<Float32>(*batch, num_threads, pool, layer, *query, *key, *value, *out, how); return 0;
    case 1: run<BFloat16>(*batch, num_threads, pool, layer, *query, *key, *value, *out, how); return 0;
    case 2: run<Float16>(*batch, num_threads, pool, layer, *query, *key, *value, *out, how); return 0;
    default: return 1;
  }
}
