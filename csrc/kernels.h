// Declares the arguments of every kernel, and the list from which everything that knows all kernels is made.
//
// Arguments are plain pointers and sizes, so that no header of torch is needed to compile a kernel. The kernels of the
// CPU and of CUDA take the same structs: the binding fills one struct for either device.
//
// Sizes and strides count elements. "Wide" is the type of the computation: double for double, else float. A tensor that
// is absent is a null pointer. A null `keys` means that there is no dropout.
#pragma once

#include <cstdint>

namespace shardzoo {

enum DType : int { kFloat = 0, kBFloat16 = 1, kHalf = 2, kDouble = 3, kDTypes = 4 };

enum Activation : int { kGelu = 0, kGeluTanh = 1, kSilu = 2 };

// Where a tensor begins within its unsplit sample, and which of its elements dropout keeps (hash.h).
struct Dropout {
  const int64_t* keys;  // [batch]
  uint32_t threshold;   // an element whose hash is below this is dropped
  double keep_scale;    // 1 / (1 - p)
  int64_t first_row;    // where the tensor begins within the sample; for attention, its first head
  int64_t first_column;
};

// One unit of work is a row of `columns` scores.
struct SoftmaxForward {
  const void *scores, *mask, *bias;  // scores contiguous; mask and bias by strides, unit stride along the keys
  const int64_t* prefix;             // [batch]
  void *probs, *dropped;
  int64_t batch, heads, queries, columns;
  int64_t mask_stride[3], bias_stride[3];  // of batch, heads, queries
  int mask_is_bool, causal;
  double scale;
  Dropout dropout;
};

// One unit of work is one (n, q) over the whole batch, because the gradient of a bias without a batch sums over it.
struct SoftmaxBackward {
  const void *grad, *probs;
  void *grad_scores, *grad_bias;
  int64_t batch, heads, queries, columns;
  int64_t bias_batch;  // 0: no bias; 1: summed over the batch; else batch
  double scale;
  Dropout dropout;
};

// LayerNorm, or RMSNorm if `mean` is null. One unit of work is a row.
struct NormForward {
  const void *x, *residual, *weight, *bias;
  void *y, *summed;
  void *mean, *rstd;  // wide [rows]
  int64_t rows, columns;
  double eps;
  double offset;    // added to RMSNorm's weight
  int rounds_once;  // whether RMSNorm rounds the product with the weight alone, not the normalized value before it
};

// One unit of work is a chunk of `chunk_rows` rows, whose column sums go to row `chunk` of the partial sums.
struct NormBackward {
  const void *grad, *grad_summed, *h, *weight;
  const void *mean, *rstd;  // wide [rows]
  void* grad_x;
  void *partial_weight, *partial_bias;  // wide [chunks, columns]
  int64_t rows, columns, chunk_rows;
  double offset;  // added to RMSNorm's weight
};

// Sums partial sums over the chunks, in order. One unit of work is a column.
struct ColumnSum {
  const void* partial;  // wide [chunks, columns]
  void* out;
  int64_t chunks, columns;
};

struct GeluForward {
  const void *x, *bias;
  void* y;
  int64_t rows, columns;
  int tanh;
};

// One unit of work is a chunk of rows, as in NormBackward.
struct GeluBackward {
  const void *grad, *x, *bias;
  void *grad_x, *partial_bias;
  int64_t rows, columns, chunk_rows;
  int tanh;
};

struct GluForward {
  const void *gate, *up;
  void* y;
  int64_t rows, columns, gate_stride, up_stride;
  int activation;
};

struct GluBackward {
  const void *grad, *gate, *up;
  void *grad_gate, *grad_up;
  int64_t rows, columns, grad_stride, gate_stride, up_stride;
  int activation;
};

struct DropoutForward {
  const void *x, *bias, *residual;
  void* y;
  int64_t rows, columns, rows_per_sample;
  Dropout dropout;
};

// One unit of work is a chunk of rows, as in NormBackward.
struct DropoutBackward {
  const void* grad;
  void *grad_x, *partial_bias;
  int64_t rows, columns, chunk_rows, rows_per_sample;
  Dropout dropout;
};

struct CrossEntropyStats {
  const void* logits;
  const int64_t* target;
  void *maximum, *sum_exp, *target_logit, *sum_logits;  // wide [rows]; sum_logits may be null
  int64_t rows, row_stride, first, columns;
};

struct CrossEntropyGrad {
  const void* logits;
  const int64_t* target;
  const void *grad, *log_z;  // wide [rows]
  void* grad_logits;         // may be the logits themselves
  int64_t rows, row_stride, first, columns, num_classes, ignore_index;
  double label_smoothing, z_loss;
};

// y = x Wᵀ + bias for a few rows. One unit of work is a block of `block` features. On the CPU only.
struct LinearOfFewRows {
  const void *x, *weight, *bias;  // [rows, columns], [features, columns], [features]
  void* y;                        // [rows, features]
  int64_t rows, columns, features, block;
};

// c = a b + bias, on the CPU and not in fp64. One stride of a and one of b is 1. One unit of work is a part of the
// result's rows and columns, of which up to kMostProductRows and kMostProductColumns are computed at a time. A unit's
// workspace holds their fp32 sums, as many rows of a, and up to kProductColumns columns of b, up to kProductDepth deep
// and filled up to whole tiles.
constexpr int64_t kMostProductRows = 1024, kMostProductColumns = 1536, kProductColumns = 192, kProductDepth = 768;
// No tile or panel of a product has more rows or columns.
constexpr int64_t kProductTile = 64;
struct MatrixProduct {
  const void *a, *b, *bias;  // [rows, depth], [depth, columns], [columns]
  void* c;                   // [rows, columns]
  float* workspace;          // [row_parts * column_parts, workspace_floats]
  int64_t rows, columns, depth;
  int64_t a_stride[2], b_stride[2];
  int64_t row_parts, column_parts, part_rows, part_columns;
  int64_t workspace_floats;
};

// out = dropout(softmax(cap(scale q kᵀ) + bias + mask)) v, on the CPU and not in fp64. The numbers of a row are adjacent;
// strides are of batch, head and row, and of a mask's keys. One unit of work is kAttentionQueries queries of a head.
constexpr int64_t kAttentionQueries = 256;
// Up to so many queries are not arranged in tiles.
constexpr int64_t kFewQueries = 4;
struct AttentionForward {
  const void *q, *k, *v, *mask;
  const float* bias;                // [heads, queries + keys - 1], by key - query
  const int64_t *prefix, *lengths;  // [batch]
  void *out, *lse;                  // lse: wide [batch, heads, queries]
  int64_t batch, heads, key_value_heads, queries, keys, size;
  int64_t q_stride[3], k_stride[3], v_stride[3], out_stride[3], mask_stride[4];
  int mask_is_bool, causal;
  double scale;
  double softcap;  // cap(x) = softcap tanh(x / softcap); 0: cap(x) = x
  int64_t first_query;
  Dropout dropout;
};

// One unit of work is a key-value head of a sample.
struct AttentionBackward {
  // The backward pass reads its `out` and `lse`.
  AttentionForward forward;
  const void* grad;
  int64_t grad_stride[3];
  void *grad_q, *grad_k, *grad_v;  // [batch, queries or keys, heads, size]
  void* partial_bias;              // wide [batch, heads, queries + keys - 1]
};

// The kernels of an optimizer run on the CPU alone. One unit of work is a block of so many elements of a parameter or
// gradient.
constexpr int64_t kOptimizerBlock = 8192;
struct SquareSums {
  const void* x;
  double* sums;  // one for each block
  int64_t elements;
};

// AdamW (Loshchilov and Hutter 2019). All tensors are of the kernel's dtype, but for `rounded`, which gets the new
// parameter in bf16 or fp16, or is null.
struct AdamW {
  void* param;
  const void* grad;
  void *exp_avg, *exp_avg_sq, *rounded;
  int64_t elements;
  int rounds_to_half;
  double factor, lr, beta1, beta2, eps, weight_decay;  // factor: of the gradient
  double bias_correction1, bias_correction2;           // 1 - beta^step
};

// Every kernel, once: X(its name, the struct of its arguments). A kernel `name` is a function template of that name in
// cpu/, and `launch_name` in cuda/. The numbers, the tables of the devices and the binding's checks follow from this
// list.
#define SHARDZOO_KERNELS_OF_BOTH_DEVICES(X)  \
  X(softmax_forward, SoftmaxForward)         \
  X(softmax_backward, SoftmaxBackward)       \
  X(norm_forward, NormForward)               \
  X(norm_backward, NormBackward)             \
  X(column_sum, ColumnSum)                   \
  X(gelu_forward, GeluForward)               \
  X(gelu_backward, GeluBackward)             \
  X(glu_forward, GluForward)                 \
  X(glu_backward, GluBackward)               \
  X(dropout_forward, DropoutForward)         \
  X(dropout_backward, DropoutBackward)       \
  X(cross_entropy_stats, CrossEntropyStats)  \
  X(cross_entropy_grad, CrossEntropyGrad)

#define SHARDZOO_KERNELS_OF_THE_CPU(X)       \
  X(linear_of_few_rows, LinearOfFewRows)     \
  X(matrix_product, MatrixProduct)           \
  X(attention_forward, AttentionForward)     \
  X(attention_backward, AttentionBackward)   \
  X(square_sums, SquareSums)                 \
  X(adamw, AdamW)

#define SHARDZOO_KERNELS(X) SHARDZOO_KERNELS_OF_BOTH_DEVICES(X) SHARDZOO_KERNELS_OF_THE_CPU(X)

// The number of a kernel is `k` and the name of its struct: kSoftmaxForward, ...
enum Kernel : int {
#define SHARDZOO_NUMBER(name, Arguments) k##Arguments,
  SHARDZOO_KERNELS(SHARDZOO_NUMBER)
#undef SHARDZOO_NUMBER
  kKernels,
};

#define SHARDZOO_TEXT(name, Arguments) #name,
constexpr const char* kKernelNames[] = {SHARDZOO_KERNELS(SHARDZOO_TEXT)};
#undef SHARDZOO_TEXT

// Returns the kernel that takes these arguments.
#define SHARDZOO_FIND(name, Arguments) \
  constexpr Kernel find_kernel(const Arguments&) { return k##Arguments; }
SHARDZOO_KERNELS(SHARDZOO_FIND)
#undef SHARDZOO_FIND

}  // namespace shardzoo

#define SHARDZOO_EXPORT __attribute__((visibility("default")))

extern "C" {
// Runs units [begin, end) of a kernel on the CPU. `arguments` points to the kernel's struct. Returns 0, or -1 if the
// kernel or dtype does not exist.
int shardzoo_cpu_run(int kernel, int dtype, const void* arguments, int64_t begin, int64_t end);

// The instruction set chosen at load time: "x86-64-v4+amx", "x86-64-v4+bf16", "x86-64-v4", "x86-64-v3" or "baseline".
SHARDZOO_EXPORT const char* shardzoo_cpu_isa();

// Returns whether the processor is AMD's.
SHARDZOO_EXPORT int shardzoo_cpu_is_amd();

// Returns whether kernels use the processor's matrix registers (AMX) for bf16. The CPU kernels call this function, too.
int shardzoo_cpu_has_amx();

// Queues a whole kernel on a CUDA stream of the current device. Returns 0, a cudaError_t, or -1 as above.
int shardzoo_cuda_run(int kernel, int dtype, const void* arguments, void* stream);

// Returns the number of multiprocessors of the current device.
int shardzoo_cuda_multiprocessors();

// Returns the text of a cudaError_t.
const char* shardzoo_cuda_error(int code);

// Returns whether the library contains CUDA kernels. Python calls this function and those of the instruction set by
// ctypes.
SHARDZOO_EXPORT int shardzoo_has_cuda();
}
