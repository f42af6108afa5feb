// Weights as a checkpoint has them into panels.

#pragma once

#include "linear.h"

namespace {

// weights [outputs][inputs] into panels from output `first` of the packed matrix on; gates and what they gate take turns by 16.
template <typename T>
void pack(const typename T::Stored* weights, int num_outputs, int num_inputs, int first, int interleave, typename T::Stored* panels) {
  constexpr int kStep = Product<T>::kInputs;
  for (int o = 0; o < num_outputs; ++o) {
    const int at = interleave < 0 ? first + o : o / kLanes * 2 * kLanes + interleave * kLanes + o % kLanes;
    typename T::Stored* panel = panels + size_t(at / kPanel) * padded(num_inputs) * kPanel + at % kPanel * kStep;
    const typename T::Stored* row = weights + size_t(o) * num_inputs;
    for (int i = 0; i < num_inputs; ++i) panel[size_t(i / kStep * kStep) * kPanel + i % kStep] = row[i];
  }
}

}  // namespace
