#pragma once

#include <cstddef>
#include <cstdint>

// The values of a payload. float32 is exact. float16 and bfloat16 round each value to the nearest, and what is beyond
// their range to their largest number. The others share bfloat16 scales, which stand before all values, the lowest bits
// of a byte first:
//   int8, int4   a scale for each 16 values: the largest magnitude over 127 or 7. Values are multiples of it
//   int2         two magnitudes for each 512 values: the means of those below and above a limit half way between them
//                (two steps of Lloyd, 1982, from the mean). A value is its sign and one of the two; 0 is the lower
namespace atoll_kernels {

enum class WireValues { float32, float16, bfloat16, int8, int4, int2 };

std::size_t wire_bytes(WireValues format, std::size_t count);

// Writes wire_bytes(format, count) bytes. Values are finite.
void write_values(WireValues format, const float* values, std::size_t count, unsigned char* out);

// Reads as many bytes, whatever they are: values may come out that are not finite.
void read_values(WireValues format, const unsigned char* in, std::size_t count, float* values);

}  // namespace atoll_kernels
