#include "activations.h"
#include "entry.h"

namespace shardzoo {
namespace {

template <class T, int kActivation>
void gelu_forward_rows(const GeluForward& a, int64_t begin, int64_t end) {
  using V = VectorOf<T>;
  const T* bias = at<T>(a.bias, 0);
  const ActivationOf<T, kActivation> activation;
  for (int64_t r = begin; r < end; ++r) {
    const T* x = at<T>(a.x, r * a.columns);
    T* y = at<T>(a.y, r * a.columns);
    const bool past_cache = beyond_cache(y, a.rows * a.columns);
    for_vectors<T>(a.columns, [&](int64_t i, auto part) LAMBDA {
      V z = load(x + i, part);
      if (bias != nullptr) z += load(bias + i, part);
      put(y + i, activation.at(z), part, past_cache);
    });
  }
}

template <class T>
void gelu_forward(const GeluForward& a, int64_t begin, int64_t end) {
  if (a.tanh) {
    gelu_forward_rows<T, kGeluTanh>(a, begin, end);
  } else {
    gelu_forward_rows<T, kGelu>(a, begin, end);
  }
}

template <class T, int kActivation>
INLINE void gelu_backward_row(const GeluBackward& a, int64_t r, Compute<T>* sum_bias) {
  using V = VectorOf<T>;
  const T *x = at<T>(a.x, r * a.columns), *grad = at<T>(a.grad, r * a.columns), *bias = at<T>(a.bias, 0);
  T* out = at<T>(a.grad_x, r * a.columns);
  const ActivationOf<T, kActivation> activation;
  const bool past_cache = beyond_cache(out, a.rows * a.columns);
  for_vectors<T>(a.columns, [&](int64_t i, auto part) LAMBDA {
    V z = load(x + i, part), derivative;
    if (bias != nullptr) z += load(bias + i, part);
    activation.at(z, derivative);
    const V grad_z = load(grad + i, part) * derivative;
    put(out + i, grad_z, part, past_cache);
    if (sum_bias != nullptr) store(sum_bias + i, load(sum_bias + i, part) + grad_z, part);
  });
}

template <class T>
void gelu_backward(const GeluBackward& a, int64_t begin, int64_t end) {
  using C = Compute<T>;
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    C* sum_bias = zeroed(at<C>(a.partial_bias, chunk * a.columns), a.columns);
    const int64_t stop = end_row(chunk, a.chunk_rows, a.rows);
    for (int64_t r = first_row(chunk, a.chunk_rows); r < stop; ++r) {
      if (a.tanh) {
        gelu_backward_row<T, kGeluTanh>(a, r, sum_bias);
      } else {
        gelu_backward_row<T, kGelu>(a, r, sum_bias);
      }
    }
  }
}

template <class T, int kActivation>
void glu_forward_rows(const GluForward& a, int64_t begin, int64_t end) {
  const ActivationOf<T, kActivation> activation;
  for (int64_t r = begin; r < end; ++r) {
    const T *gate = at<T>(a.gate, r * a.gate_stride), *up = at<T>(a.up, r * a.up_stride);
    T* y = at<T>(a.y, r * a.columns);
    const bool past_cache = beyond_cache(y, a.rows * a.columns);
    for_vectors<T>(a.columns, [&](int64_t i, auto part) LAMBDA {
      put(y + i, activation.at(load(gate + i, part)) * load(up + i, part), part, past_cache);
    });
  }
}

template <class T>
void glu_forward(const GluForward& a, int64_t begin, int64_t end) {
  if (a.activation == kGelu) glu_forward_rows<T, kGelu>(a, begin, end);
  if (a.activation == kGeluTanh) glu_forward_rows<T, kGeluTanh>(a, begin, end);
  if (a.activation == kSilu) glu_forward_rows<T, kSilu>(a, begin, end);
}

template <class T, int kActivation>
void glu_backward_rows(const GluBackward& a, int64_t begin, int64_t end) {
  using V = VectorOf<T>;
  const ActivationOf<T, kActivation> activation;
  for (int64_t r = begin; r < end; ++r) {
    const T *gate = at<T>(a.gate, r * a.gate_stride), *up = at<T>(a.up, r * a.up_stride);
    const T* grad = at<T>(a.grad, r * a.grad_stride);
    T *grad_gate = at<T>(a.grad_gate, r * a.columns), *grad_up = at<T>(a.grad_up, r * a.columns);
    const bool past_cache = beyond_cache(grad_gate, a.rows * a.columns) && beyond_cache(grad_up, a.rows * a.columns);
    for_vectors<T>(a.columns, [&](int64_t i, auto part) LAMBDA {
      V derivative;
      const V value = activation.at(load(gate + i, part), derivative);
      const V dy = load(grad + i, part);
      put(grad_gate + i, dy * load(up + i, part) * derivative, part, past_cache);
      put(grad_up + i, dy * value, part, past_cache);
    });
  }
}

template <class T>
void glu_backward(const GluBackward& a, int64_t begin, int64_t end) {
  if (a.activation == kGelu) glu_backward_rows<T, kGelu>(a, begin, end);
  if (a.activation == kGeluTanh) glu_backward_rows<T, kGeluTanh>(a, begin, end);
  if (a.activation == kSilu) glu_backward_rows<T, kSilu>(a, begin, end);
}

}  // namespace
}  // namespace shardzoo

SHARDZOO_CPU_KERNEL(gelu_forward, GeluForward)
SHARDZOO_CPU_KERNEL(gelu_backward, GeluBackward)
SHARDZOO_CPU_KERNEL(glu_forward, GluForward)
SHARDZOO_CPU_KERNEL(glu_backward, GluBackward)
