// An operator's inputs as text: "float32[32,128] int64[32]", a list of tensors as "(float32[2] float32[3] float32[4] +5)". The
// only part that needs torch's headers, so it is built on the user's machine, and only for inputs=True.
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/ScalarType.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <string>

namespace {
constexpr int kSizes = 8;            // of a tensor; the number of further ones is appended
constexpr int kListed[] = {3, 1, 0};  // tensors of a list: the first of these counts that fits
constexpr char kCut[] = " ...";

struct Text {
  char* at;
  int room, used = 0;
  bool cut = false;
  void add(const char* word) {
    int n = int(strlen(word));
    cut = cut || used + n > room;
    if (cut) return;
    memcpy(at + used, word, size_t(n));
    used += n;
  }
  void add(const char* before, long long number, const char* after = "") {
    char word[40];
    snprintf(word, sizeof word, "%s%lld%s", before, number, after);
    add(word);
  }
};

// torch's own names (torch.float32), looked up once.
using Names = std::array<std::string, size_t(c10::ScalarType::NumOptions)>;
const char* name_of(c10::ScalarType type) {
  static const Names* const names = [] {
    auto* all = new Names();
    for (size_t i = 0; i < all->size(); ++i) {
      auto each = c10::ScalarType(i);
      try {
        (*all)[i] = c10::getDtypeNames(each).first;
      } catch (...) {
        (*all)[i] = c10::toString(each);
      }
    }
    return all;
  }();
  return size_t(type) < names->size() ? (*names)[size_t(type)].c_str() : "?";
}

void add_tensor(Text& text, const at::Tensor& tensor) {
  if (!tensor.defined()) return text.add("none");
  auto* impl = tensor.unsafeGetTensorImpl();
  text.add(name_of(tensor.scalar_type()));
  // Symbolic sizes throw when read, as do those of nested tensors; a subclass may answer from Python, which needs the GIL.
  if (impl->has_symbolic_sizes_strides() || impl->is_python_dispatch() || tensor.is_nested()) return text.add("[?]");
  auto sizes = tensor.sizes();
  int shown = 0, all = int(sizes.size());
  text.add("[");
  for (; shown < all && shown < kSizes; ++shown) text.add(shown ? "," : "", static_cast<long long>(sizes[size_t(shown)]));
  if (shown < all) text.add(",+", all - shown);
  text.add("]");
}

void add_list(Text& text, c10::ArrayRef<c10::IValue> list, int most) {
  int shown = 0, all = int(list.size());
  text.add("(");
  for (; shown < all && shown < most; ++shown) {
    if (shown) text.add(" ");
    if (list[size_t(shown)].isTensor()) add_tensor(text, list[size_t(shown)].toTensor());
    else text.add("none");
  }
  if (shown < all) text.add(shown ? " +" : "+", all - shown);
  text.add(")");
}

// Append a whole input or nothing, so that a cut text is still readable.
void add_value(Text& text, const c10::IValue& value) {
  bool list = value.isTensorList() || value.isOptionalTensorList();
  if (text.cut || (!list && !value.isTensor())) return;
  int before = text.used;
  try {
    for (int most : kListed) {
      text.used = before;
      text.cut = false;
      if (before) text.add(" ");
      if (list) add_list(text, value.toListRef(), most);
      else add_tensor(text, value.toTensor());
      if (!text.cut) return;
    }
  } catch (...) {
    text.cut = true;
  }
  text.used = before;
}
}  // namespace

extern "C" int ff_describe_inputs(const void* call, char* to, int room) {
  Text text{to, room - int(strlen(kCut))};
  for (const auto& value : static_cast<const at::RecordFunction*>(call)->inputs()) add_value(text, value);
  if (text.cut) {
    text.cut = false;
    text.room = room;
    text.add(text.used ? kCut : kCut + 1);
  }
  return text.used;
}
