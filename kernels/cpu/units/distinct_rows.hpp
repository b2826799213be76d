#pragma once

#include <cstddef>
#include <cstdint>

// Rows that are there several times: gradients of a bag of embeddings are alike in all rows that one sample alone
// asked for, so a message has each once.
namespace atoll_kernels {

constexpr std::size_t probe_rows = 1024;  // after so many it is judged whether looking further is worth it
constexpr std::size_t worth_eighths = 7;  // it is, where at most so many eighths of them are distinct

// reference[k] = number of the distinct row whose bits row k has; first[j] = where distinct row j is first, ascending.
// Returns how many are distinct; `count`, with both then as if no row repeated, where hardly any of the first did.
//   values: float32 [count, width], any alignment; reference, first: uint32 [count], overwritten; count < 2^32
// Reads 4 width bytes a row, and as many again of the row that it is compared with where hashes are equal.
std::size_t distinct_rows(const float* values, std::size_t count, std::size_t width, std::uint32_t* reference,
                          std::uint32_t* first);

}  // namespace atoll_kernels
