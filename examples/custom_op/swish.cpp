// An operator of one's own in C++, against PyTorch's stable interface: one build serves several torch versions.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cmath>

using torch::stable::Tensor;

Tensor swish(Tensor x, double beta) {
  Tensor y = torch::stable::empty_like(x);
  const auto* from = static_cast<const float*>(x.data_ptr());
  auto* to = static_cast<float*>(y.data_ptr());
  for (int64_t i = 0; i < x.numel(); ++i) to[i] = from[i] / (1.0f + std::exp(-float(beta) * from[i]));
  return y;
}

STABLE_TORCH_LIBRARY(example, library) { library.def("swish(Tensor x, float beta) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(example, CPU, library) { library.impl("swish", TORCH_BOX(&swish)); }
