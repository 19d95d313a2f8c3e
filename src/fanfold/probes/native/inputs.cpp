// An operator's inputs as text: "float32[32,128] int64[32]". The one part that needs torch's headers, so it is built on the
// user's machine and only when inputs=True asks for it.
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/ScalarType.h>

#include <cstdio>
#include <cstring>

namespace {
struct Text {
  char* at;
  int room, used = 0;
  void add(const char* word) {
    int n = int(strlen(word));
    if (used + n <= room) { memcpy(at + used, word, size_t(n)); used += n; }
    else room = used;  // full: nothing more, so that a cut text is a beginning
  }
};

void add_tensor(Text& text, const at::Tensor& tensor) {
  if (text.used) text.add(" ");
  if (!tensor.defined()) return text.add("none");
  auto* impl = tensor.unsafeGetTensorImpl();
  text.add(c10::toString(tensor.scalar_type()));
  // Symbolic sizes throw when asked for, and a subclass may answer from Python, which needs the GIL: ask neither.
  if (impl->has_symbolic_sizes_strides() || impl->is_python_dispatch()) return text.add("[?]");
  text.add("[");
  char number[24];
  const char* between = "";
  for (auto size : tensor.sizes()) {
    snprintf(number, sizeof number, "%s%lld", between, static_cast<long long>(size));
    text.add(number);
    between = ",";
  }
  text.add("]");
}
}  // namespace

extern "C" int ff_describe_inputs(const void* call, char* to, int room) {
  Text text{to, room};
  try {
    for (const auto& value : static_cast<const at::RecordFunction*>(call)->inputs()) {
      if (value.isTensor()) add_tensor(text, value.toTensor());
      else if (value.isTensorList()) text.add(text.used ? " list" : "list");
    }
  } catch (...) {
    text.add("?");
  }
  return text.used;
}
