// Checks, per torch version, everything that native.cpp assumes about torch without its headers. Compile it for each new version:
//   g++ -std=c++20 -fsyntax-only -I<torch>/include -I<torch>/include/torch/csrc/api/include abi.cpp
#include <bits/stdc++.h>
#define private public  // the offsets of private members are checked
#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#undef private
#pragma GCC diagnostic ignored "-Winvalid-offsetof"  // supported by g++ and clang++, which warn anyway

using Callback = at::RecordFunctionCallback;
static_assert(sizeof(Callback) == 40 && alignof(Callback) == 8);
static_assert(std::is_trivially_copyable_v<Callback> && std::is_trivially_destructible_v<Callback>, "passed by value as plain bytes");
static_assert(offsetof(Callback, start_) == 0 && offsetof(Callback, end_) == 8 && offsetof(Callback, sampling_prob_) == 16);
static_assert(offsetof(Callback, scopes_) == 24 && sizeof(Callback::scopes_) == 10);
static_assert(offsetof(Callback, needs_inputs_) == 34 && offsetof(Callback, needs_outputs_) == 35 && offsetof(Callback, needs_ids_) == 36);
static_assert(offsetof(at::RecordFunction, step_callbacks_) + offsetof(at::StepCallbacks, scope_) == 96 && sizeof(at::RecordScope) == 1);
static_assert(int(at::RecordScope::FUNCTION) == 0 && int(at::RecordScope::BACKWARD_FUNCTION) == 1);
static_assert(int(at::RecordScope::TORCHSCRIPT_FUNCTION) == 2 && int(at::RecordScope::USER_SCOPE) == 7);
static_assert(int(at::RecordScope::NUM_SCOPES) == 10 && sizeof(at::CallbackHandle) == 8);
static_assert(sizeof(at::ObserverContext) == sizeof(void*) && sizeof(c10::DebugInfoBase) == sizeof(void*), "a vtable and nothing else");
static_assert(sizeof(c10::DebugInfoKind) == 1 || sizeof(c10::DebugInfoKind) == sizeof(void*));
static_assert(std::is_same_v<Callback::StartCallback, std::unique_ptr<at::ObserverContext> (*)(const at::RecordFunction&)>);
static_assert(std::is_same_v<Callback::EndCallback, void (*)(const at::RecordFunction&, at::ObserverContext*)>);
