// SPDX-License-Identifier: Apache-2.0
// Vectors of kLanes numbers. ``instruction_sets.h`` includes this file once for each set.

typedef float Vector __attribute__((vector_size(kLanes * sizeof(float))));
typedef float Anywhere __attribute__((vector_size(kLanes * sizeof(float)), aligned(4), may_alias));

typedef double Wide __attribute__((vector_size(kLanes * sizeof(double))));

inline Vector load(const float* from) { return *reinterpret_cast<const Anywhere*>(from); }
inline void store(float* to, Vector v) { *reinterpret_cast<Anywhere*>(to) = v; }
inline Vector broadcast(float value) { return value - Vector{}; }

inline double sum_of(const Wide& v) {
  double sum = 0;
  for (int k = 0; k < kLanes; ++k) sum += v[k];
  return sum;
}

inline float sum_of(Vector v) {
  typedef float Four __attribute__((vector_size(16)));
  Four parts[kLanes / 4], sum{};
  std::memcpy(parts, &v, sizeof v);
  for (const Four& part : parts) sum += part;
  return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

inline float value(float x) { return x; }
inline float value(Bfloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
