// SPDX-License-Identifier: Apache-2.0
// What gram.cpp calls in other files.
#pragma once
#include "gram.h"

namespace gnsfast::cpu {

using OfSample = void (*)(const Gram& call, int64_t b);

#ifdef GNSFAST_BFLOAT16
void amx_gram(const Gram& call);
OfSample bfloat16_gram();  // null where the processor lacks avx512_bf16
#else
inline void amx_gram(const Gram&) { throw std::invalid_argument("this build has no kernel amx"); }
inline OfSample bfloat16_gram() { return nullptr; }
#endif

}  // namespace gnsfast::cpu
