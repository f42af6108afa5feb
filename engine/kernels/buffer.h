// Scratch memory of a model, kept from step to step.

#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>

namespace {

// Memory that grows and is cleared when it does: nobody writes what rows are filled up with, so it stays zero.
template <typename E>
class Buffer {
 public:
  E* fit(size_t size) {
    if (size > capacity_) {
      const size_t num_bytes = (size * sizeof(E) + 63) / 64 * 64;
      elements_.reset(static_cast<E*>(aligned_alloc(64, num_bytes)));
      memset(static_cast<void*>(elements_.get()), 0, num_bytes);
      capacity_ = size;
    }
    return elements_.get();
  }
  E* get() const { return elements_.get(); }

 private:
  struct Free {
    void operator()(E* p) const { free(p); }
  };
  std::unique_ptr<E, Free> elements_;
  size_t capacity_ = 0;
};

}  // namespace
