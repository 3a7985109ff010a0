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
  float lanes[kLanes];
  std::memcpy(lanes, &v, sizeof v);
  for (int half = kLanes / 2; half; half /= 2) {
    for (int k = 0; k < half; ++k) lanes[k] += lanes[k + half];
  }
  return lanes[0];
}

inline float value(float x) { return x; }
inline float value(Bfloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
