#pragma once

#include <cstdint>
#include <cstring>

struct __nv_bfloat16 {
  uint16_t bits;
};
inline float __bfloat162float(__nv_bfloat16 x) {
  const uint32_t wide = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  uint32_t wide;
  std::memcpy(&wide, &x, 4);
  if (x != x) return {static_cast<uint16_t>(wide >> 16 | 0x40)};
  return {static_cast<uint16_t>((wide + 0x7FFF + (wide >> 16 & 1)) >> 16)};
}

struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)}; }
