// SPDX-License-Identifier: Apache-2.0
// The kernel of linear_wgrad.cpp for bfloat16 by AMX, whose registers hold [16, 32] numbers. A tile
// of dW is 32 x 32 here. It leaves the registers after each sample's tokens: AVX-512 squares it.
#include "amx.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "linear_wgrad.h"
#include "plan.h"

namespace gnsfast::cpu {
namespace {

#define GNSFAST_LOOPS "amx_tile.h"
#include "avx512_instructions.h"

size_t bytes_of(const Work& work) { return memory_of(work, nullptr).bytes; }

// Blocks of dW that fit into a second-level cache of 2 MiB. Packing a number costs as much as so many
// products.
const Kernel kAmx{"amx", kTile, kTile, 512 / kTile, 768 / kTile, 32, bytes_of, run};

}  // namespace

const Kernel* amx_kernel() { return amx::available() ? &kAmx : nullptr; }

}  // namespace gnsfast::cpu
